"""Retrieval from Milvus: a file served by Milvus Lite inside the process, or a cluster.

Dense vectors are a Milvus field with an index of Milvus'. BM25 is a sparse field: a document's vector holds what
each of its words adds to a BM25 score, a query's how often it asks for each word, and the inner product is the score.

Differs: from Milvus' own BM25 function, which Milvus Lite has too. There, a word's rarity is counted in each segment
of the storage apart, so that equal documents score differently; it stems no words; and a given document can't be
scored. Here the scores are those of ``retriever=bm25`` everywhere.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from refragkit.data.document_table import PassageTexts
from refragkit.errors import ConfigError, RetrievalError
from refragkit.retrievers.base import IntArray, Retriever, ScoreArray, best_first, passage_text
from refragkit.retrievers.bm25 import TEXT_BLOCK, BM25Retriever
from refragkit.retrievers.dense import SCORE_DECIMALS, DenseRetriever
from refragkit.retrievers.encoder import FloatArray, SentenceEncoder
from refragkit.retrievers.hybrid import HybridRetriever
from refragkit.retrievers.milvus_collection import (
    DATABASE,
    POSITION,
    VECTOR,
    WORDS,
    Collection,
    require_packages,
)
from refragkit.types import Document, Hit

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever

logger = logging.getLogger(__name__)

_MODES = ("dense", "bm25", "hybrid")
#: BM25 scores are tens, and Milvus returns float32.
BM25_DECIMALS = 5
INSERT_ROWS = 512
#: Milvus' limit for a row's dynamic fields.
METADATA_BYTES = 65_536
#: Words are numbered by their hash; the last number is the only word of a document without words, and never asked for.
NO_WORD = 2**32 - 2


def word_ids(stems: Sequence[str]) -> Counter[int]:
    """How often a text has each word, by the word's number (two in four thousand million words share one)."""
    return Counter(zlib.crc32(s.encode("utf-8", "surrogatepass")) % NO_WORD for s in stems)


def filterable(document: Document) -> dict[str, Any] | None:
    """What a filter can ask for: metadata, doc_id and title; None where it is more than Milvus takes."""
    fields = {**document.metadata, "doc_id": document.doc_id, "title": document.title}
    text = json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8", "replace")
    if len(text) > METADATA_BYTES:
        return None
    # Milvus has 64-bit integers, JSON any.
    found: dict[str, Any] = json.loads(text, parse_int=_milvus_integer)
    found.pop("$meta", None)  # Milvus' own name for all of them
    return found


def _milvus_integer(digits: str) -> int | float:
    value = int(digits)
    return value if -(2**63) <= value < 2**63 else float(value)


class MilvusDense(DenseRetriever):
    """The dense half: DenseRetriever's vectors, searched by Milvus."""

    name: ClassVar[str] = "milvus"

    def __init__(self, collection: Collection, encoder: SentenceEncoder, shard_size: int) -> None:
        """Share the collection with the other half."""
        super().__init__(encoder, shard_size=shard_size, cache_dir=encoder.cache_dir)
        self.collection = collection
        self.exact = True
        self.expression: str | None = None
        self.search_params: Mapping[str, Any] = {}

    def settings(self) -> dict[str, Any]:
        """The encoder and the metric."""
        settings = super().settings()
        del settings["factory"]
        return settings

    def top(self, queries: Sequence[str], k: int) -> list[tuple[IntArray, ScoreArray]]:
        """Per query, the positions of the best documents and their scores."""
        if not queries:
            return []
        vectors = list(self.encoder.encode_queries(queries))
        return _best(self, VECTOR, vectors, k, SCORE_DECIMALS)

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """The inner products with the given documents' stored vectors; 0 for an empty document."""
        self._require_index()
        if not queries:
            return []
        vectors = self.encoder.encode_queries(queries)
        wanted = np.unique(np.concatenate([np.asarray(p, dtype=np.int64) for p in positions]))
        matrix: FloatArray = np.zeros((len(wanted), vectors.shape[1]), dtype=np.float32)
        for position, row in self.collection.fetch(VECTOR, wanted).items():
            matrix[np.searchsorted(wanted, position)] = row
        return [
            self._exact(matrix[np.searchsorted(wanted, chosen)] @ vector)
            for vector, chosen in zip(vectors, positions, strict=True)
        ]


