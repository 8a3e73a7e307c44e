"""What a planner does, and the registry that names them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

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
    """

    question: Question
    hops: list[Hop] = field(default_factory=list)
    found: dict[str, Hit] = field(default_factory=dict)

    @property
    def queries(self) -> set[str]:
        """What was asked before."""
        return {hop.query for hop in self.hops}


@dataclass(frozen=True, slots=True)
class Ask:
    """A planner's next request for one question.

    Attributes:
        query: what to search for.
        linked: documents to consider beside what the search finds, best first, with their scores.
    """

    query: str
    linked: tuple[Hit, ...] = ()


class QueryPlanner(ABC):
    """Decides, for all questions of a batch together, what to ask next or to stop."""

    name: ClassVar[str] = "planner"

    def open_index(self, retriever: Retriever, cache_dir: str | Path | None = None) -> None:  # noqa: B027
        """Prepare for a corpus: called once, after the retriever has indexed it."""

    @abstractmethod
    def plan(self, trails: Sequence[Trail]) -> list[Ask | None]:
        """The next request of each trail, or None to stop it. Trails without hops ask for the first time."""

    def merge(self, trail: Trail, ask: Ask, hits: Sequence[Hit], k: int) -> list[Hit]:
        """The hop's at most k hits, given what the search found for ``ask.query`` and was not known."""
        return list(hits[:k])

    def rank(self, trails: Sequence[Trail]) -> list[list[Hit]]:
        """All documents of each trail, best first over all hops; by default in the order of finding."""
        return [list(t.found.values()) for t in trails]


#: Name in ``retriever.planner`` -> where its class is. Add a planner: one file and one line here.
PLANNERS: dict[str, str] = {
    "expand": "refragkit.retrievers.planners.expand:ExpandPlanner",
    "gold": "refragkit.retrievers.planners.gold:GoldPlanner",
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
