"""The knowledge base: ``corpus.jsonl``, one passage ``{id, title, text}`` a line."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from refragkit.data.document_store import DocumentStore, line_starts, write_table
from refragkit.data.document_table import RepeatedIdError, TableReader
from refragkit.data.jsonl import (
    MAX_REPORTED_LINES,
    LineError,
    Record,
    bad_lines,
    existing_file,
    read_jsonl,
    scan_jsonl,
)
from refragkit.errors import DataError
from refragkit.types import Document

log = logging.getLogger(__name__)

#: A file of this size or more is not read into memory.
LARGE_CORPUS_BYTES = 64 << 20
#: Raise it when the rules for lines change: files are then checked again.
TABLE_VERSION = 1


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


def open_corpus(path: str | Path, cache_dir: str | Path) -> Sequence[Document]:
    """``load_corpus`` for a file of any size: a large one stays on disk.

    It is checked once, and a table of its lines is kept in the cache under the hash of its bytes.

    Raises:
        DataError: as `load_corpus`, or the table can't be written.
    """
    file = existing_file(path, "a JSONL file of passages")
    if file.stat().st_size < LARGE_CORPUS_BYTES:
        return load_corpus(file)
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    table = Path(cache_dir) / "corpus" / f"{digest[:32]}-{TABLE_VERSION}.safetensors"
    if not table.is_file():
        log.info("checking %s", file)
        _write_table(file, table)
    return DocumentStore(file, table, _stored)


def _stored(line: bytes) -> Document:
    """A line that was checked before."""
    return _document(Record(json.loads(line)))[1]


def _write_table(file: Path, table: Path) -> None:
    reader, n_problems = TableReader(hashing=True), 0
    problems: list[str] = []
    temporary = table.with_name(f"{table.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        for number, record in scan_jsonl(file):
            try:
                if isinstance(record, LineError):
                    raise record
                reader.add(_document(record)[1])
            except LineError as problem:
                n_problems += 1
                if len(problems) < MAX_REPORTED_LINES:
                    problems.append(f"{file}:{number}: {problem}")
        if problems:
            raise DataError(bad_lines(file, problems, n_problems))
        if not reader.ids:
            raise DataError(f"{file}: expected passages, one JSON object a line, but the file is empty")
        table.parent.mkdir(parents=True, exist_ok=True)
        write_table(temporary, line_starts(file), reader)
        temporary.replace(table)
    except RepeatedIdError as error:
        raise DataError(
            f"{file}:{error.second + 1}: key 'id': {error.doc_id!r} is already used on line {error.first + 1}; ids "
            "must be unique"
        ) from error
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"{file}: can't be read, or its table {table} not written ({error.strerror or error}); free space there or "
            "set another paths.outputs"
        ) from error
