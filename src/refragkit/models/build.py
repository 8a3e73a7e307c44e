"""From a ``conf/model`` node to a model with seeded weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from refragkit.errors import ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.checkpoint import load_model, read_config
from refragkit.models.config import SIZES, ModelConfig
from refragkit.models.hybrid import HybridLM
from refragkit.models.location import model_location
from refragkit.models.pretrained import SMOLLM2_HYBRID, resolve_pretrained
from refragkit.models.quantize import Quantization, checked_quantization, quantize_int8
from refragkit.ops.int8 import quantize_rows

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_CACHE_DIR = Path("outputs", "cache")
"""Where pretrained models that have to be converted are kept, unless the caller says."""

_READY_MADE = {("hybrid", "smollm2"): SMOLLM2_HYBRID}
"""Sizes of an option that stand for pretrained weights."""


def build_model(
    cfg: Mapping[str, Any],
    vocab_size: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    cache_dir: str | Path | None = None,
    quantize: str | None = None,
) -> SequenceModel:
    """Build the model that a configuration node describes.

    Args:
        cfg: a ``conf/model`` node (plain or OmegaConf): ``_target_`` and the arguments of that function.
        vocab_size: the tokenizer's size; used where neither the node nor its size fixes one. None stands for 4096, the
            size of the tokenizers that ``conf/data`` trains.
        seed: of the initial weights, which depend on nothing else; in particular not on torch's global state.
        device: where to put them; ``meta`` allocates nothing.
        cache_dir: where pretrained models that have to be converted are kept; None for ``outputs/cache``.
        quantize: ``int8`` or ``bf16`` for frozen weights of that form: read or drawn part by part, so that the model
            never exists in float32; see :func:`refragkit.models.checkpoint.load_model`.

    Raises:
        ConfigError: an unknown target, argument or size, values that don't fit together, a pretrained model of another
            kind, or a vocabulary smaller than the tokenizer's.
        CheckpointError: ``init`` or ``path`` is set and there is no model that can be read.
    """
    arguments = {str(key): _plain(value) for key, value in dict(cfg).items()}
    target = str(arguments.pop("_target_", ""))
    module_name, _, function_name = target.rpartition(".")
    if not module_name.startswith("refragkit.models"):
        raise ConfigError(f"model._target_ must name a function under refragkit.models, got {target!r}")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model._target_: there is no {target!r} ({error})") from error
    init, path = start_of(cfg), arguments.get("path")
    if init is not None:
        family = function_name.replace("_", "-")
        kept = ("init", "path", "size", "gradient_checkpointing")
        sizes = [f"model.{key}" for key, value in arguments.items() if value is not None and key not in kept]
        if sizes:
            start = f"model.init={init}" if arguments.get("init") else f"model.size={arguments['size']}"
            raise ConfigError(
                f"{start} brings its own sizes, and these are set as well: {', '.join(sizes)};"
                " leave them null"
            )
        arguments["init"] = str(pretrained_folder(family, init, path, Path(cache_dir or DEFAULT_CACHE_DIR)))
    loaded = init is not None or path is not None
    fixed = arguments.get("vocab_size")
    if fixed is None and not loaded:
        fixed = (
            SIZES.get(function_name.replace("_", "-"), {})
            .get(str(arguments.get("size")), {})
            .get("vocab_size")
        )
    if path is not None:
        arguments["vocab_size"] = vocab_size
    elif init is not None:
        pass  # its own; one that is set is refused
    elif fixed is None:
        arguments["vocab_size"] = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    elif vocab_size is not None and fixed < vocab_size:
        raise ConfigError(
            f"model.vocab_size is {fixed}, but the tokenizer has {vocab_size} entries: ids would fall outside the "
            f"embedding. Set model.vocab_size to at least {vocab_size}, or choose the tokenizer that belongs to it."
        )
    quantization = checked_quantization(quantize)
    try:
        made_on = device if quantization is None else "meta"
        model = cast(SequenceModel, function(**arguments, seed=seed, device=made_on))
    except TypeError as error:
        raise ConfigError(f"model: {target} does not take these arguments: {error}") from error
    if loaded and vocab_size is not None and model.vocab_size < vocab_size:
        shown = f"model.path: {path}" if init is None else f"model.init={init}"
        raise ConfigError(
            f"{shown} has a vocabulary of {model.vocab_size}, but the tokenizer has {vocab_size} entries:"
            " ids would fall outside the embedding. Choose the tokenizer that belongs to the model"
            " (data.tokenizer=null takes the one in its folder)."
        )
    if quantization is None or device == "meta":
        return model
    checkpointing = model.gradient_checkpointing
    if not loaded:
        return build_from_config(
            model.config,
            seed=seed,
            device=device,
            gradient_checkpointing=checkpointing,
            quantize=quantization,
        )
    location = Path(arguments["init"]) if path is None else model_location(path)
    model = load_model(location, device=device, quantize=quantization)
    model.gradient_checkpointing = checkpointing
    return model


def start_of(cfg: Mapping[str, Any]) -> str | None:
    """The pretrained model that a ``conf/model`` node starts from, by ``init`` or by its size; None for any other."""
    if cfg.get("init") is not None or cfg.get("path") is not None:
        return cast(str | None, cfg.get("init"))
    family = str(cfg.get("_target_", "")).rpartition(".")[2].replace("_", "-")
    return _READY_MADE.get((family, str(cfg.get("size"))))


def model_folder(cfg: Mapping[str, Any], cache_dir: Path) -> Path | None:
    """The folder (or single checkpoint file) that ``init`` or ``path`` of a node means, or None for random weights.

    Raises:
        ConfigError: both are set.
        CheckpointError: nothing is there.
    """
    init, path = start_of(cfg), cfg.get("path")
    _one_start(init, path)
    if init is not None:
        return resolve_pretrained(init, cache_dir)
    return None if path is None else model_location(path)


def _one_start(init: str | None, path: str | None) -> None:
    if init is not None and path is not None:
        raise ConfigError(
            f"model.init={init} and model.path={path} both name a model to start from; leave one null: model.init for"
            " a pretrained model, model.path for one that was trained here"
        )


def pretrained_folder(family: str, init: str, path: str | None, cache_dir: Path) -> Path:
    """The folder that ``model.init`` means, if its model is of the kind that an option of the group trains.

    Args:
        family: the option: mamba, hybrid, rwkv-qwen or transformer.
        init: see :func:`refragkit.models.pretrained.resolve_pretrained`.
        path: ``model.path``, which excludes it.
        cache_dir: where conversions are kept.

    Raises:
        ConfigError: both are set, or the model is of another kind; the message names the options that fit.
        CheckpointError: there is none that can be read.
    """
    _one_start(init, path)
    folder = resolve_pretrained(init, cache_dir)
    config = read_config(folder)
    options, pattern = fitting_options(config), config.block_pattern
    if family not in options:
        kinds = {"T": "attention", "M": "Mamba-2", "R": "RWKV-7"}
        held = " and ".join(
            f"{pattern.count(kind)} {name}" for kind, name in kinds.items() if kind in pattern
        )
        raise ConfigError(
            f"model={family} does not fit model.init={init}, which has {held} blocks; choose"
            f" {' or '.join(f'model={option}' for option in options)}"
        )
    return folder


def fitting_options(config: ModelConfig) -> list[str]:
    """The options of the model group that a stack of this shape is one of, the closest first."""
    kinds = set(config.block_pattern)
    if kinds == {"T"}:
        return ["transformer"]
    if kinds == {"M"} and config.mlp == "none":
        return ["mamba"]
    return ["rwkv-qwen", "hybrid"] if kinds <= {"R", "T"} else ["hybrid"]


def build_from_config(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    quantize: Quantization | None = None,
) -> HybridLM:
    """Build a stack with seeded weights from its exact shape.

    With ``quantize`` one mixer or MLP at a time is drawn in float32, the same numbers as without, and turned into
    frozen int8 or bfloat16 weights.
    """
    with torch.device("meta"):
        model = HybridLM(config, gradient_checkpointing=gradient_checkpointing)
    if torch.device(device).type == "meta":
        return model
    if quantize is not None:
        _draw_quantized(model, seed, device, quantize)
        return model
    model.to_empty(device=device)
    model.tie_weights()
    model.init_weights(seed)
    return model


def _draw_quantized(model: HybridLM, seed: int, device: str, quantize: Quantization) -> None:
    """Allocate a model that is on the meta device, and fill it with seeded weights of another type, part by part.

    What stays is allocated first, so that what goes leaves no holes in the heap.
    """
    with torch.device("meta"):
        drawn = HybridLM(model.config)
    if quantize == "int8":
        quantize_int8(model)
    else:
        model.to(torch.bfloat16)
    model.to_empty(device=device)
    model.tie_weights()
    model.requires_grad_(False)
    kept = model.state_dict()
    for path in drawn.parts():
        part = drawn.get_submodule(path).to_empty(device=device)
        drawn.init_part(path, seed)
        for name, weight in part.named_parameters(prefix=path):
            if kept[name].dtype == torch.int8:
                values, scale = quantize_rows(weight)
                kept[name].copy_(values)
                kept[f"{name.removesuffix('weight')}scale"].copy_(scale)
            else:
                kept[name].copy_(weight.detach())
        part.to("meta")


def mamba(
    init: str | None = None,
    path: str | None = None,
    size: str = "tiny",
    vocab_size: int | None = None,
    n_layers: int | None = None,
    d_model: int | None = None,
    d_state: int | None = None,
    head_dim: int | None = None,
    n_groups: int | None = None,
    tie_embeddings: bool | None = None,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> SequenceModel:
    """A pure Mamba-2 stack. None means "what ``size`` says".

    Args:
        init: a pretrained model to start from, see :func:`refragkit.models.pretrained.resolve_pretrained`; it must be
            of this kind, and its sizes are its own.
        path: a trained model to load: its architecture is its own, and every size below is ignored.
        size: a key of ``SIZES["mamba"]``; 130m to 2.7b are the released shapes.
        vocab_size: rows of the embedding.
        n_layers: blocks.
        d_model: width of the residual stream.
        d_state: N, the state's width per channel.
        head_dim: P, channels per head.
        n_groups: groups of heads that share B and C.
        tie_embeddings: the head is the embedding.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        seed: of the initial weights.
        device: where to put them.
    """
    return _build(
        "mamba",
        size,
        init,
        path,
        seed,
        device,
        gradient_checkpointing,
        block_pattern=None if n_layers is None else "M" * n_layers,
        vocab_size=vocab_size,
        d_model=d_model,
        d_state=d_state,
        ssm_head_dim=head_dim,
        n_groups=n_groups,
        tie_embeddings=tie_embeddings,
    )


def hybrid(
    init: str | None = None,
    path: str | None = None,
    size: str = "tiny",
    vocab_size: int | None = None,
    block_pattern: str | None = None,
    d_model: int | None = None,
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    d_ff: int | None = None,
    d_state: int | None = None,
    ssm_head_dim: int | None = None,
    n_groups: int | None = None,
    wkv_head_dim: int | None = None,
    rope_theta: float | None = None,
    tie_embeddings: bool | None = None,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> SequenceModel:
    """Attention and Mamba-2 blocks (or any pattern of T, M and R), each with a SwiGLU. None means "what ``size`` says".

    Args:
        init: a pretrained model to start from, see :func:`refragkit.models.pretrained.resolve_pretrained`; it must be
            of this kind, and its sizes are its own.
        path: a trained model to load: its architecture is its own, and every size below is ignored.
        size: a key of ``SIZES["hybrid"]``.
        vocab_size: rows of the embedding.
        block_pattern: one letter per block.
        d_model: width of the residual stream.
        n_heads: query heads of T blocks.
        n_kv_heads: key/value heads of T blocks.
        head_dim: width of a T head.
        d_ff: inner width of the SwiGLU.
        d_state: N of M blocks.
        ssm_head_dim: P of M blocks.
        n_groups: groups of M heads that share B and C.
        wkv_head_dim: N of R blocks.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: the head is the embedding.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        seed: of the initial weights.
        device: where to put them.
    """
    return _build(
        "hybrid",
        size,
        init,
        path,
        seed,
        device,
        gradient_checkpointing,
        vocab_size=vocab_size,
        block_pattern=block_pattern,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        d_state=d_state,
        ssm_head_dim=ssm_head_dim,
        n_groups=n_groups,
        wkv_head_dim=wkv_head_dim,
        rope_theta=rope_theta,
        tie_embeddings=tie_embeddings,
    )


def rwkv_qwen(
    init: str | None = None,
    path: str | None = None,
    size: str = "tiny",
    vocab_size: int | None = None,
    block_pattern: str | None = None,
    d_model: int | None = None,
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    d_ff: int | None = None,
    wkv_head_dim: int | None = None,
    wkv_gate: str | None = None,
    wkv_group_norm: bool | None = None,
    rope_theta: float | None = None,
    tie_embeddings: bool | None = None,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> SequenceModel:
    """RWKV-7 time mixes and Qwen2.5 attention, ``RRRT`` repeated, with Qwen's norms and MLP.

    None means "what ``size`` says".

    Args:
        init: a pretrained model to start from, see :func:`refragkit.models.pretrained.resolve_pretrained`; it must be
            of this kind, and its sizes are its own.
        path: a trained model to load: its architecture is its own, and every size below is ignored.
        size: a key of ``SIZES["rwkv-qwen"]``; 1.5b has the dimensions and vocabulary of Qwen2.5-1.5B.
        vocab_size: rows of the embedding.
        block_pattern: one letter per block.
        d_model: width of the residual stream.
        n_heads: query heads of T blocks.
        n_kv_heads: key/value heads of T blocks.
        head_dim: width of a T head.
        d_ff: inner width of the SwiGLU.
        wkv_head_dim: N of R blocks.
        wkv_gate: output gate of R blocks: sigmoid, one_plus or none.
        wkv_group_norm: normalise R heads before the output projection.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: the head is the embedding.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        seed: of the initial weights.
        device: where to put them.
    """
    return _build(
        "rwkv-qwen",
        size,
        init,
        path,
        seed,
        device,
        gradient_checkpointing,
        vocab_size=vocab_size,
        block_pattern=block_pattern,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        wkv_head_dim=wkv_head_dim,
        wkv_gate=wkv_gate,
        wkv_group_norm=wkv_group_norm,
        rope_theta=rope_theta,
        tie_embeddings=tie_embeddings,
    )


def transformer(
    init: str | None = None,
    path: str | None = None,
    size: str = "tiny",
    vocab_size: int | None = None,
    n_layers: int | None = None,
    d_model: int | None = None,
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    d_ff: int | None = None,
    qkv_bias: bool | None = None,
    rope_theta: float | None = None,
    tie_embeddings: bool | None = None,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> SequenceModel:
    """Attention only, the control. None means "what ``size`` says".

    Args:
        init: a pretrained model to start from, see :func:`refragkit.models.pretrained.resolve_pretrained`; it must be
            of this kind, and its sizes are its own.
        path: a trained model to load: its architecture is its own, and every size below is ignored.
        size: a key of ``SIZES["transformer"]``; 1.5b has the dimensions and vocabulary of Qwen2.5-1.5B.
        vocab_size: rows of the embedding.
        n_layers: blocks.
        d_model: width of the residual stream.
        n_heads: query heads.
        n_kv_heads: key/value heads.
        head_dim: width of a head.
        d_ff: inner width of the SwiGLU.
        qkv_bias: biases on q_proj, k_proj and v_proj.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: the head is the embedding.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        seed: of the initial weights.
        device: where to put them.
    """
    return _build(
        "transformer",
        size,
        init,
        path,
        seed,
        device,
        gradient_checkpointing,
        block_pattern=None if n_layers is None else "T" * n_layers,
        vocab_size=vocab_size,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=d_ff,
        qkv_bias=qkv_bias,
        rope_theta=rope_theta,
        tie_embeddings=tie_embeddings,
    )


def _build(
    family: str,
    size: str,
    init: str | None,
    path: str | None,
    seed: int,
    device: str,
    gradient_checkpointing: bool,
    **overrides: Any,
) -> SequenceModel:
    location = None if path is None else model_location(path)
    if init is not None:
        location = pretrained_folder(family, init, path, DEFAULT_CACHE_DIR)
    if location is not None:
        model = load_model(location, device=device)
        model.gradient_checkpointing = gradient_checkpointing
        return model
    sizes = SIZES[family]
    if size not in sizes:
        known = [*sizes, *(name for option, name in _READY_MADE if option == family)]
        raise ConfigError(f"model.size={size} is not a size of {family}; sizes are {', '.join(known)}")
    values = {**sizes[size], **{key: value for key, value in overrides.items() if value is not None}}
    if values.get("vocab_size") is None:
        raise ConfigError(
            f"model.vocab_size is null and size {size} of {family} fixes none: it comes from the tokenizer; "
            "give build_model a vocab_size, or set model.vocab_size"
        )
    return build_from_config(
        ModelConfig(**values), seed=seed, device=device, gradient_checkpointing=gradient_checkpointing
    )


def _plain(value: Any) -> Any:
    """OmegaConf containers as plain ones."""
    if isinstance(value, str) or not hasattr(value, "_content"):
        return value
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True)
