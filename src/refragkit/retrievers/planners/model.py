"""Let the language model write the follow-up queries (``<|search|> query``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from refragkit.errors import ConfigError
from refragkit.retrievers.planners.base import QueryPlanner, Trail

#: Given trails with at least one hop each, the next query of each, or None to answer now.
QueryWriter = Callable[[Sequence[Trail]], Sequence[str | None]]


class ModelPlanner(QueryPlanner):
    """Hop 1 asks the question; later hops ask what the writer says.

    A query that was asked before ends its question: the same search can't find anything new.
    """

    name: ClassVar[str] = "model"

    def __init__(self, writer: QueryWriter | None = None) -> None:
        """``writer`` may be set later, when the model is built."""
        self.writer = writer

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The question, then the writer's queries, written for all trails in one batch.

        Raises:
            ConfigError: no writer is set.
        """
        later = [t for t in trails if t.hops]
        if later and self.writer is None:
            raise ConfigError(
                "retriever.planner=model needs a language model that writes queries, and this task sets none: "
                "choose planner expand"
            )
        written = iter(self.writer(later) if self.writer is not None and later else ())
        return [self._new(t, next(written)) if t.hops else t.question.question for t in trails]

    @staticmethod
    def _new(trail: Trail, query: str | None) -> str | None:
        query = (query or "").strip()
        return query if query and query not in trail.queries else None
