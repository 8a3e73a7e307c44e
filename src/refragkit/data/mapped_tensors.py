"""Safetensors files written array by array and read memory-mapped, so that neither costs memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "I32": "<i4",
    "U8": "|u1",
}
_NAMES = {np.dtype(text): name for name, text in _DTYPES.items()}


def write_tensors(
    path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays without a copy of all of them in memory (which ``safetensors.numpy.save`` makes).

    Raises:
        OSError: the disk is full.
    """
    shapes = {name: (_NAMES[t.dtype], t.shape) for name, t in tensors.items()}
    with path.open("wb") as f:
        f.write(header(shapes, metadata))
        for tensor in tensors.values():
            f.write(np.ascontiguousarray(tensor).data)


def header(
    shapes: Mapping[str, tuple[str, Iterable[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a file whose tensors, (dtype, shape) by name, follow in that order."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, sizes = end, [int(n) for n in shape]
        end = start + int(np.prod(sizes, dtype=np.int64)) * np.dtype(_DTYPES[dtype]).itemsize
        entries[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def map_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a safetensors file, read-only and memory-mapped, and its metadata.

    Raises:
        ValueError: the file is missing, truncated or not such a file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > size:
                raise ValueError(f"its header should have {length} bytes")
            entries = json.loads(f.read(length))
        metadata = dict(entries.pop("__metadata__", {}))
        first, end, tensors = 8 + length, 0, {}
        # One mapping for all; plain arrays over it, since np.memmap's own indexing is slow.
        whole = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            tensors[name] = whole[first + start : first + end].view(_DTYPES[entry["dtype"]])
            tensors[name] = tensors[name].reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        raise ValueError(f"{path} is not an intact safetensors file ({error})") from error
    if first + end != size:
        raise ValueError(f"{path} has {size} bytes, expected {first + end}: truncated?")
    return tensors, metadata
