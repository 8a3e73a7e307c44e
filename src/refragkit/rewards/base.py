"""What a reward is: a number in [0, 1] for what the model generated, and 0 where it generated nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from refragkit.types import Episode


def says_nothing(completion: str) -> bool:
    """Whether a completion has not one letter or digit: empty, blank, or punctuation only."""
    return not any(c.isalnum() for c in completion)


class Reward(ABC):
    """Scores finished episodes, one at a time or as a batch.

    A subclass writes ``score``; this class guarantees the rest of the contract: an empty completion earns 0
    in every reward, and every value lies in [0, 1].
    """

    name: ClassVar[str] = "reward"

    def __call__(self, episodes: Sequence[Episode]) -> list[float]:
        """The reward of each episode, in [0, 1].

        Raises:
            ValueError: a subclass returned a value outside [0, 1] or not a number.
        """
        spoken = [i for i, e in enumerate(episodes) if not says_nothing(e.completion)]
        values = [0.0] * len(episodes)
        if not spoken:
            return values
        for i, value in zip(spoken, self.score([episodes[i] for i in spoken]), strict=True):
            if not 0.0 <= value <= 1.0:  # also catches NaN
                raise ValueError(
                    f"reward {self.name}: got {value} for episode {episodes[i].id!r}, expected 0 to 1"
                )
            values[i] = float(value)
        return values

    @abstractmethod
    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """The reward of episodes whose completion is not empty."""
