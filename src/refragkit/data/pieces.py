"""What both renderings are made of: runs of tokens that are learnt, shortened or kept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refragkit.types import Document, Message


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


def is_follow_up(message: Message, question: str) -> bool:
    """Whether a retrieval turn asked for something else than the question."""
    return bool(message.query) and message.query.strip() != question.strip()


def retrieval_hop_indices(messages: Sequence[Message]) -> list[int]:
    """For each message, how many retrieval turns come before it."""
    indices, n = [], 0
    for message in messages:
        indices.append(n)
        n += message.role == "retrieval"
    return indices
