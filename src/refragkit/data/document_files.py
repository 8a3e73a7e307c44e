"""The files of a user's own corpus, read one document at a time: ``.jsonl``, ``.txt``, ``.md`` and ``.parquet``.

What can't be read becomes a `Problem` between the documents; whoever reads decides whether it ends the run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from refragkit.data.jsonl import LineError, Record, scan_jsonl
from refragkit.data.markdown import Section, sections
from refragkit.errors import DataError
from refragkit.types import Document

SUFFIXES = (".jsonl", ".md", ".parquet", ".txt")

_PARQUET_ROWS = 1024


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file of the corpus; ``name`` is its path relative to the folder, with forward slashes."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What was left out and why.

    Attributes:
        kind: ``file`` (a whole file or folder, or the rest of one), ``line`` (a line or row), ``link`` (a symbolic link
            that leads out of the folder) or ``other`` (a file of another type; ``message`` is its suffix).
        message: names the place, what was expected and what was got.
    """

    kind: Literal["file", "line", "link", "other"]
    message: str


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document as its file holds it, before it is cut.

    Attributes:
        document: metadata hold ``source``, the name of the file, beside what the file carries.
        sections: of a ``.md``, its sections; else empty.
        is_passage: whether it comes from a file of passages (``.jsonl``, ``.parquet``), which need no cutting.
    """

    document: Document
    sections: Sequence[Section] = ()
    is_passage: bool = False


def corpus_files(source: str | Path) -> Iterator[CorpusFile | Problem]:
    """The files of a folder and all below it, sorted by name, or the one file that was given.

    Hidden files and folders are passed over, and so are symbolic links to what the folder holds anyway.

    Raises:
        DataError: there is no such file or folder, or the one file has another type.
    """
    root = Path(source).expanduser()
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"data.corpus={source}: expected a {_listed()} file or a folder of them, got a file of type"
                f" {root.suffix or 'none'}"
            )
        yield CorpusFile(root, root.name)
        return
    if not root.is_dir():
        problem = "is neither" if root.exists() else "does not exist"
        raise DataError(
            f"data.corpus={source}: expected a {_listed()} file or a folder of them, but it {problem}"
        )
    yield from _walk(root, root.resolve(), "")


def _walk(folder: Path, root: Path, above: str) -> Iterator[CorpusFile | Problem]:
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as error:
        yield Problem("file", f"{folder}: can't be read ({error.strerror or error})")
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path, name = Path(entry.path), above + entry.name
        if not _is_text(name):
            yield Problem("file", f"{_shown(path)}: expected a file name in UTF-8; rename it")
        elif entry.is_symlink():
            # Not followed either way: a target inside is read where it is. (Path.resolve raises on a link to itself.)
            if not Path(os.path.realpath(path)).is_relative_to(root):
                yield Problem(
                    "link", f"{path}: a symbolic link that leaves the folder; put the file itself there"
                )
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(path, root, f"{name}/")
        elif path.suffix.lower() not in SUFFIXES:
            yield Problem("other", path.suffix.lower() or "no suffix")
        elif not entry.is_file(follow_symlinks=False):
            yield Problem("file", f"{path}: expected a regular file")
        else:
            yield CorpusFile(path, name)


def read_file(file: CorpusFile) -> Iterator[SourceDocument | Problem]:
    """The documents of one file, in order.

    A ``.txt`` or ``.md`` is one document with the file's name as id. A line of a ``.jsonl`` and a row of a ``.parquet``
    is one each: ``text`` is required, ``id`` defaults to ``<name>:<line>``, ``title`` to nothing, and all other keys
    become metadata.
    """
    read = _READERS[file.path.suffix.lower()]
    empty = True
    try:
        for item in read(file):
            empty = False
            yield item
    except OSError as error:
        yield Problem("file", f"{file.path}: can't be read ({error.strerror or error})")
    else:
        if empty:
            yield Problem("file", f"{file.path}: the file is empty")


def _read_txt(file: CorpusFile) -> Iterator[SourceDocument | Problem]:
    text = _text(file)
    if isinstance(text, Problem):
        yield text
    elif text.strip():
        yield SourceDocument(Document(file.name, file.path.stem, text, {"source": file.name}))


def _read_md(file: CorpusFile) -> Iterator[SourceDocument | Problem]:
    text = _text(file)
    if isinstance(text, Problem):
        yield text
    elif text.strip():
        title, parts = sections(text, file.path.stem)
        yield SourceDocument(Document(file.name, title, text, {"source": file.name}), parts)


def _text(file: CorpusFile) -> str | Problem:
    content = file.path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return Problem(
            "file",
            f"{file.path}: expected UTF-8, got byte 0x{content[error.start]:02x} at byte {error.start + 1}"
            " (save the file as UTF-8)",
        )


def _read_jsonl(file: CorpusFile) -> Iterator[SourceDocument | Problem]:
    for number, record in scan_jsonl(file.path):
        try:
            if isinstance(record, LineError):
                raise record
            yield _passage(record, file.name, number)
        except LineError as error:
            yield Problem("line", f"{file.path}:{number}: {error}")


def _read_parquet(file: CorpusFile) -> Iterator[SourceDocument | Problem]:
    import pyarrow as pa
    from pyarrow import parquet

    if not file.path.stat().st_size:
        return
    number = 0
    try:
        with parquet.ParquetFile(file.path) as table:
            columns = table.schema_arrow.names
            if "text" not in columns:
                yield Problem(
                    "file",
                    f"{file.path}: expected a column 'text', got the columns {', '.join(columns) or 'none'}",
                )
                return
            for batch in table.iter_batches(_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    # What other formats leave out is null here
                    fields = {k: _json_value(v) for k, v in row.items() if v is not None or k == "text"}
                    try:
                        yield _passage(Record(fields), file.name, number)
                    except LineError as error:
                        yield Problem("line", f"{file.path}: row {number}: {error}")
            if not number:
                yield Problem("file", f"{file.path}: the table has no rows")
    # Arrow reports a damaged file as any of these, and text that is no UTF-8 as the last.
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        after = f" after row {number}" if number else ""
        yield Problem("file", f"{file.path}: can't be read as Parquet{after} ({what})")


_READERS: Mapping[str, Callable[[CorpusFile], Iterator[SourceDocument | Problem]]] = {
    ".jsonl": _read_jsonl,
    ".md": _read_md,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _passage(record: Record, name: str, number: int) -> SourceDocument:
    doc_id = record.identifier("id", default=f"{name}:{number}")  # many collections number their passages
    title = record.string("title", default="", may_be_empty=True)
    text = record.string("text", may_be_empty=True)
    metadata = {"source": name, **record.rest()}  # a key "source" of the user's own wins
    try:
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise LineError(
            "expected valid Unicode, got a lone surrogate in one of the keys besides id and text"
        ) from None
    return SourceDocument(Document(doc_id, title, text, metadata), is_passage=True)


def _json_value(value: Any) -> Any:
    """A value of a table as JSON has it: dates and the like as text, NaN as null."""
    if isinstance(value, Mapping):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _listed() -> str:
    return ", ".join(SUFFIXES[:-1]) + f" or {SUFFIXES[-1]}"
