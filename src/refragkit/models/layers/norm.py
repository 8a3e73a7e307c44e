"""Norms of the residual stream and of the Mamba-2 mixer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def init_weights(self, generator: torch.Generator) -> None:
        """Start as the plain normalisation."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., width]``."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.weight * functional.rms_norm(x.to(dtype), self.weight.shape, eps=self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """``RMSNorm(x * silu(z))``, each of ``groups`` equal parts of the last dimension on its own.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 8.2; the gate comes before the norm.
    """

    def __init__(self, width: int, eps: float, groups: int) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(width))

    def init_weights(self, generator: torch.Generator) -> None:
        """Start as the plain normalisation."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Gate and normalise ``[..., width]``."""
        dtype = torch.promote_types(z.dtype, torch.float32)
        gated = x.to(dtype) * functional.silu(z.to(dtype))
        width = gated.shape[-1] // self.groups
        grouped = gated.view(*gated.shape[:-1], self.groups, width)
        return self.weight * functional.rms_norm(grouped, (width,), eps=self.eps).view_as(gated).to(z.dtype)


class LayerNorm(nn.LayerNorm):
    """The usual layer norm, initialised like the other norms here."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def init_weights(self, generator: torch.Generator) -> None:
        """Start as the plain normalisation."""
        self.reset_parameters()


def make_norm(kind: Literal["rms", "layer"], width: int, eps: float) -> RMSNorm | LayerNorm:
    """The norm that ``ModelConfig.norm`` names."""
    return RMSNorm(width, eps) if kind == "rms" else LayerNorm(width, eps)
