"""Ask the annotated sub-questions of a MuSiQue decomposition: an upper bound for planners."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from refragkit.retrievers.planners.base import QueryPlanner, Trail
from refragkit.types import Question

_REFERENCE = re.compile(r"#(\d+)")


class GoldPlanner(QueryPlanner):
    """Hop n asks sub-question n, with ``#i`` replaced by the annotated answer of sub-question i.

    A question without a decomposition asks itself once and stops.
    """

    name: ClassVar[str] = "gold"

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The next sub-question, or None when there is none left."""
        return [self._next(t) for t in trails]

    @staticmethod
    def _next(trail: Trail) -> str | None:
        steps = trail.question.decomposition
        if not steps:
            return None if trail.hops else trail.question.question
        return sub_question(trail.question, len(trail.hops)) if len(trail.hops) < len(steps) else None


def sub_question(question: Question, step: int) -> str:
    """Sub-question number ``step`` of a decomposition, from 0, with the annotated answers of earlier ones filled in."""
    steps = question.decomposition

    def answer(match: re.Match[str]) -> str:
        i = int(match.group(1))
        known = steps[i - 1].get("answer") if 1 <= i <= len(steps) else None
        return match.group(0) if known is None else str(known)

    # MuSiQue writes some steps as "X >> relation".
    return _REFERENCE.sub(answer, str(steps[step]["question"]).replace(" >> ", " "))
