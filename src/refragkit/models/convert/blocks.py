"""A model of which some attention blocks have become recurrent ones; everything else is the teacher's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch

from refragkit.errors import ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.config import BLOCK_KINDS, ModelConfig
from refragkit.models.convert.from_attention import mamba2_from_attention, rwkv7_from_attention
from refragkit.models.hybrid import Block, HybridLM
from refragkit.models.layers.attention import Attention
from refragkit.models.layers.mamba2 import Mamba2
from refragkit.models.layers.rwkv7 import RWKV7TimeMix

RecurrentKind = Literal["R", "M"]
Mixer = Attention | Mamba2 | RWKV7TimeMix


def check_layers(block_pattern: str, layers: Iterable[Any]) -> list[int]:
    """The blocks to convert in ascending order.

    Args:
        block_pattern: of the model.
        layers: their places in the stack, counted from 0.

    Raises:
        ConfigError: none, one twice, one that isn't there, or one that is no attention block.
    """
    given = list(layers)
    last = len(block_pattern) - 1
    attention = [i for i, kind in enumerate(block_pattern) if kind == "T"]
    if not attention:
        raise ConfigError(
            f"this model (block pattern {block_pattern}) has no attention block that could be converted"
        )
    if not given:
        raise ConfigError("convert.layers is empty; give block numbers such as [3,7], or auto")
    wrong = [i for i in given if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= last]
    if wrong:
        raise ConfigError(
            f"convert.layers: {_listed(wrong)} is not a block of this model; blocks are numbered 0 to {last}"
        )
    repeated = sorted({i for i in given if given.count(i) > 1})
    if repeated:
        raise ConfigError(f"convert.layers names {_listed(repeated)} more than once")
    other = [f"{i} ({BLOCK_KINDS[block_pattern[i]]})" for i in sorted(given) if block_pattern[i] != "T"]
    if other:
        raise ConfigError(
            f"convert.layers: only attention blocks can be converted, and {_listed(other)} is none; this model's are "
            f"{_listed(attention)}"
        )
    return sorted(given)


def converted_config(config: ModelConfig, layers: Sequence[int], to: RecurrentKind) -> ModelConfig:
    """The shape of a model after its blocks ``layers`` have become ``to`` blocks.

    Recurrent heads are as many and as wide as the query heads were.

    Raises:
        ConfigError: layers or ``to`` that can't be, widths that no such block has, or blocks of that kind that are
            there already and have another shape.
    """
    layers = check_layers(config.block_pattern, layers)
    if to not in ("R", "M"):
        raise ConfigError(f"convert.to must be R (RWKV-7) or M (Mamba-2), got {to!r}")
    width = config.n_heads * config.head_dim
    if to == "R" and width != config.d_model:
        raise ConfigError(
            f"convert.to=R needs n_heads x head_dim = d_model; this model has {config.n_heads} x {config.head_dim} = "
            f"{width} and d_model {config.d_model}"
        )
    if to == "M" and width % config.d_model:
        raise ConfigError(
            f"convert.to=M needs n_heads x head_dim to be a multiple of d_model; this model has {config.n_heads} x "
            f"{config.head_dim} = {width} and d_model {config.d_model}"
        )
    if to == "R" and config.o_bias:
        raise ConfigError(
            "convert.to=R: this model's o_proj has a bias, which an R block lacks; use convert.to=M"
        )
    shape: dict[str, Any] = (
        {
            "wkv_head_dim": config.head_dim,
            "decay_rank": _rank(2.5, config.d_model),
            "iclr_rank": _rank(2.5, config.d_model),
            "gate_rank": _rank(5, config.d_model),
            "wkv_gate": "one_plus",
            "wkv_group_norm": True,
            "wkv_bias": config.qkv_bias,
            "wkv_value_residual": False,
        }
        if to == "R"
        else {
            "d_state": config.head_dim,
            "ssm_head_dim": config.head_dim,
            "ssm_expand": width // config.d_model,
            "n_groups": config.n_heads,
            "ssm_norm_groups": config.n_heads,
            "d_conv": 4,
            "ssm_bias": True,
            "conv_bias": True,
            "conv_silu": False,
            "dt_limit": None,
        }
    )
    if to in config.block_pattern:
        other = {key: getattr(config, key) for key, value in shape.items() if getattr(config, key) != value}
        if other:
            raise ConfigError(
                f"convert.to={to}: this model has {to} blocks of another shape, and all must be alike: it has "
                + ", ".join(f"{key}={value!r}, not {shape[key]!r}" for key, value in other.items())
            )
    pattern = "".join(to if i in layers else kind for i, kind in enumerate(config.block_pattern))
    return dataclasses.replace(config, block_pattern=pattern, **shape)


def convert_blocks(
    teacher: SequenceModel, layers: Sequence[int], to: RecurrentKind, *, seed: int = 0
) -> HybridLM:
    """A model like ``teacher`` with recurrent mixers in the blocks ``layers``, started from q, k, v and o.

    Kept weights are not copied: both models hold the same tensors, so that a second model costs its new mixers only.
    Deep-copy the result before training any other part of it.

    Args:
        teacher: any stack of ours; not changed.
        layers: attention blocks, counted from 0.
        to: R (RWKV-7) or M (Mamba-2).
        seed: of the new low-rank maps, which q, k, v and o say nothing about.

    Raises:
        ConfigError: see :func:`converted_config`.
    """
    assert isinstance(teacher, HybridLM)
    config = converted_config(teacher.config, layers, to)
    weight = teacher.embed_tokens.weight
    with torch.device("meta"):
        student = HybridLM(config, gradient_checkpointing=teacher.gradient_checkpointing)
    for index in layers:
        attention = mixer_of(teacher, index)
        assert isinstance(attention, Attention)
        new = mixer_of(student, index).to_empty(device=weight.device).float()  # orthogonal maps want no less
        new.init_weights(torch.Generator(weight.device).manual_seed(seed * config.n_layers + index))
        if isinstance(new, Mamba2):
            mamba2_from_attention(new, attention)
        elif isinstance(new, RWKV7TimeMix):
            rwkv7_from_attention(new, attention)
        new.to(weight.dtype)
    kept = {name: value for name, value in teacher.state_dict().items() if not _replaced(name, layers)}
    for name, value in student.state_dict().items():
        if _replaced(name, layers):
            kept[name] = value
    student.load_state_dict(kept, assign=True)
    student.tie_weights()
    return student.train(teacher.training)


def _rank(factor: float, d_model: int) -> int:
    """Inner width of a low-rank map in RWKV-LM's x070."""
    return max(32, round(factor * math.sqrt(d_model) / 32) * 32)


def mixer_of(model: SequenceModel, index: int) -> Mixer:
    """The mixer of block ``index``."""
    assert isinstance(model, HybridLM)
    return cast(Block, model.blocks[index]).mixer


def _replaced(name: str, layers: Sequence[int]) -> bool:
    return any(name.startswith(f"blocks.{i}.mixer.") for i in layers)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
