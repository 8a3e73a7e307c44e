"""Prompts that share documents, and what their kept states are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from refragkit.generation.state_cache import StateCache
from refragkit.models.base import SequenceModel
from refragkit.models.state import ModelState

VOCAB, PAD = 48, 0
ROOM = 1 << 30


def ids(seed: int, n: int) -> list[int]:
    return torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENTS = [ids(1, 40), ids(2, 57), ids(3, 33)]
QUESTIONS = [ids(4, 5), ids(5, 9), ids(6, 1)]
# Two questions about the first documents, one about each of the others, and one without any
PROMPTS = [
    DOCUMENTS[0] + QUESTIONS[0],
    DOCUMENTS[1] + QUESTIONS[1],
    DOCUMENTS[0] + QUESTIONS[2],
    DOCUMENTS[2] + QUESTIONS[0],
    QUESTIONS[1],
]
ENDS = [[40], [57], [40], [33], []]


def begin(
    cache: StateCache,
    model: SequenceModel,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    ends: Any = ENDS,
    **options: Any,
) -> ModelState:
    state = cache.begin(model, prompts, ends, pad_id=PAD, **options)
    assert state is not None
    return state


@torch.no_grad()
def check(model: SequenceModel, state: ModelState, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Each row's state, and the logits behind it, are those of reading that prompt alone and at once."""
    for row, (prompt, n) in enumerate(zip(prompts, state.lengths.tolist(), strict=True)):
        own = state.select([row])
        if n:
            want = model(torch.tensor([prompt[:n]]), return_state=True).state
            for a, b in zip(own.tensors(), want.tensors(), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        got = model(torch.tensor([prompt[n:]]), state=own).logits
        whole = model(torch.tensor([prompt])).logits[:, n:]
        torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)
