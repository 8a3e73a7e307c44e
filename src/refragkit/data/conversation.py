r"""A conversation as token ids with a loss mask, and its prompt as an exact prefix of it.

With special tokens::

    <|system|> text <|end|>  <|user|> question <|end|>
    <|retrieval|> [<|search|> query] <|doc|> title \n text  <|doc|> ...  <|end|>   one per hop
    <|assistant|> answer <|end|>

without anything in between. A hop's query is shown only where it isn't the question itself. Where the model
writes the queries, each is an assistant turn of its own, whose text begins with ``<|search|>``, and the
retrieval turn behind it doesn't repeat it::

    <|assistant|> <|search|> query <|end|>
    <|retrieval|> <|doc|> title \n text ...  <|end|>
    <|assistant|> answer <|end|>

What is trained on is the text of assistant turns and the ``<|end|>`` that closes them: the mask is set as the
ids are put together, never found again in decoded text. A pretrained tokenizer with a chat template keeps it
(`refragkit.data.chat_template`).

The question stands before the documents (``question_first``: needed to go on from hop to hop), behind them
(``documents_first``: what was read of the documents serves every question; no queries are shown) or on both sides
(``sandwich``: a recurrent model recalls better when it knows what to look for, and is asked when it has read;
arXiv 2407.05483).

What doesn't fit is taken from the documents, the least relevant first, never from a question or an answer.
Relevance is the rank within a hop (scores of different queries don't compare); of the same rank, the later
hop gives way first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from refragkit.data import chat_template
from refragkit.data.pieces import (
    SEARCH_MARK,
    Piece,
    document_text,
    retrieval_hop_indices,
    search_query,
    shows_query,
)
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import DataError
from refragkit.types import Conversation, Hop, Message

ORDERS: tuple[str, ...] = ("question_first", "documents_first", "sandwich")

MIN_DOCUMENT_TOKENS = 8
"""A document cut to fewer tokens is left out: half a title tells nothing."""

Dropped = Literal["", "too_long", "no_supervised_token"]


class PromptTooLongError(DataError):
    """A question that leaves no room for its answer, even without documents."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids and what became of the conversation on the way.

    Attributes:
        input_ids: T ids; empty if the example was dropped.
        loss_mask: T flags; True where the token is to be learnt (as a target, at its own position).
        truncated_documents: documents that lost their end.
        left_out_documents: documents that were left out whole.
        dropped: why the example can't be used, else "".
        documents_end: how many tokens there are up to the end of the last document; 0 without any.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    truncated_documents: int = 0
    left_out_documents: int = 0
    dropped: Dropped = ""
    documents_end: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def supervised_tokens(self) -> int:
        """How many tokens are learnt."""
        return sum(self.loss_mask)


def conversation_from_hops(
    question: str,
    hops: Sequence[Hop] = (),
    answer: str | None = None,
    *,
    system: str = "",
    order: str = "question_first",
    conversation_id: str = "",
    written_from_hop: int | None = None,
) -> Conversation:
    """The conversation of one question: question, one retrieval turn per hop with new documents, answer.

    Args:
        question: the user turn.
        hops: what was retrieved; a hop shows the documents that no earlier one did.
        answer: the last assistant turn; None leaves it to the model.
        system: text of a system turn, none if empty.
        order: one of `ORDERS`.
        conversation_id: id of the conversation.
        written_from_hop: hops with this number or a higher one were asked for by the assistant, in a turn of its own
            each, and are shown even if nothing new was found; None for none.
    """
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {ORDERS}, got {order!r}")
    if written_from_hop is not None and order != "question_first":
        raise ValueError(f"order={order}: a query can't be written before the question was read")
    messages = [Message("system", system)] if system else []
    if order != "documents_first":
        messages.append(Message("user", question))
    for hop in hops:
        written = written_from_hop is not None and hop.hop >= written_from_hop
        if written:
            messages.append(search_turn(hop.query))
        if written or hop.new_documents:
            query = "" if order == "documents_first" else hop.query
            messages.append(Message("retrieval", hop=hop.hop, query=query, documents=hop.new_documents))
    if order == "documents_first" or (order == "sandwich" and len(messages) > 1 + bool(system)):
        messages.append(Message("user", question))
    if answer is not None:
        messages.append(Message("assistant", answer))
    return Conversation(conversation_id, tuple(messages))


def search_turn(query: str) -> Message:
    """The assistant turn that asks for documents."""
    return Message("assistant", f"{SEARCH_MARK} {query}")


def read_turn(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str | None, str]:
    """What a model wrote in an assistant turn: (query, "") where it searches, else (None, answer).

    Args:
        token_ids: the turn behind its header, without the end token.
        tokenizer: decides between special tokens and a chat template.
    """
    if tokenizer.chat_template:
        text = tokenizer.decode(token_ids).strip()
        if text.startswith(chat_template.SEARCH_PREFIX):
            return text[len(chat_template.SEARCH_PREFIX) :].strip(), ""
        return None, text
    if token_ids and token_ids[0] == tokenizer.special_ids.get(SEARCH_MARK):
        return tokenizer.decode(token_ids[1:]).strip(), ""
    return None, tokenizer.decode(token_ids).strip()


