"""Ask the question itself once more at every hop: single-hop search, cut into hops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from refragkit.retrievers.planners.base import QueryPlanner, Trail


class RepeatPlanner(QueryPlanner):
    """Always the question; the loop leaves out what is already found, so that each hop digs deeper."""

    name: ClassVar[str] = "repeat"

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The question, for every trail."""
        return [t.question.question for t in trails]
