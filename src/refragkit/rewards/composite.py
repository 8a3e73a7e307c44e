"""A weighted mean of rewards whose parts can be logged apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from refragkit.errors import ConfigError
from refragkit.rewards.base import Reward
from refragkit.types import Episode


class CompositeReward(Reward):
    """Sum of weight times part, divided by the sum of the weights, so that it stays in [0, 1]."""

    name: ClassVar[str] = "composite"

    def __init__(self, rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> None:
        """Combine named rewards.

        Raises:
            ConfigError: the names differ, a weight is negative, or all are 0.
        """
        if set(rewards) != set(weights):
            raise ConfigError(f"reward.weights: expected the keys {sorted(rewards)}, got {sorted(weights)}")
        for part, weight in weights.items():
            if not weight >= 0:
                raise ConfigError(f"reward.weights.{part}: expected a number >= 0, got {weight}")
        if sum(weights.values()) == 0:
            raise ConfigError(f"reward.weights: at least one of {sorted(weights)} must be above 0")
        self.rewards = dict(rewards)
        self.weights = {part: float(weights[part]) for part in rewards}

    def parts(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Each part's own values, unweighted; parts of weight 0 included."""
        return {part: reward(episodes) for part, reward in self.rewards.items()}

    def combine(self, parts: Mapping[str, Sequence[float]]) -> list[float]:
        """The total from the values that ``parts`` returned, without computing them again."""
        total = sum(self.weights.values())
        rows = zip(*(parts[p] for p in self.weights), strict=True)
        # The weighted mean of numbers up to 1 can round to a hair above 1.
        return [
            min(1.0, sum(w * v for w, v in zip(self.weights.values(), row, strict=True)) / total)
            for row in rows
        ]

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """One value per episode."""
        return self.combine(self.parts(episodes))
