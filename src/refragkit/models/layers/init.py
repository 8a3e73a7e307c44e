"""Initial weights that depend on nothing but the seed and the parameter's place in the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def small_init(linear: nn.Linear, generator: torch.Generator, residual_branches: int = 1) -> None:
    """Normal with variance 2 / (5 fan_in), biases 0.

    Args:
        linear: a projection; fan_in is its input width.
        generator: source of randomness.
        residual_branches: for a projection that writes to the residual stream, how many of them the stack has;
            the scale shrinks by its square root, so that their sum doesn't grow with depth.

    Source: Nguyen and Salazar 2019 (arXiv 1910.05895) for the scale, GPT-2 for the residual factor.
    """
    std = math.sqrt(2 / (5 * linear.in_features)) / math.sqrt(residual_branches)
    nn.init.normal_(linear.weight, 0.0, std, generator=generator)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def uniform_(tensor: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Fill uniformly in [low, high)."""
    return nn.init.uniform_(tensor, low, high, generator=generator)
