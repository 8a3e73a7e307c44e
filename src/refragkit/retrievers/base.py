"""What every retriever does: index documents once, then answer queries, always in batches.

A retriever finds documents for *query strings*. The loop that asks several times for one question, each time
something new, is :mod:`refragkit.retrievers.multi_hop`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from refragkit.data.document_store import DocumentStore
from refragkit.data.document_table import DocumentTable, RepeatedIdError, corpus_hash, passage_text
from refragkit.errors import ConfigError, DataError, RetrievalError
from refragkit.types import Document, Hit, Question

__all__ = ["IntArray", "Retriever", "ScoreArray", "best_first", "corpus_hash", "passage_text"]

logger = logging.getLogger(__name__)

IntArray = NDArray[np.int64]
ScoreArray = NDArray[np.float64]


def best_first(
    scores: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], id_rank: np.ndarray[Any, Any], k: int
) -> np.ndarray[Any, Any]:
    """The k best of a scored candidate list, ties by doc_id.

    Args:
        scores: [n], higher is better.
        positions: [n] int, the document each score belongs to.
        id_rank: [n_documents] int, the rank of each document's id in sorted order.
        k: how many to keep.

    Returns:
        [min(k, n)] int, indices into ``scores``.
    """
    candidates = np.arange(len(scores))
    if len(scores) > 4 * k > 0:  # cut to what can matter before sorting: everything not below the k-th best
        # Apart from the lowest score: most BM25 scores are 0, and a partition of equal values is slow.
        candidates = np.flatnonzero(scores > scores.min())
        missing = k - len(candidates)
        if missing > 0:
            lowest = np.flatnonzero(scores == scores.min())
            first = np.argpartition(id_rank[positions[lowest]], missing - 1)[:missing]
            candidates = np.concatenate([candidates, lowest[first]])
        else:
            above = scores[candidates]
            candidates = candidates[above >= np.partition(above, len(above) - k)[len(above) - k]]
    order = np.lexsort((id_rank[positions[candidates]], -scores[candidates]))
    return candidates[order[:k]]


class Retriever(ABC):
    """Finds the documents of a corpus that match query strings.

    A subclass needs ``index`` and ``search``; ``write_files``, ``read_files`` and ``settings`` where it has
    something to store; and ``score`` where it can rank given documents faster than by a search of the whole
    corpus.

    Attributes:
        name: the option in ``conf/retriever/``.
        documents: what is indexed; hits hold these very objects (of a `DocumentStore`, equal ones).
        index_path: the folder that the index was opened from; None where it is only in memory.
        counts: numbers about the last build, such as how many passages were ``encoded``.
    """

    name: ClassVar[str] = "retriever"
    #: Whether the index is worth a folder on disk (the controls' is not).
    cached: ClassVar[bool] = True

    def __init__(self) -> None:
        self.documents: Sequence[Document] = ()
        self.index_path: Path | None = None
        self.counts: dict[str, int] = {}
        self._corpus_hash: str | None = None
        self._positions: Mapping[str, int] = {}
        self._id_rank: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)
        self._searchable: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)

    # --- to implement -------------------------------------------------------------------------------------

    @abstractmethod
    def index(self, documents: Sequence[Document]) -> None:
        """Build the index in memory.

        Raises:
            RetrievalError: the corpus is empty or has a doc_id twice.
        """

    @abstractmethod
    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most k hits per query, by descending score, ties by doc_id; fewer if the corpus is smaller."""

    # --- optional -----------------------------------------------------------------------------------------

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to load
        """Load the models that the first search would load."""

    def settings(self) -> dict[str, Any]:
        """Everything besides the corpus that the stored index depends on: JSON scalars."""
        return {}

    def allowed(self) -> NDArray[np.bool_] | None:
        """[n_documents] which documents a search may return, where a filter leaves some out; else None."""
        return None

    def write_files(self, folder: Path) -> None:  # noqa: B027 - the controls have nothing to store
        """Write the index's own files into an empty folder."""

    def read_files(self, folder: Path) -> None:  # noqa: B027
        """Read what ``write_files`` wrote; the documents are already set."""

    def encode_part(self, documents: Sequence[Document], part: int, parts: int) -> None:
        """Do one part of the costly work of an index, for a later build that finds it done.

        Raises:
            ConfigError: this retriever has no such work.
        """
        raise ConfigError(
            f"index.shard={part}/{parts}: retriever={self.name} has no vectors to encode, so there is nothing "
            "to do in parts; leave index.shard out, or choose retriever=dense or hybrid"
        )

    def missing_shards(self, documents: Sequence[Document]) -> list[int]:
        """The numbers of the shards that a build would have to encode."""
        return []

    def score(self, queries: Sequence[str], doc_ids: Sequence[Sequence[str]]) -> list[list[float]]:
        """What ``search`` would score each of the given documents for each query.

        Args:
            queries: n queries.
            doc_ids: n lists of documents of the corpus.

        Returns:
            n lists of scores, as long as the lists of documents.
        """
        self._require_index()
        positions = [np.array([self._position(i) for i in ids], dtype=np.int64) for ids in doc_ids]
        return [[float(v) for v in values] for values in self.score_at(queries, positions)]

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """``score`` for documents given by their positions in the corpus.

        Override it: this one searches the whole corpus and looks the scores up.
        """
        found = self.search(queries, max(len(self.documents), 1))
        tables = [{self._positions[hit.doc_id]: hit.score for hit in hits} for hits in found]
        return [
            np.array([table.get(int(p), 0.0) for p in chosen], dtype=np.float64)
            for table, chosen in zip(tables, positions, strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Write the index, its documents and its manifest into a folder, all or nothing.

        Raises:
            RetrievalError: nothing is indexed, or the disk is full.
        """
        from refragkit.data.document_store import write_documents
        from refragkit.retrievers.index import DOCUMENT_TABLE, DOCUMENTS, write_folder

        self._require_index()

        def write(folder: Path) -> None:
            write_documents(folder / DOCUMENTS, folder / DOCUMENT_TABLE, self.documents)
            self.write_files(folder)

        write_folder(path, self.manifest(), write)

    def load(self, path: str | Path) -> None:
        """Read an index that ``save`` wrote; its documents stay on disk.

        Raises:
            RetrievalError: the folder is not an intact index of this retriever with these settings.
        """
        from refragkit.retrievers.index import DOCUMENT_TABLE, DOCUMENTS, check_manifest, read_manifest

        path = Path(path)
        wanted = {"retriever": self.name, "settings": self.settings()}
        check_manifest(path, read_manifest(path), wanted)
        try:
            self._set_documents(DocumentStore(path / DOCUMENTS, path / DOCUMENT_TABLE))
        except DataError as error:
            raise RetrievalError(f"index {path}: {error}") from error
        self.read_files(path)
        self.index_path = path

    def search_for(
        self,
        questions: Sequence[Question],
        queries: Sequence[str],
        k: int,
        skip: Sequence[Collection[str]] | None = None,
    ) -> list[list[Hit]]:
        """``search`` on behalf of questions, without the documents they already have.

        Args:
            questions: whose search this is. Only the ``gold`` control looks at them.
            queries: one per question.
            k: hits per query at most.
            skip: doc_ids per question that must not be returned again.
        """
        if skip is None:
            return self.search(queries, k)
        longest = max((len(s) for s in skip), default=0)
        found = self.search(queries, k + longest)
        return [[h for h in hits if h.doc_id not in s][:k] for hits, s in zip(found, skip, strict=True)]

    def open_index(self, documents: Sequence[Document], cache_dir: str | Path | None = None) -> Self:
        """Load the cached index of these documents if its manifest matches, else build and save it.

        Args:
            documents: the corpus.
            cache_dir: where indexes are kept; None uses the retriever's own, or builds in memory only.

        Returns:
            self, ready to search.
        """
        from refragkit.retrievers.index import open_cached

        open_cached(self, documents, cache_dir if cache_dir is not None else getattr(self, "cache_dir", None))
        return self

    # --- shared -------------------------------------------------------------------------------------------

    def _set_documents(self, documents: Sequence[Document]) -> None:
        """Keep the documents, check their ids, and report what is wrong with them.

        Raises:
            RetrievalError: no documents, or a doc_id twice.
        """
        if not documents:
            raise RetrievalError(
                f"retriever={self.name}: the corpus is empty: expected at least one document; "
                "check data.path or data.corpus"
            )
        if isinstance(documents, DocumentStore):
            table = documents.table
        else:
            try:
                table = DocumentTable.of(documents)
            except RepeatedIdError as error:
                raise RetrievalError(f"retriever={self.name}: {error}") from error
        self.documents = documents
        self._corpus_hash = table.corpus_hash
        self._positions = table.positions
        self._id_rank = table.id_rank
        self._searchable = table.searchable
        if table.empty or table.duplicates:
            logger.info(
                "corpus of %d documents: %d are empty (never returned), %d repeat another's title and text",
                len(documents),
                table.empty,
                table.duplicates,
            )

    def _share_documents(self, other: Retriever) -> None:
        """Take over another retriever's documents and what is known of them."""
        self.documents = other.documents
        self._corpus_hash = other._corpus_hash
        self._positions = other._positions
        self._id_rank = other._id_rank
        self._searchable = other._searchable

    @property
    def corpus_hash(self) -> str:
        """The hash of the indexed documents."""
        if self._corpus_hash is None:
            self._corpus_hash = corpus_hash(self.documents)
        return self._corpus_hash

    def _hits(self, positions: IntArray, scores: ScoreArray) -> list[Hit]:
        documents = self.documents
        return [Hit(documents[p], s) for p, s in zip(positions.tolist(), scores.tolist(), strict=True)]

    def _require_index(self) -> None:
        if not self.documents:
            raise RetrievalError(
                f"retriever={self.name} has no index yet: call index(documents) or load(path)"
            )

    def _require_k(self, k: int) -> None:
        if k < 1:
            raise RetrievalError(f"retriever={self.name}: k must be at least 1, got {k}")

    def _position(self, doc_id: str) -> int:
        try:
            return self._positions[doc_id]
        except KeyError:
            raise RetrievalError(
                f"retriever={self.name}: document {doc_id!r} is not in the indexed corpus "
                f"of {len(self.documents)}"
            ) from None

    def manifest(self) -> Mapping[str, Any]:
        """What the stored index depends on: retriever, corpus hash, count, settings."""
        return {
            "retriever": self.name,
            "corpus_hash": self.corpus_hash,
            "count": len(self.documents),
            "settings": self.settings(),
        }
