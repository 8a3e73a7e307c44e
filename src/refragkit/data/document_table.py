"""What a search needs to know of all documents at once: who is where, in which order ids sort, which are empty."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refragkit.types import Document

IntArray = NDArray[np.int64]


def passage_text(document: Document) -> str:
    """The text that is indexed and encoded: the title, then the passage."""
    return f"{document.title}\n{document.text}" if document.title else document.text


def _hash_line(document: Document) -> bytes:
    # Metadata counts too: a cached index stores the documents and must hand back the right ones.
    row = [document.doc_id, document.title, document.text, dict(document.metadata)]
    return json.dumps(row, ensure_ascii=False, sort_keys=True, default=str).encode() + b"\n"


def corpus_hash(documents: Sequence[Document]) -> str:
    """Sha256 over ids, titles, texts and metadata in order: any change to the corpus changes it."""
    digest = hashlib.sha256()
    for d in documents:
        digest.update(_hash_line(d))
    return digest.hexdigest()


class PassageTexts(Sequence[str]):
    """The texts of some documents, made when asked for: a large corpus never lies in memory as a list of texts."""

    def __init__(self, documents: Sequence[Document], positions: IntArray) -> None:
        self._documents = documents
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        """A text, or a list of them for a slice."""
        if isinstance(index, slice):
            return [passage_text(self._documents[p]) for p in self._positions[index].tolist()]
        return passage_text(self._documents[int(self._positions[index])])


class IdTable(Mapping[str, int]):
    """Positions by doc_id in 24 bytes a document, which may lie on disk: sorted 128-bit hashes of the ids."""

    def __init__(
        self,
        documents: Sequence[Document],
        high: NDArray[np.uint64],
        low: NDArray[np.uint64],
        order: IntArray,
    ) -> None:
        """Wrap what `arrays` made for these documents."""
        self._documents = documents
        self._high = high
        self._low = low
        self._order = order

    @staticmethod
    def arrays(ids: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], IntArray]:
        """The hashes' halves, sorted, and the position that each belongs to; the ids are distinct."""
        raw = b"".join(map(_id_hash, ids))
        halves = np.frombuffer(raw, dtype="<u8").reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        return halves[order, 0], halves[order, 1], order.astype(np.int64)

    def __getitem__(self, doc_id: str) -> int:
        high, low = np.frombuffer(_id_hash(doc_id), dtype="<u8")
        i = int(self._high.searchsorted(high))
        while i < len(self._high) and self._high[i] == high:
            if self._low[i] == low:
                return int(self._order[i])
            i += 1
        raise KeyError(doc_id)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[str]:
        return (d.doc_id for d in self._documents)


def _id_hash(doc_id: str) -> bytes:
    return hashlib.blake2b(doc_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class DocumentTable:
    """What is known of all documents.

    Attributes:
        positions: doc_id -> position in the corpus.
        id_rank: [n] int64, the rank of each document's id in sorted order.
        searchable: int64, the positions of the documents with any text. One without can't be a meaningful answer to
            a query: it stays in the corpus (its id may be referred to), but no search returns it.
        duplicates: documents that repeat another's title and text, empty ones not counted.
        corpus_hash: see :func:`corpus_hash`; None where it has not been computed.
    """

    positions: Mapping[str, int]
    id_rank: IntArray
    searchable: IntArray
    duplicates: int
    corpus_hash: str | None = None

    @property
    def empty(self) -> int:
        """How many documents have no text."""
        return len(self.id_rank) - len(self.searchable)

    @classmethod
    def of(cls, documents: Sequence[Document]) -> DocumentTable:
        """Read every document once.

        Raises:
            RepeatedIdError: a doc_id is used twice.
        """
        reader = TableReader()
        positions: dict[str, int] = {}
        for i, document in enumerate(documents):
            if positions.setdefault(document.doc_id, i) != i:
                raise RepeatedIdError(document.doc_id, positions[document.doc_id], i)
            reader.add(document)
        return reader.table(positions)


class TableReader:
    """Collects a table document by document."""

    def __init__(self, hashing: bool = False) -> None:
        """``hashing`` also computes the corpus hash."""
        self.ids: list[str] = []
        self._text_hashes = array("q")
        self._searchable = array("q")
        self._digest = hashlib.sha256() if hashing else None

    def add(self, document: Document) -> None:
        """The next document."""
        text = passage_text(document).strip()
        if text:
            self._searchable.append(len(self.ids))
            self._text_hashes.append(hash(text))  # 64 bits: it only counts repetitions
        self.ids.append(document.doc_id)
        if self._digest is not None:
            self._digest.update(_hash_line(document))

    def table(self, positions: Mapping[str, int]) -> DocumentTable:
        """The table, with that map from id to position.

        Raises:
            RepeatedIdError: a doc_id is used twice.
        """
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        for i, j in pairwise(order):
            if self.ids[i] == self.ids[j]:
                raise RepeatedIdError(self.ids[i], i, j)
        id_rank = np.empty(len(order), dtype=np.int64)
        id_rank[order] = np.arange(len(order))
        distinct = len(np.unique(np.array(self._text_hashes, dtype=np.int64)))
        return DocumentTable(
            positions,
            id_rank,
            np.array(self._searchable, dtype=np.int64),
            len(self._text_hashes) - distinct,
            None if self._digest is None else self._digest.hexdigest(),
        )


class RepeatedIdError(ValueError):
    """Two documents, by their positions in the corpus, have one id."""

    def __init__(self, doc_id: str, first: int, second: int) -> None:
        super().__init__(
            f"doc_id {doc_id!r} is used by documents number {first} and {second}: every document needs an id of its own"
        )
        self.doc_id = doc_id
        self.first = first
        self.second = second