class MilvusBM25(BM25Retriever):
    """The lexical half: BM25Retriever's words and weights, searched by Milvus."""

    name: ClassVar[str] = "milvus"

    def __init__(self, collection: Collection, k1: float, b: float, stemmer: str) -> None:
        """Share the collection with the other half."""
        super().__init__(k1, b, stemmer)
        self.collection = collection
        self.exact = True
        self.expression: str | None = None
        self.search_params: Mapping[str, Any] = {}
        self._best_scores: dict[str, float] = {}

    def top(self, queries: Sequence[str], k: int) -> list[tuple[IntArray, ScoreArray]]:
        """Per query, the positions of the best documents and their scores; only of those that share a word."""
        vectors = [{w: float(n) for w, n in word_ids(stems).items()} for stems in self._stems(queries)]
        asked = [i for i, vector in enumerate(vectors) if vector]
        none: tuple[IntArray, ScoreArray] = (np.zeros(0, dtype=np.int64), np.zeros(0))
        found = [none] * len(queries)
        for i, best in zip(
            asked, _best(self, WORDS, [vectors[i] for i in asked], k, BM25_DECIMALS), strict=True
        ):
            found[i] = best
        if len(self._best_scores) > 100_000:
            self._best_scores.clear()
        self._best_scores.update(
            (query, float(scores[0]) if len(scores) else 0.0)
            for query, (_, scores) in zip(queries, found, strict=True)
        )
        return found

    def score_with_best(
        self, queries: Sequence[str], positions: Sequence[IntArray]
    ) -> list[tuple[ScoreArray, float]]:
        """BM25 of the given documents, and each query's best score over the documents that a search may return."""
        self._require_index()
        if not queries:
            return []
        new = [q for q in dict.fromkeys(queries) if q not in self._best_scores]
        if new:
            self.top(new, 1)
        best = [self._best_scores[q] for q in queries]
        wanted = np.unique(np.concatenate([np.asarray(p, dtype=np.int64) for p in positions]))
        rows = self.collection.fetch(WORDS, wanted)
        nothing: dict[int, float] = {}
        result = []
        for stems, chosen, highest in zip(self._stems(queries), positions, best, strict=True):
            asked = word_ids(stems).items()
            scores = np.zeros(len(chosen))
            for i, position in enumerate(np.asarray(chosen).tolist()):
                row = rows.get(position, nothing)
                scores[i] = sum(times * row.get(word, 0.0) for word, times in asked)
            result.append((np.round(scores, BM25_DECIMALS), highest))
        return result

    def weights(self, documents: Sequence[Document]) -> Iterator[list[dict[int, float]]]:
        """The sparse vectors of all documents, block by block, after one pass that counts words.

        Source: Lucene's BM25, as in bm25s (arXiv 2407.03618): what a word adds is
        ``idf * tf / (tf + k1 * (1 - b + b * length / mean length))``.
        """
        frequency: Counter[int] = Counter()
        total = 0
        for counts in self._counts(documents):
            for words in counts:
                frequency.update(words.keys())
                total += words.total()
        n = len(documents)
        mean = total / n or 1.0
        for counts in self._counts(documents):
            block = []
            for words in counts:
                norm = self.k1 * (1 - self.b + self.b * words.total() / mean)
                block.append(
                    {
                        w: math.log1p((n - frequency[w] + 0.5) / (frequency[w] + 0.5)) * tf / (tf + norm)
                        for w, tf in words.items()
                    }
                    or {NO_WORD: 1.0}
                )
            yield block

    def _counts(self, documents: Sequence[Document]) -> Iterator[list[Counter[int]]]:
        texts = PassageTexts(documents, np.arange(len(documents)))
        for start in range(0, len(texts), TEXT_BLOCK):
            yield [word_ids(stems) for stems in self._stems(texts[start : start + TEXT_BLOCK])]


