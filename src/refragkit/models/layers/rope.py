"""Rotary position embedding and its context extensions.

Glossary: ``theta`` the base, ``frequencies`` the angle per position of each channel pair, ``attention_factor`` a
factor on cosines and sines (yarn's temperature).

Source: Su et al. 2021 (arXiv 2104.09864), in the half-split layout of Llama and Qwen2: channel i is paired with
channel i + head_dim / 2. Linear: Chen et al. 2023 (arXiv 2306.15595); yarn: Peng et al. 2023 (arXiv 2309.00071);
llama3: the rule published with Llama 3.1. Parameters carry the names of Hugging Face's configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.config import rope_type


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for :func:`rotate`.

    Args:
        positions: int64 ``[1 or B, T]``.
        head_dim: width of a head.
        theta: base of the frequencies.
        scaling: ``ModelConfig.rope_scaling``.
        dtype: of the result; the angles are computed in float32 (float64 for float64).

    Returns:
        Two tensors ``[1 or B, 1, T, head_dim]``.

    Raises:
        ConfigError: a scaling that is not implemented.
    """
    precise = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=precise, device=positions.device) / head_dim)
    frequencies, attention_factor = scale_frequencies(frequencies, theta, scaling)
    angles = positions[:, None, :, None].to(precise) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return cos.to(dtype), sin.to(dtype)


def scale_frequencies(
    frequencies: Tensor, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Apply a context extension.

    Args:
        frequencies: plain ones, ``[head_dim / 2]``.
        theta: their base.
        scaling: ``ModelConfig.rope_scaling``.

    Returns:
        The extended frequencies and the attention factor.
    """
    kind = rope_type(scaling)
    if scaling is None or kind == "default":
        return frequencies, 1.0
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "llama3":
        return _llama3(frequencies, factor, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, theta, factor, scaling)
    raise ConfigError(f"model.rope_scaling: {kind!r} has no implementation")


def _llama3(frequencies: Tensor, factor: float, scaling: Mapping[str, Any]) -> Tensor:
    """Slow waves are stretched, fast ones kept, those between blended."""
    context = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = context * frequencies / (2 * math.pi)  # within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


def _yarn(
    frequencies: Tensor, theta: float, factor: float, scaling: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """The ramp is linear in the channel index, between the channels that turn beta_fast and beta_slow times."""
    width = 2 * frequencies.shape[0]
    context = float(scaling["original_max_position_embeddings"])

    def channel(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(float(scaling.get("beta_fast") or 32))
    high = channel(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    index = torch.arange(frequencies.shape[0], dtype=frequencies.dtype, device=frequencies.device)
    stretched = ((index - low) / (high - low)).clamp(0, 1)
    frequencies = frequencies * (1 - stretched + stretched / factor)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = (
            temperature(mscale) / temperature(all_dims) if mscale and all_dims else temperature(1)
        )
    return frequencies, float(attention_factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x [B, heads, T, head_dim]`` by the tables' angles."""
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([-right, left], dim=-1), sin)
