"""The controls that a retriever must be compared with: no documents, random ones, and the gold ones."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from refragkit.retrievers.base import Retriever
from refragkit.types import Document, Hit, Question

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever


class NoneRetriever(Retriever):
    """Finds nothing: what the model knows by itself."""

    name: ClassVar[str] = "none"
    cached: ClassVar[bool] = False

    def index(self, documents: Sequence[Document]) -> None:
        """Keep the documents."""
        self._set_documents(documents)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """No hits."""
        return [[] for _ in queries]


class RandomRetriever(Retriever):
    """Draws documents that have nothing to do with the query; the same query gets the same ones."""

    name: ClassVar[str] = "random"
    cached: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def settings(self) -> dict[str, int]:
        """The seed."""
        return {"seed": self.seed}

    def index(self, documents: Sequence[Document]) -> None:
        """Keep the documents."""
        self._set_documents(documents)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Draw k documents with a generator seeded by (seed, query); the score is the draw."""
        self._require_index()
        self._require_k(k)
        found = []
        for query in queries:
            digest = hashlib.sha256(f"{self.seed}\n{query}".encode()).digest()
            draws = np.random.default_rng(int.from_bytes(digest[:8], "little")).random(len(self._searchable))
            best = np.argsort(-draws, kind="stable")[:k]
            found.append([Hit(self.documents[self._searchable[i]], float(draws[i])) for i in best])
        return found


class GoldRetriever(Retriever):
    """Returns the annotated supporting passages: the upper bound of any retriever.

    It answers a question, not a query string: the loop reaches it by ``search_for``.
    """

    name: ClassVar[str] = "gold"
    cached: ClassVar[bool] = False

    def index(self, documents: Sequence[Document]) -> None:
        """Keep the documents."""
        self._set_documents(documents)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """No hits: a bare query has no annotation."""
        self._require_index()
        return [[] for _ in queries]

    def search_for(
        self,
        questions: Sequence[Question],
        queries: Sequence[str],
        k: int,
        skip: Sequence[Collection[str]] | None = None,
    ) -> list[list[Hit]]:
        """The first k supporting passages that the question doesn't have yet, in their order, with score 1.

        Raises:
            RetrievalError: a supporting passage is not in the corpus.
        """
        self._require_index()
        self._require_k(k)
        known = skip if skip is not None else [()] * len(questions)
        return [
            [Hit(self.documents[self._position(i)], 1.0) for i in q.supporting_ids if i not in s][:k]
            for q, s in zip(questions, known, strict=True)
        ]


def none(
    planner: str = "repeat",
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
    rerank: str | None = None,
    state_cache: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> MultiHopRetriever:
    """``retriever=none``: the control without documents."""
    from refragkit.retrievers.multi_hop import MultiHopRetriever

    return MultiHopRetriever(
        NoneRetriever(),
        planner,
        max_hops,
        top_k_per_hop,
        rerank=rerank,
        state_cache=state_cache,
        cache_dir=cache_dir,
    )


def random(
    seed: int = 0,
    planner: str = "repeat",
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
    rerank: str | None = None,
    state_cache: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> MultiHopRetriever:
    """``retriever=random``: the control with documents that don't help."""
    from refragkit.retrievers.multi_hop import MultiHopRetriever

    return MultiHopRetriever(
        RandomRetriever(seed),
        planner,
        max_hops,
        top_k_per_hop,
        rerank=rerank,
        state_cache=state_cache,
        cache_dir=cache_dir,
    )


def gold(
    planner: str = "repeat",
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
    rerank: str | None = None,
    state_cache: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> MultiHopRetriever:
    """``retriever=gold``: the control with exactly the annotated passages."""
    from refragkit.retrievers.multi_hop import MultiHopRetriever

    return MultiHopRetriever(
        GoldRetriever(),
        planner,
        max_hops,
        top_k_per_hop,
        rerank=rerank,
        state_cache=state_cache,
        cache_dir=cache_dir,
    )