def _best(
    half: MilvusDense | MilvusBM25, field: str, vectors: Sequence[Any], k: int, decimals: int
) -> list[tuple[IntArray, ScoreArray]]:
    """Per vector the k best documents, ties by doc_id.

    Milvus cuts a tie anywhere: a query whose last hit ties with its k-th is asked again for more.
    """
    collection, limit = half.collection, half.collection.max_hits
    if k > limit and limit < collection.count:
        raise RetrievalError(
            f"retriever=milvus: a Milvus cluster returns at most {limit} hits per query, asked for {k}; lower k or "
            "retriever.pool"
        )
    found: list[tuple[IntArray, ScoreArray]] = [(np.zeros(0, dtype=np.int64), np.zeros(0))] * len(vectors)
    # An approximate index loses hits anyway, and its search parameters may allow no more than k.
    wanted = min(limit, k + 16 if half.exact else k)
    todo = list(range(len(vectors)))
    while todo:
        results = collection.search(
            field, [vectors[i] for i in todo], wanted, half.expression, half.search_params
        )
        again = []
        for i, (positions, values) in zip(todo, results, strict=True):
            scores = np.round(values, decimals)
            if half.exact and k < len(scores) == wanted < limit and scores[-1] == scores[k - 1]:
                again.append(i)
                continue
            best = best_first(scores, positions, half._id_rank, k)
            found[i] = (positions[best], scores[best])
        todo, wanted = again, min(limit, wanted * 4)
    return found


