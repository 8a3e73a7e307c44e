"""What a planner does, and the registry that names them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from refragkit.errors import ConfigError
from refragkit.retrievers.base import Retriever
from refragkit.types import Hit, Hop, Question


@dataclass(slots=True)
class Trail:
    """One question on its way: what it has asked and found so far.

    Attributes:
        question: whose trail it is.
        hops: the finished hops.
        found: every distinct document found, by id, in the order in which it was found.
        seen: every distinct document that a search returned, kept or not, in the same order.
        memory: whatever the planner keeps about this question.
    """

    question: Question
    hops: list[Hop] = field(default_factory=list)
    found: dict[str, Hit] = field(default_factory=dict)
    seen: dict[str, Hit] = field(default_factory=dict)
    memory: Any = None

    @property
    def queries(self) -> set[str]:
        """What was asked before."""
        return {hop.query for hop in self.hops}


class QueryPlanner(ABC):
    """Decides, for all questions of a batch together, what to ask next or to stop."""

    name: ClassVar[str] = "planner"
    #: The folder of what the planner keeps about the corpus, None where that is nothing or only in memory.
    index_path: Path | None = None

    def open_index(self, retriever: Retriever, cache_dir: str | Path | None = None) -> None:  # noqa: B027
        """Prepare for a corpus: called once, after the retriever has indexed it."""

    @abstractmethod
    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The next query of each trail, or None to stop it. A trail without hops asks for the first time."""

    def depth(self, k: int) -> int:
        """How many documents the planner wants to see of a search that may add k."""
        return k

    def merge(
        self, trails: Sequence[Trail], queries: Sequence[str], found: Sequence[Sequence[Hit]], k: int
    ) -> list[list[Hit]]:
        """Each trail's at most k hits, given what its search found and was not known before."""
        return [list(hits[:k]) for hits in found]

    def rank(self, trails: Sequence[Trail], k: int) -> list[list[Hit]]:
        """At most k documents of each trail, best first over all hops; by default in the order of finding.

        Behind what was found comes what was only seen.
        """
        return [
            list({**t.found, **{i: h for i, h in t.seen.items() if i not in t.found}}.values())[:k]
            for t in trails
        ]


#: Name in ``retriever.planner`` -> where its class is. Add a planner: one file and one line here.
PLANNERS: dict[str, str] = {
    "expand": "refragkit.retrievers.planners.expand:ExpandPlanner",
    "gold": "refragkit.retrievers.planners.gold:GoldPlanner",
    "model": "refragkit.retrievers.planners.model:ModelPlanner",
    "repeat": "refragkit.retrievers.planners.repeat:RepeatPlanner",
}


def build_planner(name: str) -> QueryPlanner:
    """The planner of that name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in PLANNERS:
        raise ConfigError(
            f"retriever.planner={name!r} is unknown: expected one of {', '.join(sorted(PLANNERS))}"
        )
    module, cls = PLANNERS[name].split(":")
    planner: QueryPlanner = getattr(importlib.import_module(module), cls)()
    return planner
