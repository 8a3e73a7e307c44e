"""Passage vectors on disk: a resumable cache of shards, and one memory-mapped matrix per index.

A shard is named by the hash of its texts, so that a build that was killed goes on with the shards that are missing,
a corpus that grew encodes its new part only, and machines that share the folder share the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refragkit.data.mapped_tensors import header, map_tensors
from refragkit.errors import RetrievalError
from refragkit.retrievers.encoder import SentenceEncoder

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
TENSOR = "vectors"
CHECKSUM = "crc32"


def write_matrix(path: Path, blocks: Sequence[FloatArray], checksum: str | None = None) -> None:
    """Write blocks of rows as one float32 tensor of a safetensors file, holding one block at a time.

    Args:
        path: the file.
        blocks: [rows, width] each.
        checksum: kept in the header, see ``_checksum``.
    """
    rows, width = sum(len(b) for b in blocks), blocks[0].shape[1]
    with path.open("wb") as f:
        f.write(header({TENSOR: ("F32", (rows, width))}, None if checksum is None else {CHECKSUM: checksum}))
        for block in blocks:
            f.write(np.ascontiguousarray(block, dtype="<f4").tobytes())


def open_matrix(path: Path) -> FloatArray:
    """Memory-map what ``write_matrix`` wrote: [rows, width] float32.

    Raises:
        RetrievalError: the file is truncated or not such a file.
    """
    try:
        matrix = map_tensors(path)[0][TENSOR]
        if matrix.dtype != np.dtype("<f4") or matrix.ndim != 2:
            raise ValueError(
                f"{path} holds {matrix.dtype} of {matrix.ndim} dimensions, expected float32 of 2"
            )
    except (ValueError, KeyError) as error:
        raise RetrievalError(f"{path} is not a vector file: {error}") from error
    return matrix


class VectorBlocks(Sequence[FloatArray]):
    """The vectors of all passages, shard by shard, each opened when asked for.

    A mapping for each of half a million shards is more than a process may have, and what it has read of a mapping
    counts as its memory for as long as the mapping lives.

    Attributes:
        encoded: how many passages were encoded for it.
        cached: how many were found in the cache.
    """

    def __init__(self, shards: Sequence[Path | FloatArray], encoded: int, cached: int) -> None:
        self._shards = shards
        self.encoded = encoded
        self.cached = cached

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: Any) -> Any:
        """[rows, width] float32."""
        if isinstance(index, slice):
            return VectorBlocks(self._shards[index], self.encoded, self.cached)
        shard = self._shards[index]
        return open_matrix(shard) if isinstance(shard, Path) else shard


class ShardCache:
    """Where the vectors of a corpus are kept: a file for each shard of passages, named by their hash."""

    def __init__(
        self, encoder: SentenceEncoder, texts: Sequence[str], size: int, cache_dir: Path | None
    ) -> None:
        """Nothing is read yet.

        Args:
            encoder: makes the vectors.
            texts: all passages; a slice of them is a list.
            size: passages per shard.
            cache_dir: where shards are kept; None keeps them in memory.
        """
        self._encoder = encoder
        self._texts = texts
        self._size = size
        self._cache_dir = cache_dir

    def __len__(self) -> int:
        """How many shards there are."""
        return -(-len(self._texts) // self._size)

    def texts(self, number: int) -> Sequence[str]:
        """The passages of a shard."""
        return self._texts[number * self._size : (number + 1) * self._size]

    def file(self, number: int) -> Path | None:
        """Where a shard is kept."""
        if self._cache_dir is None:
            return None
        folder = self._cache_dir / "vectors" / self._encoder.fingerprint
        return folder / f"{_text_hash(self.texts(number))}.safetensors"

    def missing(self) -> list[int]:
        """The numbers of the shards that are not in the cache, not whole, or altered."""
        return [n for n in range(len(self)) if not _is_cached(self.file(n), self._rows(n))]

    def encode(self, part: int = 0, parts: int = 1) -> VectorBlocks:
        """The vectors of the shards number part, part + parts, part + 2 parts, ...; those in the cache are read.

        Raises:
            RetrievalError: the disk is full.
        """
        numbers = range(part, len(self), parts)
        files = {n: self.file(n) for n in numbers}
        missing = [n for n, f in files.items() if not _is_cached(f, self._rows(n))]
        total, todo = sum(map(self._rows, numbers)), sum(map(self._rows, missing))
        shards: dict[int, Path | FloatArray] = {n: f for n, f in files.items() if f is not None}
        encoded = 0
        if todo:
            logger.info("encoding %d of %d passages (the others are cached)", todo, total)
            with self._encoder.workers(), _progress(todo) as advance:
                for done, n in enumerate(missing, start=1):
                    file, texts = files[n], self.texts(n)
                    if _is_cached(file, len(texts)):  # by another process since we looked
                        advance(len(texts))
                        continue
                    block = self._encoder.encode_passages(texts, advance)
                    encoded += len(texts)
                    shards[n] = block if file is None else _store(file, block)
                    _return_memory()
                    logger.info("encoded shard %d (%d of %d)", n, done, len(missing))
        return VectorBlocks([shards[n] for n in numbers], encoded, total - encoded)

    def _rows(self, number: int) -> int:
        return min(self._size, len(self._texts) - number * self._size)


def _return_memory() -> None:
    """Hand freed memory back to the system: activations of many sizes leave holes, a hundred megabytes a shard."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)


def _text_hash(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


def _is_cached(file: Path | None, rows: int) -> bool:
    if file is None or not file.is_file():
        return False
    try:
        vectors, kept = open_matrix(file), map_tensors(file)[1].get(CHECKSUM)
        if len(vectors) != rows:
            raise RetrievalError(f"{file} holds {len(vectors)} vectors, expected {rows}")
        if kept is None:
            raise RetrievalError(f"{file} has no checksum (an earlier version wrote it)")
        if kept != _checksum(vectors):
            raise RetrievalError(f"{file} was altered (its checksum differs)")
    except RetrievalError as error:
        logger.warning("%s: encoding that shard again", error)
        return False
    return True


def _checksum(vectors: FloatArray) -> str:
    """CRC-32 of the vectors' bytes in a file, as eight hex digits."""
    return f"{zlib.crc32(np.ascontiguousarray(vectors, dtype='<f4').data):08x}"


def _store(file: Path, block: FloatArray) -> Path:
    temporary = file.with_name(f"{file.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_matrix(temporary, [block], _checksum(block))
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RetrievalError(
            f"can't store vectors in {file.parent}: {error.strerror}. Finished shards are kept; free space there (or "
            "set another paths.outputs) and run again"
        ) from error
    return file


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere (the log has a line per shard)."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("encoding passages"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("encode", total=total)
        yield lambda n: bar.advance(task, n)
