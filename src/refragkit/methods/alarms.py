"""Alarms of reinforcement learning: what goes wrong silently is said, once when it begins, and is a metric all along.

Each looks at the mean over the last ``window`` steps, so that one odd batch raises nothing, and is quiet again when the
mean recovers. ``alarm/<name>`` is 1 while it is on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("refragkit")

WINDOW_STEPS = 10
#: Shares from which on most of a batch teaches nothing.
EQUAL_GROUPS, UNUSABLE, WITHOUT_SEARCH = 0.9, 0.5, 0.9
#: A reward that fell to this part of its best, an entropy to this part of its first or below so many nats per token.
REWARD_PART, ENTROPY_PART, ENTROPY_NATS = 0.5, 0.1, 0.01
#: Below this a best reward is noise, and falling from it means nothing.
REWARD_FLOOR = 0.05

_MESSAGES: dict[str, str] = {
    "zero_reward": "every reward has been 0 for {steps} steps; look at samples.jsonl",
    "equal_rewards": "in {value:.0%} of the groups all rewards are equal, and such a group teaches nothing; raise"
    " method.group_size, take easier questions, or choose a reward with more grades",
    "reward_collapse": "the reward has fallen to {value:.3f}; its best was {reference:.3f}. Lower the learning rate or"
    " raise method.kl_coef",
    "entropy_collapse": "the entropy of what is sampled has fallen to {value:.4f} nats per token, from {reference:.3f}:"
    " all samples are becoming the same. Lower the learning rate or raise method.kl_coef",
    "empty": "{value:.0%} of the runs end without an answer",
    "truncated": "{value:.0%} of the runs have a turn that ran out of tokens; raise method.max_new_tokens",
    "stopped_searching": "{value:.0%} of the runs search no more, although they may; see method.warmup",
}


class Alarms:
    """Watches the metrics of one run.

    Args:
        window: steps that a mean is taken over, and that must have been seen before anything is said.
    """

    def __init__(self, window: int = WINDOW_STEPS) -> None:
        self.window = window
        self._seen: dict[str, deque[float]] = {}
        self._best_reward = 0.0
        self._first_entropy: float | None = None
        self._on: dict[str, bool] = {}

    def watch(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in the metrics of a step and warn of what has begun to go wrong.

        Returns:
            ``alarm/<name>`` for each alarm whose metric is there, 0 or 1.
        """
        result: dict[str, float] = {}

        def check(
            name: str, key: str, wrong: Callable[[float], bool], reference: Callable[[], float] = lambda: 0.0
        ) -> None:
            if key not in metrics:
                return
            mean = self._mean(key)
            on = mean is not None and wrong(mean)
            if on and not self._on.get(name):
                text = _MESSAGES[name].format(value=mean, reference=reference(), steps=self.window)
                log.warning("alarm %s: %s", name, text)
            self._on[name] = on
            result[f"alarm/{name}"] = float(on)

        for key, value in metrics.items():
            if key.startswith(("reward/", "rollouts/")):
                self._seen.setdefault(key, deque(maxlen=self.window)).append(value)
        reward, entropy = self._mean("reward/total"), self._mean("rollouts/entropy")
        if reward is not None:
            self._best_reward = max(self._best_reward, reward)
        if entropy is not None and self._first_entropy is None:
            self._first_entropy = entropy
        check("zero_reward", "reward/total", lambda mean: mean == 0)
        check("equal_rewards", "rollouts/equal_reward_groups", lambda mean: mean >= EQUAL_GROUPS)
        check(
            "reward_collapse",
            "reward/total",
            lambda mean: self._best_reward >= REWARD_FLOOR and mean < REWARD_PART * self._best_reward,
            lambda: self._best_reward,
        )
        check(
            "entropy_collapse",
            "rollouts/entropy",
            lambda mean: mean < max(ENTROPY_NATS, ENTROPY_PART * (self._first_entropy or 0.0)),
            lambda: self._first_entropy or 0.0,
        )
        check("empty", "reward/empty_completions", lambda mean: mean >= UNUSABLE)
        check("truncated", "rollouts/truncated", lambda mean: mean >= UNUSABLE)
        check("stopped_searching", "rollouts/without_search", lambda mean: mean >= WITHOUT_SEARCH)
        return result

    def _mean(self, key: str) -> float | None:
        """Over the window; None until it is full."""
        seen = self._seen.get(key, ())
        return sum(seen) / len(seen) if len(seen) == self.window else None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to say what an uninterrupted one would."""
        return {
            "seen": {key: list(values) for key, values in self._seen.items()},
            "best_reward": self._best_reward,
            "first_entropy": self._first_entropy,
            "on": dict(self._on),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self._seen = {key: deque(values, maxlen=self.window) for key, values in state["seen"].items()}
        self._best_reward = state["best_reward"]
        self._first_entropy = state["first_entropy"]
        self._on = dict(state["on"])
