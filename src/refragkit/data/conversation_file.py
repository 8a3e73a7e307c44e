"""A user's conversations: JSONL of ``{"id": ..., "messages": [{"role", "content"}, ...]}``."""

from __future__ import annotations

from pathlib import Path

from refragkit.data.jsonl import LineError, Record, read_jsonl
from refragkit.types import ROLES, Conversation, Document, Hit, Message

_DOCUMENT_KEYS = {"doc_id", "title", "text", "score"}


def _hit(record: Record) -> Hit:
    return Hit(
        Document(
            doc_id=record.string("doc_id"),
            title=record.string("title", default="", may_be_empty=True),
            text=record.string("text", may_be_empty=True),
            metadata={k: v for k, v in record.fields.items() if k not in _DOCUMENT_KEYS},
        ),
        score=record.number("score", default=0.0),
    )


def _message(record: Record) -> Message:
    role = record.string("role")
    if role == "retrieval":
        return Message(
            role="retrieval",
            hop=record.integer("hop", default=1, minimum=1),
            query=record.string("query", default="", may_be_empty=True),
            documents=tuple(_hit(d) for d in record.objects("documents")),
        )
    for known in ROLES:
        if role == known:
            return Message(role=known, content=record.string("content", may_be_empty=role != "user"))
    raise LineError(f"key '{record.where}role': expected one of {', '.join(ROLES)}, got {role!r}")


def parse_conversation(record: Record) -> tuple[str, Conversation]:
    """One line: its id and the conversation.

    Raises:
        LineError: what is wrong with it.
    """
    conversation_id = record.string("id")
    messages = tuple(_message(m) for m in record.objects("messages"))
    if not messages:
        raise LineError("key 'messages': expected at least one message, got an empty list")
    return conversation_id, Conversation(conversation_id, messages)


def load_conversations(path: str | Path) -> list[Conversation]:
    """The conversations of ``path`` in file order; keys other than id and messages are ignored.

    Raises:
        DataError: a missing or empty file, broken lines, unknown roles, repeated ids; names file and line.
    """
    return read_jsonl(path, "conversations", parse_conversation)
