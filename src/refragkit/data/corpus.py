"""The knowledge base: ``corpus.jsonl``, one passage ``{id, title, text}`` a line."""

from __future__ import annotations

from pathlib import Path

from refragkit.data.jsonl import Record, read_jsonl
from refragkit.types import Document


def _document(record: Record) -> tuple[str, Document]:
    doc_id = record.string("id")
    title = record.string("title", default="", may_be_empty=True)
    text = record.string("text", may_be_empty=True)
    return doc_id, Document(doc_id=doc_id, title=title, text=text, metadata=record.rest())


def load_corpus(path: str | Path) -> list[Document]:
    """The passages of ``path`` in file order; keys other than id, title and text become metadata.

    A passage may have an empty text (real collections hold a few, and their judgements name the ids).

    Raises:
        DataError: a missing or empty file, broken lines, repeated ids; names file and line.
    """
    return read_jsonl(path, "passages", _document)
