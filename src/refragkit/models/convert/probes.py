"""What perplexity doesn't show of a conversion: copying, recall, length, and the cost of a token.

Attention finds an earlier token however long ago; a recurrent state has room for so much. A few attention blocks do
most of a model's finding (induction heads, Olsson et al. 2022, arXiv 2209.11895), and a model that loses them reads
ordinary text almost as well.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from refragkit.models.base import SequenceModel
from refragkit.models.state import BlockState, KVCache, ModelState
from refragkit.ops.cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer

_NAMES: tuple[str, ...] = ("Anna", "Ben", "Carl", "Dana", "Eric", "Fay", "George", "Helen", "Ian", "Jane")
_NAMES += ("Kevin", "Laura", "Mark", "Nina", "Oscar", "Paul", "Rosa", "Sam", "Tina", "Victor")
PAIRS, COUNTED = 8, 4
"""Names with a number each in one recall context, and how many of them are asked for."""
_NOISE_TOKENS = 256


@torch.no_grad()
def token_losses(model: SequenceModel, input_ids: Tensor) -> Tensor:
    """Nats of each token but the first, in float32: ``[B, T - 1]`` for int64 ``[B, T]`` without padding."""
    hidden, _ = model.hidden_states(input_ids)
    return losses_of(model, hidden, input_ids)


def losses_of(model: SequenceModel, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """:func:`token_losses` from hidden states ``[B, T, d_model]``."""
    flat = linear_cross_entropy(hidden[:, :-1].flatten(0, 1), model.head_weight, input_ids[:, 1:].flatten())
    return flat.view(input_ids.shape[0], -1)


def perplexity(model: SequenceModel, rows: Tensor, batch: int = 4) -> float:
    """Exponential of the mean loss over windows int64 ``[n, T]``, each read on its own."""
    losses = torch.cat([token_losses(model, part) for part in torch.split(rows, batch)])
    return math.exp(float(losses.double().mean()))


def induction_rows(vocab_size: int, control_ids: Iterable[int], rows: int, length: int, seed: int) -> Tensor:
    """Random ordinary tokens, twice in a row: int64 ``[rows, 2 * length]``."""
    ordinary = torch.ones(vocab_size, dtype=torch.bool)
    ordinary[[i for i in control_ids if i < vocab_size]] = False
    ids = ordinary.nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(seed)
    once = ids[torch.randint(len(ids), (rows, length), generator=generator)]
    return torch.cat([once, once], dim=1)


def second_copy(losses: Tensor) -> Tensor:
    """Of the losses of :func:`induction_rows`, those of tokens that can be known: the second copy but its first."""
    return losses[:, (losses.shape[1] + 1) // 2 :]


@torch.no_grad()
def induction_perplexity(model: SequenceModel, rows: Tensor, batch: int = 8) -> float:
    """Perplexity of the second copy: 1 for a model that copies, the vocabulary's size for one that can't."""
    half = rows.shape[1] // 2
    losses = []
    for part in torch.split(rows, batch):
        hidden, _ = model.hidden_states(part)
        losses.append(
            losses_of(model, hidden[:, half:], part[:, half:])
        )  # as second_copy, without the first's logits
    return math.exp(float(torch.cat(losses).double().mean()))


@torch.no_grad()
def recall(model: SequenceModel, tokenizer: Tokenizer, contexts: int = 50, seed: int = 0) -> float:
    """Share of prompts whose number the model would write greedily, every digit of it.

    A context lists 8 people with a three-digit number each, then again in another order. In the second list the first
    four numbers show what is asked for; the other four are counted, each a prompt of its own: what stands before it is
    given, whatever the model would have written there. (Asked only once, a small model hardly ever answers.)

    Args:
        model: to ask.
        tokenizer: its own.
        contexts: four prompts each.
        seed: of people, numbers and orders.
    """
    generator = torch.Generator().manual_seed(seed)
    device = model.head_weight.device
    right = 0
    for first in range(0, contexts, 10):
        rows: list[list[int]] = []
        answers: list[tuple[int, int, list[int]]] = []  # row, where it starts, its ids
        for row in range(min(10, contexts - first)):
            people = torch.randperm(len(_NAMES), generator=generator)[:PAIRS].tolist()
            numbers = torch.randint(100, 1000, (PAIRS,), generator=generator).tolist()
            ids: list[int] = []
            order = [*range(PAIRS), *torch.randperm(PAIRS, generator=generator).tolist()]
            for place, i in enumerate(order):
                ids += tokenizer.encode(f"{_NAMES[people[i]]}:")
                answer = tokenizer.encode(f" {numbers[i]}")
                if place >= 2 * PAIRS - COUNTED:
                    answers.append((row, len(ids), answer))
                ids += answer + tokenizer.encode("\n")
            rows.append(ids)
        padded, mask = _padded(rows)
        hidden, _ = model.hidden_states(padded.to(device), attention_mask=mask.to(device))
        places = [(row, start - 1 + i) for row, start, answer in answers for i in range(len(answer))]
        at_rows, at_columns = torch.tensor(places, device=device).unbind(1)
        guesses = functional.linear(hidden[at_rows, at_columns], model.head_weight).argmax(-1).tolist()
        for _, _, answer in answers:
            right += guesses[: len(answer)] == answer
            del guesses[: len(answer)]
    return right / (contexts * COUNTED)


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def perplexity_by_position(model: SequenceModel, rows: Tensor, parts: int = 4) -> list[float]:
    """Perplexity of each of ``parts`` equal stretches of long windows int64 ``[n, T]``."""
    losses = torch.cat([token_losses(model, row[None]) for row in rows]).double().mean(0)
    return [math.exp(float(part.mean())) for part in losses.tensor_split(parts)]


@torch.no_grad()
def decoding_tokens_per_second(model: SequenceModel, context: int, steps: int = 9, seed: int = 0) -> float:
    """Speed of decoding one row token by token behind ``context`` tokens: of the median step.

    The state is of that length and its content is noise, repeated, which changes nothing about the time.
    """
    weight = model.head_weight
    generator = torch.Generator().manual_seed(seed)
    first = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    read = model(first, return_state=True).state
    lengths = torch.full_like(read.lengths, context)

    def noise(heads: int, width: int) -> Tensor:
        drawn = torch.randn((1, heads, min(context, _NOISE_TOKENS), width), generator=generator).to(weight)
        return drawn.repeat(1, 1, -(-context // drawn.shape[2]), 1)[:, :, :context]

    blocks: list[BlockState] = []
    for block in read:
        if isinstance(block, KVCache):
            heads, width = block.keys.shape[1], block.keys.shape[3]
            block = KVCache(noise(heads, width), noise(heads, width), lengths)
        blocks.append(block)
    state = ModelState(tuple(blocks), lengths)
    state = model(first, state=state, return_state=True).state  # room to grow is made here
    seconds = []
    for _ in range(steps):
        _wait(weight.device)
        started = time.perf_counter()
        state = model(first, state=state.overwritable(), return_state=True).state
        _wait(weight.device)
        seconds.append(time.perf_counter() - started)
    return 1 / statistics.median(seconds)


def _wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
