"""Other people's checkpoint layouts: how their configurations and tensor names correspond to ours.

A layout is a reader of configurations, a table of tensor names, and, where it can be written, a writer of
configurations. The table is complete: what it doesn't name is unknown, what it names and the file lacks is missing.

Source: ``transformers`` 5 (mamba2, qwen2, llama), ``state-spaces/mamba``, RWKV-LM x070, flash-linear-attention
(rwkv7), RWKV hybrids of ARWKV (``RwkvHybridForCausalLM``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from refragkit.errors import CheckpointError
from refragkit.models.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """One tensor under two names.

    Attributes:
        theirs: name in the layout.
        ours: name in :class:`refragkit.models.hybrid.HybridLM`.
        form: ``same``; ``transposed`` for a matrix applied from the right; ``row`` for a vector kept as [1, 1, C];
            ``vector`` for one that comes in either shape and is written as [C].
    """

    theirs: str
    ours: str
    form: Literal["same", "transposed", "row", "vector"] = "same"

    def load(self, tensor: Tensor) -> Tensor:
        """Their tensor as ours."""
        if self.form == "transposed":
            return tensor.T
        return tensor if self.form == "same" else tensor.flatten()

    def dump(self, tensor: Tensor) -> Tensor:
        """Our tensor as theirs."""
        if self.form == "transposed":
            return tensor.T
        return tensor.view(1, 1, -1) if self.form == "row" else tensor

    def shape(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that their tensor will have here."""
        if self.form == "transposed":
            return theirs[::-1]
        return theirs if self.form == "same" else (math.prod(theirs),)


@dataclass(frozen=True)
class Layout:
    """A checkpoint layout.

    Attributes:
        name: its ``model_type``, or a name of ours where it has none.
        read_config: from its ``config.json`` and the tensors' shapes.
        entries: the table of names for a configuration, the untied head included.
        head: its name of the output head.
        unused: tensors that may be present and carry nothing.
        write_config: our configuration as its ``config.json``; raises CheckpointError saying why not. None if
            the layout is only read.
    """

    name: str
    read_config: Callable[[Mapping[str, Any], Shapes], ModelConfig]
    entries: Callable[[ModelConfig], list[Entry]]
    head: str
    unused: str = r"(?!)"
    write_config: Callable[[ModelConfig], dict[str, Any]] | None = None


def find_layout(values: Mapping[str, Any]) -> Layout | None:
    """The layout of a ``config.json``, or None."""
    kind = values.get("model_type")
    if kind is None and "ssm_cfg" in values and "d_model" in values:
        return STATE_SPACES
    return next((layout for layout in (MAMBA2, QWEN2, LLAMA, FLA_RWKV7, ARWKV) if layout.name == kind), None)


def layout_for_export(config: ModelConfig) -> tuple[Layout, dict[str, Any]]:
    """The Hugging Face layout that can hold a model, and its ``config.json``.

    Raises:
        CheckpointError: none can; the reasons are listed.
    """
    reasons = []
    for layout in (MAMBA2, QWEN2, LLAMA, FLA_RWKV7, ARWKV):
        if layout.write_config is None:
            continue
        try:
            return layout, layout.write_config(config)
        except CheckpointError as error:
            reasons.append(f"{layout.name}: {error}")
    raise CheckpointError(
        f"no Hugging Face layout holds this {config.block_pattern} model ({'; '.join(reasons)}). "
        "Use our own format."
    )


# Reading configurations