class MilvusRetriever(HybridRetriever):
    """Dense, BM25, or both fused as in HybridRetriever, over one collection in Milvus."""

    name: ClassVar[str] = "milvus"

    dense: MilvusDense
    bm25: MilvusBM25

    def __init__(
        self,
        collection: Collection,
        dense: MilvusDense,
        bm25: MilvusBM25,
        mode: str = "hybrid",
        fusion: str = "score",
        alpha: float = 0.6,
        rrf_k: int = 60,
        pool: int = 200,
        index: str = "FLAT",
        index_params: Mapping[str, Any] | None = None,
        search_params: Mapping[str, Any] | None = None,
        filter: str | None = None,
        collection_name: str | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Nothing is connected or read yet.

        Args:
            collection: the connection, which both halves share.
            dense: the one half; unused in mode bm25.
            bm25: the other; unused in mode dense.
            mode: ``dense``, ``bm25`` or ``hybrid``.
            fusion: see HybridRetriever.
            alpha: see HybridRetriever.
            rrf_k: see HybridRetriever.
            pool: see HybridRetriever.
            index: the type of the dense vectors' index, as Milvus names it.
            index_params: its parameters (``M``, ``nlist``).
            search_params: of its searches (``ef``, ``nprobe``).
            filter: a Milvus expression over metadata, ``doc_id`` and ``title``; only documents that match are found.
            collection_name: of a cluster's collection; None for one made of what the collection depends on.
            cache_dir: where the file, or the documents of a cluster's collection, are kept.

        Raises:
            ConfigError: a value is out of its range.
        """
        super().__init__(dense, bm25, fusion, alpha, rrf_k, pool, cache_dir)
        if mode not in _MODES:
            raise ConfigError(f"retriever.mode={mode!r}: expected one of {', '.join(_MODES)}")
        if filter is not None and not filter.strip():
            raise ConfigError("retriever.filter: expected an expression, got an empty one; null means none")
        self.collection = collection
        self.mode = mode
        self.index_type = index
        self.index_params = dict(index_params or {})
        self.filter = filter
        self.collection_name = collection_name
        dense.exact = index == "FLAT"
        dense.search_params = dict(search_params or {})
        dense.expression = bm25.expression = filter
        self._allowed: NDArray[np.bool_] | None = None

    @property
    def _halves(self) -> list[MilvusDense | MilvusBM25]:
        return [half for mode, half in (("bm25", self.dense), ("dense", self.bm25)) if self.mode != mode]

    # --- what the index depends on ------------------------------------------------------------------------

    def _collection_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"mode": self.mode}
        for half in self._halves:
            settings |= half.settings()
        if self.mode != "bm25":
            settings |= {"index": self.index_type, "index_params": self.index_params}
        return settings

    def settings(self) -> dict[str, Any]:
        """What the collection holds and, of a cluster's, where it is."""
        where = (
            {}
            if self.collection.uri is None
            else {"uri": self.collection.uri, "collection": self.collection_name}
        )
        return {**self._collection_settings(), **where}

    def _collection_manifest(self) -> dict[str, Any]:
        # Without the address: one cluster may have several, and its collection is the same.
        return {**self.manifest(), "settings": self._collection_settings()}

    def _name(self) -> str:
        from refragkit.retrievers.index import fingerprint

        own = f"refragkit_{fingerprint(self._collection_manifest())}"
        return own if self.collection.uri is None else self.collection_name or own

    # --- building and opening -----------------------------------------------------------------------------

    def open_index(self, documents: Sequence[Document], cache_dir: str | Path | None = None) -> Self:
        """Open the collection of these documents, after filling it where it is not there or not complete.

        Raises:
            RetrievalError: a package is missing, the cluster can't be reached, a collection of that name holds
                something else, or the filter is wrong.
        """
        require_packages(self.collection.uri)
        if self.collection.uri is not None:
            self.collection.connect()  # before anything is read
        super().open_index(documents, cache_dir)
        if self.filter is not None:
            self.collection.check_filter(self.filter)
        return self

    def index(self, documents: Sequence[Document]) -> None:
        """Fill the collection; a cluster's that is complete already is only opened."""
        self._set_documents(documents)
        if not len(self._searchable):
            raise RetrievalError(f"retriever={self.name}: every document of the corpus is empty")
        self._share()
        cache_dir = None if self.cache_dir is None else Path(self.cache_dir)
        self.collection.connect(cache_dir)
        name, manifest = self._name(), self._collection_manifest()
        if self.collection.uri is None:
            self._fill(name, manifest, None)
        elif self.collection.exists(name):
            self.collection.open(name, manifest, len(self._searchable))
        else:
            record = None
            if cache_dir is not None:
                cache_dir.mkdir(parents=True, exist_ok=True)
                record = cache_dir / f"{name}.building"
            try:
                self._fill(name, manifest, record)
            except RetrievalError:
                # Another machine may have finished the same collection first.
                if not self.collection.exists(name):
                    raise
                self.collection.open(name, manifest, len(self._searchable))

    def _fill(self, name: str, manifest: Mapping[str, Any], record: Path | None) -> None:
        blocks: Sequence[FloatArray] = ()
        if self.mode != "bm25":
            encoded = self.dense._shards().encode()
            self.counts = {"encoded": encoded.encoded, "cached": encoded.cached}
            blocks = encoded
        self.collection.build(
            name,
            manifest,
            self._rows(blocks),
            blocks[0].shape[1] if self.mode != "bm25" else None,
            self.mode != "dense",
            self.index_type,
            self.index_params,
            record,
        )

    def _rows(self, blocks: Sequence[FloatArray]) -> Iterator[list[dict[str, Any]]]:
        """Batches of rows, one at a time in memory; empty documents have none."""
        vectors = (v for block in blocks for v in block)
        weights = (
            (w for block in self.bm25.weights(self.documents) for w in block)
            if self.mode != "dense"
            else iter(())
        )
        too_long = 0
        batch: list[dict[str, Any]] = []
        for position, document in enumerate(self.documents):
            words = next(weights, None)
            if not passage_text(document).strip():
                continue
            fields = filterable(document)
            too_long += fields is None
            row = {**(fields or {}), POSITION: position}
            if words is not None:
                row[WORDS] = words
            if self.mode != "bm25":
                row[VECTOR] = next(vectors)
            batch.append(row)
            if len(batch) == INSERT_ROWS:
                yield batch
                batch = []
        if batch:
            yield batch
        if too_long:
            logger.warning(
                "the metadata of %d documents has more than %d bytes and is not in Milvus: no filter matches them",
                too_long,
                METADATA_BYTES,
            )

    def _share(self) -> None:
        for half in (self.dense, self.bm25):
            half._share_documents(self)
        self.bm25._best_scores.clear()
        self._allowed = None

    def write_files(self, folder: Path) -> None:
        """The database; of a cluster's collection nothing, it stays where it is."""
        if self.collection.uri is None:
            self.collection.copy_to(folder / DATABASE)

    def read_files(self, folder: Path) -> None:
        """Open a working copy of the database, or the cluster's collection."""
        self._share()
        cache_dir = None if self.cache_dir is None else Path(self.cache_dir)
        self.collection.connect(cache_dir, folder / DATABASE)
        self.collection.open(self._name(), self._collection_manifest(), len(self._searchable))

    def encode_part(self, documents: Sequence[Document], part: int, parts: int) -> None:
        """The dense half's, where there is one."""
        if self.mode == "bm25":
            Retriever.encode_part(self, documents, part, parts)
        super().encode_part(documents, part, parts)

    def missing_shards(self, documents: Sequence[Document]) -> list[int]:
        """The dense half's, where there is one."""
        return [] if self.mode == "bm25" else super().missing_shards(documents)

    def warm_up(self) -> None:
        """Load the encoder, where there is one."""
        if self.mode != "bm25":
            super().warm_up()

    # --- searching ----------------------------------------------------------------------------------------

    def allowed(self) -> NDArray[np.bool_] | None:
        """Which documents the filter lets through."""
        if self.filter is not None and self._allowed is None:
            self._allowed = self.collection.matching(self.filter, len(self.documents))
        return self._allowed

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k best documents that match the filter; in mode bm25 only those that share a word with the query."""
        self._require_index()
        self._require_k(k)
        depth = k if self.mode != "hybrid" else max(k, self.pool)
        ranked = [half.top(queries, depth) for half in self._halves]
        if self.mode != "hybrid":
            return [self._hits(*best) for best in ranked[0]]
        pools = [np.union1d(d, b) for (d, _), (b, _) in zip(*ranked, strict=True)]
        if self.fusion == "score":
            scores = self.score_at(queries, pools)
        else:
            scores = [self._rrf(*row) for row in zip(pools, *ranked, strict=True)]
        found = []
        for positions, values in zip(pools, scores, strict=True):
            best = best_first(values, positions, self._id_rank, k)
            found.append(self._hits(positions[best], values[best]))
        return found

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """The scores of the given documents, whether they match the filter or not."""
        if self.mode != "hybrid":
            return self._halves[0].score_at(queries, positions)
        return super().score_at(queries, positions)


def milvus(
    mode: str = "hybrid",
    uri: str | None = None,
    token_env: str | None = "MILVUS_TOKEN",
    collection: str | None = None,
    filter: str | None = None,
    index: str = "FLAT",
    index_params: dict[str, Any] | None = None,
    search_params: dict[str, Any] | None = None,
    fusion: str = "score",
    alpha: float = 0.6,
    rrf_k: int = 60,
    pool: int = 200,
    k1: float = 1.5,
    b: float = 0.75,
    stemmer: str = "english",
    encoder: str | None = None,
    query_prefix: str = "",
    passage_prefix: str = "",
    normalize: bool = True,
    max_tokens: int | None = None,
    dtype: str = "auto",
    backend: str = "torch",
    device: str = "auto",
    batch_size: int = 32,
    shard_size: int = 2048,
    planner: str = "expand",
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
    rerank: str | None = None,
    state_cache: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> MultiHopRetriever:
    """``retriever=milvus``: dense vectors and BM25 in Milvus, in the multi-hop loop."""
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
        cache_dir=cache_dir,
    )
    connection = Collection(uri, token_env)
    base = MilvusRetriever(
        connection,
        MilvusDense(connection, model, shard_size),
        MilvusBM25(connection, k1, b, stemmer),
        mode,
        fusion,
        alpha,
        rrf_k,
        pool,
        index,
        index_params,
        search_params,
        filter,
        collection,
        cache_dir,
    )
    return MultiHopRetriever(
        base, planner, max_hops, top_k_per_hop, rerank=rerank, state_cache=state_cache, cache_dir=cache_dir
    )
