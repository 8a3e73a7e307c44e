"""Causal self-attention with grouped keys and values and rotary positions.

Glossary: ``n_heads`` query heads, ``n_kv_heads`` key/value heads, ``head_dim`` their width, ``S`` keys in view.

Source: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023 (arXiv 2305.13245).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from refragkit.models.config import ModelConfig
from refragkit.models.layers.init import small_init
from refragkit.models.layers.linear import Linear
from refragkit.models.layers.rope import rotate
from refragkit.models.layout import TokenLayout
from refragkit.models.state import KVCache, SpareColumns
from refragkit.ops.graph_break import graph_break

_LEAST_SPARE = 64  # columns


class Attention(nn.Module):
    """A T block's mixer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        self.residual_branches = config.n_layers * (1 if config.mlp == "none" else 2)
        width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = Linear(config.d_model, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.d_model, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.d_model, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.d_model, bias=config.o_bias)

    def init_weights(self, generator: torch.Generator) -> None:
        """Small init, the output scaled down with depth."""
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            small_init(projection, generator)
        small_init(self.o_proj, generator, self.residual_branches)

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout,
        rotary: tuple[Tensor, Tensor],
        state: KVCache | None,
        return_state: bool,
    ) -> tuple[Tensor, KVCache | None]:
        """Attend within each row (or packed document).

        Args:
            x: ``[B, T, d_model]``, real tokens first.
            layout: where they are.
            rotary: tables for ``layout.positions``.
            state: keys and values of earlier calls.
            return_state: whether to build the new cache.

        Returns:
            ``[B, T, d_model]`` and the cache.
        """
        batch, T, _ = x.shape
        q = self.q_proj(x).view(batch, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if state is None and layout.document_ids is None and not (return_state and layout.valid is not None):
            cache = KVCache(k, v, layout.total_lengths) if return_state else None
            y = self._attend(q, k, v, None, causal=T > 1)
        else:
            y, cache = self._read(q, k, v, layout, state, return_state)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, T, -1))
        return out, cache

    @graph_break  # widths that depend on the data, and columns that are written in place
    def _read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: TokenLayout,
        state: KVCache | None,
        return_state: bool,
    ) -> tuple[Tensor, KVCache | None]:
        """Attention with a cache, packed documents, or padding that a cache must leave out."""
        T = q.shape[2]
        mask = None
        causal = T > 1
        spare = None
        if state is not None:
            if layout.uniform_past is None:
                k, v = _scatter(state.keys, k, layout), _scatter(state.values, v, layout)
            else:
                k, v, spare = _append(state, k, v, layout.uniform_past)
            causal = False
            if T > 1 or layout.uniform_past is None:
                columns = torch.arange(k.shape[2], device=q.device)
                mask = (columns <= layout.positions[..., None])[:, None]  # [1 or B, 1, T, S]
        rows = layout.document_rows if state is None else None
        if rows is not None:
            take, put = rows
            y = self._attend(
                _regroup(q, take), _regroup(k, take), _regroup(v, take), None, causal=take.shape[1] > 1
            )
            y = _regroup(y, put)
        else:
            if layout.document_ids is not None:
                same = layout.document_ids[:, :, None] == layout.document_ids[:, None, :]
                mask, causal = same.tril()[:, None], False
            y = self._attend(q, k, v, mask, causal)
        return y, self._cache(k, v, layout, spare) if return_state else None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        batch, _, T, _ = q.shape
        groups = self.n_heads // self.n_kv_heads
        if groups > 1 and T == 1:
            # The heads of a group see the same keys: let them be the queries of one head, and copy nothing
            grouped = q.reshape(batch, self.n_kv_heads, groups, self.head_dim)
            return functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    @staticmethod
    def _cache(k: Tensor, v: Tensor, layout: TokenLayout, spare: SpareColumns | None) -> KVCache:
        if layout.document_ids is not None:  # a packed row goes on with its last document
            lengths = layout.document_lengths
            width = max(1, int(lengths.max()))
            offsets = torch.arange(width, device=k.device)
            index = (layout.lengths - lengths)[:, None] + offsets
            index = index.clamp(max=k.shape[2] - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
            k, v = k.gather(2, index), v.gather(2, index)
            empty = (offsets >= lengths[:, None])[:, None, :, None]
        else:
            lengths = layout.total_lengths
            if layout.valid is None and (layout.past_lengths is None or layout.uniform_past is not None):
                return KVCache(k, v, lengths, spare)
            empty = (torch.arange(k.shape[2], device=k.device) >= lengths[:, None])[:, None, :, None]
        return KVCache(k.masked_fill(empty, 0), v.masked_fill(empty, 0), lengths).trimmed()


def _regroup(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of ``[B, heads, T, head_dim]``, numbered along B and T, as ``[rows, heads, columns, head_dim]``."""
    tokens = x.transpose(1, 2).flatten(0, 1)  # [B * T, heads, head_dim]
    return tokens[index].transpose(1, 2)


def _append(state: KVCache, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor, SpareColumns | None]:
    """Put new entries behind ``past`` old ones: ``[B, heads, past + T, head_dim]`` twice, and room for more.

    Without gradients the entries go into spare columns, which are allocated a quarter ahead.
    """
    columns = past + k.shape[2]
    if torch.is_grad_enabled():
        return _after(state.keys, k, past), _after(state.values, v, past), None
    spare = state.spare
    if spare is None or not spare.usable(columns, k.dtype):
        capacity = columns + max(_LEAST_SPARE, columns // 4)
        spare = SpareColumns(
            k.new_empty(*k.shape[:2], capacity, k.shape[3]), v.new_empty(*v.shape[:2], capacity, v.shape[3])
        )
        spare.keys[:, :, :past] = state.keys[:, :, :past]
        spare.values[:, :, :past] = state.values[:, :, :past]
    spare.taken = True
    spare.keys[:, :, past:columns] = k
    spare.values[:, :, past:columns] = v
    return (
        spare.keys[:, :, :columns],
        spare.values[:, :, :columns],
        SpareColumns(spare.keys, spare.values),
    )


def _after(old: Tensor, new: Tensor, past: int) -> Tensor:
    return torch.cat([old[:, :, :past].to(new.dtype), new], dim=2)


def _scatter(old: Tensor, new: Tensor, layout: TokenLayout) -> Tensor:
    """Put each row's new entries right behind its own old ones: ``[B, heads, S, head_dim]``.

    Entries of a row beyond its tokens are never in view: the mask ends at each query's own position.
    """
    extended = torch.cat([old.to(new.dtype), torch.zeros_like(new)], dim=2)
    index = layout.positions[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
    return extended.scatter(2, index, new)
