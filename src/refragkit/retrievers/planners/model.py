"""Let the language model write the queries (``<|search|> query``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

from refragkit.errors import ConfigError
from refragkit.retrievers.planners.base import QueryPlanner, Trail

#: Given trails, the next query of each, or None to answer now.
QueryWriter = Callable[[Sequence[Trail]], Sequence[str | None]]


class ModelPlanner(QueryPlanner):
    """Later hops ask what the writer says; the first one asks the question, or what the writer says as well.

    A query that was asked before ends its question: the same search can't find anything new.
    """

    name: ClassVar[str] = "model"

    def __init__(
        self, writer: QueryWriter | None = None, first_query: Literal["question", "model"] = "question"
    ) -> None:
        """``writer`` may be set later, when the model is built.

        Args:
            writer: writes the queries of a batch; with ``first_query="question"`` its trails have a hop each.
            first_query: who writes the first one.
        """
        self.writer = writer
        self.first_query = first_query

    @contextmanager
    def written_by(self, writer: QueryWriter) -> Iterator[None]:
        """Ask this writer meanwhile."""
        before, self.writer = self.writer, writer
        try:
            yield
        finally:
            self.writer = before

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The writer's queries, written for all trails in one batch, and the question where it comes first.

        Raises:
            ConfigError: no writer is set.
        """
        asked = [t for t in trails if t.hops or self.first_query == "model"]
        if asked and self.writer is None:
            raise ConfigError(
                "retriever.planner=model needs a language model that writes queries, and this task sets none: "
                "choose planner expand"
            )
        written = iter(self.writer(asked) if self.writer is not None and asked else ())
        asking = {id(t) for t in asked}
        return [self._new(t, next(written)) if id(t) in asking else t.question.question for t in trails]

    @staticmethod
    def _new(trail: Trail, query: str | None) -> str | None:
        query = (query or "").strip()
        return query if query and query not in trail.queries else None
