"""Rendering with the chat template of a pretrained tokenizer, mask and documents kept apart by token ids.

The template is run once with a placeholder for each turn's text; what stands between the placeholders is
the template's own, encoded with control tokens, and the texts go in between, encoded without. So a document
that contains ``<|im_end|>`` stays text, the mask needs no search, and documents can be shortened by tokens.

The prompt is what the template gives with ``add_generation_prompt``; the full rendering is that prompt, the
answer, and what the template writes behind an answer. It is a prefix by construction, also for templates
that render the last turn differently.

Retrieval turns become text on the user's side, in the turn before them: templates know no such role, and
many want user and assistant to alternate. An assistant turn that searches is the text ``Search: query``: a
vocabulary that is left alone has no token for it.

Differs: tokenizers that put a space in front of every text (SentencePiece without a prefix rule of their
own) put one in front of every piece here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from refragkit.data.pieces import Piece, document_text, retrieval_hop_indices, search_query, shows_query
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import DataError
from refragkit.types import Message

SEARCH_PREFIX = "Search:"
_NOTHING_FOUND = "No new documents."
_SLOT = re.compile(r"refragkit-slot-(\d+)-text")


@dataclass(slots=True)
class _Turn:
    """One turn as the template sees it, and its texts: (text, rank of a document or None)."""

    role: str
    texts: list[tuple[str, tuple[int, int] | None]] = field(default_factory=list)

    def add(self, text: str, rank: tuple[int, int] | None) -> None:
        """Append a text, two lines below what is there."""
        self.texts.append(("\n\n" + text if self.texts else text, rank))


def pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
    """Pieces of the whole conversation."""
    turns = _turns(messages)
    if not turns or turns[-1].role != "assistant":
        return _fill(_scaffold(turns, tokenizer, False), turns, tokenizer)
    prompt = _fill(_scaffold(turns[:-1], tokenizer, True), turns[:-1], tokenizer)
    answer = Piece(tokenizer.encode(turns[-1].texts[0][0]), supervised=True, final=True)
    # Behind the end of the answer nothing is needed; a template without an end gets one, so that it is learnt.
    end, _ = _closing(_scaffold(turns, tokenizer, False)[-1], tokenizer)
    return [*prompt, answer, Piece(end.ids or [tokenizer.end_id], supervised=True, final=True)]


def prompt_pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
    """Pieces of a conversation that the model is to answer, up to the header of its turn."""
    turns = _turns(messages)
    return _fill(_scaffold(turns, tokenizer, True), turns, tokenizer)


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    """Turns of user, assistant and system; neighbours on the user's side are one turn."""
    turns: list[_Turn] = []
    question = ""
    hop_indices = retrieval_hop_indices(messages)
    for i, message in enumerate(messages):
        role = "user" if message.role == "retrieval" else message.role
        follows = bool(turns) and turns[-1].role == role == "user"
        if not follows:
            turns.append(_Turn(role))
        turn = turns[-1]
        if message.role != "retrieval":
            if message.role == "user":
                question = message.content
            turn.add(turn_text(message), None)
            continue
        if shows_query(messages, i, question):
            turn.add(f"{SEARCH_PREFIX} {message.query}", None)
        for n, hit in enumerate(message.documents):
            turn.add(f"Document: {document_text(hit.document)}", (n, hop_indices[i]))
        if not message.documents and i and search_query(messages[i - 1]) is not None:
            turn.add(_NOTHING_FOUND, None)
    return turns


def turn_text(message: Message) -> str:
    """The text of a turn other than a retrieval, as the template gets it."""
    query = search_query(message)
    return message.content if query is None else f"{SEARCH_PREFIX} {query}"


def _scaffold(turns: Sequence[_Turn], tokenizer: Tokenizer, add_generation_prompt: bool) -> list[str]:
    """What the template writes before, between and behind the turns: len(turns) + 1 texts.

    A template may leave a turn out or move it (a system turn into the first user turn, say): the texts of
    the turn then have no place, which is refused rather than lost.
    """
    messages = [{"role": t.role, "content": f"refragkit-slot-{n}-text"} for n, t in enumerate(turns)]
    text = tokenizer.render_template(messages, add_generation_prompt)
    order = [int(n) for n in _SLOT.findall(text)]
    if order != list(range(len(turns))):
        roles = ", ".join(t.role for t in turns)
        raise DataError(
            f"the tokenizer's chat template doesn't write every turn once and in order: turns [{roles}], "
            f"written {order}"
        )
    return _SLOT.split(text)[::2]


def _fill(scaffold: Sequence[str], turns: Sequence[_Turn], tokenizer: Tokenizer) -> list[Piece]:
    result: list[Piece] = []
    after_assistant = False
    for n, turn in enumerate(turns):
        before = scaffold[n]
        lead = ""
        if turn.role != "assistant":
            # White space in front of a text belongs to its first token in most vocabularies.
            before, lead = before.rstrip(), before[len(before.rstrip()) :]
        result += (
            _closing(before, tokenizer) if after_assistant else [Piece(tokenizer.encode_template(before))]
        )
        texts = [(lead + text if m == 0 else text, rank) for m, (text, rank) in enumerate(turn.texts)]
        encoded = tokenizer.encode_batch([text for text, _ in texts])
        after_assistant = turn.role == "assistant"
        result += [
            Piece(ids, supervised=after_assistant, rank=rank)
            for ids, (_, rank) in zip(encoded, texts, strict=True)
        ]
    last = scaffold[len(turns)]
    result += _closing(last, tokenizer) if after_assistant else (Piece(tokenizer.encode_template(last)),)
    return result


def _closing(text: str, tokenizer: Tokenizer) -> tuple[Piece, Piece]:
    """What follows an answer: learnt up to the token that ends the turn, the rest not."""
    ids = tokenizer.encode_template(text)
    n = ids.index(tokenizer.end_id) + 1 if tokenizer.end_id in ids else 0
    return Piece(ids[:n], supervised=True), Piece(ids[n:])
