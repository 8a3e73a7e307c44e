"""Named tensors in files: safetensors (whole or sharded) and PyTorch files, read one tensor at a time."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refragkit.errors import CheckpointError

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def description(self) -> str:
        """For messages: the file or folder."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, without reading it."""

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU; may share memory with the file."""


def open_tensors(path: Path) -> TensorSource:
    """Find a folder's weights, or open a PyTorch file.

    Raises:
        CheckpointError: none there, or broken.
    """
    if path.is_file():
        return _PickledTensors([path], str(path))
    for whole, kind in ((_SAFETENSORS, _SafeTensors), (_PICKLED, _PickledTensors)):
        index = path / f"{whole}.index.json"
        if (path / whole).is_file():
            return kind([path / whole], str(path / whole))
        if index.is_file():
            return kind(_shards(index), str(index))
    raise CheckpointError(f"{path} has no weights: neither {_SAFETENSORS} nor {_PICKLED}, whole or sharded")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard {name!r} is not a plain file name")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: shard {name} is missing")
    return [index.parent / name for name in names]


class _SafeTensors:
    def __init__(self, files: list[Path], description: str) -> None:
        self.description = description
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path in files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is broken: {error}") from error
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = path

    def read(self, name: str) -> Tensor:
        # A mapping of its own, which ends with the tensor: pages of a file that stays open add up to all of it
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is broken: {error}") from error
        return tensor


class _PickledTensors:
    """Loaded with ``weights_only``: no code in the file is ever run."""

    def __init__(self, files: list[Path], description: str) -> None:
        self.description = description
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            content = _unpickle(path)
            if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
                raise CheckpointError(f"{path} holds something other than named tensors")
            self._tensors.update(content)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _unpickle(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # the format before zip files can't be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} can't be read as tensors only (nothing else is ever unpickled): {str(error).splitlines()[0]}"
        ) from error
