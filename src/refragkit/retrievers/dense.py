"""Dense retrieval: sentence-transformers vectors in a faiss index.

The vectors themselves are kept beside the index, memory-mapped: ``Flat`` searches them directly and exactly,
without faiss, and what an approximate index (``HNSW32``, ``IVF4096,PQ64``, ...) finds is scored again exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from refragkit.data.document_table import PassageTexts
from refragkit.errors import ConfigError, RetrievalError
from refragkit.retrievers.base import IntArray, Retriever, ScoreArray, best_first
from refragkit.retrievers.encoder import FloatArray, SentenceEncoder
from refragkit.retrievers.vectors import ShardCache, open_matrix, write_matrix
from refragkit.types import Document, Hit

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever

VECTORS_FILE = "vectors.safetensors"
FAISS_FILE = "index.faiss"
#: Scores are rounded, so that the last bits, which depend on the batch a text was encoded in, decide nothing.
SCORE_DECIMALS = 6
#: An approximate index is asked for this many times k, and the exact scores choose among them.
OVERSAMPLING = 4
#: Exact search takes so many queries and so many passages at a time (64 MiB of products).
QUERY_BLOCK, ROW_BLOCK = 256, 65_536
#: The largest of a row's values are looked for group by group where it has this many times as many as are wanted.
GROUP, GROUPED = 32, 64


class DenseRetriever(Retriever):
    """Ranks by the inner product of query and passage vectors (the cosine, where they are normalised)."""

    name: ClassVar[str] = "dense"

    def __init__(
        self,
        encoder: SentenceEncoder,
        factory: str = "Flat",
        nprobe: int | None = None,
        ef_search: int | None = None,
        train_sample: int = 262_144,
        shard_size: int = 2048,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            encoder: makes the vectors.
            factory: a faiss factory string.
            nprobe: cells visited per query, for IVF indexes.
            ef_search: candidates kept per query, for HNSW indexes.
            train_sample: vectors that an IVF or PQ index is trained on at most.
            shard_size: passages encoded and stored at a time: what a killed build loses at most.
            cache_dir: where vectors and indexes are kept.

        Raises:
            ConfigError: a number is below 1, ``factory`` has a number that ends the process, or a search parameter
                belongs to another type of index.
        """
        super().__init__()
        for key, value in (
            ("nprobe", nprobe),
            ("ef_search", ef_search),
            ("train_sample", train_sample),
            ("shard_size", shard_size),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"retriever.{key} must be at least 1, got {value}")
        factory = str(factory)
        _check_factory(factory)
        if nprobe is not None and "IVF" not in factory:
            raise ConfigError(
                f"retriever.nprobe={nprobe} is for IVF indexes, retriever.factory={factory!r} is none: set "
                "nprobe to null"
            )
        if ef_search is not None and "HNSW" not in factory:
            raise ConfigError(
                f"retriever.ef_search={ef_search} is for HNSW indexes, retriever.factory={factory!r} is none: set "
                "ef_search to null"
            )
        self.encoder = encoder
        self.factory = factory
        self.nprobe = nprobe
        self.ef_search = ef_search
        self.train_sample = train_sample
        self.shard_size = shard_size
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._blocks: Sequence[FloatArray] = ()
        self._vectors: FloatArray | None = None
        self._faiss: Any = None

    def settings(self) -> dict[str, Any]:
        """The encoder, the index type and the metric."""
        return {
            "encoder": self.encoder.name,
            "encoder_hash": self.encoder.fingerprint,
            "factory": self.factory,
            "metric": "inner_product",
        }

    # --- building -----------------------------------------------------------------------------------------

    def index(self, documents: Sequence[Document]) -> None:
        """Encode all passages (or read their cached vectors) and build the faiss index."""
        self._set_documents(documents)
        self.build()

    def build(self) -> None:
        """``index`` for the documents that are already set."""
        if not len(self._searchable):
            raise RetrievalError(f"retriever={self.name}: every document of the corpus is empty")
        blocks = self._shards().encode()
        self.counts = {"encoded": blocks.encoded, "cached": blocks.cached}
        self._blocks = blocks
        self._vectors = None
        self._faiss = None if self.factory == "Flat" else self._build_faiss()

    def encode_part(self, documents: Sequence[Document], part: int, parts: int) -> None:
        """Encode every ``parts``-th shard of a corpus into the cache, from shard ``part`` on.

        Machines that share the cache folder encode a part each; whoever opens the index then finds all shards there.

        Raises:
            ConfigError: there is no cache folder, or ``part`` is not in 0 to parts - 1.
        """
        if self.cache_dir is None:
            raise ConfigError("encoding a part of a corpus needs a cache folder that all parts share")
        if not 0 <= part < parts:
            raise ConfigError(
                f"index.shard={part}/{parts}: expected a number from 0 to {parts - 1} before the slash"
            )
        self._set_documents(documents)
        blocks = self._shards().encode(part, parts)
        self.counts = {"encoded": blocks.encoded, "cached": blocks.cached, "shards": len(blocks)}

    def missing_shards(self, documents: Sequence[Document]) -> list[int]:
        """The numbers of the shards that a build would have to encode."""
        self._set_documents(documents)
        return self._shards().missing()

    def _shards(self) -> ShardCache:
        texts = PassageTexts(self.documents, self._searchable)
        return ShardCache(self.encoder, texts, self.shard_size, self.cache_dir)

    def _rows_of(self, positions: IntArray) -> IntArray:
        """Row of the matrix of each document; -1 for the empty ones, which have none."""
        if len(self._searchable) == len(self.documents):
            return positions
        rows = np.searchsorted(self._searchable, positions)
        found = self._searchable[np.minimum(rows, len(self._searchable) - 1)] == positions
        return np.where(found, rows, -1)

    def _matrix(self) -> FloatArray:
        """[searchable documents, dimension] float32."""
        if self._vectors is None:
            self._vectors = self._blocks[0] if len(self._blocks) == 1 else np.concatenate(self._blocks)
        return self._vectors

    def _build_faiss(self) -> Any:
        import faiss

        total, width = sum(len(b) for b in self._blocks), self._blocks[0].shape[1]
        points = min(total, self.train_sample)
        cells = max(map(int, re.findall(r"IVF(\d+)", self.factory)), default=0)
        if cells > points:
            raise RetrievalError(
                f"retriever.factory={self.factory!r} asks for {cells} cells, but there are {points} vectors to train "
                f"them on (of {total}; retriever.train_sample={self.train_sample}): use fewer cells, Flat or HNSW32"
            )
        try:
            index = faiss.index_factory(width, self.factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(self._training_sample(total, width))
            for block in self._blocks:
                index.add(np.ascontiguousarray(block, dtype=np.float32))
        except MemoryError as error:
            raise RetrievalError(
                f"retriever.factory={self.factory!r}: memory ran out on {total} vectors of dimension {width}: use an "
                "index with smaller codes (IVF4096,PQ64), or a smaller retriever.train_sample"
            ) from error
        except RuntimeError as error:
            raise RetrievalError(
                f"retriever.factory={self.factory!r} failed on {total} vectors of dimension {width}: "
                f"{str(error).split('Error: ')[-1].strip()}. With few documents use Flat or HNSW32"
            ) from error
        return index

    def _training_sample(self, total: int, width: int) -> FloatArray:
        """Evenly spaced rows: the same on every machine."""
        chosen = np.linspace(0, total - 1, min(total, self.train_sample)).astype(np.int64)
        sample = np.empty((len(chosen), width), dtype=np.float32)
        start = filled = 0
        for block in self._blocks:
            rows = chosen[filled : np.searchsorted(chosen, start + len(block))] - start
            sample[filled : filled + len(rows)] = block[rows]
            start, filled = start + len(block), filled + len(rows)
        return sample

    def write_files(self, folder: Path) -> None:
        """The vectors, and the faiss index where it is not Flat."""
        write_matrix(folder / VECTORS_FILE, self._blocks or [self._matrix()])
        if self._faiss is not None:
            import faiss

            faiss.write_index(self._faiss, str(folder / FAISS_FILE))

    def read_files(self, folder: Path) -> None:
        """Map the vectors into memory and open the faiss index."""
        self._blocks = ()
        self._vectors = open_matrix(folder / VECTORS_FILE)
        if len(self._vectors) != len(self._searchable):
            raise RetrievalError(
                f"index {folder}: {len(self._vectors)} vectors for {len(self._searchable)} documents; index again"
            )
        self._faiss = None
        if self.factory != "Flat":
            import faiss

            # Two ways to map: inverted lists by the one, flat codes and HNSW's vectors by the other.
            flag = faiss.IO_FLAG_MMAP if "IVF" in self.factory else faiss.IO_FLAG_MMAP_IFC
            self._faiss = faiss.read_index(str(folder / FAISS_FILE), flag)

    # --- searching ----------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Load the encoder."""
        self.encoder.encode(["warm up"])

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k passages of highest inner product."""
        self._require_index()
        self._require_k(k)
        return [self._hits(*best) for best in self.top(queries, k)]

    def top(self, queries: Sequence[str], k: int) -> list[tuple[IntArray, ScoreArray]]:
        """``search`` as arrays: per query, the positions of the best documents and their scores."""
        if not queries:
            return []
        rows, scores = self._candidates(self.encoder.encode_queries(queries), k)
        found = []
        for row, score in zip(rows, scores, strict=True):
            positions = self._searchable[row]
            best = best_first(score, positions, self._id_rank, k)
            found.append((positions[best], score[best]))
        return found

    def _candidates(self, vectors: FloatArray, k: int) -> tuple[list[IntArray], list[ScoreArray]]:
        """Per query, at least the k best rows with all that tie with the last of them, and their scores."""
        matrix = self._matrix()
        total = len(matrix)
        if self._faiss is not None:
            self._set_search_parameters()
            _, found = self._faiss.search(vectors, min(total, OVERSAMPLING * k))
            # faiss pads with -1 where it finds fewer.
            rows = [np.unique(r[r >= 0]) for r in found]
            return rows, [self._exact(matrix[r] @ v) for r, v in zip(rows, vectors, strict=True)]
        wanted = min(total, k + 16)
        while True:
            best_rows, scores = _flat_search(vectors, matrix, wanted)
            exact = self._exact(scores)
            kth = np.partition(exact, wanted - min(k, wanted), axis=1)[:, wanted - min(k, wanted)]
            if wanted == total or bool((exact.min(axis=1) < kth).all()):
                return list(best_rows), list(exact)
            wanted = min(total, wanted * 4)

    @staticmethod
    def _exact(scores: NDArray[Any]) -> ScoreArray:
        return np.asarray(np.round(scores.astype(np.float64), SCORE_DECIMALS), dtype=np.float64)

    def _set_search_parameters(self) -> None:
        import faiss

        for key, value in (("nprobe", self.nprobe), ("efSearch", self.ef_search)):
            if value is not None:
                try:
                    faiss.ParameterSpace().set_index_parameter(self._faiss, key, value)
                except RuntimeError as error:
                    raise RetrievalError(
                        f"retriever.factory={self.factory!r} has no parameter {key}: set it to null"
                    ) from error

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """The inner products with the given documents; 0 for an empty document."""
        self._require_index()
        if not queries:
            return []
        matrix, vectors = self._matrix(), self.encoder.encode_queries(queries)
        result = []
        for vector, chosen in zip(vectors, positions, strict=True):
            rows = self._rows_of(chosen)
            values = self._exact(matrix[rows] @ vector)
            values[rows < 0] = 0.0
            result.append(values)
        return result


def _check_factory(factory: str) -> None:
    """Refuse what faiss answers by ending the process (``HNSW0``, ``PQ8x0``); the rest is faiss's to parse."""
    for kind, low, high in (("HNSW", 4, 512), ("IVF", 1, 1 << 24)):
        for number in re.findall(rf"{kind}(\d+)", factory):
            if not low <= int(number) <= high:
                raise ConfigError(
                    f"retriever.factory={factory!r}: expected a number from {low} to {high} after {kind}, got {number}"
                )
    if re.search(r"(?<!\d)0+(?!\d)", factory):
        raise ConfigError(f"retriever.factory={factory!r}: expected numbers of at least 1, got 0")


def _largest(values: FloatArray, k: int) -> IntArray:
    """The columns of each row's k largest values, in no order; all of them where there are no more."""
    n, width = values.shape
    if width <= k:
        return np.broadcast_to(np.arange(width), values.shape)
    if width < GROUPED * k:
        return np.argpartition(values, width - k, axis=1)[:, width - k :]
    # The k-th largest of the groups' maxima is a floor that k values reach, and few others: far less to partition.
    groups = width // GROUP
    maxima = values[:, : groups * GROUP].reshape(n, GROUP, groups).max(axis=1)
    floors = np.partition(maxima, groups - k, axis=1)[:, groups - k]
    kept = np.empty((n, k), dtype=np.int64)
    for i, (row, floor) in enumerate(zip(values, floors, strict=True)):
        above = np.flatnonzero(row >= floor)
        kept[i] = above[np.argpartition(row[above], len(above) - k)[len(above) - k :]]
    return kept


def _flat_search(vectors: FloatArray, matrix: FloatArray, k: int) -> tuple[IntArray, FloatArray]:
    """The rows of highest inner product, exactly: [n, k] rows and [n, k] scores, in no order.

    Block by block, so that a memory-mapped matrix streams through; a matrix product and a partition are several
    times faster here than ``faiss.knn`` on a few hundred queries.
    """
    rows = np.empty((len(vectors), k), dtype=np.int64)
    scores = np.empty((len(vectors), k), dtype=np.float32)
    for start in range(0, len(vectors), QUERY_BLOCK):
        chunk = vectors[start : start + QUERY_BLOCK]
        best_rows = np.zeros((len(chunk), 0), dtype=np.int64)
        best = np.zeros((len(chunk), 0), dtype=np.float32)
        for first in range(0, len(matrix), ROW_BLOCK):
            products = chunk @ matrix[first : first + ROW_BLOCK].T
            kept = _largest(products, k)
            best_rows = np.hstack([best_rows, kept + first])
            best = np.hstack([best, np.take_along_axis(products, kept, axis=1)])
            kept = _largest(best, k)
            best_rows, best = (
                np.take_along_axis(best_rows, kept, axis=1),
                np.take_along_axis(best, kept, axis=1),
            )
        rows[start : start + QUERY_BLOCK], scores[start : start + QUERY_BLOCK] = best_rows, best
    return rows, scores


def dense(
    encoder: str | None = None,
    query_prefix: str = "",
    passage_prefix: str = "",
    normalize: bool = True,
    max_tokens: int | None = None,
    dtype: str = "auto",
    backend: str = "torch",
    device: str = "auto",
    batch_size: int = 32,
    processes: int = 1,
    factory: str = "Flat",
    nprobe: int | None = None,
    ef_search: int | None = None,
    train_sample: int = 262_144,
    shard_size: int = 2048,
    planner: str = "expand",
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
    rerank: str | None = None,
    state_cache: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> MultiHopRetriever:
    """``retriever=dense``: sentence vectors in the multi-hop loop."""
    from refragkit.retrievers.multi_hop import MultiHopRetriever

    model = SentenceEncoder(
        encoder,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
        normalize=normalize,
        max_tokens=max_tokens,
        dtype=dtype,
        backend=backend,
        device=device,
        batch_size=batch_size,
        processes=processes,
        cache_dir=cache_dir,
    )
    base = DenseRetriever(model, factory, nprobe, ef_search, train_sample, shard_size, cache_dir)
    return MultiHopRetriever(
        base, planner, max_hops, top_k_per_hop, rerank=rerank, state_cache=state_cache, cache_dir=cache_dir
    )
