"""Gold traces: which search should follow what has been found, from the annotation of a question.

They teach a model to write ``<|search|> query`` before any reward does: a policy that never searches never finds out
what a search is worth.

A trace asks for supporting passages that are still missing, and stops when none is: first the sub-questions of a
MuSiQue decomposition, each with the answers of earlier ones filled in; for a question without one, the titles of its
supporting passages. What a search finds is what the run's retriever finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from refragkit.retrievers.base import Retriever
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.base import QueryPlanner, Trail
from refragkit.retrievers.planners.gold import sub_question
from refragkit.types import Hop, Question


@dataclass(slots=True)
class _Progress:
    """How far a trace has come: sub-questions and passages that need not be asked for again."""

    steps: int = 0
    titles: set[str] = field(default_factory=set)


class TracePlanner(QueryPlanner):
    """Asks for what is missing of the annotated evidence.

    Args:
        first_query: ``question`` asks the question in hop 1; ``model`` begins with the first missing passage.
    """

    name: ClassVar[str] = "gold_traces"

    def __init__(self, first_query: str = "question") -> None:
        self.first_query = first_query

    def open_index(self, retriever: Retriever, cache_dir: str | Path | None = None) -> None:
        """Remember where titles are."""
        self._retriever = retriever

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The next query of each trace, None where everything is found."""
        return [self._next(t) for t in trails]

    def _next(self, trail: Trail) -> str | None:
        question = trail.question
        if not trail.hops and self.first_query == "question":
            return question.question
        if trail.memory is None:
            trail.memory = _Progress()
        progress: _Progress = trail.memory
        while progress.steps < len(question.decomposition):
            step = question.decomposition[progress.steps]
            progress.steps += 1
            if step.get("supporting_id") not in trail.found:
                query = sub_question(question, progress.steps - 1)
                if query not in trail.queries:
                    return query
        if question.decomposition:
            return None
        for doc_id in question.supporting_ids:
            if doc_id not in trail.found and doc_id not in progress.titles:
                progress.titles.add(doc_id)
                title = self._title(doc_id)
                if title and title not in trail.queries:
                    return title
        return None

    def _title(self, doc_id: str) -> str:
        position = self._retriever._positions.get(doc_id)
        return "" if position is None else self._retriever.documents[position].title


class GoldTraces:
    """The hops of gold traces, each searched for once.

    Args:
        retriever: the run's; its index and its limits are shared.
        first_query: see `TracePlanner`.
    """

    def __init__(self, retriever: MultiHopRetriever, first_query: str) -> None:
        planner = TracePlanner(first_query)
        planner.open_index(retriever.retriever)
        self._walker = MultiHopRetriever(
            retriever.retriever, planner, retriever.max_hops, retriever.top_k_per_hop
        )
        self._hops: dict[str, tuple[Hop, ...]] = {}

    def hops(self, questions: Sequence[Question]) -> list[tuple[Hop, ...]]:
        """The hops of each question; one batched walk for those not seen before."""
        new = {q.id: q for q in questions if q.id not in self._hops}
        if new:
            self._hops.update(zip(new, self._walker.retrieve(list(new.values())), strict=True))
        return [self._hops[q.id] for q in questions]
