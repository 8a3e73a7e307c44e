"""From a stack in floating point to one whose frozen weights are int8."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Literal

import torch
from torch import nn

from refragkit.errors import ConfigError
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.int8 import Int8Embedding, Int8Linear
from refragkit.models.layers.rwkv7 import LowRank

Quantization = Literal["int8", "bf16"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "bf16")

# From glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 2**18


def checked_quantization(value: str | None, key: str = "quantize") -> Quantization | None:
    """``value`` if it names a form of weights that is known.

    Args:
        value: int8, bf16, or None for weights as they are stored.
        key: what the message calls it.

    Raises:
        ConfigError: it doesn't.
    """
    if value is None or value in QUANTIZATIONS:
        return value
    raise ConfigError(
        f"{key}: expected null, {' or '.join(QUANTIZATIONS)}, got {value!r}; int8 rounds the weights of linear"
        " layers and embeddings to one byte each, bf16 keeps all in two"
    )


def return_freed_memory() -> None:
    """Let large tensors that are freed leave the process at once, as long as it runs.

    glibc keeps what tensors of up to 32 MiB free for later ones, in pieces that these seldom fit: after a step of LoRA
    on the 1.5b hybrid, 0.64 of 2.70 GiB. With a fixed limit what is larger is mapped on its own. Other allocators have
    no such setting and are left alone.
    """
    with suppress(OSError, AttributeError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)
        set_option(_TRIM_THRESHOLD, _LARGE_BYTES)


@torch.no_grad()
def quantize_int8(model: HybridLM, path: str = "") -> None:
    """Replace the embedding and the linear layers under a path by int8 ones, one at a time, in place.

    What stays in floating point, because it is small and states are sensitive to it: norms, biases, convolutions,
    token-shift mixes, and RWKV-7's low-rank maps. The whole stack is frozen. On the meta device only the structure
    changes. Who wants a small model wants freed memory back, too: see :func:`return_freed_memory`.

    Args:
        model: changed in place.
        path: of a module in the stack; the empty path is all of it.

    Raises:
        ConfigError: a weight that is not finite.
    """
    return_freed_memory()
    root = model.get_submodule(path)
    root.requires_grad_(False)
    inside_low_rank = {
        id(layer) for low in root.modules() if isinstance(low, LowRank) for layer in low.modules()
    }
    for name, module in list(root.named_modules(prefix=path)):
        if id(module) in inside_low_rank or isinstance(module, (Int8Linear, Int8Embedding)):
            continue
        if module is model.lm_head and model.config.tie_embeddings:
            continue  # it is the embedding
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        try:
            layer = Int8Linear.of(module) if isinstance(module, nn.Linear) else Int8Embedding.of(module)
        except ValueError as error:
            raise ConfigError(f"quantize=int8: {name}.weight: {error}") from error
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
    if isinstance(model.embed_tokens, Int8Embedding):
        model.tie_weights()


def is_int8(model: nn.Module) -> bool:
    """Whether any weight of a model is int8."""
    return any(isinstance(module, (Int8Linear, Int8Embedding)) for module in model.modules())
