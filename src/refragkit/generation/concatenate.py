"""Joins model states along the batch: the inverse of ``ModelState.select``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refragkit.models.state import BlockState, KVCache, Mamba2State, ModelState, RWKV7State


def concatenate_states(states: Sequence[ModelState]) -> ModelState:
    """Stacks the rows of several states of one model, in order; caches of different lengths are padded.

    Args:
        states: at least one, all of the same stack.

    Returns:
        A state with the rows of the first, then those of the second, and so on.
    """
    if len(states) == 1:
        return states[0]
    blocks = tuple(_concatenate_blocks(parts) for parts in zip(*states, strict=True))
    return ModelState(blocks, torch.cat([state.lengths for state in states]))


def _concatenate_blocks(parts: Sequence[BlockState]) -> BlockState:
    """Stacks one block's states."""
    first = parts[0]
    if isinstance(first, KVCache):
        caches = [part for part in parts if isinstance(part, KVCache)]
        columns = max(cache.keys.shape[2] for cache in caches)
        return KVCache(
            torch.cat([_pad(cache.keys, columns) for cache in caches]),
            torch.cat([_pad(cache.values, columns) for cache in caches]),
            torch.cat([cache.lengths for cache in caches]),
        )
    if isinstance(first, Mamba2State):
        mamba = [part for part in parts if isinstance(part, Mamba2State)]
        return Mamba2State(
            torch.cat([part.conv_state for part in mamba]), torch.cat([part.ssm_state for part in mamba])
        )
    rwkv = [part for part in parts if isinstance(part, RWKV7State)]
    shifts = [part.ffn_shift_state for part in rwkv if part.ffn_shift_state is not None]
    return RWKV7State(
        torch.cat([part.shift_state for part in rwkv]),
        torch.cat([part.wkv_state for part in rwkv]),
        torch.cat(shifts) if shifts else None,
    )


def _pad(cache: Tensor, columns: int) -> Tensor:
    """Adds zero columns behind a cache [B, heads, S, head_dim] until it has ``columns``."""
    return torch.nn.functional.pad(cache, (0, 0, 0, columns - cache.shape[2]))
