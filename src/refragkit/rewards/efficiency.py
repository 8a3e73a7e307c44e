"""Fewer hops and documents for the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from refragkit.rewards.answer import AnswerReward
from refragkit.rewards.base import Reward
from refragkit.types import Episode

#: Passages that a question is taken to need where no annotation says it: two make a multi-hop question.
DEFAULT_NEEDED_DOCUMENTS = 2


def economy(episode: Episode) -> float:
    """How little retrieval an episode used, in [0, 1]; 0 for none at all.

    The mean of two shares: of hops saved (1 for one hop, falling linearly to ``1 / max_hops``), and of
    documents needed among documents retrieved (1 for no more than needed).
    """
    documents, hops = len(episode.documents), len(episode.hops)
    if documents == 0:
        return 0.0
    hop_share = 1.0 - (hops - 1) / max(episode.max_hops, hops)
    needed = len(episode.supporting_ids) or DEFAULT_NEEDED_DOCUMENTS
    return 0.5 * hop_share + 0.5 * min(1.0, needed / documents)


class EfficiencyReward(Reward):
    """Economy times the quality of the answer.

    The product keeps it honest: a wrong answer earns nothing by being cheap, and neither does retrieving
    nothing, so that this part can never be raised by searching less than the answer needs.
    """

    name: ClassVar[str] = "efficiency"

    def __init__(self, metric: str = "f1") -> None:
        """``metric`` measures the answer: ``f1`` or ``em``."""
        self._answer = AnswerReward(metric)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """One value per episode."""
        return [economy(e) * a for e, a in zip(episodes, self._answer(episodes), strict=True)]
