"""The probes give a model that copies and recalls full marks, and one that can't none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from refragkit.data.tokenizer import Tokenizer
from refragkit.models.base import ModelOutput, SequenceModel
from refragkit.models.build import hybrid
from refragkit.models.convert.probes import (
    _NAMES,
    COUNTED,
    PAIRS,
    decoding_tokens_per_second,
    induction_perplexity,
    induction_rows,
    perplexity,
    perplexity_by_position,
    recall,
    second_copy,
    token_losses,
)

VOCAB = 61


@pytest.fixture(scope="module")
def model() -> SequenceModel:
    return hybrid(block_pattern="MTR", vocab_size=VOCAB, seed=2).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(0))


def test_perplexity_is_that_of_the_logits(model: SequenceModel) -> None:
    rows = tokens(5, 20)
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    losses = functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    assert perplexity(model, rows) == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    parts = perplexity_by_position(model, rows, 2)
    assert parts[0] == pytest.approx(math.exp(losses[:, :10].mean()), rel=1e-5)
    assert parts[1] == pytest.approx(math.exp(losses[:, 10:].mean()), rel=1e-5)


class Copier(torch.nn.Module):
    """Predicts the token ``lag`` places back from the one it predicts; knows nothing for lag 0."""

    def __init__(self, lag: int) -> None:
        super().__init__()
        self.lag = lag
        self.head_weight = torch.eye(VOCAB)

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, None]:
        if not self.lag:
            return torch.zeros(*ids.shape, VOCAB), None
        return 50.0 * functional.one_hot(ids.roll(self.lag - 1, 1), VOCAB).float(), None


def test_the_induction_probe_sees_copying_and_nothing_else() -> None:
    rows = induction_rows(VOCAB, [0, 3, 999], rows=6, length=16, seed=0)
    assert rows.shape == (6, 32) and torch.equal(rows[:, :16], rows[:, 16:])
    assert not {0, 3} & set(rows.flatten().tolist()) and len(set(rows.flatten().tolist())) > 30
    assert torch.equal(rows, induction_rows(VOCAB, [0, 3], 6, 16, 0))
    assert not torch.equal(rows, induction_rows(VOCAB, [0, 3], 6, 16, 1))
    perfect: Any = Copier(16)
    assert induction_perplexity(perfect, rows) == pytest.approx(1, abs=1e-6)
    ignorant: Any = Copier(0)
    assert induction_perplexity(ignorant, rows) == pytest.approx(VOCAB, rel=1e-5)
    wrong: Any = Copier(15)
    assert induction_perplexity(wrong, rows) > 1e9


class Reader(torch.nn.Module):
    """Writes behind each name the number that stood behind it before, if it is one that it knows."""

    def __init__(self, tokenizer: Tokenizer, known: set[str]) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.known = known
        self.head_weight = torch.eye(tokenizer.vocab_size)
        self.prompts = 0

    def hidden_states(self, ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:
        logits = torch.zeros(*ids.shape, self.tokenizer.vocab_size)
        for i, (row, mask) in enumerate(zip(ids, attention_mask, strict=True)):
            lines = self.tokenizer.decode(row[mask == 1].tolist()).splitlines()
            pairs = [line.split(": ") for line in lines]
            assert len(lines) == 2 * PAIRS and sorted(lines[:PAIRS]) == sorted(lines[PAIRS:])
            assert lines[:PAIRS] != lines[PAIRS:]
            position, seen = 0, dict[str, str]()
            for name, number in pairs:
                position += len(self.tokenizer.encode(f"{name}:"))
                wanted = seen.get(name, "000") if name in self.known else "000"
                for j, token in enumerate(self.tokenizer.encode(f" {wanted}")):
                    logits[i, position - 1 + j, token] = 1
                position += len(self.tokenizer.encode(f" {number}")) + len(self.tokenizer.encode("\n"))
                seen[name] = number
            self.prompts += COUNTED
        return logits, None


def test_recall_counts_right_answers() -> None:
    tokenizer = Tokenizer.train(["Anna: 123\nBen: 456"] * 3, 300)
    reader: Any = Reader(tokenizer, set(_NAMES))
    assert recall(reader, tokenizer, contexts=13) == 1
    half: Any = Reader(tokenizer, set(_NAMES[::2]))
    assert 0.35 < recall(half, tokenizer) < 0.65
    assert half.prompts == 200
    nothing: Any = Reader(tokenizer, set())
    assert recall(nothing, tokenizer, contexts=5) == 0


def test_the_induction_probe_is_the_second_half_of_all_losses(model: SequenceModel) -> None:
    rows = induction_rows(VOCAB, [0], rows=5, length=16, seed=0)
    losses = second_copy(token_losses(model, rows))
    assert losses.shape == (5, 15)
    assert induction_perplexity(model, rows) == pytest.approx(math.exp(losses.mean()), rel=1e-5)


def test_decoding_is_timed_at_any_context(model: SequenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    forward = model.forward

    def heard(ids: Tensor, **options: Any) -> ModelOutput:
        output = forward(ids, **options)
        read.append(int(output.state.lengths[0]) if output.state is not None else -1)
        return output

    monkeypatch.setattr(model, "forward", heard)
    assert decoding_tokens_per_second(model, 300, steps=3) > 0
    assert read == [1, 301, 302, 303, 304]
