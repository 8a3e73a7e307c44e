"""Parameter groups, schedules and clipping."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from refragkit.adapters.lora import LoRA
from refragkit.errors import ConfigError, RefragError
from refragkit.models.build import hybrid
from refragkit.training.optim import (
    SCHEDULES,
    LearningRates,
    build_adamw,
    clip_gradients,
    learning_rate_factor,
    parameter_groups,
    parameter_kinds,
    set_learning_rates,
)

RATES = LearningRates(embedding=0.1, unembedding=0.002, matrix=0.01, other=0.03)


class Toy(nn.Module):
    """One weight of every kind."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.proj = nn.Linear(4, 6)
        self.conv = nn.Conv1d(6, 6, 3, groups=6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Parameter(torch.zeros(1, 6))
        self.r_k = nn.Parameter(torch.zeros(2, 3))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @property
    def head_weight(self) -> torch.Tensor:
        return self.head.weight


def test_every_parameter_has_one_kind() -> None:
    assert parameter_kinds(Toy()) == {
        "mix": "other",
        "r_k": "other",
        "embed.weight": "embedding",
        "proj.weight": "matrix",
        "proj.bias": "other",
        "conv.weight": "other",
        "conv.bias": "other",
        "norm.weight": "other",
        "norm.bias": "other",
        "head.weight": "unembedding",
    }


def test_tied_head_is_one_embedding() -> None:
    kinds = parameter_kinds(Toy(tied=True))
    assert "head.weight" not in kinds
    assert kinds["embed.weight"] == "embedding"


@pytest.mark.parametrize("tied", [False, True])
def test_kinds_in_the_real_stack(tied: bool) -> None:
    model = hybrid(size="tiny", vocab_size=32, block_pattern="TMR", wkv_head_dim=32, tie_embeddings=tied)
    kinds = parameter_kinds(model)
    assert set(kinds) == {name for name, _ in model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == "embedding"} == {"embed_tokens.weight"}
    assert {name for name, kind in kinds.items() if kind == "unembedding"} == (
        set() if tied else {"lm_head.weight"}
    )
    matrices = {name for name, kind in kinds.items() if kind == "matrix"}
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path != "lm_head"
    }
    assert matrices == linear

    LoRA(rank=2).apply(model)
    assert set(parameter_kinds(model).values()) == {"matrix"}


def test_groups_carry_their_rates_and_decay() -> None:
    groups = {g["name"]: g for g in parameter_groups(Toy(), RATES, weight_decay=0.5)}
    assert {name: g["lr"] for name, g in groups.items()} == {
        "embedding": 0.1,
        "unembedding": 0.002,
        "matrix": 0.01,
        "other": 0.03,
    }
    assert {name: g["weight_decay"] for name, g in groups.items()} == {
        "embedding": 0.5,
        "unembedding": 0.5,
        "matrix": 0.5,
        "other": 0.0,
    }


def test_frozen_parameters_are_left_out() -> None:
    model = Toy().requires_grad_(False)
    model.proj.weight.requires_grad_(True)
    groups = parameter_groups(model, RATES)
    assert [g["name"] for g in groups] == ["matrix"]
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        parameter_groups(model, RATES)


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_impossible_rates_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="learning rate of embedding"):
        LearningRates.uniform(value)
    with pytest.raises(ConfigError, match="weight_decay"):
        parameter_groups(Toy(), RATES, weight_decay=value)


def test_each_group_moves_at_its_own_rate() -> None:
    """The first AdamW update has magnitude lr in every element with a gradient."""
    model = Toy()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_adamw(model, RATES.scaled(0.01))
    assert set_learning_rates(optimizer, 0.5) == pytest.approx(
        {"embedding": 5e-4, "unembedding": 1e-5, "matrix": 5e-5, "other": 1.5e-4}
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, kind in parameter_kinds(model).items():
        moved = before[name] - model.state_dict()[name]
        want = getattr(RATES, kind) * 0.01 * 0.5
        torch.testing.assert_close(moved, torch.full_like(moved, want), rtol=2e-2, atol=0)
    # The factor applies to the peak, not to the last value.
    set_learning_rates(optimizer, 1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_linear_matches_the_seed_formula() -> None:
    assert [learning_rate_factor("linear", s, 4) for s in range(4)] == [1.0, 0.75, 0.5, 0.25]


def test_cosine_with_warmup() -> None:
    factors = [learning_rate_factor("cosine", s, 8, warmup_steps=4) for s in range(8)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("n_steps", "warmup"), [(1, 0), (5, 0), (20, 5), (2, 100), (5, 5)])
def test_no_update_has_rate_zero(schedule: str, n_steps: int, warmup: int) -> None:
    factors = [learning_rate_factor(schedule, s, n_steps, warmup) for s in range(n_steps)]
    assert all(0 < f <= 1 for f in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_final_fraction_is_the_floor(schedule: str) -> None:
    factors = [learning_rate_factor(schedule, s, 1000, final_fraction=0.1) for s in range(1000)]
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)
    assert min(factors) >= 0.1


def test_schedule_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="cosine"):
        learning_rate_factor("cosin", 0, 1)
    with pytest.raises(ConfigError, match=r"\[0, 4\), got 4"):
        learning_rate_factor("linear", 4, 4)
    with pytest.raises(ConfigError, match="warmup_steps"):
        learning_rate_factor("linear", 0, 4, -1)


def test_clipping_scales_all_gradients_together() -> None:
    a, b, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients([a, b, unused], 0) == 5.0
    assert clip_gradients([a, b, unused], 10.0) == 5.0
    assert a.grad.tolist() == [3.0, 0.0]
    assert clip_gradients([a, b, unused], 1.0) == 5.0
    torch.testing.assert_close(a.grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(b.grad, torch.tensor([0.0, 0.8]))
    assert clip_gradients([unused], 1.0) == 0.0


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    a = nn.Parameter(torch.zeros(2))
    a.grad = torch.tensor([math.nan, 0.0])
    with pytest.raises(RefragError, match="norm of the gradient is nan"):
        clip_gradients([a], 1.0)
