"""Rotary position embedding.

Source: Su et al. 2021 (arXiv 2104.09864), in the half-split layout of Llama and Qwen2: channel i is paired with
channel i + head_dim / 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from refragkit.errors import ConfigError


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for :func:`rotate`.

    Args:
        positions: int64 ``[1 or B, T]``.
        head_dim: width of a head.
        theta: base of the frequencies.
        scaling: Hugging Face's ``rope_scaling``, or None.
        dtype: of the result; the angles are computed in float32 (float64 for float64).

    Returns:
        Two tensors ``[1 or B, 1, T, head_dim]``.

    Raises:
        ConfigError: a scaling that is not implemented.
    """
    precise = torch.promote_types(dtype, torch.float32)
    frequencies = inverse_frequencies(head_dim, theta, scaling, precise, positions.device)
    angles = positions[:, None, :, None].to(precise) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Angle per position of each channel pair, ``[head_dim / 2]``."""
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind != "default":
        raise ConfigError(f"model.rope_scaling {kind!r} is not implemented; known: default")
    return theta ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x [B, heads, T, head_dim]`` by the tables' angles."""
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-right, left], dim=-1), sin)
