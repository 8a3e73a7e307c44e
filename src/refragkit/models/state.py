"""What a model remembers between calls: one state per block, forkable and never changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


class SpareColumns:
    """Allocated columns behind a cache, for the first call that continues it without gradients.

    Decoding would otherwise copy the whole cache at every step. Only columns that no cache shows yet are ever
    written, and only once: a second continuation of the same cache (a fork) finds them taken and copies.

    Attributes:
        keys: ``[B, n_kv_heads, capacity, head_dim]``, of which the cache shows the first columns.
        values: the same for values.
        taken: whether they have been used.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.taken = False

    def usable(self, columns: int, dtype: torch.dtype) -> bool:
        """Whether a cache of ``columns`` may be written here now."""
        writable = torch.is_inference_mode_enabled() or not self.keys.is_inference()
        return not self.taken and writable and columns <= self.keys.shape[2] and dtype == self.keys.dtype


@dataclass(frozen=True)
class KVCache:
    """Keys and values of an attention block.

    Attributes:
        keys: ``[B, n_kv_heads, S, head_dim]`` with rotary positions applied; row i's real entries come first.
        values: ``[B, n_kv_heads, S, head_dim]``.
        lengths: int64 ``[B]``, how many entries of each row are real; the rest are zeros.
        spare: room to continue without a copy; never part of the values.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    spare: SpareColumns | None = field(default=None, compare=False, repr=False)

    def trimmed(self) -> KVCache:
        """Without columns that are padding in every row."""
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        if longest == self.keys.shape[2]:
            return self
        return KVCache(self.keys[:, :, :longest], self.values[:, :, :longest], self.lengths)

    def _map(self, function: Callable[[Tensor], Tensor]) -> KVCache:
        return KVCache(function(self.keys), function(self.values), function(self.lengths))


@dataclass(frozen=True)
class Mamba2State:
    """State of a Mamba-2 block, float32 (float64 for a float64 model).

    Attributes:
        conv_state: ``[B, d_conv - 1, channels]``, the last inputs of the convolution, oldest first.
        ssm_state: ``[B, H, P, N]``.
        overwritable: see :meth:`ModelState.overwritable`.
    """

    conv_state: Tensor
    ssm_state: Tensor
    overwritable: bool = field(default=False, compare=False, repr=False)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Mamba2State:
        return Mamba2State(function(self.conv_state), function(self.ssm_state))


@dataclass(frozen=True)
class RWKV7State:
    """State of an RWKV-7 block, float32 (float64 for a float64 model).

    Attributes:
        shift_state: ``[B, d_model]``, the time mix's last (normalised) input.
        wkv_state: ``[B, H, N, N]`` (value, key).
        ffn_shift_state: ``[B, d_model]``, the channel mix's last input; None where the MLP has no token shift.
    """

    shift_state: Tensor
    wkv_state: Tensor
    ffn_shift_state: Tensor | None = None

    def _map(self, function: Callable[[Tensor], Tensor]) -> RWKV7State:
        ffn = None if self.ffn_shift_state is None else function(self.ffn_shift_state)
        return RWKV7State(function(self.shift_state), function(self.wkv_state), ffn)


BlockState = KVCache | Mamba2State | RWKV7State


@dataclass(frozen=True)
class ModelState:
    """The states of all blocks after the same tokens. Immutable: a forward pass returns a new one.

    Attributes:
        blocks: one state per block, in the order of the stack.
        lengths: int64 ``[B]``, real tokens read by each row so far.
    """

    blocks: tuple[BlockState, ...]
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> BlockState:
        return self.blocks[index]

    def __iter__(self) -> Iterator[BlockState]:
        return iter(self.blocks)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    def expand(self, k: int) -> ModelState:
        """Fork every row k times; copies of a row are neighbours (row i becomes rows i*k .. i*k + k - 1)."""
        return self._map(lambda tensor: tensor.repeat_interleave(k, dim=0))

    def select(self, indices: Tensor | list[int]) -> ModelState:
        """Keep these rows, in this order (a row may appear more than once).

        Args:
            indices: int64 ``[rows]``, or a bool mask ``[B]``.
        """
        index = torch.as_tensor(indices, device=self.lengths.device)
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        index = index.to(torch.int64)
        chosen = self._map(lambda tensor: tensor.index_select(0, index))
        blocks = tuple(block.trimmed() if isinstance(block, KVCache) else block for block in chosen.blocks)
        return ModelState(blocks, chosen.lengths)

    def overwritable(self) -> ModelState:
        """The same tensors, into which the next forward pass may write (one token a row, no gradients).

        For a caller that decodes token by token and keeps nothing of the old state: writing into memory that is there
        takes a quarter of the time of allocating as much anew.
        """
        blocks = (replace(b, overwritable=True) if isinstance(b, Mamba2State) else b for b in self.blocks)
        return ModelState(tuple(blocks), self.lengths)

    def compact(self) -> ModelState:
        """The same values in memory of their own, :attr:`nbytes` of it: a view keeps all that it was cut from."""
        return self._map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def detach(self) -> ModelState:
        """The same values, cut off from the autograd graph."""
        return self._map(lambda tensor: tensor.detach())

    def to(self, device: str | torch.device) -> ModelState:
        """The same values on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the blocks, in a fixed order."""
        for block in self.blocks:
            for value in vars(block).values():
                if isinstance(value, Tensor):
                    yield value

    @property
    def nbytes(self) -> int:
        """Bytes held by all blocks together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def _map(self, function: Callable[[Tensor], Tensor]) -> ModelState:
        return ModelState(tuple(block._map(function) for block in self.blocks), function(self.lengths))
