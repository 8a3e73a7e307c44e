"""Hybrid retrieval: dense and BM25 rankings fused.

Source: reciprocal rank fusion, Cormack et al. 2009; score fusion, Bruch et al. 2023 (arXiv 2210.11934).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from refragkit.errors import ConfigError
from refragkit.retrievers.base import IntArray, Retriever, ScoreArray, best_first
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.dense import DenseRetriever
from refragkit.retrievers.encoder import SentenceEncoder
from refragkit.types import Document, Hit

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever

_FUSIONS = ("score", "rrf")


class HybridRetriever(Retriever):
    """``alpha`` parts dense and ``1 - alpha`` parts BM25.

    ``score`` adds the cosine and the BM25 score divided by the query's best BM25 score, both about 0 to 1, so that a
    document's fused score does not depend on what else was retrieved. ``rrf`` adds reciprocal ranks, divided by
    their maximum so that a document first in both scores 1.
    """

    name: ClassVar[str] = "hybrid"

    def __init__(
        self,
        dense: DenseRetriever,
        bm25: BM25Retriever,
        fusion: str = "score",
        alpha: float = 0.6,
        rrf_k: int = 60,
        pool: int = 200,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Combine two retrievers.

        Args:
            dense: the one.
            bm25: the other.
            fusion: ``score`` or ``rrf``.
            alpha: the dense share, 0 to 1.
            rrf_k: how slowly reciprocal ranks fall.
            pool: how deep each ranking is read, at least.
            cache_dir: where indexes are kept.

        Raises:
            ConfigError: a value is out of its range.
        """
        super().__init__()
        if fusion not in _FUSIONS:
            raise ConfigError(f"retriever.fusion={fusion!r}: expected one of {', '.join(_FUSIONS)}")
        if not 0 <= alpha <= 1 or rrf_k < 1 or pool < 1:
            raise ConfigError(
                f"retriever: expected 0 <= alpha <= 1, rrf_k >= 1 and pool >= 1, got {alpha}, {rrf_k}, {pool}"
            )
        self.dense = dense
        self.bm25 = bm25
        self.fusion = fusion
        self.alpha = alpha
        self.rrf_k = rrf_k
        self.pool = pool
        self.cache_dir = cache_dir

    def settings(self) -> dict[str, Any]:
        """Both parts' settings; fusion happens when searching and does not change the index."""
        return {**self.dense.settings(), **self.bm25.settings()}

    def index(self, documents: Sequence[Document]) -> None:
        """Index both parts."""
        self._set_documents(documents)
        for part in (self.dense, self.bm25):
            part._share_documents(self)
            part.build()
        self.counts = self.dense.counts

    def encode_part(self, documents: Sequence[Document], part: int, parts: int) -> None:
        """The dense retriever's."""
        self.dense.encode_part(documents, part, parts)
        self.counts = self.dense.counts

    def missing_shards(self, documents: Sequence[Document]) -> list[int]:
        """The dense retriever's."""
        return self.dense.missing_shards(documents)

    def write_files(self, folder: Path) -> None:
        """Both parts, in a folder each."""
        for part in (self.dense, self.bm25):
            (folder / part.name).mkdir()
            part.write_files(folder / part.name)

    def read_files(self, folder: Path) -> None:
        """Both parts."""
        for part in (self.dense, self.bm25):
            part._share_documents(self)
            part.read_files(folder / part.name)

    def warm_up(self) -> None:
        """Load the encoder."""
        self.dense.warm_up()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k documents of highest fused score among the pools of both parts."""
        self._require_index()
        self._require_k(k)
        depth = max(k, self.pool)
        by_dense = self.dense.top(queries, depth)
        if self.fusion == "score":
            pools, scores = self._fused(queries, by_dense, depth)
        else:
            by_bm25 = self.bm25.top(queries, depth)
            pools = [np.union1d(d, b) for (d, _), (b, _) in zip(by_dense, by_bm25, strict=True)]
            scores = [self._rrf(*row) for row in zip(pools, by_dense, by_bm25, strict=True)]
        found = []
        for positions, values in zip(pools, scores, strict=True):
            best = best_first(values, positions, self._id_rank, k)
            found.append(self._hits(positions[best], values[best]))
        return found

    def _fused(
        self, queries: Sequence[str], by_dense: Sequence[tuple[IntArray, ScoreArray]], depth: int
    ) -> tuple[list[IntArray], list[ScoreArray]]:
        """Each query's pool of both rankings and the pool's fused scores; BM25 scores the corpus once per query."""
        pools, others, lexical = [], [], []
        in_dense = np.zeros(len(self.documents), dtype=bool)
        for (positions, _), scores in zip(by_dense, self.bm25.all_scores(queries), strict=True):
            best = self.bm25.best_of(scores, depth)
            in_dense[positions] = True
            other = best[~in_dense[best]]
            in_dense[positions] = False
            pool = np.concatenate([positions, other])
            pools.append(pool)
            others.append(other)
            lexical.append((scores[pool], float(scores.max())))
        cosines = [
            np.concatenate([known, new])
            for (_, known), new in zip(by_dense, self.dense.score_at(queries, others), strict=True)
        ]
        return pools, self._fuse(cosines, lexical)

    def _rrf(
        self, positions: IntArray, by_dense: tuple[IntArray, ScoreArray], by_bm25: tuple[IntArray, ScoreArray]
    ) -> ScoreArray:
        fused = np.zeros(len(positions))
        for share, (ranked, scores) in ((self.alpha, by_dense), (1 - self.alpha, by_bm25)):
            # BM25 fills its list with documents that share no word with the query: they have no rank.
            ranked = ranked[scores > 0]
            fused[np.searchsorted(positions, ranked)] += share / (self.rrf_k + 1 + np.arange(len(ranked)))
        return fused * (self.rrf_k + 1)

    def _rrf_at(
        self, chosen: IntArray, by_dense: tuple[IntArray, ScoreArray], by_bm25: tuple[IntArray, ScoreArray]
    ) -> ScoreArray:
        positions = np.unique(np.concatenate([chosen, by_dense[0], by_bm25[0]]))
        return self._rrf(positions, by_dense, by_bm25)[np.searchsorted(positions, chosen)]

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """The fused scores of the given documents."""
        self._require_index()
        if self.fusion == "rrf":
            tops = (self.dense.top(queries, self.pool), self.bm25.top(queries, self.pool))
            return [self._rrf_at(*row) for row in zip(positions, *tops, strict=True)]
        return self._fuse(
            self.dense.score_at(queries, positions), self.bm25.score_with_best(queries, positions)
        )

    def _fuse(
        self, cosines: Sequence[ScoreArray], lexical: Sequence[tuple[ScoreArray, float]]
    ) -> list[ScoreArray]:
        return [
            self.alpha * cosine + (1 - self.alpha) * bm25 / (best or 1.0)
            for cosine, (bm25, best) in zip(cosines, lexical, strict=True)
        ]


def hybrid(
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
    """``retriever=hybrid``: dense and BM25 fused, in the multi-hop loop."""
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
    base = HybridRetriever(
        DenseRetriever(model, factory, nprobe, ef_search, train_sample, shard_size, cache_dir),
        BM25Retriever(k1, b, stemmer),
        fusion,
        alpha,
        rrf_k,
        pool,
        cache_dir,
    )
    return MultiHopRetriever(
        base, planner, max_hops, top_k_per_hop, rerank=rerank, state_cache=state_cache, cache_dir=cache_dir
    )