def _need(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise CheckpointError(f"config.json lacks {key!r}")
    return values[key]


def _only(values: Mapping[str, Any], **allowed: Any) -> None:
    """Refuse settings that would change the arithmetic and aren't implemented; absent ones are taken as usual."""
    for key, usual in allowed.items():
        usual = usual if isinstance(usual, tuple) else (usual,)
        if values.get(key) is not None and values[key] not in usual:
            raise CheckpointError(
                f"config.json has {key}={values[key]!r}, which is not implemented (only {', '.join(map(repr, usual))})"
            )


def _shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(f"the weights lack {name!r}")
    return shapes[name]


def _layers(shapes: Shapes, prefix: str) -> int:
    """How many layers the tensors' names count."""
    numbers = [int(m.group(1)) for name in shapes if (m := re.match(re.escape(prefix) + r"(\d+)\.", name))]
    if not numbers:
        raise CheckpointError(f"the weights have no {prefix}0.*")
    return max(numbers) + 1


def _tied(values: Mapping[str, Any], shapes: Shapes, head: str, key: str = "tie_word_embeddings") -> bool:
    """What the configuration says; where it says nothing, whether the weights lack a head."""
    return bool(values[key]) if values.get(key) is not None else head not in shapes


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling, from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    parameters = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError(
            f"config.json has rope_parameters per layer type, which is not implemented: {parameters}"
        )
    theta = float(parameters.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    _only({**values, **parameters}, partial_rotary_factor=1.0, rope_interleaved=False)
    for key in ("partial_rotary_factor", "rope_interleaved"):
        parameters.pop(key, None)
    if kind == "default":
        return theta, None
    if kind in ("llama3", "yarn") and parameters.get("original_max_position_embeddings") is None:
        parameters["original_max_position_embeddings"] = values.get(
            "original_max_position_embeddings", values.get("max_position_embeddings")
        )
    return theta, {
        "rope_type": kind,
        **{key: value for key, value in parameters.items() if value is not None},
    }


def _attention_fields(values: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """What Llama, Qwen2 and Qwen2-based hybrids have in common; sizes left out are read off the tensors."""
    _only(values, hidden_act="silu")
    vocab_size, width = _shape(shapes, "model.embed_tokens.weight")
    d_model, n_heads = int(values.get("hidden_size") or width), int(_need(values, "num_attention_heads"))
    theta, scaling = _rope(values)
    return {
        "vocab_size": int(values.get("vocab_size") or vocab_size),
        "tie_embeddings": _tied(values, shapes, "lm_head.weight"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": int(values.get("num_key_value_heads") or n_heads),
        "head_dim": int(values.get("head_dim") or d_model // n_heads),
        "d_ff": int(
            values.get("intermediate_size") or _shape(shapes, "model.layers.0.mlp.gate_proj.weight")[0]
        ),
        "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": values.get("max_position_embeddings"),
    }


def _refuse_sliding_window(values: Mapping[str, Any]) -> None:
    kinds = values.get("layer_types") or []
    first = values.get("max_window_layers", 0)
    windowed = values.get("use_sliding_window") and (
        any(kind != "full_attention" for kind in kinds)
        if kinds
        else first < int(values.get("num_hidden_layers") or first + 1)
    )
    if windowed:
        raise CheckpointError(
            "config.json has use_sliding_window=true with windowed layers, which is not implemented"
        )


# Mamba-2


def _mamba2_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    _only(values, hidden_act="silu", norm_before_gate=False, rms_norm=True)
    vocab_size, d_model = _shape(shapes, "backbone.embeddings.weight")
    limit = [_number(value) for value in values.get("time_step_limit") or (0.0, math.inf)]
    d_inner = _shape(shapes, "backbone.layers.0.mixer.out_proj.weight")[1]
    maps = _shape(shapes, "backbone.layers.0.mixer.conv1d.weight")[0] - d_inner
    n_groups = int(values.get("n_groups") or maps // 2 // int(values.get("state_size") or 128))
    return ModelConfig(
        **_mamba2_fields(values, shapes, n_groups=n_groups),
        d_model=int(values.get("hidden_size") or d_model),
        vocab_size=int(values.get("vocab_size") or vocab_size),
        norm_eps=float(values.get("layer_norm_epsilon", 1e-5)),
        dt_limit=None if limit[0] <= 0 and limit[1] == math.inf else (limit[0], limit[1]),
        tie_embeddings=_tied(values, shapes, "lm_head.weight"),
    )


def _number(value: Any) -> float:
    """A float, also in transformers' JSON spelling of infinity."""
    return float(value["__float__"]) if isinstance(value, Mapping) else float(value)


def _state_spaces_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    ssm = values.get("ssm_cfg") or {}
    _only(ssm, layer="Mamba2", norm_before_gate=False, rmsnorm=True, D_has_hdim=False, d_ssm=None)
    if ssm.get("layer") != "Mamba2":
        raise CheckpointError("config.json: ssm_cfg.layer is not 'Mamba2'; only Mamba-2 is implemented")
    _only(values, rms_norm=True, d_intermediate=0)
    if values.get("attn_layer_idx"):
        raise CheckpointError(
            f"config.json has attn_layer_idx={values['attn_layer_idx']}, which is not implemented"
        )
    vocab_size, d_model = _shape(shapes, "backbone.embedding.weight")
    limit = tuple(_number(value) for value in ssm.get("dt_limit") or (0.0, math.inf))
    return ModelConfig(
        **_mamba2_fields(values, shapes, n_groups=int(ssm.get("ngroups") or 1)),
        d_model=d_model,
        vocab_size=vocab_size,  # padded to a multiple, unlike the configuration's
        norm_eps=1e-5,
        dt_limit=None if limit[0] <= 0 and limit[1] == math.inf else (limit[0], limit[1]),
        tie_embeddings=_tied(values, shapes, "lm_head.weight", "tie_embeddings"),
    )


def _mamba2_fields(values: Mapping[str, Any], shapes: Shapes, n_groups: int) -> dict[str, Any]:
    """What the mixer's tensors tell; configurations leave much of it to defaults that differ between versions."""
    mixer = "backbone.layers.0.mixer."
    d_model, d_inner = _shape(shapes, mixer + "out_proj.weight")
    heads = _shape(shapes, mixer + "A_log")[0]
    channels, _, d_conv = _shape(shapes, mixer + "conv1d.weight")
    given = values.get("num_hidden_layers", values.get("n_layer"))
    return {
        "block_pattern": "M" * int(given or _layers(shapes, "backbone.layers.")),
        "mlp": "none",
        "ssm_head_dim": d_inner // heads,
        "ssm_expand": d_inner // d_model,
        "d_state": (channels - d_inner) // 2 // n_groups,
        "d_conv": d_conv,
        "n_groups": n_groups,
        "ssm_norm_groups": n_groups,
        "ssm_bias": mixer + "in_proj.bias" in shapes,
        "conv_bias": mixer + "conv1d.bias" in shapes,
    }


def _mamba2_entries(embedding: str) -> Callable[[ModelConfig], list[Entry]]:
    def entries(config: ModelConfig) -> list[Entry]:
        table = [
            Entry(f"backbone.{embedding}.weight", "embed_tokens.weight"),
            Entry("backbone.norm_f.weight", "norm.weight"),
            Entry("lm_head.weight", "lm_head.weight"),
        ]
        parts = ["in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"]
        parts += ["conv1d.bias"] if config.conv_bias else []
        parts += ["in_proj.bias", "out_proj.bias"] if config.ssm_bias else []
        for i in range(config.n_layers):
            theirs, ours = f"backbone.layers.{i}", f"blocks.{i}"
            table.append(Entry(f"{theirs}.norm.weight", f"{ours}.mixer_norm.weight"))
            table += [Entry(f"{theirs}.mixer.{part}", f"{ours}.mixer.{part}") for part in parts]
        return table

    return entries


def _mamba2_write(config: ModelConfig) -> dict[str, Any]:
    _fits(
        config,
        "M",
        mlp="none",
        norm="rms",
        embedding_norm=False,
        ssm_norm_groups=config.n_groups,
        conv_silu=True,
    )
    values = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "vocab_size": config.vocab_size,
        "state_size": config.d_state,
        "num_heads": config.ssm_heads,
        "head_dim": config.ssm_head_dim,
        "expand": config.ssm_expand,
        "conv_kernel": config.d_conv,
        "n_groups": config.n_groups,
        "use_bias": config.ssm_bias,
        "use_conv_bias": config.conv_bias,
        "layer_norm_epsilon": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.dt_limit is not None:
        values["time_step_limit"] = list(config.dt_limit)
    return values


# Llama and Qwen2


def _llama_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    _only(values, pretraining_tp=1)
    bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        block_pattern="T" * int(values.get("num_hidden_layers") or _layers(shapes, "model.layers.")),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        **_attention_fields(values, shapes),
    )


def _qwen2_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    _refuse_sliding_window(values)
    return ModelConfig(
        block_pattern="T" * int(values.get("num_hidden_layers") or _layers(shapes, "model.layers.")),
        qkv_bias=True,
        **_attention_fields(values, shapes),
    )


def _attention_block(config: ModelConfig, i: int) -> list[Entry]:
    theirs, ours = f"model.layers.{i}.self_attn", f"blocks.{i}.mixer"
    table = [Entry(f"{theirs}.{p}_proj.weight", f"{ours}.{p}_proj.weight") for p in "qkvo"]
    biased = ("qkv" if config.qkv_bias else "") + ("o" if config.o_bias else "")
    return table + [Entry(f"{theirs}.{p}_proj.bias", f"{ours}.{p}_proj.bias") for p in biased]


def _norms_and_mlp(config: ModelConfig, i: int) -> list[Entry]:
    theirs, ours = f"model.layers.{i}", f"blocks.{i}"
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    return [
        Entry(f"{theirs}.input_layernorm.weight", f"{ours}.mixer_norm.weight"),
        Entry(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight"),
        *(
            Entry(f"{theirs}.mlp.{part}_proj.{kind}", f"{ours}.mlp.{part}_proj.{kind}")
            for part in ("gate", "up", "down")
            for kind in kinds
        ),
    ]


_OUTSIDE_OF_BLOCKS = [
    Entry("model.embed_tokens.weight", "embed_tokens.weight"),
    Entry("model.norm.weight", "norm.weight"),
    Entry("lm_head.weight", "lm_head.weight"),
]


def _attention_entries(config: ModelConfig) -> list[Entry]:
    table = list(_OUTSIDE_OF_BLOCKS)
    for i in range(config.n_layers):
        table += _attention_block(config, i) + _norms_and_mlp(config, i)
    return table


def _attention_write(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        "attention_dropout": 0.0,
    }
    if config.max_positions is not None:
        values["max_position_embeddings"] = config.max_positions
    return values


def _qwen2_write(config: ModelConfig) -> dict[str, Any]:
    _fits(
        config,
        "T",
        mlp="swiglu",
        norm="rms",
        embedding_norm=False,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
    )
    values = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_attention_write(config)}
    return {**values, "use_sliding_window": False}


def _llama_write(config: ModelConfig) -> dict[str, Any]:
    _fits(config, "T", mlp="swiglu", norm="rms", embedding_norm=False, o_bias=config.qkv_bias)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_attention_write(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


# RWKV-7


def _rwkv7_original_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """Everything is read off the tensors: the original files have no configuration."""
    del values
    vocab_size, d_model = _shape(shapes, "emb.weight")
    layers = _layers(shapes, "blocks.")
    att = "blocks.0.att."
    return ModelConfig(
        block_pattern="R" * layers,
        d_model=d_model,
        vocab_size=vocab_size,
        mlp="channel_mix",
        d_ff=_shape(shapes, "blocks.0.ffn.key.weight")[0],
        wkv_head_dim=_shape(shapes, att + "r_k")[1],
        decay_rank=_shape(shapes, att + "w1")[1],
        iclr_rank=_shape(shapes, att + "a1")[1],
        gate_rank=_shape(shapes, att + "g1")[1],
        value_rank=_shape(shapes, "blocks.1.att.v1")[1] if layers > 1 else 32,
        norm="layer",
        norm_eps=1e-5,
        embedding_norm=True,
        tie_embeddings=False,
    )


# Name of a mixer's map in the original files: (ours, activation's partner) by the letter of its matrices
_MAPS = {"w": "decay", "a": "iclr", "v": "value_residual", "g": "gate"}
_PROJECTIONS = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def _original_time_mix(config: ModelConfig, i: int, theirs: str) -> list[Entry]:
    """A time mix under the original names, which ARWKV keeps."""
    ours = f"blocks.{i}.mixer"
    gated = config.wkv_gate != "none"
    first = "R" not in config.block_pattern[:i]
    table = [Entry(f"{theirs}.x_{n}", f"{ours}.x_{n}", "row") for n in ("rwkvag" if gated else "rwkva")]
    table += [Entry(f"{theirs}.{n}", f"{ours}.{n}", "row") for n in ("k_k", "k_a")]
    table.append(Entry(f"{theirs}.r_k", f"{ours}.r_k"))
    table += [Entry(f"{theirs}.{t}.weight", f"{ours}.{o}.weight") for t, o in _PROJECTIONS.items()]
    for letter, name in _MAPS.items():
        if (letter == "v" and first) or (letter == "g" and not gated):
            continue
        table.append(Entry(f"{theirs}.{letter}1", f"{ours}.{name}.down.weight", "transposed"))
        table.append(Entry(f"{theirs}.{letter}2", f"{ours}.{name}.up.weight", "transposed"))
        if letter != "g":
            table.append(Entry(f"{theirs}.{letter}0", f"{ours}.{name}.bias", "row"))
    if config.wkv_group_norm:
        table += [Entry(f"{theirs}.ln_x.{kind}", f"{ours}.ln_x.{kind}") for kind in ("weight", "bias")]
    return table


def _affine(theirs: str, ours: str) -> list[Entry]:
    return [Entry(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias")]


def _rwkv7_original_entries(config: ModelConfig) -> list[Entry]:
    table = [Entry("emb.weight", "embed_tokens.weight"), Entry("head.weight", "lm_head.weight")]
    table += _affine("blocks.0.ln0", "embedding_norm") + _affine("ln_out", "norm")
    for i in range(config.n_layers):
        theirs, ours = f"blocks.{i}", f"blocks.{i}"
        table += _affine(f"{theirs}.ln1", f"{ours}.mixer_norm") + _affine(f"{theirs}.ln2", f"{ours}.mlp_norm")
        table += _original_time_mix(config, i, f"{theirs}.att")
        table.append(Entry(f"{theirs}.ffn.x_k", f"{ours}.mlp.x_k", "row"))
        table += [Entry(f"{theirs}.ffn.{p}.weight", f"{ours}.mlp.{p}.weight") for p in ("key", "value")]
    return table


def _fla_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    _only(values, hidden_act="sqrelu", norm_first=True, norm_bias=True)
    if values.get("attn"):
        raise CheckpointError(
            "config.json has attn (a hybrid with attention), which is not implemented for rwkv7"
        )
    vocab_size, d_model = _shape(shapes, "model.embeddings.weight")
    layers = int(values.get("num_hidden_layers") or _layers(shapes, "model.layers."))
    attn = "model.layers.0.attn."
    head_dim = _shape(shapes, attn + "r_k")[1]
    norm_eps = float(values.get("norm_eps", 1e-5))
    return ModelConfig(
        block_pattern="R" * layers,
        d_model=d_model,
        vocab_size=int(values.get("vocab_size") or vocab_size),
        mlp="channel_mix",
        d_ff=_shape(shapes, "model.layers.0.ffn.key.weight")[0],
        wkv_head_dim=head_dim,
        decay_rank=_shape(shapes, attn + "w_lora.lora.0.weight")[0],
        iclr_rank=_shape(shapes, attn + "a_lora.lora.0.weight")[0],
        gate_rank=_shape(shapes, attn + "g_lora.lora.0.weight")[0],
        value_rank=_shape(shapes, "model.layers.1.attn.v_lora.lora.0.weight")[0] if layers > 1 else 32,
        wkv_norm_eps=head_dim * norm_eps,
        norm="layer",
        norm_eps=norm_eps,
        embedding_norm=True,
        tie_embeddings=_tied(values, shapes, "lm_head.weight"),
        max_positions=values.get("max_position_embeddings"),
    )


def _fla_entries(config: ModelConfig) -> list[Entry]:
    table = [
        Entry("model.embeddings.weight", "embed_tokens.weight"),
        Entry("lm_head.weight", "lm_head.weight"),
    ]
    table += _affine("model.layers.0.pre_norm", "embedding_norm") + _affine("model.norm", "norm")
    for i in range(config.n_layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        table += _affine(f"{theirs}.attn_norm", f"{ours}.mixer_norm")
        table += _affine(f"{theirs}.ffn_norm", f"{ours}.mlp_norm")
        table += [Entry(f"{theirs}.attn.x_{n}", f"{ours}.mixer.x_{n}", "row") for n in "rwkvag"]
        table += [Entry(f"{theirs}.attn.{n}", f"{ours}.mixer.{n}", "vector") for n in ("k_k", "k_a")]
        table.append(Entry(f"{theirs}.attn.r_k", f"{ours}.mixer.r_k"))
        table += [Entry(f"{theirs}.attn.{n}_proj.weight", f"{ours}.mixer.{n}_proj.weight") for n in "rkvo"]
        for letter, name in _MAPS.items():
            if letter == "v" and i == 0:
                continue
            lora = f"{theirs}.attn.{letter}_lora.lora"
            table.append(Entry(f"{lora}.0.weight", f"{ours}.mixer.{name}.down.weight"))
            table.append(Entry(f"{lora}.2.weight", f"{ours}.mixer.{name}.up.weight"))
            if letter != "g":
                table.append(Entry(f"{lora}.2.bias", f"{ours}.mixer.{name}.bias"))
        table += _affine(f"{theirs}.attn.g_norm", f"{ours}.mixer.ln_x")
        table.append(Entry(f"{theirs}.ffn.x_k", f"{ours}.mlp.x_k", "vector"))
        table += [Entry(f"{theirs}.ffn.{p}.weight", f"{ours}.mlp.{p}.weight") for p in ("key", "value")]
    return table


def _fla_write(config: ModelConfig) -> dict[str, Any]:
    _fits(
        config,
        "R",
        mlp="channel_mix",
        norm="layer",
        embedding_norm=True,
        wkv_gate="sigmoid",
        wkv_group_norm=True,
        wkv_bias=False,
        wkv_value_residual=True,
    )
    if not math.isclose(config.wkv_norm_eps, config.wkv_head_dim * config.norm_eps, rel_tol=1e-6):
        raise CheckpointError(
            f"its head norm's epsilon is wkv_head_dim * norm_eps = {config.wkv_head_dim * config.norm_eps}, this "
            f"model's is {config.wkv_norm_eps}"
        )
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "head_dim": config.wkv_head_dim,
        "num_heads": config.wkv_heads,
        "value_dim": [config.d_model] * config.n_layers,
        "decay_low_rank_dim": config.decay_rank,
        "gate_low_rank_dim": config.gate_rank,
        "a_low_rank_dim": config.iclr_rank,
        "v_low_rank_dim": config.value_rank,
        "hidden_ratio": config.d_ff / config.d_model,
        "intermediate_size": config.d_ff,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }


# RWKV-7 time mixes in Qwen2 (ARWKV)


def _arwkv_config(values: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    _only(values, wkv_version=7)
    _refuse_sliding_window(values)
    layers = int(values.get("num_hidden_layers") or _layers(shapes, "model.layers."))
    recurrent = [
        any(f"model.layers.{i}.self_attn.time_mixer." in name for name in shapes) for i in range(layers)
    ]
    if not any(recurrent):
        raise CheckpointError(
            "the weights have no model.layers.*.self_attn.time_mixer.*: no layer is an RWKV-7 one"
        )
    mixer = f"model.layers.{recurrent.index(True)}.self_attn.time_mixer."
    later = [i for i, is_r in enumerate(recurrent) if is_r][1:]
    gated = bool(values.get("wkv_has_gate", mixer + "g1" in shapes))
    return ModelConfig(
        block_pattern="".join("R" if is_r else "T" for is_r in recurrent),
        qkv_bias=True,
        wkv_head_dim=_shape(shapes, mixer + "r_k")[1],
        decay_rank=_shape(shapes, mixer + "w1")[1],
        iclr_rank=_shape(shapes, mixer + "a1")[1],
        value_rank=_shape(shapes, f"model.layers.{later[0]}.self_attn.time_mixer.v1")[1] if later else 32,
        gate_rank=_shape(shapes, mixer + "g1")[1] if gated else 128,
        wkv_gate=values.get("wkv_gate", "sigmoid") if gated else "none",
        wkv_group_norm=bool(values.get("wkv_has_group_norm", mixer + "ln_x.weight" in shapes)),
        wkv_norm_eps=1e-5 * float(values.get("head_size_divisor", 8)) ** 2,
        **_attention_fields(values, shapes),
    )


def _arwkv_entries(config: ModelConfig) -> list[Entry]:
    table = list(_OUTSIDE_OF_BLOCKS)
    for i, kind in enumerate(config.block_pattern):
        table += _norms_and_mlp(config, i)
        if kind == "T":
            table += _attention_block(config, i)
        else:
            table += _original_time_mix(config, i, f"model.layers.{i}.self_attn.time_mixer")
    return table


def _arwkv_write(config: ModelConfig) -> dict[str, Any]:
    if set(config.block_pattern) - set("RT") or "R" not in config.block_pattern:
        raise CheckpointError("it holds R and T blocks")
    _fits(
        config,
        None,
        mlp="swiglu",
        norm="rms",
        embedding_norm=False,
        mlp_bias=False,
        wkv_norm_eps=64e-5,
        wkv_bias=False,
        wkv_value_residual=True,
    )
    if "T" in config.block_pattern:
        _fits(config, None, qkv_bias=True, o_bias=False)
        attention = _attention_write(config)
    else:  # sizes of attention blocks that don't exist: what Qwen2's configuration insists on
        attention = {
            **_attention_write(config),
            "num_attention_heads": config.wkv_heads,
            "num_key_value_heads": config.wkv_heads,
            "head_dim": config.wkv_head_dim,
        }
    return {
        "architectures": ["RwkvHybridForCausalLM"],
        "model_type": "rwkv_hybrid",
        **attention,
        "wkv_version": 7,
        "head_size": config.wkv_head_dim,
        "head_size_divisor": 8,
        "num_wkv_heads": config.wkv_heads,
        "wkv_layers": [i for i, kind in enumerate(config.block_pattern) if kind == "R"],
        "wkv_has_gate": config.wkv_gate != "none",
        "wkv_has_group_norm": config.wkv_group_norm,
        **({} if config.wkv_gate == "none" else {"wkv_gate": config.wkv_gate}),
    }


def _fits(config: ModelConfig, kind: str | None, **wanted: Any) -> None:
    """Raise CheckpointError where a layout has no place for what a model has."""
    if kind is not None and set(config.block_pattern) != {kind}:
        raise CheckpointError(f"it holds {kind} blocks only")
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise CheckpointError(f"it needs {field}={value!r}, this model has {getattr(config, field)!r}")


MAMBA2 = Layout(
    "mamba2", _mamba2_config, _mamba2_entries("embeddings"), "lm_head.weight", write_config=_mamba2_write
)
STATE_SPACES = Layout("state-spaces", _state_spaces_config, _mamba2_entries("embedding"), "lm_head.weight")
QWEN2 = Layout(
    "qwen2",
    _qwen2_config,
    _attention_entries,
    "lm_head.weight",
    unused=r".*rotary_emb\.inv_freq",
    write_config=_qwen2_write,
)
LLAMA = Layout(
    "llama",
    _llama_config,
    _attention_entries,
    "lm_head.weight",
    unused=r".*rotary_emb\.inv_freq",
    write_config=_llama_write,
)
# The first layer's value residual is stored and never used; ARWKV also keeps x_g where there is no gate
RWKV7_ORIGINAL = Layout(
    "RWKV-7 .pth",
    _rwkv7_original_config,
    _rwkv7_original_entries,
    "head.weight",
    unused=r"blocks\.0\.att\.v[012]",
)
FLA_RWKV7 = Layout(
    "rwkv7",
    _fla_config,
    _fla_entries,
    "lm_head.weight",
    unused=r"model\.layers\.0\.attn\.v_lora\..*",
    write_config=_fla_write,
)
ARWKV = Layout(
    "rwkv_hybrid",
    _arwkv_config,
    _arwkv_entries,
    "lm_head.weight",
    unused=r"model\.layers\.0\.self_attn\.time_mixer\.v[012]|.*time_mixer\.x_g|.*rotary_emb\.inv_freq",
    write_config=_arwkv_write,
)
