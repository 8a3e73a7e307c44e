"""Folders of models that are made here and kept: what is used later is what was written, or it is made again."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUMS = "checksums.json"
_ALWAYS = ("config.json", "model.safetensors")


def write_checksums(folder: Path) -> None:
    """Write ``checksums.json``: the sha256 of every file in a folder."""
    digests = {file.name: file_digest(file) for file in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a model, and all that was listed in its ``checksums.json`` as it was then."""
    try:
        expected: Mapping[str, str] = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return all(name in expected for name in _ALWAYS) and all(
            file_digest(folder / name) == digest for name, digest in expected.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def file_digest(file: Path) -> str:
    """The sha256 of a file, computed once for each of its versions."""
    status = file.stat()
    return _digest_of_version(file, status.st_size, status.st_mtime_ns)


@lru_cache
def _digest_of_version(file: Path, size_bytes: int, modified_ns: int) -> str:
    """A run asks several times, and a file may hold many gigabytes."""
    del size_bytes, modified_ns
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def tensors_checksum(label: str, tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of a label and of tensors' bytes (contiguous, on the CPU), by name: damage to a file is accidental."""
    import torch

    value = zlib.crc32(label.encode())
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
