"""Where the real tokens of a batch are.

Padding may be on either side, or in between, and rows may hold several packed documents. All of it is turned into
one case before the first block: rows whose real tokens come first. Blocks then only need to make the tail inert,
and the result is scattered back to the caller's columns at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """A batch with its real tokens moved to the front of each row, ``T`` columns wide.

    Attributes:
        columns: T.
        lengths: int64 ``[B]``, real tokens per row.
        positions: int64 ``[1 or B, T]``, the position of each token in its document, past calls included.
        valid: bool ``[B, T]``; None when every token is real.
        past_lengths: int64 ``[B]``, tokens of earlier calls; None without a state.
        uniform_past: the common past length, or None where rows differ.
        document_ids: int64 ``[B, T]``, numbers the packed documents of a row from 0 (padding belongs to the last
            one); None without packing.
        source: int64 ``[B, T]``, the caller's column of each token; None when nothing was moved.
        rank: int64 ``[B, caller's T]``, the column here of each of the caller's tokens.
        caller_valid: bool ``[B, caller's T]``.
    """

    columns: int
    lengths: Tensor
    positions: Tensor
    valid: Tensor | None
    past_lengths: Tensor | None
    uniform_past: int | None
    document_ids: Tensor | None
    source: Tensor | None
    rank: Tensor | None
    caller_valid: Tensor | None

    @staticmethod
    def of(
        shape: tuple[int, int],
        device: torch.device,
        *,
        attention_mask: Tensor | None,
        segment_ids: Tensor | None,
        past_lengths: Tensor | None,
    ) -> TokenLayout:
        """Read the layout off a call's arguments.

        Args:
            shape: (B, T) of the token ids.
            device: where they live.
            attention_mask: ``[B, T]``, non-zero for real tokens.
            segment_ids: ``[B, T]``, 0 for padding, equal within a packed document.
            past_lengths: int64 ``[B]`` of the state passed in.

        Raises:
            ValueError: shapes that don't fit, or packing together with a state.
        """
        batch, T = shape
        for name, tensor in (("attention_mask", attention_mask), ("segment_ids", segment_ids)):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} must have the shape {shape} of input_ids, got {tuple(tensor.shape)}"
                )
        if past_lengths is not None and past_lengths.shape[0] != batch:
            raise ValueError(f"the state has {past_lengths.shape[0]} rows, input_ids has {batch}")
        if segment_ids is not None and past_lengths is not None:
            raise ValueError("segment_ids can't be combined with state: a packed row starts new documents")

        valid = None if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool)
        if segment_ids is not None:
            segment_ids = segment_ids.to(device)
            real = segment_ids != 0
            valid = real if valid is None else valid & real
        source = rank = caller_valid = None
        columns = T
        lengths = torch.full((batch,), T, dtype=torch.int64, device=device)
        if valid is not None and device.type != "meta":
            lengths = valid.sum(1)
            caller_valid = valid
            columns = max(1, int(lengths.max())) if batch else T
            if _is_prefix(valid, lengths):
                valid = valid[:, :columns]
                rank = torch.arange(T, device=device).clamp(max=columns - 1).expand(batch, T)
            else:
                source = (~valid).to(torch.int8).argsort(dim=1, stable=True)[:, :columns]
                rank = (valid.cumsum(1) - 1).clamp(0, columns - 1)
                valid = torch.arange(columns, device=device) < lengths[:, None]
            if bool(caller_valid.all()):
                source = rank = caller_valid = valid = None

        positions = torch.arange(columns, device=device)[None]
        uniform_past: int | None = None
        if past_lengths is not None:
            if device.type == "meta":
                uniform_past = 0
            else:
                first = int(past_lengths[0]) if batch else 0
                uniform_past = first if bool((past_lengths == first).all()) else None
            positions = (
                positions + past_lengths[:, None] if uniform_past is None else positions + uniform_past
            )

        document_ids = None
        if segment_ids is not None:
            ids = segment_ids[:, :columns] if source is None else segment_ids.gather(1, source)
            starts = torch.zeros_like(ids, dtype=torch.bool)
            starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
            if valid is not None:
                starts &= valid  # padding stays with the last document
            document_ids = starts.cumsum(1)
            first_column = torch.where(starts, positions, 0).cummax(1).values
            positions = positions - first_column
        return TokenLayout(
            columns=columns,
            lengths=lengths,
            positions=positions,
            valid=valid,
            past_lengths=past_lengths,
            uniform_past=uniform_past,
            document_ids=document_ids,
            source=source,
            rank=rank,
            caller_valid=caller_valid,
        )

    @cached_property
    def document_rows(self) -> tuple[Tensor, Tensor] | None:
        """Packed documents as rows of their own, D rows of L columns: attention then needs no mask.

        Returns:
            take: int64 ``[D, L]``, which of the B * T tokens stands there (any one beyond a document's end).
            put: int64 ``[B, T]``, where among the D * L each token went (padding: to its document's start).
            None where such rows would cost more than attention over the packed ones, or nothing is packed.
        """
        if self.document_ids is None:
            return None
        batch, T = self.document_ids.shape
        positions = self.positions
        if self.valid is not None:
            positions = positions.masked_fill(~self.valid, 0)
        per_row = self.document_ids[:, -1] + 1
        rows, width = int(per_row.sum()), int(positions.max()) + 1
        if rows * width**2 >= batch * T**2:
            return None
        first_row = (per_row.cumsum(0) - per_row)[:, None]
        put = (first_row + self.document_ids) * width + positions
        tokens = torch.arange(batch * T, device=put.device)
        slots = put.flatten()
        if self.valid is not None:
            tokens, slots = tokens[self.valid.flatten()], slots[self.valid.flatten()]
        take = torch.zeros(rows * width, dtype=torch.int64, device=put.device).scatter(0, slots, tokens)
        return take.view(rows, width), put

    @property
    def document_lengths(self) -> Tensor:
        """Real tokens of this call in each row's last document, int64 ``[B]``."""
        if self.document_ids is None:
            return self.lengths
        last = (self.lengths - 1).clamp(min=0)[:, None]
        return torch.where(self.lengths > 0, self.positions.gather(1, last).squeeze(1) + 1, 0)

    @property
    def total_lengths(self) -> Tensor:
        """Tokens that the state after this call has read, int64 ``[B]``; of the last document where packed."""
        lengths = self.document_lengths
        return lengths if self.past_lengths is None else lengths + self.past_lengths

    def compact(self, input_ids: Tensor) -> Tensor:
        """Token ids ``[B, caller's T]`` -> ``[B, T]``, real ones first, 0 elsewhere."""
        if self.caller_valid is None:
            return input_ids
        moved = input_ids[:, : self.columns] if self.source is None else input_ids.gather(1, self.source)
        return moved if self.valid is None else moved.masked_fill(~self.valid, 0)

    def restore(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[B, T, d]`` -> ``[B, caller's T, d]``, zeros at padding."""
        if self.caller_valid is None or self.rank is None:
            return hidden
        index = self.rank[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, index).masked_fill(~self.caller_valid[..., None], 0)

    def last(self, hidden: Tensor, k: int) -> Tensor:
        """The last k real positions of each row, ``[B, k, d]``; zeros in front where a row has fewer."""
        index = self.lengths[:, None] - k + torch.arange(k, device=hidden.device)
        picked = hidden.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        return picked.masked_fill((index < 0)[..., None], 0)

    def with_history(self, x: Tensor, history: Tensor | None, width: int) -> Tensor:
        """Put the last ``width`` inputs of earlier calls (zeros if None) in front: ``[B, width + T, C]``."""
        if history is None:
            history = x.new_zeros(x.shape[0], width, x.shape[2])
        return torch.cat([history.to(x.dtype), x], dim=1)

    def history(self, extended: Tensor, width: int) -> Tensor:
        """The last ``width`` real inputs of each row, from :meth:`with_history`'s result: ``[B, width, C]``."""
        offsets = torch.arange(width, device=extended.device)
        if self.valid is None:
            tail = extended[:, extended.shape[1] - width :]
        else:
            index = self.lengths[:, None] + offsets
            tail = extended.gather(1, index[..., None].expand(-1, -1, extended.shape[2]))
        if self.document_ids is not None:  # an earlier document's inputs are not this one's history
            outside = width - offsets > self.document_lengths[:, None]
            tail = tail.masked_fill(outside[..., None], 0)
        # A copy: a view would keep the whole sequence alive for as long as the state
        return tail.to(torch.promote_types(extended.dtype, torch.float32), copy=True)

    def same_document(self, distance: int) -> Tensor | None:
        """Where the token ``distance`` columns earlier belongs to the same document.

        Returns:
            bool ``[B, T, 1]``, or None if that needs no check.
        """
        if self.document_ids is None:
            return None
        return (self.positions >= distance)[..., None]


def _is_prefix(valid: Tensor, lengths: Tensor) -> bool:
    return bool((valid == (torch.arange(valid.shape[1], device=valid.device) < lengths[:, None])).all())
