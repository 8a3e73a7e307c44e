"""Models on disk: our own folders (``config.json`` beside ``model.safetensors``), and other people's."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from refragkit.errors import CheckpointError, ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.config import ModelConfig
from refragkit.models.formats import RWKV7_ORIGINAL, Entry, Layout, find_layout, layout_for_export
from refragkit.models.hybrid import HybridLM
from refragkit.models.quantize import checked_quantization, is_int8, quantize_int8
from refragkit.models.tensors import TensorSource, open_tensors
from refragkit.ops.int8 import dequantize_rows, quantize_rows

FORMAT_VERSION = 1
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_MODEL_TYPE = "refragkit"
# Layers take these in any precision; the rest of a model is of one type
_ANY_PRECISION = (".A_log", ".dt_bias", ".D", ".decay.bias", ".iclr.bias", ".value_residual.bias")


class SavesToFolder(Protocol):
    """A tokenizer, as far as saving is concerned."""

    def save(self, folder: Path) -> None:
        """Write its files."""


def save_model(
    model: SequenceModel,
    path: str | Path,
    tokenizer: SavesToFolder | None = None,
    *,
    format: Literal["refragkit", "hf"] = "refragkit",
) -> Path:
    """Write a model to a folder. Each file appears whole or not at all; tied weights are stored once.

    Args:
        model: what to write; its dtype is kept, but for int8 weights, which become float32.
        path: the folder; created if absent.
        tokenizer: saved beside the weights if given; its ``pad_id`` and ``end_id`` go into a Hugging Face
            configuration.
        format: ``refragkit`` for our own, ``hf`` for the Hugging Face layout of the model's family: mamba2, qwen2,
            llama, rwkv7 (flash-linear-attention's) or rwkv_hybrid (ARWKV's).

    Returns:
        The folder.

    Raises:
        CheckpointError: an unknown format, or a model that no Hugging Face layout holds.
    """
    if format == "refragkit":
        entries = _own_entries(model.config)
        values = {"model_type": _MODEL_TYPE, "format_version": FORMAT_VERSION, **model.config.to_dict()}
    elif format == "hf":
        layout, values = layout_for_export(model.config)
        entries = layout.entries(model.config)
        dtype = torch.float32 if is_int8(model) else model.head_weight.dtype
        values["torch_dtype"] = str(dtype).removeprefix("torch.")
        for key, attribute in (("pad_token_id", "pad_id"), ("eos_token_id", "end_id")):
            values[key] = getattr(tokenizer, attribute, None)
    else:
        raise CheckpointError(f"format must be 'refragkit' or 'hf', got {format!r}")
    weights = model.state_dict()
    absent = sorted({entry.ours for entry in entries} - set(weights))
    if absent:
        raise CheckpointError(
            f"the model lacks {_listed(absent[:3])}{' and more' if absent[3:] else ''}: it is wrapped or carries an "
            "adapter; merge the adapter first"
        )
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        if not (model.config.tie_embeddings and entry.ours == "lm_head.weight"):
            weight = weights[entry.ours].detach()
            if weight.dtype == torch.int8:
                weight = dequantize_rows(weight, weights[_scale_of(entry.ours)])
            tensors[entry.theirs] = entry.dump(weight).contiguous()

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{_WEIGHTS}.{os.getpid()}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(folder / _WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    _write_text(folder / _CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def load_model(
    path: str | Path, dtype: torch.dtype | str | None = None, device: str = "cpu", quantize: str | None = None
) -> SequenceModel:
    """Read a model.

    Args:
        path: a folder of ours; a Hugging Face folder with model_type mamba2, qwen2, llama, rwkv7 or rwkv_hybrid; a
            state-spaces Mamba-2 folder; or an original RWKV-7 ``.pth`` file.
        dtype: of the parameters, a torch dtype or its name; None keeps the stored one. A file that mixes types gets
            the embedding's, but for decays and their biases, which may be more precise.
        device: where to put them.
        quantize: ``int8`` rounds linear layers and the embedding while they are read (see
            :mod:`refragkit.models.quantize`): no more than one of them is held in floating point at a time. The rest is
            float32, and the model is frozen. ``bf16`` is the same as ``dtype="bfloat16"``.

    Raises:
        CheckpointError: nothing there, a broken file, an unknown layout, settings that aren't implemented, or keys
            or shapes that don't fit (all are listed).
        ConfigError: an unknown ``quantize``, or one that contradicts ``dtype``.
    """
    wanted_dtype, quantization = _dtype(dtype), checked_quantization(quantize)
    if quantization is not None:
        fixed = torch.float32 if quantization == "int8" else torch.bfloat16
        if wanted_dtype not in (None, fixed):
            raise ConfigError(
                f"quantize={quantize} keeps what it doesn't round in {str(fixed).removeprefix('torch.')}; got"
                f" dtype={dtype}, leave it null"
            )
        wanted_dtype = fixed
    return _assemble(_open(Path(path)), wanted_dtype, device, int8=quantization == "int8")


def read_config(path: str | Path) -> ModelConfig:
    """The shape of a model that :func:`load_model` reads, without its weights.

    Raises:
        CheckpointError: as there, but for keys and shapes of tensors.
    """
    return _open(Path(path)).config


@dataclass(frozen=True)
class _Contents:
    """A checkpoint whose tensors are still in their file.

    Attributes:
        config: its shape.
        entries: the tensors that it must have.
        source: where they are.
        head: the name of the output head there.
        unused: a regular expression for names of tensors that may be there and carry nothing.
    """

    config: ModelConfig
    entries: list[Entry]
    source: TensorSource
    head: str
    unused: str


def _open(location: Path) -> _Contents:
    values: dict[str, Any] = {}
    layout: Layout | None = None
    if location.is_file():
        if location.suffix not in (".pth", ".pt"):
            raise CheckpointError(f"{location} is neither a model folder nor an RWKV-7 .pth file")
        layout = RWKV7_ORIGINAL
    else:
        values = _read_config(location)
        if values.get("model_type") != _MODEL_TYPE:
            layout = find_layout(values)
            if layout is None:
                raise CheckpointError(
                    f"{location / _CONFIG}: model_type {values.get('model_type')!r} is not known; known are "
                    f"{_MODEL_TYPE}, mamba2, qwen2, llama, rwkv7, rwkv_hybrid and state-spaces' Mamba-2"
                )
    source = open_tensors(location)
    try:
        if layout is None:
            config = _own_config(values)
            entries, head, unused = _own_entries(config), "lm_head.weight", r"(?!)"
        else:
            config = layout.read_config(values, source.shapes)
            entries, head, unused = layout.entries(config), layout.head, layout.unused
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{location}: {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{location}: a value or shape of the wrong kind: {error}") from error
    return _Contents(config, entries, source, head, unused)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no {_CONFIG}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold an object, got {type(values).__name__}")
    return values


def _own_config(values: dict[str, Any]) -> ModelConfig:
    values = {key: value for key, value in values.items() if key != "model_type"}
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(f"format_version {version!r}; this version of refragkit reads {FORMAT_VERSION}")
    return ModelConfig.from_dict(values)


def _own_entries(config: ModelConfig) -> list[Entry]:
    return [Entry(name, name) for name in _empty_model(config).state_dict()]


def _empty_model(config: ModelConfig) -> HybridLM:
    with torch.device("meta"):
        return HybridLM(config)


def _assemble(contents: _Contents, dtype: torch.dtype | None, device: str, int8: bool = False) -> HybridLM:
    """Make a model of a source's tensors, one at a time, without initialising anything first."""
    config, source, head = contents.config, contents.source, contents.head
    model = _empty_model(config)
    if int8:
        quantize_int8(model)
        model.to_empty(device=device)  # what stays is allocated first: what goes leaves no holes in the heap
        model.tie_weights()
    expected = model.state_dict()
    table = {entry.theirs: entry for entry in contents.entries}
    if config.tie_embeddings:
        table.pop(head)
    shapes = source.shapes
    missing = sorted(set(table) - set(shapes))
    unknown = sorted(set(shapes) - set(table) - {head if config.tie_embeddings else ""})
    unknown = [name for name in unknown if not re.fullmatch(contents.unused, name)]
    wrong = [
        f"{name} {shapes[name]} instead of {tuple(expected[entry.ours].shape)}"
        for name, entry in table.items()
        if name in shapes and entry.shape(shapes[name]) != tuple(expected[entry.ours].shape)
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{source.description} does not fit its configuration. Missing: {_listed(missing)}. "
            f"Unknown: {_listed(unknown)}. Wrong shape: {_listed(wrong)}."
        )
    tensors: dict[str, Tensor] = {}
    embedding = next(name for name, entry in table.items() if entry.ours == "embed_tokens.weight")
    common = dtype or source.read(embedding).dtype
    # The largest first: in floating point it is best held while there is little else
    for name in sorted(table, key=lambda name: -math.prod(shapes[name])):
        entry = table[name]
        tensor = entry.load(source.read(name))
        if not tensor.is_floating_point():
            raise CheckpointError(f"{source.description}: {name} is {tensor.dtype}, expected floating point")
        if expected[entry.ours].dtype == torch.int8:
            values, scale = _rounded(tensor, f"{source.description}: {name}")
            tensors[entry.ours] = expected[entry.ours].copy_(values)
            tensors[_scale_of(entry.ours)] = expected[_scale_of(entry.ours)].copy_(scale)
            continue
        # A copy of its own: it doesn't hang on the mapped file, and its layout in memory (which decides the order
        # of summation in matrix products) is that of a tensor that was never on disk
        kept = dtype is None and entry.ours.endswith(_ANY_PRECISION)
        copied = torch.empty(tensor.shape, dtype=tensor.dtype if kept else common, device=device)
        tensors[entry.ours] = copied.copy_(tensor)
    del tensor
    if config.tie_embeddings and head in shapes:
        stored = source.read(head)
        stored = _rounded(stored, head)[0] if int8 else stored.to(dtype=common)
        if not torch.equal(stored.to(device), tensors["embed_tokens.weight"]):
            raise CheckpointError(
                f"{source.description}: the configuration ties the head to the embedding, but {head} differs from it"
            )
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    return model


def _rounded(tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A weight as int8, and its scales."""
    try:
        return quantize_rows(tensor)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _scale_of(weight: str) -> str:
    """The name of an int8 weight's scales."""
    return f"{weight.removesuffix('weight')}scale"


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"dtype {dtype!r} is not a torch dtype; use float32, bfloat16 or float16")
    return found


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
