"""An exponential moving average of the weights that are trained.

Torch's ``AveragedModel`` over the trainable parameters only, so that an adapter's average costs an adapter's memory.
The decay warms up, min(decay, (1 + n) / (10 + n)) at update n, without which the average of a short run would be its
first weights.

Source: Polyak and Juditsky 1992; the warm-up is TensorFlow's ``ExponentialMovingAverage(num_updates=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def decay_at(update: int, decay: float) -> float:
    """The share that the average keeps at update number ``update``, from 1."""
    return min(decay, (1 + update) / (10 + update))


class WeightAverage(nn.Module):
    """The average of a model's trainable parameters; its state is in the checkpoint of what holds it.

    Args:
        model: what is trained. The average starts as its weights at the first `update`.
        decay: in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        # A list, so that the model's parameters do not become this module's too
        self._trained = [nn.ParameterList([p for p in model.parameters() if p.requires_grad])]
        self.average = AveragedModel(self._trained[0], multi_avg_fn=self._blend)
        self.average.requires_grad_(False)

    @torch.no_grad()
    def _blend(self, averages: Any, weights: Any, updates: Tensor | int) -> None:
        torch._foreach_lerp_(averages, weights, 1 - decay_at(int(updates), self.decay))

    def update(self) -> None:
        """Take in the weights as they are, after an optimiser step."""
        self.average.update_parameters(self._trained[0])

    @property
    def updates(self) -> int:
        """How many times `update` was called."""
        return int(self.average.n_averaged)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside; nothing happens before the first update."""
        if not self.updates:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def apply_for_good(self) -> None:
        """Give the model the averaged weights."""
        if self.updates:
            for weight, average in self._pairs():
                weight.copy_(average)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._trained[0].parameters(), self.average.module.parameters(), strict=True)

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in self._pairs():
            weight.data, average.data = average.data, weight.data
