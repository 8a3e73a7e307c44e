"""The shape of a model: one frozen dataclass for every block pattern, and the named sizes of each family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from refragkit.errors import ConfigError

BLOCK_KINDS: dict[str, str] = {"T": "attention", "M": "Mamba-2", "R": "RWKV-7 time mix"}


# Needed and optional parameters of the rotary context extensions that are implemented
_ROPE_PARAMETERS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """Name of a ``rope_scaling``; ``type`` is its name in older configurations."""
    return "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))


def check_rope_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Refuse what would otherwise be computed wrongly.

    Raises:
        ConfigError: an extension that is not implemented, or parameters that it lacks or doesn't know.
    """
    if scaling is None:
        return
    kind = rope_type(scaling)
    if kind not in _ROPE_PARAMETERS:
        raise ConfigError(
            f"model.rope_scaling: rope_type {kind!r} is not implemented; implemented are "
            f"{', '.join(_ROPE_PARAMETERS)}"
        )
    needed, optional = _ROPE_PARAMETERS[kind]
    given = {key for key, value in scaling.items() if value is not None} - {"rope_type", "type"}
    missing, unknown = sorted(needed - given), sorted(given - needed - optional)
    if missing or unknown:
        raise ConfigError(f"model.rope_scaling of type {kind!r}: missing {missing}, not understood {unknown}")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a model's tensors and arithmetic.

    Attributes:
        block_pattern: one letter per block, T (attention), M (Mamba-2) or R (RWKV-7 time mix).
        d_model: width of the residual stream.
        vocab_size: rows of the embedding.
        n_heads: query heads of T blocks.
        n_kv_heads: key/value heads of T blocks; divides n_heads.
        head_dim: width of a T head; even.
        qkv_bias: biases on q_proj, k_proj and v_proj.
        o_bias: bias on o_proj.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Hugging Face's ``rope_scaling`` (``{"rope_type": ..., ...}``), or None.
        max_positions: context length that the model was made for; recorded, not enforced.
        mlp: ``swiglu``, ``channel_mix`` (RWKV's, with a token shift; only where all blocks are R) or ``none``.
        d_ff: inner width of the MLP.
        mlp_bias: biases on the MLP's projections.
        d_state: N of M blocks.
        ssm_head_dim: P of M blocks; divides ``ssm_expand * d_model``.
        ssm_expand: inner width of M blocks over d_model.
        d_conv: taps of the causal convolution of M blocks.
        n_groups: groups of M heads that share B and C.
        ssm_norm_groups: groups over which the gated RMSNorm of M blocks normalises separately.
        ssm_bias: biases on in_proj and out_proj of M blocks.
        conv_bias: bias on the convolution of M blocks.
        conv_silu: SiLU behind the convolution of M blocks; off in blocks that were attention.
        dt_limit: (least, greatest) step size of M blocks, or None.
        wkv_head_dim: N of R blocks; divides d_model.
        decay_rank, iclr_rank, value_rank, gate_rank: inner widths of R blocks' low-rank maps.
        wkv_gate: output gate of R blocks: ``sigmoid`` (g = sigmoid(x g1) g2), ``one_plus`` (1 + g) or ``none``.
        wkv_group_norm: normalise R heads before the output projection.
        wkv_norm_eps: added to the variance there.
        wkv_bias: biases on r_proj, k_proj and v_proj; on in blocks that were attention with such biases.
        wkv_value_residual: R blocks mix in the values of the first one; off in blocks that were attention.
        norm: ``rms`` or ``layer``.
        norm_eps: added to the variance in every norm of the residual stream.
        embedding_norm: a LayerNorm on the embeddings (RWKV's ln0).
        tie_embeddings: the output head is the embedding.
    """

    block_pattern: str
    d_model: int
    vocab_size: int
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_positions: int | None = None
    mlp: Literal["swiglu", "channel_mix", "none"] = "swiglu"
    d_ff: int = 0
    mlp_bias: bool = False
    d_state: int = 128
    ssm_head_dim: int = 64
    ssm_expand: int = 2
    d_conv: int = 4
    n_groups: int = 1
    ssm_norm_groups: int = 1
    ssm_bias: bool = False
    conv_bias: bool = True
    conv_silu: bool = True
    dt_limit: tuple[float, float] | None = None
    wkv_head_dim: int = 64
    decay_rank: int = 64
    iclr_rank: int = 64
    value_rank: int = 32
    gate_rank: int = 128
    wkv_gate: Literal["sigmoid", "one_plus", "none"] = "sigmoid"
    wkv_group_norm: bool = True
    wkv_norm_eps: float = 64e-5
    wkv_bias: bool = False
    wkv_value_residual: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    embedding_norm: bool = False
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        unknown = sorted(set(self.block_pattern) - set(BLOCK_KINDS))
        if not self.block_pattern or unknown:
            kinds = ", ".join(f"{letter} ({kind})" for letter, kind in BLOCK_KINDS.items())
            raise ConfigError(
                f"model.block_pattern must be a string of {kinds}; got {self.block_pattern!r}"
                + (f" with {''.join(unknown)!r}" if unknown else "")
            )
        self._positive("d_model", "vocab_size")
        if "T" in self.block_pattern:
            self._positive("n_heads", "n_kv_heads", "head_dim")
            self._multiple("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)
            self._multiple("head_dim", self.head_dim, "2 (rotary pairs)", 2)
            check_rope_scaling(self.rope_scaling)
        if "M" in self.block_pattern:
            self._positive("d_state", "ssm_head_dim", "ssm_expand", "d_conv", "n_groups", "ssm_norm_groups")
            self._multiple("ssm_expand * d_model", self.d_inner, "ssm_head_dim", self.ssm_head_dim)
            self._multiple("the number of M heads", self.ssm_heads, "n_groups", self.n_groups)
            self._multiple("ssm_expand * d_model", self.d_inner, "ssm_norm_groups", self.ssm_norm_groups)
        if "R" in self.block_pattern:
            self._positive("wkv_head_dim", "decay_rank", "iclr_rank")
            if self.wkv_value_residual:
                self._positive("value_rank")
            if self.wkv_gate != "none":
                self._positive("gate_rank")
            self._multiple("d_model", self.d_model, "wkv_head_dim", self.wkv_head_dim)
        self._one_of("mlp", ("swiglu", "channel_mix", "none"))
        self._one_of("wkv_gate", ("sigmoid", "one_plus", "none"))
        self._one_of("norm", ("rms", "layer"))
        if self.mlp != "none":
            self._positive("d_ff")
        if self.mlp == "channel_mix" and set(self.block_pattern) != {"R"}:
            raise ConfigError(
                f"model.mlp=channel_mix keeps a token shift in the R state and needs R blocks only; "
                f"block_pattern is {self.block_pattern!r}. Use mlp=swiglu."
            )

    @property
    def n_layers(self) -> int:
        """Blocks in the stack."""
        return len(self.block_pattern)

    @property
    def d_inner(self) -> int:
        """Inner width of M blocks."""
        return self.ssm_expand * self.d_model

    @property
    def ssm_heads(self) -> int:
        """Heads of M blocks."""
        return self.d_inner // self.ssm_head_dim

    @property
    def wkv_heads(self) -> int:
        """Heads of R blocks."""
        return self.d_model // self.wkv_head_dim

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, complete; :meth:`from_dict` reads it back."""
        values = dataclasses.asdict(self)
        values["rope_scaling"] = None if self.rope_scaling is None else dict(self.rope_scaling)
        values["dt_limit"] = None if self.dt_limit is None else list(self.dt_limit)
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelConfig:
        """Read :meth:`to_dict`'s form.

        Raises:
            ConfigError: unknown or missing keys, or values that don't fit together.
        """
        fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
        unknown = sorted(set(values) - set(fields))
        missing = sorted(
            name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values
        )
        if unknown or missing:
            raise ConfigError(
                f"model configuration: unknown keys {unknown}, missing keys {missing}; known are {sorted(fields)}"
            )
        arguments = dict(values)
        if arguments.get("dt_limit") is not None:
            arguments["dt_limit"] = tuple(float(value) for value in arguments["dt_limit"])
        return ModelConfig(**arguments)

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"model.{name} must be an integer of at least 1 for block_pattern {self.block_pattern!r}, "
                    f"got {value!r}"
                )

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(
                f"model.{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}"
            )

    @staticmethod
    def _multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
        if value % divisor:
            raise ConfigError(f"model: {name} ({value}) must be a multiple of {divisor_name} ({divisor})")


# Named sizes. A vocab_size that is absent is the tokenizer's.
_MAMBA: dict[str, dict[str, Any]] = {
    "tiny": {"block_pattern": "M" * 6, "d_model": 128, "d_state": 32, "ssm_head_dim": 32},
    "small": {"block_pattern": "M" * 12, "d_model": 384, "d_state": 64},
    # The released mamba2-130m, 370m, 780m, 1.3b and 2.7b
    "130m": {"block_pattern": "M" * 24, "d_model": 768, "vocab_size": 50288},
    "370m": {"block_pattern": "M" * 48, "d_model": 1024, "vocab_size": 50288},
    "780m": {"block_pattern": "M" * 48, "d_model": 1536, "vocab_size": 50288},
    "1.3b": {"block_pattern": "M" * 48, "d_model": 2048, "vocab_size": 50288},
    "1.5b": {"block_pattern": "M" * 54, "d_model": 2048, "vocab_size": 50288},
    "2.7b": {"block_pattern": "M" * 64, "d_model": 2560, "vocab_size": 50288},
}
_ATTENTION: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 256},
    "small": {"d_model": 384, "n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "d_ff": 1024},
    "130m": {"d_model": 768, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64, "d_ff": 2048},
    # Qwen2.5-1.5B
    "1.5b": {
        "d_model": 1536,
        "n_heads": 12,
        "n_kv_heads": 2,
        "head_dim": 128,
        "d_ff": 8960,
        "vocab_size": 151936,
        "rope_theta": 1_000_000.0,
        "qkv_bias": True,
        "norm_eps": 1e-6,
    },
}
_WKV: dict[str, dict[str, Any]] = {
    "tiny": {"wkv_head_dim": 32, "decay_rank": 16, "iclr_rank": 16, "value_rank": 16, "gate_rank": 32},
    "small": {"decay_rank": 32, "iclr_rank": 32, "value_rank": 32, "gate_rank": 64},
    "130m": {},
    "1.5b": {},
}
_MIXED: dict[str, dict[str, Any]] = {  # attention early, interleaved in the middle, recurrent late
    "tiny": {"block_pattern": "TMTMMM", "d_state": 32, "ssm_head_dim": 32},
    "small": {"block_pattern": "TTMTMMTMMMMM", "d_state": 64},
    "130m": {"block_pattern": "TTMTMMTMMMMM"},
    "1.5b": {"block_pattern": "TTTMTMMTMMTMMTMMMMMMMMMM"},
}
_QWEN_LAYERS = {"tiny": 8, "small": 12, "130m": 12, "1.5b": 28}
_TRANSFORMER_LAYERS = {"tiny": 6, "small": 12, "130m": 16, "1.5b": 28}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "mamba": {name: {"mlp": "none", **size} for name, size in _MAMBA.items()},
    "hybrid": {name: {**_ATTENTION[name], **size} for name, size in _MIXED.items()},
    "rwkv-qwen": {
        name: {
            **_ATTENTION[name],
            **_WKV[name],
            "block_pattern": "RRRT" * (layers // 4),
            "qkv_bias": True,
            "rope_theta": 1_000_000.0,
            "norm_eps": 1e-6,
        }
        for name, layers in _QWEN_LAYERS.items()
    },
    "transformer": {
        name: {**_ATTENTION[name], "block_pattern": "T" * layers}
        for name, layers in _TRANSFORMER_LAYERS.items()
    },
}
