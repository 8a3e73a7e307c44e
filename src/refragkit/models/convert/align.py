"""Stage 1 of distillation: each new mixer learns to put out what the attention it replaces puts out.

The teacher's inputs go into the mixer, so no mixer depends on another, and nothing but the mixers runs.

Source: "hidden-state alignment" of MOHAWK (Bick et al. 2024, arXiv 2408.10189, section 3.2), step 1 of RADLADS
(Goldstein et al. 2025, arXiv 2505.03005) and stage 1 of ARWKV (Yueyu et al. 2025, arXiv 2501.15570); weights start from
q, k, v and o as in Mamba in the Llama (Wang et al. 2024, arXiv 2408.15237).
Differs: the squared error is divided by the target's variance, so that all blocks weigh the same; MOHAWK's first stage
(matching attention matrices) is left out, calibration stands in its place; AdamW with a higher rate for small
parameters, gradients clipped per block; activations come from a cache in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from refragkit.errors import ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.convert.activation_cache import ActivationCache
from refragkit.models.convert.activations import run_mixer
from refragkit.models.convert.blocks import mixer_of
from refragkit.training.optim import (
    LearningRates,
    build_adamw,
    clip_gradients,
    learning_rate_factor,
    set_learning_rates,
)

STEP_TOKENS = 1024
_MAX_NORM = 1.0


class Alignment:
    """Stage 1, step by step.

    Args:
        mixers: of the cached blocks, in their order; trainable and in float32 (:func:`trained_mixers`).
        cache: the teacher's activations in the converted blocks.
        tokens: to train on, in steps of 1,024 (or one window); windows come again where there are fewer.
        matrix_lr: peak learning rate of matrices.
        other_lr: of the mixers' other parameters.
        seed: of the windows' order.

    Attributes:
        name: aligning.
        steps: how many there are.
        step_tokens: tokens of each.
        optimizer: AdamW over the mixers.
    """

    name = "aligning"

    def __init__(
        self,
        mixers: nn.ModuleList,
        cache: ActivationCache,
        *,
        tokens: int,
        matrix_lr: float = 2e-3,
        other_lr: float = 3e-3,
        seed: int = 0,
    ) -> None:
        self._mixers, self._cache, self._seed = mixers, cache, seed
        self._windows, self.steps = training_steps(tokens, cache.window_tokens)
        self.step_tokens = self._windows * cache.window_tokens
        self.optimizer: Any = build_adamw(mixers, LearningRates(matrix_lr, matrix_lr, matrix_lr, other_lr))

    def step(self, step: int) -> dict[str, float]:
        """Update number ``step``; returns each block's loss before it: squared error over the output's variance.

        Raises:
            RefragError: training diverged.
        """
        factor = learning_rate_factor("cosine", step, self.steps, warmup_steps(self.steps))
        set_learning_rates(self.optimizer, factor)
        rows = window_rows(self._cache.windows, self._windows, step, self._seed)
        device = next(self._mixers.parameters()).device
        losses = {}
        for layer, mixer in zip(self._cache.layers, self._mixers, strict=True):
            x, y = (part.to(device).float() for part in self._cache.read(layer, rows))
            # A block whose attention puts out a constant has no variance to divide by
            loss = (run_mixer(mixer, x).float() - y).square().mean() / max(self._cache.variance[layer], 1e-12)
            torch.autograd.backward(loss)
            clip_gradients(mixer.parameters(), _MAX_NORM)
            losses[f"align_loss/{layer}"] = float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


@contextmanager
def trained_mixers(student: SequenceModel, layers: Sequence[int]) -> Iterator[nn.ModuleList]:
    """The mixers of some blocks as all that a gradient flows into while the block lasts.

    Raises:
        ConfigError: weights in less than float32, in which small updates vanish.
    """
    mixers = nn.ModuleList(mixer_of(student, layer) for layer in layers)
    low = {p.dtype for p in mixers.parameters()} - {torch.float32, torch.float64}
    if low:
        raise ConfigError(
            f"new mixers can't be trained in {low.pop()}: small updates vanish in it; convert the model in float32 "
            "(hardware.precision other than bf16-true)"
        )
    before = [(p, p.requires_grad) for p in student.parameters()]
    student.requires_grad_(False)
    mixers.requires_grad_(True)
    try:
        yield mixers
    finally:
        mixers.zero_grad()
        for parameter, needed in before:
            parameter.requires_grad_(needed)


def training_steps(tokens: int, window_tokens: int, step_tokens: int = STEP_TOKENS) -> tuple[int, int]:
    """Windows per step and steps, both at least 1, for about so many tokens."""
    windows = max(1, step_tokens // window_tokens)
    return windows, max(1, round(tokens / (windows * window_tokens)))


def warmup_steps(steps: int) -> int:
    """A fifth of a short run, 20 of a long one: AdamW's first full steps throw a calibrated mixer far off."""
    return min(20, steps // 5)


def window_rows(total: int, windows: int, step: int, seed: int) -> list[int]:
    """Which of ``total`` windows step ``step`` reads: all in random order, then all again in another.

    A function of its arguments alone.
    """
    rows = []
    for place in range(step * windows, (step + 1) * windows):
        epoch, position = divmod(place, total)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        rows.append(int(torch.randperm(total, generator=generator)[position]))
    return rows
