"""The average of the weights, against the sum it stands for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from refragkit.training.ema import WeightAverage, decay_at


def steps(model: nn.Linear, average: WeightAverage, n: int) -> list[torch.Tensor]:
    weights = []
    for _ in range(n):
        with torch.no_grad():
            model.weight += torch.randn_like(model.weight)
        average.update()
        weights.append(model.weight.detach().clone())
    return weights


def expected(weights: list[torch.Tensor], decay: float) -> torch.Tensor:
    value = weights[0]
    for n, weight in enumerate(weights[1:], start=1):
        kept = min(decay, (1 + n) / (10 + n))
        value = kept * value + (1 - kept) * weight
    return value


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_is_what_its_definition_says(decay: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = WeightAverage(model, decay)
    weights = steps(model, average, 20)
    assert average.updates == 20
    before = model.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), expected(weights, decay))
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)
    average.apply_for_good()
    torch.testing.assert_close(model.weight.detach(), expected(weights, decay))


def test_the_decay_warms_up() -> None:
    assert decay_at(1, 0.999) == pytest.approx(2 / 11)
    assert [decay_at(n, 0.5) for n in (1, 8, 100)] == [pytest.approx(2 / 11), 0.5, 0.5]


def test_weights_come_back_after_an_error_and_are_left_alone_before_the_first_update() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.9)
    before = model.weight.detach().clone()
    with average.applied():
        assert torch.equal(model.weight, before)
    average.apply_for_good()
    assert torch.equal(model.weight, before)
    steps(model, average, 2)
    now = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="stop"), average.applied():
        raise RuntimeError("stop")
    assert torch.equal(model.weight, now)


def test_only_what_is_trained_is_averaged_and_it_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    average = WeightAverage(model, 0.9)
    parameters = list(average.parameters())
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in model[1].parameters())
    assert not any(p.requires_grad for p in parameters)
    assert {id(p) for p in parameters}.isdisjoint({id(p) for p in model.parameters()})


def test_a_checkpoint_restores_it_to_the_bit() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    average = WeightAverage(model, 0.99)
    steps(model, average, 5)
    state, weights = copy.deepcopy(average.state_dict()), copy.deepcopy(model.state_dict())
    torch.manual_seed(2)
    steps(model, average, 3)
    average.apply_for_good()
    other = nn.Linear(3, 3)
    resumed = WeightAverage(other, 0.99)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    torch.manual_seed(2)
    steps(other, resumed, 3)
    assert resumed.updates == 8
    resumed.apply_for_good()
    assert torch.equal(other.weight, model.weight)