def render(
    conversation: Conversation,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    reserve_tokens: int = 0,
    max_document_tokens: int | None = None,
) -> Rendered:
    """The whole conversation, at most ``max_tokens`` long.

    Args:
        conversation: turns in order.
        tokenizer: decides between special tokens and a chat template.
        max_tokens: upper bound of the length.
        reserve_tokens: room to keep for the last assistant turn even if it is shorter. With the value
            given to `render_prompt` (at least the length of the answer and its end token), the
            prompt is a token-exact prefix of this render, truncation included. Without truncation it
            always is.
        max_document_tokens: upper bound for each document.

    Returns:
        A `Rendered`; with ``dropped`` set and no tokens if everything but the documents is already too
        long, or if there is nothing to learn.
    """
    pieces = _pieces(conversation.messages, tokenizer)
    rendered = _fit(pieces, max_tokens, reserve_tokens, max_document_tokens)
    if not rendered.dropped and not any(rendered.loss_mask):
        return Rendered([], [], dropped="no_supervised_token")
    return rendered


def prepare_prompt(
    conversation: Conversation,
    tokenizer: Tokenizer,
    max_tokens: int,
    reserve_tokens: int,
    *,
    max_document_tokens: int | None = None,
) -> Rendered:
    """What `render_prompt` gives, with the counts; ``dropped="too_long"`` instead of an error."""
    messages = conversation.messages
    if messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    pieces = _prompt_pieces(messages, tokenizer)
    rendered = _fit(pieces, max_tokens, reserve_tokens, max_document_tokens)
    return replace(rendered, loss_mask=[False] * len(rendered.input_ids))


def render_prompt(
    conversation: Conversation,
    tokenizer: Tokenizer,
    max_tokens: int,
    reserve_tokens: int,
    *,
    max_document_tokens: int | None = None,
) -> list[int]:
    """The conversation up to where the model answers; ends with the header of an assistant turn.

    Args:
        conversation: turns in order; an assistant turn at the end is left out.
        tokenizer: as for `render`.
        max_tokens: upper bound for prompt and answer together.
        reserve_tokens: room kept for the answer.
        max_document_tokens: upper bound for each document.

    Raises:
        PromptTooLongError: question and reserve alone don't fit.
    """
    rendered = prepare_prompt(
        conversation, tokenizer, max_tokens, reserve_tokens, max_document_tokens=max_document_tokens
    )
    if rendered.dropped:
        raise PromptTooLongError(
            f"conversation {conversation.id!r}: the question and {reserve_tokens} tokens for the answer don't fit "
            f"into {max_tokens} tokens, even without documents; allow more tokens or a shorter answer"
        )
    return rendered.input_ids


