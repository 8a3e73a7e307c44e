"""refrag's reward: 0.6 answer + 0.3 relevance + 0.1 efficiency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from refragkit.rewards.answer import AnswerReward
from refragkit.rewards.composite import CompositeReward
from refragkit.rewards.efficiency import EfficiencyReward
from refragkit.rewards.relevance import RelevanceReward


class RefragReward(CompositeReward):
    """The answer's quality, the relevance of what was retrieved, and the economy of retrieving it."""

    name: ClassVar[str] = "refrag"

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        answer_metric: str = "f1",
        relevance_beta: float = 2.0,
        relevance_encoder: str | None = None,
    ) -> None:
        """Build the three parts.

        Args:
            weights: ``{answer, relevance, efficiency}``; None for 0.6, 0.3, 0.1.
            answer_metric: ``f1`` or ``em``, also for efficiency.
            relevance_beta: how many times more recall counts than precision.
            relevance_encoder: see :class:`RelevanceReward`.
        """
        super().__init__(
            {
                "answer": AnswerReward(answer_metric),
                "relevance": RelevanceReward(relevance_beta, relevance_encoder),
                "efficiency": EfficiencyReward(answer_metric),
            },
            {"answer": 0.6, "relevance": 0.3, "efficiency": 0.1} if weights is None else weights,
        )
