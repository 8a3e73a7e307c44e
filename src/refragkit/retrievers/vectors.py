"""Passage vectors on disk: a resumable cache of shards, and one memory-mapped matrix per index.

A shard is named by the hash of its texts, so that a build that was killed goes on with the shards that are missing,
a corpus that grew encodes its new part only, and machines that share the folder share the work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refragkit.errors import RetrievalError
from refragkit.retrievers.encoder import SentenceEncoder

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float32]
TENSOR = "vectors"


def write_matrix(path: Path, blocks: Sequence[FloatArray]) -> None:
    """Write blocks of rows as one float32 tensor of a safetensors file, holding one block at a time."""
    rows, width = sum(len(b) for b in blocks), blocks[0].shape[1]
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}
    header = json.dumps({TENSOR: entry}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for block in blocks:
            f.write(np.ascontiguousarray(block, dtype="<f4").tobytes())


def open_matrix(path: Path) -> FloatArray:
    """Memory-map what ``write_matrix`` wrote: [rows, width] float32.

    Raises:
        RetrievalError: the file is truncated or not such a file.
    """
    try:
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            entry = json.loads(f.read(length))[TENSOR]
        rows, width = entry["shape"]
        expected = 8 + length + rows * width * 4
    except (OSError, ValueError, KeyError, TypeError, struct.error, MemoryError, OverflowError) as error:
        raise RetrievalError(f"{path} is not a vector file ({error})") from error
    if path.stat().st_size != expected or entry["dtype"] != "F32":
        raise RetrievalError(
            f"{path} has {path.stat().st_size} bytes, expected {expected} of float32: truncated?"
        )
    if rows == 0:
        return np.zeros((0, width), dtype=np.float32)
    # A plain array over the mapped file: np.memmap's own indexing is slow.
    return np.memmap(path, dtype="<f4", mode="r", offset=8 + length, shape=(rows, width)).view(np.ndarray)


def encode_shards(
    encoder: SentenceEncoder,
    texts: Sequence[str],
    shard_size: int,
    cache_dir: Path | None,
    part: int = 0,
    parts: int = 1,
) -> list[FloatArray]:
    """The vectors of all passages, shard by shard; finished shards are read from the cache.

    Args:
        encoder: makes the vectors.
        texts: all passages.
        shard_size: passages per shard.
        cache_dir: where shards are kept; None keeps them in memory.
        part: with ``parts``, only the shards number part, part + parts, part + 2 parts, ...
        parts: how many such parts there are.

    Returns:
        Blocks of at most ``shard_size`` rows each, in the order of the texts.

    Raises:
        RetrievalError: the disk is full.
    """
    folder = None if cache_dir is None else cache_dir / "vectors" / encoder.fingerprint
    shards = [texts[i : i + shard_size] for i in range(0, len(texts), shard_size)][part::parts]
    files = [None if folder is None else folder / f"{_text_hash(shard)}.safetensors" for shard in shards]
    blocks = [_cached(file, len(shard)) for file, shard in zip(files, shards, strict=True)]
    todo = sum(len(s) for s, b in zip(shards, blocks, strict=True) if b is None)
    if todo:
        logger.info("encoding %d of %d passages (the others are cached)", todo, len(texts))
        with _progress(todo) as advance:
            for i, (shard, file) in enumerate(zip(shards, files, strict=True)):
                if blocks[i] is None:
                    block = encoder.encode_passages(shard, advance)
                    blocks[i] = block if file is None else _store(file, block)
                    logger.info("encoded shard %d of %d", i + 1, len(shards))
    return [b for b in blocks if b is not None]


def _text_hash(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


def _cached(file: Path | None, rows: int) -> FloatArray | None:
    if file is None or not file.is_file():
        return None
    try:
        block = open_matrix(file)
    except RetrievalError as error:
        logger.warning("%s: encoding that shard again", error)
        return None
    return block if len(block) == rows else None


def _store(file: Path, block: FloatArray) -> FloatArray:
    temporary = file.with_name(f"{file.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_matrix(temporary, [block])
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RetrievalError(
            f"can't store vectors in {file.parent}: {error.strerror}. Finished shards are kept; free space there (or "
            "set another paths.cache_dir) and run again"
        ) from error
    return open_matrix(file)


@contextmanager
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
