"""Rendered examples as padded tensors, and their grouping into micro batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refragkit.data.conversation import Rendered

IGNORED = -100
"""Label of a position that is not learnt (PyTorch's ``ignore_index``)."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One padded micro batch.

    Attributes:
        input_ids: [B, T] int64, right padded.
        attention_mask: [B, T] bool, True at real tokens.
        labels: [B, T] int64; ``labels[b, t]`` is the token that position t is to predict, that is token
            t + 1 of the example, or `IGNORED`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def supervised_tokens(self) -> int:
        """How many positions are learnt."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: str | torch.device) -> TokenBatch:
        """The same on another device."""
        return TokenBatch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device))


def collate(examples: Sequence[Rendered], pad_id: int, device: str | torch.device = "cpu") -> TokenBatch:
    """Pad ``examples`` on the right to the longest of them.

    Args:
        examples: B examples, none of them dropped.
        pad_id: fills ``input_ids``; what it is makes no difference, it is masked.
        device: where the tensors live.

    Raises:
        ValueError: there is no example, or one has no tokens.
    """
    if not examples or not all(len(e) for e in examples):
        empty = [n for n, e in enumerate(examples) if not len(e)]
        raise ValueError(
            f"collate: expected examples with tokens, got {len(examples)}, empty ones at {empty}"
        )
    shape = (len(examples), max(map(len, examples)))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, example in enumerate(examples):
        ids = torch.tensor(example.input_ids, dtype=torch.int64)
        learnt = torch.tensor(example.loss_mask, dtype=torch.bool)
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = True
        labels[row, : len(ids) - 1] = ids[1:].masked_fill(~learnt[1:], IGNORED)
    return TokenBatch(input_ids, attention_mask, labels).to(device)


def micro_batch_indices(lengths: Sequence[int], micro_batch_size: int) -> list[list[int]]:
    """Group examples of similar length, every one exactly once.

    Args:
        lengths: tokens of each example.
        micro_batch_size: largest group.

    Returns:
        Groups of positions in ``lengths``, longest first (what doesn't fit into memory fails at once), ties
        in the order given.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size: expected at least 1, got {micro_batch_size}")
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [by_length[i : i + micro_batch_size] for i in range(0, len(by_length), micro_batch_size)]


def micro_batches(examples: Sequence[Rendered], micro_batch_size: int) -> list[list[Rendered]]:
    """`micro_batch_indices` applied to the examples themselves."""
    groups = micro_batch_indices([len(e) for e in examples], micro_batch_size)
    return [[examples[i] for i in group] for group in groups]