def render_follow_up(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What follows an answer that a model has just given, up to the header of its next one.

    For a model that keeps its state, and so has read everything up to the answer.

    Args:
        conversation: turns in order; those behind the last assistant turn are new. Nothing is cut.
        tokenizer: as for `render`.

    Returns:
        The ids that close the answer (its end token, which the model may have written itself), and those of the
        new turns with the assistant header. Prompt, answer, closing and new turns together are what
        `render_prompt` gives for the whole conversation, unless a chat template writes earlier turns
        differently once there are later ones.

    Raises:
        ValueError: no assistant turn, or nothing behind it.
    """
    closing, new = _follow_up_pieces(conversation.messages, tokenizer)
    return closing, [t for piece in new for t in piece.ids]


def prepare_follow_up(
    conversation: Conversation,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    max_document_tokens: int | None = None,
) -> tuple[list[int], Rendered]:
    """`render_follow_up` with documents cut to size.

    Args:
        conversation: as for `render_follow_up`; what precedes the last assistant turn makes no difference.
        tokenizer: as for `render`.
        max_tokens: upper bound of the new turns with the assistant header.
        max_document_tokens: upper bound for each document.

    Returns:
        The ids that close the answer, and the new turns with the counts; ``dropped`` where even without documents
        they are too long.
    """
    closing, new = _follow_up_pieces(conversation.messages, tokenizer)
    rendered = _fit(new, max_tokens, 0, max_document_tokens)
    return closing, replace(rendered, loss_mask=[False] * len(rendered.input_ids))


def _follow_up_pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[Piece]]:
    """The ids that close the last assistant turn behind its text, and the pieces behind it."""
    pieces = _prompt_pieces(messages, tokenizer)
    last = max((i for i, piece in enumerate(pieces) if piece.supervised), default=-1)
    if last < 0 or messages[-1].role == "assistant":
        raise ValueError("a follow-up needs an assistant turn with at least one turn behind it")
    first = last
    while first > 0 and pieces[first - 1].supervised:
        first -= 1
    answer = next(m for m in reversed(messages) if m.role == "assistant")
    ids = [t for piece in pieces[first : last + 1] for t in piece.ids]
    return ids[len(assistant_ids(answer, tokenizer)) :], pieces[last + 1 :]


def assistant_ids(message: Message, tokenizer: Tokenizer) -> list[int]:
    """The ids of an assistant turn's text, without its header and its end."""
    query = search_query(message)
    if query is None or tokenizer.chat_template:
        return tokenizer.encode(chat_template.turn_text(message))
    return [tokenizer.special_ids[SEARCH_MARK], *tokenizer.encode(query)]


def render_all(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    reserve_tokens: int = 0,
    max_document_tokens: int | None = None,
) -> tuple[list[Rendered], dict[str, int]]:
    """`render` of each conversation, dropped ones left out, and what was cut.

    Returns:
        The examples in order, and the counts ``examples``, ``dropped_too_long``,
        ``dropped_no_supervised_token``, ``truncated_documents``, ``left_out_documents``.
    """
    rendered = [
        render(
            c, tokenizer, max_tokens, reserve_tokens=reserve_tokens, max_document_tokens=max_document_tokens
        )
        for c in conversations
    ]
    return [r for r in rendered if not r.dropped], render_counts(rendered)


def render_counts(rendered: Iterable[Rendered]) -> dict[str, int]:
    """How many examples there are, and what was cut or dropped."""
    counts = Counter(
        examples=0,
        dropped_too_long=0,
        dropped_no_supervised_token=0,
        truncated_documents=0,
        left_out_documents=0,
    )
    for r in rendered:
        counts[f"dropped_{r.dropped}" if r.dropped else "examples"] += 1
        counts["truncated_documents"] += r.truncated_documents
        counts["left_out_documents"] += r.left_out_documents
    return dict(counts)


def _pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
    if tokenizer.chat_template:
        return chat_template.pieces(messages, tokenizer)
    return _special_pieces(messages, tokenizer)


def _prompt_pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
    if tokenizer.chat_template:
        return chat_template.prompt_pieces(messages, tokenizer)
    return [*_special_pieces(messages, tokenizer), Piece([tokenizer.special_ids["<|assistant|>"]])]


def _special_pieces(messages: Sequence[Message], tokenizer: Tokenizer) -> list[Piece]:
    """Pieces of the rendering with special tokens."""
    special = tokenizer.special_ids
    end = special["<|end|>"]
    pieces = [] if tokenizer.bos_id is None else [Piece([tokenizer.bos_id])]
    question = ""
    hop_indices = retrieval_hop_indices(messages)
    for i, message in enumerate(messages):
        if message.role == "retrieval":
            pieces.append(Piece([special["<|retrieval|>"]]))
            if shows_query(messages, i, question):
                pieces.append(Piece([special["<|search|>"], *tokenizer.encode(message.query)]))
            texts = tokenizer.encode_batch([document_text(hit.document) for hit in message.documents])
            pieces += [
                Piece([special["<|doc|>"], *ids], rank=(n, hop_indices[i])) for n, ids in enumerate(texts)
            ]
            pieces.append(Piece([end]))
            continue
        if message.role == "user":
            question = message.content
        supervised = message.role == "assistant"
        final = supervised and i == len(messages) - 1
        text = assistant_ids(message, tokenizer) if supervised else tokenizer.encode(message.content)
        pieces.append(Piece([special[f"<|{message.role}|>"]]))
        pieces.append(Piece([*text, end], supervised=supervised, final=final))
    return pieces


def _fit(
    pieces: Sequence[Piece], max_tokens: int, reserve_tokens: int, max_document_tokens: int | None
) -> Rendered:
    """Shorten documents until everything and the reserve fit."""
    truncated: set[int] = set()
    left_out: set[int] = set()
    ids = [piece.ids for piece in pieces]
    documents = [i for i, piece in enumerate(pieces) if piece.rank is not None]
    if max_document_tokens is not None:
        for i in documents:
            if len(ids[i]) > max_document_tokens:
                ids[i] = ids[i][:max_document_tokens]
                truncated.add(i)

    answer_tokens = sum(len(piece.ids) for piece in pieces if piece.final)
    spare_tokens = max(reserve_tokens - answer_tokens, 0)
    excess = sum(map(len, ids)) + spare_tokens - max_tokens
    for i in sorted(documents, key=lambda i: pieces[i].rank or (0, 0), reverse=True):
        if excess <= 0:
            break
        keep = len(ids[i]) - excess
        if keep < MIN_DOCUMENT_TOKENS:
            keep = 0
            left_out.add(i)
        else:
            truncated.add(i)
        excess -= len(ids[i]) - keep
        ids[i] = ids[i][:keep]
    if excess > 0:
        return Rendered([], [], dropped="too_long")
    return Rendered(
        input_ids=[t for part in ids for t in part],
        loss_mask=[piece.supervised for piece, part in zip(pieces, ids, strict=True) for _ in part],
        truncated_documents=len(truncated - left_out),
        left_out_documents=len(left_out),
        documents_end=_documents_end(pieces, ids),
    )


def _documents_end(pieces: Sequence[Piece], ids: Sequence[Sequence[int]]) -> int:
    """The position behind the last document, the pieces being as long as their ``ids`` now."""
    shown = [i for i, piece in enumerate(pieces) if piece.rank is not None and ids[i]]
    return sum(map(len, ids[: shown[-1] + 1])) if shown else 0
