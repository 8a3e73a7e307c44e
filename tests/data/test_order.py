from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refragkit.data.order import batch_indices

sizes = {"n": st.integers(1, 40), "size": st.integers(1, 50), "seed": st.integers(0, 2**31)}


@given(**sizes, epochs=st.integers(1, 4))
def test_every_example_once_per_epoch_whatever_the_batch_size(
    n: int, size: int, seed: int, epochs: int
) -> None:
    batches = [batch_indices(seed, i, n, size) for i in range(-(-epochs * n // size))]
    assert all(len(b) == size for b in batches)
    stream = [i for b in batches for i in b]
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(**sizes, index=st.integers(0, 200))
def test_a_batch_depends_on_nothing_but_seed_and_index(n: int, size: int, seed: int, index: int) -> None:
    expected = batch_indices(seed, index, n, size)
    batch_indices(seed + 1, index + 1, n, size)
    assert batch_indices(seed, index, n, size) == expected
    # The order of examples doesn't depend on how they are cut into batches.
    ones = [batch_indices(seed, index * size + j, n, 1)[0] for j in range(size)]
    assert ones == expected


def test_seeds_and_epochs_differ() -> None:
    epochs = {tuple(batch_indices(seed, e, 50, 50)) for seed in range(5) for e in range(5)}
    assert len(epochs) == 25


def test_all_places_are_equally_likely() -> None:
    first = Counter(batch_indices(seed, 0, 4, 1)[0] for seed in range(4000))
    assert all(850 < first[i] < 1150 for i in range(4))


def test_another_process_gets_the_same_order() -> None:
    code = "from refragkit.data.order import batch_indices; print(batch_indices(3, 7, 100, 9))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(batch_indices(3, 7, 100, 9))


def test_the_order_is_this_one_for_good() -> None:
    """A run resumed under a later version must go on with the same examples."""
    assert batch_indices(0, 0, 10, 10) == [2, 3, 6, 0, 5, 7, 1, 8, 4, 9]


@pytest.mark.parametrize(("index", "n", "size"), [(-1, 5, 2), (0, 0, 2), (0, 5, 0)])
def test_impossible_batches_are_refused(index: int, n: int, size: int) -> None:
    with pytest.raises(ValueError, match="batch_indices"):
        batch_indices(0, index, n, size)
