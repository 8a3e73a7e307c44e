"""Bootstrap intervals: what is known of them in closed form, and that they repeat themselves."""

from __future__ import annotations

import numpy as np
import pytest

import refragkit.bootstrap
from refragkit.bootstrap import bootstrap_interval


def test_it_is_near_the_normal_interval_of_many_values() -> None:
    values = np.random.default_rng(0).random(2000)
    low, high = bootstrap_interval(list(values), 4000, 0)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for trial in range(300):
        low, high = bootstrap_interval(list(generator.exponential(1.0, 60)), 400, trial)
        inside += low <= 1.0 <= high
    assert 0.88 < inside / 300 < 0.99  # a skewed mean of 60 is covered a little less than 95%


def test_it_follows_the_seed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.0, 1.0, 0.0, 0.5, 1.0, 0.25]
    first = bootstrap_interval(values, 300, 3)
    assert first == bootstrap_interval(values, 300, 3) != bootstrap_interval(values, 300, 4)
    monkeypatch.setattr(refragkit.bootstrap, "_BLOCK_ELEMENTS", 7)  # one resample at a time
    assert first == bootstrap_interval(values, 300, 3)


def test_ends_are_what_resampling_can_give() -> None:
    assert bootstrap_interval([0.5], 10, 0) == (0.5, 0.5)
    assert bootstrap_interval([1.0] * 20, 10, 0) == (1.0, 1.0)
    low, high = bootstrap_interval([0.0, 1.0], 1000, 0)
    assert (low, high) == (0.0, 1.0)
    wide, narrow = (bootstrap_interval([0.0, 1.0] * 20, 2000, 0, level) for level in (0.99, 0.5))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
