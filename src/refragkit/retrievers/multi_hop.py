"""The multi-hop loop: search, look at what was found, ask for what is still missing, search again.

All questions of a batch go hop by hop together, so that each hop is one batched search.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refragkit.errors import ConfigError
from refragkit.retrievers.base import Retriever
from refragkit.retrievers.planners.base import QueryPlanner, Trail, build_planner
from refragkit.retrievers.state_cache import state_cache_settings
from refragkit.types import Document, Hit, Hop, Question

DEFAULT_MAX_HOPS = 3
DEFAULT_TOP_K_PER_HOP = 3


class MultiHopRetriever:
    """A retriever, a planner, and the loop between them.

    Attributes:
        retriever: what answers each hop's queries.
        planner: what writes them.
        max_hops: searches per question at most; the method may set it where the configuration left it open.
        top_k_per_hop: new documents per hop at most.
        state_cache: how the states of who reads the documents are to be kept; None for not at all.
    """

    def __init__(
        self,
        retriever: Retriever,
        planner: str | QueryPlanner = "expand",
        max_hops: int | None = None,
        top_k_per_hop: int | None = None,
        rerank: str | None = None,
        state_cache: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Combine the parts; nothing is read or built yet.

        Args:
            retriever: the retriever.
            planner: a name in ``refragkit.retrievers.planners.base.PLANNERS``, or a planner.
            max_hops: None stands for 3.
            top_k_per_hop: None stands for 3.
            rerank: a cross-encoder (name or path) that reorders each search; None for none.
            state_cache: the keys of `refragkit.retrievers.state_cache.StateCacheSettings`; None for no cache.
            cache_dir: where indexes are kept; None builds them in memory.

        Raises:
            ConfigError: the planner is unknown, a number is below 1, or ``state_cache`` can't be.
        """
        if rerank is not None:
            from refragkit.retrievers.rerank import RerankRetriever

            retriever = RerankRetriever(retriever, rerank)
        self.retriever = retriever
        self.planner = build_planner(planner) if isinstance(planner, str) else planner
        self.max_hops = DEFAULT_MAX_HOPS if max_hops is None else max_hops
        self.top_k_per_hop = DEFAULT_TOP_K_PER_HOP if top_k_per_hop is None else top_k_per_hop
        self.state_cache = state_cache_settings(state_cache)
        self.cache_dir = cache_dir
        _require_positive("max_hops", self.max_hops)
        _require_positive("top_k_per_hop", self.top_k_per_hop)

    @property
    def name(self) -> str:
        """The retriever's name."""
        return self.retriever.name

    @property
    def documents(self) -> Sequence[Document]:
        """The indexed corpus."""
        return self.retriever.documents

    def open_index(
        self, documents: Sequence[Document], cache_dir: str | Path | None = None
    ) -> MultiHopRetriever:
        """Load or build the retriever's index and what the planner needs of the corpus; returns self."""
        folder = cache_dir if cache_dir is not None else self.cache_dir
        self.retriever.open_index(documents, folder)
        self.planner.open_index(self.retriever, folder)
        return self

    def index(self, documents: Sequence[Document]) -> None:
        """Build everything in memory."""
        self.retriever.index(documents)
        self.planner.open_index(self.retriever, None)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """One search, no hops."""
        return self.retriever.search(queries, k)

    def retrieve(
        self, questions: Sequence[Question], max_hops: int | None = None, top_k_per_hop: int | None = None
    ) -> list[tuple[Hop, ...]]:
        """The hops of every question.

        Args:
            questions: a batch.
            max_hops: overrides the attribute for this call.
            top_k_per_hop: overrides the attribute for this call.

        Returns:
            One tuple of hops per question. A hop that finds nothing new ends its question and is not
            recorded, except the first, which always is.
        """
        return [tuple(t.hops) for t in self.walk(questions, max_hops, top_k_per_hop)]

    def retrieve_ranked(
        self,
        questions: Sequence[Question],
        depth: int,
        max_hops: int | None = None,
        top_k_per_hop: int | None = None,
    ) -> tuple[list[tuple[Hop, ...]], list[list[Hit]]]:
        """The hops, and for each question at most ``depth`` documents in one order over all hops, best first.

        The order may hold documents that a hop saw and did not keep: they are what it would have kept next.
        """
        trails = self.walk(questions, max_hops, top_k_per_hop, depth)
        return [tuple(t.hops) for t in trails], self.planner.rank(trails, depth)

    def warm_up(self) -> None:
        """Load whatever would be loaded at the first search, so that the search itself can be timed."""
        self.retriever.warm_up()

    def walk(
        self,
        questions: Sequence[Question],
        max_hops: int | None = None,
        top_k_per_hop: int | None = None,
        depth: int = 0,
    ) -> list[Trail]:
        """The loop itself: the trails with everything that their planner keeps about them.

        Each search looks at ``depth`` documents at least, for a ranking longer than what the hops keep.
        """
        hops = self.max_hops if max_hops is None else max_hops
        k = self.top_k_per_hop if top_k_per_hop is None else top_k_per_hop
        _require_positive("max_hops", hops)
        _require_positive("top_k_per_hop", k)
        trails = [Trail(q) for q in questions]
        active = trails
        for number in range(1, hops + 1):
            started = time.perf_counter()
            planned = [
                (t, query) for t, query in zip(active, self.planner.plan(active), strict=True) if query
            ]
            if not planned:
                break
            active, queries = [t for t, _ in planned], [query for _, query in planned]
            wanted = self.planner.depth(k)
            found = self.retriever.search_for(
                [t.question for t in active], queries, max(wanted, depth), [t.found.keys() for t in active]
            )
            for trail, hits in zip(active, found, strict=True) if depth else ():
                trail.seen.update((h.doc_id, h) for h in hits if h.doc_id not in trail.seen)
            merged = self.planner.merge(active, queries, [hits[:wanted] for hits in found], k)
            latency = (time.perf_counter() - started) / len(active)
            going_on = []
            for trail, query, hits in zip(active, queries, merged, strict=True):
                new = tuple(h for h in hits if h.doc_id not in trail.found)
                if new or number == 1:
                    trail.hops.append(Hop(number, query, tuple(hits), new, latency))
                if new:
                    trail.found.update((h.doc_id, h) for h in new)
                    going_on.append(trail)
            active = going_on
        return trails


def _require_positive(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"retriever.{key} must be at least 1, got {value}; for no documents use retriever=none"
        )
