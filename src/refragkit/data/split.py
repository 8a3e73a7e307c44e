"""Deterministic splits and subsets, from ids and contents only: no seed, no dependence on file order."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from refragkit.types import Question

T = TypeVar("T", bound=Hashable)


def id_rank(example_id: str) -> str:
    """A fixed pseudo-random order of ids."""
    return hashlib.sha256(example_id.encode("utf-8")).hexdigest()


def subset_positions(ids: Sequence[str], n: int | None) -> list[int]:
    """Positions of ``n`` of the ids (None: all), in file order; a smaller subset is part of a larger one."""
    if n is None or n >= len(ids):
        return list(range(len(ids)))
    return sorted(sorted(range(len(ids)), key=lambda i: id_rank(ids[i]))[:n])


def connected_groups(keys: Sequence[Iterable[Hashable]]) -> list[list[int]]:
    """Positions joined when they share a key, directly or through others (union-find)."""
    parent = list(range(len(keys)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[Hashable, int] = {}
    for i, own_keys in enumerate(keys):
        for key in own_keys:
            parent[root(i)] = root(owner.setdefault(key, i))
    groups: dict[int, list[int]] = {}
    for i in range(len(keys)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def hold_out(
    ids: Sequence[str], keys: Sequence[Iterable[Hashable]], n_validation: int
) -> tuple[list[int], list[int]]:
    """Split so that no key is on both sides.

    Groups are taken whole, in the order of their smallest `id_rank`, while they fit.

    Args:
        ids: of the examples.
        keys: per example, what it must not share with the other side.
        n_validation: upper bound of the validation side.

    Returns:
        Positions (train, validation), each in file order.
    """
    groups = sorted(connected_groups(keys), key=lambda group: min(id_rank(ids[i]) for i in group))
    validation: list[int] = []
    for group in groups:
        if len(validation) + len(group) <= n_validation:
            validation += group
    held = set(validation)
    return [i for i in range(len(ids)) if i not in held], sorted(held)


def shared_gold(train: Sequence[Question], validation: Sequence[Question]) -> set[str]:
    """Passages that are gold for a question of either side."""
    return {i for q in train for i in q.supporting_ids} & {i for q in validation for i in q.supporting_ids}
