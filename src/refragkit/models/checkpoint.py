"""Models on disk: ``config.json`` beside ``model.safetensors``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from refragkit.errors import CheckpointError, ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.config import ModelConfig
from refragkit.models.hybrid import HybridLM

FORMAT_VERSION = 1
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_MODEL_TYPE = "refragkit"


class SavesToFolder(Protocol):
    """A tokenizer, as far as saving is concerned."""

    def save(self, folder: Path) -> None:
        """Write its files."""


def save_model(model: SequenceModel, path: str | Path, tokenizer: SavesToFolder | None = None) -> Path:
    """Write a model to a folder. Each file appears whole or not at all; tied weights are stored once.

    Args:
        model: what to write; its dtype is kept.
        path: the folder; created if absent.
        tokenizer: saved beside the weights if given.

    Returns:
        The folder.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if model.config.tie_embeddings and name == "lm_head.weight":
            continue
        tensors[name] = tensor.detach().contiguous()
    temporary = folder / f".{_WEIGHTS}.{os.getpid()}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.replace(folder / _WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    config = {"model_type": _MODEL_TYPE, "format_version": FORMAT_VERSION, **model.config.to_dict()}
    _write_text(folder / _CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def load_model(
    path: str | Path, dtype: torch.dtype | str | None = None, device: str = "cpu", quantize: str | None = None
) -> SequenceModel:
    """Read a model from a folder.

    Args:
        path: a folder that :func:`save_model` wrote.
        dtype: of the parameters, a torch dtype or its name; None keeps the stored one.
        device: where to put them.
        quantize: not available for this format yet; must be None.

    Raises:
        CheckpointError: no such folder, a broken file, an unknown format, or keys or shapes that don't fit.
    """
    wanted_dtype = _dtype(dtype)
    folder = Path(path)
    config_file = folder / _CONFIG
    if not config_file.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no {_CONFIG}")
    try:
        values: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{config_file} is not JSON: {error}") from error
    if quantize is not None:
        raise CheckpointError(f"quantize={quantize!r} is not available; leave it null")
    return _load_own(folder, values, wanted_dtype, device)


def _load_own(folder: Path, values: dict[str, Any], dtype: torch.dtype | None, device: str) -> HybridLM:
    values = dict(values)
    if values.pop("model_type", None) != _MODEL_TYPE:
        raise CheckpointError(f"{folder / _CONFIG}: expected model_type {_MODEL_TYPE!r}")
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / _CONFIG}: format_version {version!r}; this version of refragkit reads {FORMAT_VERSION}"
        )
    try:
        config = ModelConfig.from_dict(values)
    except ConfigError as error:
        raise CheckpointError(f"{folder / _CONFIG}: {error}") from error
    tensors: dict[str, Tensor] = {}
    weights = folder / _WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{folder} has no {_WEIGHTS}")
    try:
        with safe_open(weights, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                # A copy of its own: it doesn't hang on the mapped file, and its alignment (which decides the
                # order of summation in matrix products) is that of a tensor that was never on disk
                tensors[name] = tensor.to(tensor.dtype if dtype is None else dtype, copy=True)
    except SafetensorError as error:
        raise CheckpointError(f"{weights} is broken: {error}") from error
    return assemble(config, tensors, source=str(weights))


def assemble(config: ModelConfig, tensors: dict[str, Tensor], source: str) -> HybridLM:
    """Make a model of tensors under our names, without initialising anything first.

    Raises:
        CheckpointError: unknown or missing keys, or shapes that don't fit; all are listed.
    """
    with torch.device("meta"):
        model = HybridLM(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_embeddings:
        expected.pop("lm_head.weight")
    missing = sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected))
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{source} does not fit its configuration. Missing: {_listed(missing)}. Unknown: {_listed(unknown)}. "
            f"Wrong shape: {_listed(wrong)}."
        )
    model.load_state_dict(tensors, strict=False, assign=True)
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.requires_grad_(True)
    model.tie_weights()
    return model


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
