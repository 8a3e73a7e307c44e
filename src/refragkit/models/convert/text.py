"""Text for calibration, scan and training, a fixed part of it that is only measured on, and sets to measure on.

Sources are plain text, passages, conversations and questions. What a model is asked to say in a chat is another
distribution than what it reads, and a conversion that saw little of it is worst there, so conversations are read the
way the model meets them: with the chat template of its own tokenizer.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from refragkit.data.conversation import conversation_from_hops, render
from refragkit.data.conversation_file import parse_conversation
from refragkit.data.document_files import CorpusFile, Problem, SourceDocument, corpus_files, read_file
from refragkit.data.jsonl import Record, read_jsonl, scan_jsonl
from refragkit.data.split import id_rank, subset_positions
from refragkit.errors import DataError
from refragkit.types import Hit, Hop

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.types import Conversation, Document, Question

log = logging.getLogger("refragkit")

Text = str | Sequence[int]
"""A piece of a source: plain text, or the token ids of a conversation, control tokens included."""

_HELD_OUT_SHARE = 10
_PIECE_CHARACTERS = 4000
_SUFFIXES = (".txt", ".md", ".jsonl")
_PARAGRAPH_END = re.compile(r"\n+")
_CHARACTERS_PER_TOKEN = 16  # more than any running text has


@dataclass(frozen=True)
class TokenPiece:
    """A conversation as its tokenizer writes it.

    Attributes:
        key: decides its place in the shuffled order.
        names: what it must not share with the other side of a split: its tree, or the passages that it shows.
        ids: token ids.
    """

    key: str
    names: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TextSplit:
    """Pieces of text in a fixed shuffled order.

    A tenth is held out. Which, depends on the pieces' names alone: no seed, no order of files.

    Attributes:
        calibration: to fit on.
        held_out: to measure on.
        left_out: pieces on neither side, because they show passages of both.
    """

    calibration: list[Text]
    held_out: list[Text]
    left_out: int = 0


def split_text(documents: Iterable[Document | TokenPiece]) -> TextSplit:
    """Cut long documents into pieces, mix them with the conversations, and hold out a tenth.

    Short documents of one title stay on one side, and so do conversations of one tree.

    Raises:
        DataError: too little to hold anything out.
    """
    pieces: list[tuple[str, tuple[str, ...], Text]] = []
    for document in documents:
        if isinstance(document, TokenPiece):
            pieces.append((document.key, document.names, document.ids))
        else:
            pieces += ((name, (name,), text) for name, text in _parts(document))
    names = sorted({name for _, own, _ in pieces for name in own}, key=id_rank)
    if len(names) < 2:
        raise DataError(
            f"convert.text: {len(names)} pieces of text, too few to hold any out for measuring; give more text (a long"
            f" text is cut at paragraphs into pieces of about {_PIECE_CHARACTERS:,} characters; passages of one title"
            " and conversations that open alike count as one)"
        )
    held = {names[i] for i in subset_positions(names, max(1, len(names) // _HELD_OUT_SHARE))}
    sides: tuple[list[Text], list[Text]] = ([], [])
    left_out = 0
    for _, own, text in sorted(pieces, key=lambda piece: id_rank(piece[0])):
        on_held_side = {name in held for name in own}
        if len(on_held_side) == 1:
            sides[on_held_side.pop()].append(text)
        else:
            left_out += 1
    return TextSplit(*sides, left_out)


def _parts(document: Document) -> Iterator[tuple[str, str]]:
    """The pieces of a document with their names; one that is a piece as it is goes by its title."""
    parts = list(_pieces(document.text))
    if len(parts) == 1:
        text = f"{document.title}\n{parts[0]}" if document.title else parts[0]
        yield document.title or document.doc_id, text
        return
    for number, part in enumerate(parts):
        yield f"{document.doc_id}#{number:06d}", part


def _pieces(text: str) -> Iterator[str]:
    """Runs of paragraphs of about 4,000 characters, nothing lost; a longer paragraph is a piece of its own."""
    start = 0
    for end in _PARAGRAPH_END.finditer(text):
        if end.end() - start >= _PIECE_CHARACTERS:
            if text[start : end.end()].strip():
                yield text[start : end.end()].strip("\n")
            start = end.end()
    if text[start:].strip():
        yield text[start:].strip("\n")


def read_documents(source: str | Path) -> Iterator[Document]:
    """The documents of a .txt, .md or .jsonl (``text`` and, if any, ``id`` and ``title``) or of a folder of them.

    Raises:
        DataError: nothing there, or a file or line that can't be read.
    """
    for item in _read(source, None, "convert.text"):
        assert isinstance(item, SourceDocument)
        yield item.document


def read_sources(
    sources: Iterable[str | Path], tokenizer: Tokenizer, key: str = "convert.text"
) -> Iterator[Document | TokenPiece]:
    """Documents and conversations of several sources, one after the other; :func:`split_text` mixes them.

    A source is a .txt, .md or .jsonl file or a folder of them. A .jsonl whose first line has ``messages`` holds
    conversations (``{"id", "messages"[, "tree_id"]}``), any other passages (``{"text"[, "id", "title"]}``).
    Conversations of one ``tree_id``, else those that open with the same turn, share a name.

    Args:
        sources: files and folders.
        tokenizer: renders conversations with its chat template, see :func:`speaks_chat`. Their text never becomes a
            control token.
        key: the configuration's, for errors.

    Raises:
        DataError: nothing there, or a file or line that can't be read.
    """
    for source in sources:
        for item in _read(source, tokenizer, key):
            yield item.document if isinstance(item, SourceDocument) else item


def check_source(source: str | Path, key: str = "convert.text") -> Path:
    """The path of a source that can be read.

    Raises:
        DataError: it isn't there, or is a file of another kind.
    """
    path = Path(source).expanduser()
    if not path.exists() or (path.is_file() and path.suffix.lower() not in _SUFFIXES):
        problem = f"is a {path.suffix or 'nameless'} file" if path.exists() else "does not exist"
        raise DataError(
            f"{key}={source}: expected a .txt, .md or .jsonl file or a folder of them, but it {problem}"
        )
    return path


def _read(source: str | Path, tokenizer: Tokenizer | None, key: str) -> Iterator[SourceDocument | TokenPiece]:
    path = check_source(source, key)
    found = False
    for file in corpus_files(path):
        if isinstance(file, Problem):
            if file.kind == "file":
                raise DataError(f"{key}: {file.message}")
            continue
        if tokenizer is not None and _holds_conversations(file):
            items: Iterator[SourceDocument | TokenPiece | Problem] = _conversations(file, tokenizer, key)
        else:
            items = iter(read_file(file))
        for item in items:
            if isinstance(item, Problem):
                raise DataError(f"{key}: {item.message}")
            found = True
            yield item
    if not found:
        where = (
            "no text in this file"
            if path.is_file()
            else "no .txt, .md or .jsonl file with text in this folder"
        )
        raise DataError(f"{key}={source}: {where} (conversations count where the assistant answers)")


def _holds_conversations(file: CorpusFile) -> bool:
    if file.path.suffix.lower() != ".jsonl":
        return False
    try:
        first = next(scan_jsonl(file.path), None)
    except OSError:  # whoever reads it says so
        return False
    return first is not None and isinstance(first[1], Record) and "messages" in first[1].fields


def _conversations(file: CorpusFile, tokenizer: Tokenizer, key: str) -> Iterator[TokenPiece]:
    """The conversations of a file; those that nobody answers are left out and counted."""

    def parse(record: Record) -> tuple[str, tuple[str, Conversation]]:
        identifier, conversation = parse_conversation(record)
        if "tree_id" in record.fields:
            return identifier, (f"tree {record.identifier('tree_id')}", conversation)
        opening = next((m for m in conversation.messages if m.role == "user"), conversation.messages[0])
        return identifier, (f"opening {' '.join(opening.content.split())}", conversation)

    try:
        rows = read_jsonl(file.path, "conversations", parse)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    unanswered = 0
    for name, conversation in rows:
        try:
            ids = chat_ids(conversation, tokenizer)
        except DataError as error:
            raise DataError(f"{key}: {file.path}: conversation {conversation.id!r}: {error}") from error
        if ids:
            yield TokenPiece(f"conversation {conversation.id}", (name,), ids)
        else:
            unanswered += 1
    if unanswered:
        log.warning("%s: %d conversations without an assistant turn are left out", file.path, unanswered)


def speaks_chat(tokenizer: Tokenizer) -> bool:
    """Whether its model has met conversations: by a chat template, or by special tokens it was trained with."""
    return bool(tokenizer.chat_template) or (bool(tokenizer.special_ids) and not tokenizer.added_ids)


def chat_ids(
    conversation: Conversation, tokenizer: Tokenizer, max_document_tokens: int | None = None
) -> tuple[int, ...]:
    """A whole conversation as its model meets it; nothing is cut but documents.

    A model that has met no conversations gets the turns as plain text, one behind the other.

    Args:
        conversation: turns in order.
        tokenizer: of the model.
        max_document_tokens: of each document; None for all.

    Returns:
        Token ids; none if there is no assistant turn.

    Raises:
        DataError: the chat template refuses the turns.
    """
    if speaks_chat(tokenizer):
        rendered = render(conversation, tokenizer, sys.maxsize, max_document_tokens=max_document_tokens)
        return tuple(rendered.input_ids)
    if not any(message.role == "assistant" for message in conversation.messages):
        return ()
    texts = []
    for message in conversation.messages:
        texts += [f"{hit.document.title}\n{hit.document.text}".strip() for hit in message.documents]
        texts += [message.content] if message.content else []
    return tuple(tokenizer.encode("\n\n".join(texts) + "\n\n"))


def question_pieces(
    questions: Iterable[Question],
    corpus: Iterable[Document],
    tokenizer: Tokenizer,
    max_document_tokens: int | None = None,
) -> Iterator[TokenPiece]:
    """Questions with their gold passages and answers, written as the methods write them.

    A piece bears the names of its passages, so that :func:`split_text` never shows a held-out passage elsewhere.
    Give questions for training only.

    Args:
        questions: without gold passages, they are question and answer.
        corpus: where the passages are.
        tokenizer: of the model.
        max_document_tokens: of each passage; None for all.
    """
    questions = list(questions)
    wanted = {i for question in questions for i in question.supporting_ids}
    passages = {document.doc_id: document for document in corpus if document.doc_id in wanted}
    for question in questions:
        gold = [passages[i] for i in question.supporting_ids if i in passages]
        hits = tuple(Hit(document, 1.0) for document in gold)
        hops = (Hop(1, question.question, hits, hits),)
        conversation = conversation_from_hops(
            question.question, hops, question.answers[0], conversation_id=question.id
        )
        names = {name for document in gold for name, _ in _parts(document)} or {f"question {question.id}"}
        yield TokenPiece(
            f"question {question.id}",
            tuple(sorted(names)),
            chat_ids(conversation, tokenizer, max_document_tokens),
        )


def windows(texts: Iterable[Text], tokenizer: Tokenizer, tokens: int, window: int, what: str) -> Tensor:
    """The first ``tokens`` tokens of texts that follow one another, int64 ``[tokens // window, window]``.

    Args:
        texts: plain ones are followed by a blank line.
        tokenizer: of the model.
        tokens: how many, rounded up to whole windows.
        window: tokens per row.
        what: named in the error.

    Raises:
        DataError: there are fewer tokens than one window.
    """
    wanted = -(-tokens // window) * window
    ids: list[int] = []
    for text in texts:
        ids += _first_ids(text, tokenizer, wanted)
        if len(ids) >= wanted:
            break
    rows = min(len(ids), wanted) // window
    if not rows:
        raise DataError(
            f"{what}: the text has {len(ids)} tokens there, fewer than one window of {window}; give more text"
        )
    return torch.tensor(ids[: rows * window], dtype=torch.int64).view(rows, window)


def _first_ids(text: Text, tokenizer: Tokenizer, wanted: int) -> Sequence[int]:
    """Ids of a text, at least ``wanted`` of them where it has so many; a book is not encoded for its first pages."""
    if not isinstance(text, str):
        return text
    most = _CHARACTERS_PER_TOKEN * wanted
    if len(text) > most:
        ids = tokenizer.encode(text[:most])
        if len(ids) > wanted:
            return ids
    return tokenizer.encode(text + "\n\n")


def with_recall(rows: Tensor, share: float, seed: int, least: int = 6, most: int = 24) -> Tensor:
    """Make some windows hard to predict without looking back.

    Their first half stays; the second half is the first again, in pieces of ``least`` to ``most`` tokens and in another
    order. Within a piece every token can be known from what stood before, however far, and nothing else tells. In
    ordinary text so little depends on looking back that perplexity hardly shows its loss.

    Args:
        rows: int64 ``[n, T]``.
        share: of the windows that are remade, in [0, 1], evenly spread.
        seed: of pieces and orders.
        least: tokens of a piece.
        most: tokens of a piece.

    Returns:
        int64 ``[n, T]``, a new tensor where ``share`` is not 0.
    """
    chosen = [i for i in range(len(rows)) if int((i + 1) * share) > int(i * share)]
    half = rows.shape[1] // 2
    if not chosen or not half:
        return rows
    rows = rows.clone()
    generator = torch.Generator().manual_seed(seed)
    for i in chosen:
        cuts = [0]
        while cuts[-1] < half:
            cuts.append(min(half, cuts[-1] + int(torch.randint(least, most + 1, (1,), generator=generator))))
        pieces = [rows[i, a:b] for a, b in itertools.pairwise(cuts)]
        order = torch.randperm(len(pieces), generator=generator).tolist()
        again = torch.cat([pieces[k] for k in order])
        rows[i, half : 2 * half] = again
    return rows


def evaluation_windows(
    texts: Mapping[str, str | Path],
    tokenizer: Tokenizer,
    tokens: int,
    window: int,
    key: str = "convert.evaluation_texts",
) -> dict[str, Tensor]:
    """Sets to measure on: each the first ``tokens`` tokens of a source as it stands, in its order, nothing held out.

    A .txt or .md is taken as it is; passages stand below their titles; conversations are whole, with what the chat
    template writes around them (a system turn of its own is easy to predict, so that perplexity on short
    conversations is low).

    Args:
        texts: a source by name, see :func:`read_sources`.
        tokenizer: of the model.
        tokens: of each set at most, rounded up to whole windows.
        window: tokens per row.
        key: the configuration's, for errors.

    Returns:
        int64 ``[n, window]`` by name.

    Raises:
        DataError: a source can't be read, or has fewer tokens than one window; names the set.
    """
    return {
        name: windows(
            _as_it_stands(source, tokenizer, f"{key}.{name}"),
            tokenizer,
            tokens,
            window,
            f"{key}.{name}={source}",
        )
        for name, source in texts.items()
    }


def _as_it_stands(source: str | Path, tokenizer: Tokenizer, key: str) -> Iterator[Text]:
    for item in _read(source, tokenizer, key):
        if isinstance(item, TokenPiece):
            yield item.ids
        elif item.is_passage and item.document.title:
            yield f"{item.document.title}\n{item.document.text}"
        else:
            yield item.document.text


def fingerprint(*tensors: Tensor) -> str:
    """sha256 of token ids."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
