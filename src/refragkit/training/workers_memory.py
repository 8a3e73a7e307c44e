"""Tensors in memory that several processes share: one copy, whoever maps it.

The memory has no name: it belongs to those who hold its file descriptor, and is gone with the last of them, however
they end.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like
Layout = dict[str, tuple[torch.dtype, tuple[int, ...], int]]
"""By name: type, shape, and first byte."""


class SharedMemory:
    """Tensors by name in one piece of shared memory.

    Pickling one, which only works while a process is being started, hands its memory on: what arrives in the new
    process is another view of the same bytes.

    Attributes:
        tensors: by name.
        size: bytes.
    """

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], label: str) -> None:
        """Allocate tensors of zeros.

        Args:
            shapes: type and shape by name.
            label: shown in the kernel's list of a process's memory.
        """
        layout: Layout = {}
        end = 0
        for name, (dtype, shape) in shapes.items():
            layout[name] = dtype, tuple(shape), end
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.size = max(end, 1)
        if hasattr(os, "memfd_create"):
            self._file: int = os.memfd_create(label)
        else:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        os.ftruncate(self._file, self.size)
        self._open(layout, writable=True)

    def _open(self, layout: Layout, writable: bool) -> None:
        self._layout = layout
        # Without `writable` what is written stays with the writer, in a copy of that page
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        self._memory = mmap.mmap(self._file, self.size, access=access)
        self.tensors: dict[str, Tensor] = {
            name: _view(self._memory, *entry) for name, entry in layout.items()
        }

    def read_only(self) -> ReadOnly:
        """The same for another process, which can't change it for the others."""
        return ReadOnly(self)

    def __getstate__(self) -> dict[str, Any]:
        return self._handle(writable=True)

    def _handle(self, writable: bool) -> dict[str, Any]:
        file = reduction.DupFd(self._file)
        return {"file": file, "size": self.size, "layout": self._layout, "writable": writable}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._file, self.size = state["file"].detach(), state["size"]
        self._open(state["layout"], state["writable"])

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class ReadOnly:
    """Arrives as a `SharedMemory` whose changes the others don't see."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._shared._handle(writable=False),)


def _arrived(state: Mapping[str, Any]) -> SharedMemory:
    shared = SharedMemory.__new__(SharedMemory)
    shared.__setstate__(state)
    return shared


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def share_tensors(tensors: Mapping[str, Tensor], label: str) -> SharedMemory:
    """Move tensors to shared memory one by one, each in place: what used them uses the shared bytes from then on.

    Tensors that are the same under several names are stored once, under the first.
    """
    unique: dict[int, str] = {}
    for name, tensor in tensors.items():
        unique.setdefault(id(tensor), name)
    shapes = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in unique.values()}
    shared = SharedMemory(shapes, label)
    for name in unique.values():
        shared.tensors[name].copy_(tensors[name].detach())
        tensors[name].data = shared.tensors[name]
    return shared


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied one under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def skeleton(model: nn.Module) -> nn.Module:
    """A model of the same structure whose tensors are on the meta device: small, and can be sent to a process."""
    memo: dict[int, Any] = {}
    for tensor in named_tensors(model).values():
        meta = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = meta
    return copy.deepcopy(model, memo)


def fill_skeleton(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a `skeleton` its tensors, in place; what was tied is tied again.

    Args:
        model: changed.
        tensors: by name, tied ones under the first of theirs.

    Raises:
        KeyError: one is missing.
    """
    filled: dict[int, Tensor] = {}
    for name, meta in named_tensors(model).items():
        owner_path, _, own = name.rpartition(".")
        owner = model.get_submodule(owner_path)
        if id(meta) not in filled:
            tensor = tensors[name]
            is_parameter = isinstance(meta, nn.Parameter)
            filled[id(meta)] = nn.Parameter(tensor, meta.requires_grad) if is_parameter else tensor
        if own in owner._parameters:
            owner._parameters[own] = filled[id(meta)]  # type: ignore[assignment]
        else:
            owner._buffers[own] = filled[id(meta)]
