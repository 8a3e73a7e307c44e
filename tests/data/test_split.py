from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from refragkit.data.split import connected_groups, hold_out, subset_positions

keys = st.lists(st.lists(st.integers(0, 15), max_size=3), min_size=1, max_size=25)


@given(keys, st.integers(0, 25))
def test_no_key_is_on_both_sides(keys: list[list[int]], n: int) -> None:
    ids = [f"q{i}" for i in range(len(keys))]
    train, validation = hold_out(ids, keys, n)
    assert sorted(train + validation) == list(range(len(keys)))
    assert len(validation) <= n
    assert not {k for i in train for k in keys[i]} & {k for i in validation for k in keys[i]}


@given(keys, st.integers(0, 25), st.randoms())
def test_the_split_does_not_depend_on_the_order_of_the_file(
    keys: list[list[int]], n: int, random: object
) -> None:
    ids = [f"q{i}" for i in range(len(keys))]
    shuffled = list(range(len(keys)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    _, validation = hold_out(ids, keys, n)
    _, again = hold_out([ids[i] for i in shuffled], [keys[i] for i in shuffled], n)
    assert {ids[i] for i in validation} == {ids[shuffled[i]] for i in again}


def test_groups_are_joined_through_others() -> None:
    assert connected_groups([["a"], ["b"], ["a", "c"], ["c"], [], []]) == [[0, 2, 3], [1], [4], [5]]


def test_a_long_chain_is_one_group_in_whatever_order() -> None:
    links = [[n, n + 1] for n in range(64)]
    for step in (1, 5, 29, 63):
        chain = [links[n * step % 64] for n in range(64)]
        assert connected_groups(chain) == [list(range(64))]
        assert connected_groups([*chain[::-1], [99]])[-1] == [64]


def test_a_smaller_subset_is_part_of_a_larger_one() -> None:
    ids = [f"q{i}" for i in range(20)]
    subsets = [set(subset_positions(ids, n)) for n in range(21)]
    assert all(a < b for a, b in pairwise(subsets))
    assert subset_positions(ids, None) == subset_positions(ids, 99) == list(range(20))
