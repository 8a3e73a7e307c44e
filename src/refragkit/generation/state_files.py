"""States on disk, for the next run: a safetensors file each, the least recently used ones removed where room is short.

A file is named by what its state has read of which model, so that processes with any models may share a folder. It is
written under a temporary name and renamed; a lock lets one process write at a time, and so holds the bound. Whoever has
just opened a file that another one removes still reads all of it.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from refragkit.errors import ConfigError
from refragkit.models.checksums import tensors_checksum
from refragkit.models.state import BlockState, KVCache, Mamba2State, ModelState, RWKV7State

log = logging.getLogger("refragkit")

_KINDS: dict[str, type[BlockState]] = {kind.__name__: kind for kind in (KVCache, Mamba2State, RWKV7State)}
_NAME = re.compile(r"(\d+)-([0-9a-f]{64})\.safetensors")


class StateFiles:
    """A folder of states.

    Args:
        folder: made where it is missing, at the first use.
        max_bytes: of all its files together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._may_write = True

    def open(self) -> StateFiles:
        """Make the folder; returns self.

        Raises:
            ConfigError: it can't be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"retriever.state_cache.path: {self.folder} can't be a folder for states ({error.strerror}); choose"
                " another one"
            ) from error
        return self

    def names(self) -> dict[str, int]:
        """The states that are there now: key to the number of tokens that it has read."""
        try:
            found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except FileNotFoundError:  # somebody has cleaned up
            return {}
        return {match[2]: int(match[1]) for match in found if match}

    def read(self, key: str, tokens: int, device: torch.device) -> ModelState | None:
        """A state of one row, or None (with a warning, and the file removed, where it is damaged)."""
        path = self._path(key, tokens)
        try:
            state = _read(path, key)
        except FileNotFoundError:  # another process has just made room
            return None
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is damaged (%s): its tokens are read again", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # used just now
        return state.to(device)

    def write(self, key: str, tokens: int, state: ModelState) -> None:
        """Keep a state of one row; without room or right to write, a warning and nothing else."""
        if not self._may_write:
            return
        data = _bytes(state, key)
        path = self._path(key, tokens)
        try:
            with FileLock(self.folder / ".lock"):
                # Who held the lock and left a temporary file behind was killed
                for left in self.folder.glob(".*.tmp"):
                    left.unlink()
                if len(data) > self.max_bytes or path.exists():
                    return
                self._make_room(len(data))
                temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
                temporary.write_bytes(data)
                temporary.replace(path)
        except OSError as error:
            self._may_write = False
            log.warning("no more states are kept in %s: %s", self.folder, error)

    def _path(self, key: str, tokens: int) -> Path:
        return self.folder / f"{tokens}-{key}.safetensors"

    def _make_room(self, size_bytes: int) -> None:
        """Remove what was not used for longest until so many bytes more are within the bound."""
        files = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        sizes = {path: path.stat() for path in files}
        total = sum(status.st_size for status in sizes.values())
        for path, status in sorted(sizes.items(), key=lambda item: item[1].st_mtime_ns):
            if total + size_bytes <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size


def _bytes(state: ModelState, key: str) -> bytes:
    """A state of one row as a safetensors file."""
    state = state.to("cpu").compact()  # files hold no memory twice
    tensors = {"lengths": state.lengths}
    for index, block in enumerate(state.blocks):
        for name, value in vars(block).items():
            if isinstance(value, torch.Tensor):
                tensors[f"blocks.{index}.{name}"] = value
    kinds = " ".join(type(block).__name__ for block in state.blocks)
    return save(
        tensors, metadata={"blocks": kinds, "crc32": tensors_checksum(_label(key, kinds, tensors), tensors)}
    )


def _read(path: Path, key: str) -> ModelState:
    """What :func:`_bytes` made, in memory of its own."""
    file: Any = safe_open(path, framework="pt")
    with file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
    kinds = metadata["blocks"]
    if metadata["crc32"] != tensors_checksum(_label(key, kinds, tensors), tensors):
        raise ValueError("its checksum is not that of its content")
    blocks = []
    for index, kind in enumerate(kinds.split()):
        start = f"blocks.{index}."
        values = {
            name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
        }
        blocks.append(_KINDS[kind](**values))
    return ModelState(tuple(blocks), tensors["lengths"])


def _label(key: str, kinds: str, tensors: dict[str, torch.Tensor]) -> str:
    """What a checksum covers besides values."""
    shapes = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return "\n".join([key, kinds, *shapes])
