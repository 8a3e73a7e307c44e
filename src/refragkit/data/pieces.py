"""What both renderings are made of: runs of tokens that are learnt, shortened or kept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refragkit.types import Document, Message

SEARCH_MARK = "<|search|>"
"""What the text of an assistant turn that searches begins with; the query follows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one kind, the unit that truncation works on.

    Attributes:
        ids: the tokens.
        supervised: they are learnt.
        rank: of a document, (rank within its hop, hop), both from 0; None for anything else.
        final: part of the last assistant turn behind its header: what a prompt leaves to the model.
    """

    ids: list[int]
    supervised: bool = False
    rank: tuple[int, int] | None = None
    final: bool = False


def document_text(document: Document) -> str:
    """A passage as a model reads it: title, line break, text."""
    return f"{document.title}\n{document.text}" if document.title else document.text


def search_query(message: Message) -> str | None:
    """The query of an assistant turn that searches instead of answering; None for every other turn."""
    if message.role != "assistant" or not message.content.startswith(SEARCH_MARK):
        return None
    return message.content[len(SEARCH_MARK) :].strip()


def shows_query(messages: Sequence[Message], index: int, question: str) -> bool:
    """Whether a retrieval turn has to say what it asked: not the question, nor what the assistant has just written."""
    query = messages[index].query.strip()
    written = index > 0 and search_query(messages[index - 1]) is not None
    return bool(query) and query != question.strip() and not written


def retrieval_hop_indices(messages: Sequence[Message]) -> list[int]:
    """For each message, how many retrieval turns come before it."""
    indices, n = [], 0
    for message in messages:
        indices.append(n)
        n += message.role == "retrieval"
    return indices
