"""A teacher's activations on disk, computed once and read in any order: all that distillation asks of the teacher.

Layout: ``<folder>/<fingerprint>/shard-00000.safetensors`` and so on, 16 windows each. A shard holds, per block i,
``blocks.i.input`` and ``blocks.i.output`` (what its mixer reads and puts out), ``start`` (the residual stream that
enters the first of these blocks, below which a student is the teacher) and ``final`` (hidden states after the last
norm), each ``[windows, T, d_model]`` in bfloat16, the sums that the outputs' variance is made of, and a checksum. A
shard is there whole or not at all, so a killed run goes on where it was; one that was damaged since is written again.

Source: MOHAWK (Bick et al. 2024, arXiv 2408.10189), section 3.2, aligns mixers on the teacher's own inputs.
Differs: they are kept, in bfloat16, where the original runs the teacher at each step, and so are its last hidden states
for the stages that match its logits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.checksums import tensors_checksum
from refragkit.models.convert.activations import Activations, activations_and_ends
from refragkit.models.convert.text import fingerprint
from refragkit.models.weights_hash import hash_tensors

log = logging.getLogger("refragkit")

_FORMAT = 3
_SHARD_WINDOWS = 16
_BATCH_WINDOWS = 2  # that the teacher reads at once
_NUMBER_BYTES = 2
_CHECKSUM = "crc32"


class ActivationCache:
    """Finished activations, memory-mapped.

    Args:
        shards: files in the order of the windows.
        layers: the blocks in them.

    Attributes:
        layers: the blocks.
        first: the block that ``start`` enters.
        windows: how many rows there are.
        window_tokens: T.
        variance: per block, of the mixer's output: the mean over channels of each channel's variance over all tokens.
    """

    def __init__(self, shards: Sequence[Path], layers: Sequence[int], first: int) -> None:
        self.layers = tuple(layers)
        self.first = first
        self._shards = [_open(path, self.layers) for path in shards]
        self.window_tokens = self._shards[0]["final"].shape[1]
        self.windows = sum(len(shard["final"]) for shard in self._shards)
        self.variance: dict[int, float] = {}
        for layer in self.layers:
            n = self.windows * self.window_tokens
            total = torch.stack([s[f"blocks.{layer}.sum"] for s in self._shards]).sum(0)
            squares = torch.stack([s[f"blocks.{layer}.square_sum"] for s in self._shards]).sum(0)
            self.variance[layer] = float((squares / n - (total / n).square()).mean())

    def read(self, layer: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The inputs and outputs of a block's mixer in some windows: two of ``[len(rows), T, d_model]``, bfloat16."""
        return self._rows(f"blocks.{layer}.input", rows), self._rows(f"blocks.{layer}.output", rows)

    def read_ends(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What enters the block ``first``, and the hidden states after the last norm, as :meth:`read` gives them."""
        return self._rows("start", rows), self._rows("final", rows)

    def _rows(self, name: str, rows: Sequence[int]) -> Tensor:
        return torch.stack([self._shards[row // _SHARD_WINDOWS][name][row % _SHARD_WINDOWS] for row in rows])


@contextmanager
def cached_activations(
    teacher: SequenceModel,
    layers: Sequence[int],
    windows: Tensor,
    folder: str | Path,
    *,
    max_bytes: int,
    keep: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[ActivationCache]:
    """Activations of a teacher while the ``with`` block lasts; computed first where they aren't there yet.

    Where the block ends with an error or is killed, they stay, for the next try to go on from. Runs side by side that
    ask for the same wait for one another and share.

    Args:
        teacher: the model.
        layers: its blocks, each once.
        windows: token ids, int64 ``[n, T]``, no padding.
        folder: of all caches; one subfolder is this one's.
        max_bytes: the most room that it may take.
        keep: whether it stays after the block.
        advance: called once per window.

    Raises:
        ConfigError: the activations take more than ``max_bytes``, or more than the disk has left.
    """
    place = Path(folder) / cache_key(teacher, layers, windows)[:32]
    place.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(f".{place.name}.lock")
    with FileLock(lock):
        place.mkdir(exist_ok=True)  # another run may have removed it meanwhile
        for left in place.glob(".*.tmp"):
            left.unlink()
        _name_leftovers(place)
        _check_room(teacher, layers, windows, place, max_bytes)
        shards = _fill(teacher, layers, windows, place, advance)
        cache = ActivationCache(shards, layers, first_block(teacher.block_pattern, layers))
    yield cache
    if not keep:
        # Who has the files mapped can go on reading them
        with FileLock(lock):
            shutil.rmtree(place, ignore_errors=True)


def cache_key(teacher: SequenceModel, layers: Sequence[int], windows: Tensor) -> str:
    """sha256 of everything that the activations depend on."""
    device = teacher.head_weight.device.type
    computed_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    digest = hashlib.sha256(f"{_FORMAT} {_SHARD_WINDOWS} {list(layers)} {computed_in}".encode())
    digest.update(json.dumps(teacher.config.to_dict(), sort_keys=True).encode())
    digest.update(fingerprint(windows.cpu()).encode())
    hash_tensors(digest, teacher)
    return digest.hexdigest()


def cache_bytes(teacher: SequenceModel, layers: Sequence[int], tokens: int) -> int:
    """What the activations of so many tokens take."""
    return tokens * (len(layers) + 1) * 2 * teacher.d_model * _NUMBER_BYTES


def first_block(block_pattern: str, layers: Sequence[int]) -> int:
    """The block to start a student at: the first that differs, unless blocks above read values of an R block below."""
    first = min(layers)
    return 0 if "R" in block_pattern[:first] else first


def _name_leftovers(place: Path) -> None:
    """Say what other caches take: of runs that go on at another time, or never."""
    for other in sorted(place.parent.iterdir()):
        files = list(other.glob("shard-*.safetensors")) if other != place else []
        size = sum(file.stat().st_size for file in files)
        if size:
            log.info(
                "%s holds %.1f GiB of activations of another run, for it to go on from; delete it if it never will",
                other,
                size / 2**30,
            )


def _check_room(
    teacher: SequenceModel, layers: Sequence[int], windows: Tensor, place: Path, max_bytes: int
) -> None:
    needed = cache_bytes(teacher, layers, windows.numel())
    there = sum(file.stat().st_size for file in place.glob("shard-*.safetensors"))
    free = shutil.disk_usage(place).free + there
    room, why = min((max_bytes, "the cache's limit"), (free, f"what is free at {place}"))
    if needed > room:
        window = windows.shape[1]
        fit = room // cache_bytes(teacher, layers, window) * window
        raise ConfigError(
            f"the activations of {windows.numel():,} tokens in {len(layers)} blocks take {needed:,} bytes, more than "
            f"{why}, {room:,}: {fit:,} tokens fit. Take fewer tokens or blocks (method.text_tokens, "
            "convert.layers), or give it more room (method.cache_gib)"
        )


@torch.no_grad()
def _fill(
    teacher: SequenceModel,
    layers: Sequence[int],
    windows: Tensor,
    place: Path,
    advance: Callable[[], None],
) -> list[Path]:
    """Write the shards that are missing or broken; return all."""
    shards = []
    was_training = teacher.training
    teacher.eval()
    try:
        for number, rows in enumerate(torch.split(windows, _SHARD_WINDOWS)):
            path = place / f"shard-{number:05d}.safetensors"
            shards.append(path)
            if _is_whole(path, number, layers, (*rows.shape, teacher.d_model)):
                for _ in rows:
                    advance()
                continue
            tensors = _shard(teacher, layers, rows, advance)
            temporary = place / f".{path.name}.{os.getpid()}.tmp"
            save_file(tensors, temporary, metadata={_CHECKSUM: tensors_checksum(str(number), tensors)})
            temporary.replace(path)
    finally:
        teacher.train(was_training)
    return shards


def _shard(
    teacher: SequenceModel, layers: Sequence[int], rows: Tensor, advance: Callable[[], None]
) -> dict[str, Tensor]:
    parts: list[Activations] = []
    ends: list[tuple[Tensor, Tensor]] = []
    device = teacher.head_weight.device
    first = first_block(teacher.block_pattern, layers)
    for batch in torch.split(rows, _BATCH_WINDOWS):
        found, start, final = activations_and_ends(teacher, layers, first, batch.to(device))
        parts.append({i: (x.bfloat16().cpu(), y.bfloat16().cpu()) for i, (x, y) in found.items()})
        ends.append((start.bfloat16().cpu(), final.bfloat16().cpu()))
        for _ in batch:
            advance()
    tensors = {name: torch.cat([pair[i] for pair in ends]) for i, name in enumerate(("start", "final"))}
    for layer in layers:
        tensors[f"blocks.{layer}.input"] = torch.cat([part[layer][0] for part in parts])
        tensors[f"blocks.{layer}.output"] = outputs = torch.cat([part[layer][1] for part in parts])
        exact = outputs.flatten(0, 1).double()
        tensors[f"blocks.{layer}.sum"] = exact.sum(0)
        tensors[f"blocks.{layer}.square_sum"] = exact.square().sum(0)
    return tensors


def _is_whole(path: Path, number: int, layers: Sequence[int], shape: tuple[int, ...]) -> bool:
    if not path.is_file():
        return False
    try:
        tensors = _open(path, layers)
        written = _safe_open(path).metadata()[_CHECKSUM]
    except (SafetensorError, OSError, KeyError, TypeError):
        return False
    shapes = [tensors[name].shape for name in tensors if not name.endswith("sum")]
    return all(found == shape for found in shapes) and written == tensors_checksum(str(number), tensors)


def _safe_open(path: Path) -> Any:
    opened: Any = safe_open(path, framework="pt")
    return opened


def _open(path: Path, layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of a shard, mapped from the file."""
    file = _safe_open(path)
    names = [f"blocks.{i}.{name}" for i in layers for name in ("input", "output", "sum", "square_sum")]
    return {name: file.get_tensor(name) for name in ["start", "final", *names]}
