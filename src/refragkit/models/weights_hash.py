"""What tells one model from another: a hash of its weights, whatever format and precision they are stored in."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from refragkit.models.checkpoint import _open

if TYPE_CHECKING:
    from torch import nn

_VALUES = 4096
"""Of each tensor. Training changes tensors as a whole: to read all of a large model would tell no more."""


def weights_hash(path: str | Path) -> str:
    """sha256 of a model's tensor names in our stack, their shapes, and up to 4096 values of each, spread evenly.

    Values count as float32, so that an export to another format, or from bfloat16 to float32, has the same hash.

    Args:
        path: a folder or file that `refragkit.models.checkpoint.load_model` reads.

    Raises:
        CheckpointError: it can't be read.
    """
    contents = _open(Path(path))
    digest = hashlib.sha256()
    for entry in sorted(contents.entries, key=lambda entry: entry.ours):
        if entry.theirs not in contents.source.shapes:
            continue  # a tied head, or something missing that loading will report
        if contents.config.tie_embeddings and entry.ours == "lm_head.weight":
            continue
        tensor = entry.load(contents.source.read(entry.theirs)).flatten()
        step = max(1, tensor.numel() // _VALUES)
        values = tensor[::step][:_VALUES].to(torch.float32).contiguous()
        digest.update(f"{entry.ours} {tensor.numel()}\n".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def hash_tensors(digest: hashlib._Hash, model: nn.Module) -> None:
    """Hash all values of a loaded model's tensors, with names and types: about a second for half a gigabyte."""
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
