"""Documents that stay in their JSONL file and are parsed when asked for.

Beside the file lies a table of where each line starts and of what a search needs to know of all documents, which is
memory-mapped: a store of a billion documents opens as fast as one of a thousand, and holds as little memory.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refragkit.data.document_table import DocumentTable, IdTable, IntArray, TableReader
from refragkit.data.mapped_tensors import map_tensors, write_tensors
from refragkit.errors import DataError
from refragkit.types import Document

Parse = Callable[[bytes], Document]


def parse_document(line: bytes) -> Document:
    """A line of an index folder's documents: ``{id, title, text, metadata}``."""
    row = json.loads(line)
    return Document(row["id"], row["title"], row["text"], row["metadata"])


class DocumentStore(Sequence[Document]):
    """The documents of a JSONL file.

    Attributes:
        table: what is known of all of them, the corpus hash included.
    """

    def __init__(self, path: Path, table_path: Path, parse: Parse = parse_document) -> None:
        """Open a file and its table; both must stay as they are while the store is in use.

        Args:
            path: one JSON object a line; blank lines only at the end.
            table_path: what `write_table` wrote for it.
            parse: makes a document of a line.

        Raises:
            DataError: the table is damaged or not that of this file.
        """
        self._arguments = (path, table_path, parse)
        self.path = path
        self._parse = parse
        try:
            tensors, metadata = map_tensors(table_path)
            self._starts: IntArray = tensors["starts"]
            ids = IdTable(self, tensors["id_high"], tensors["id_low"], tensors["id_order"])
            self.table = DocumentTable(
                ids,
                tensors["id_rank"],
                tensors["searchable"],
                int(metadata["duplicates"]),
                metadata["corpus_hash"],
            )
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path}: its document table can't be used ({error}); delete {table_path}"
            ) from error
        if os.fstat(self._file).st_size < self._starts[-1]:
            raise DataError(f"{path} is shorter than when {table_path} was made; delete that file")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        """A document, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self._read(i) for i in range(*index.indices(len(self)))]
        i = int(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self._read(i % len(self))

    def __iter__(self) -> Iterator[Document]:
        with self.path.open("rb") as lines:
            lines.seek(int(self._starts[0]))
            for _ in range(len(self)):
                yield self._document(lines.readline())

    def _read(self, i: int) -> Document:
        start, end = self._starts[i : i + 2].tolist()
        # Read, not mapped: a file that is cut while in use would kill the process through its mapping.
        if hasattr(os, "pread"):
            return self._document(os.pread(self._file, end - start, start))
        with self.path.open("rb") as file:
            file.seek(start)
            return self._document(file.read(end - start))

    def _document(self, line: bytes) -> Document:
        try:
            return self._parse(line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} was changed while in use ({error}): run again with the file left alone"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __reduce__(self) -> tuple[Any, ...]:  # an open file can't be sent to another process
        return DocumentStore, self._arguments


def line_starts(path: Path) -> IntArray:
    """Where each document of a file starts, and where the last one ends: [n + 1] int64."""
    starts, end = array("q"), 0
    with path.open("rb") as lines:
        for line in lines:
            if line.strip() and line != b"\xef\xbb\xbf":
                starts.append(end + (3 if end == 0 and line.startswith(b"\xef\xbb\xbf") else 0))
                last = end + len(line)
            end += len(line)
    return np.array([*starts, last], dtype=np.int64) if starts else np.zeros(1, dtype=np.int64)


def write_table(path: Path, starts: IntArray, reader: TableReader) -> None:
    """Write the table of documents that ``reader`` has read.

    Args:
        path: a new file.
        starts: see `line_starts`.
        reader: with the corpus hash.

    Raises:
        RepeatedIdError: a doc_id is used twice.
        OSError: the disk is full.
    """
    table = reader.table({})
    high, low, order = IdTable.arrays(reader.ids)
    tensors = {
        "starts": starts,
        "id_high": high,
        "id_low": low,
        "id_order": order,
        "id_rank": table.id_rank,
        "searchable": table.searchable,
    }
    write_tensors(path, tensors, {"duplicates": str(table.duplicates), "corpus_hash": str(table.corpus_hash)})


def write_documents(path: Path, table_path: Path, documents: Sequence[Document]) -> None:
    """Write documents, one ``{id, title, text, metadata}`` a line, and their table.

    Raises:
        OSError: the disk is full.
    """
    starts, end, reader = array("q", [0]), 0, TableReader(hashing=True)
    with path.open("wb") as f:
        for d in documents:
            row = {"id": d.doc_id, "title": d.title, "text": d.text, "metadata": dict(d.metadata)}
            end += f.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            starts.append(end)
            reader.add(d)
    write_table(table_path, np.array(starts, dtype=np.int64), reader)
