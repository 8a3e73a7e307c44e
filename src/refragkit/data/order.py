"""Which examples batch number i of a run holds: a pure function of (seed, i).

Nothing depends on how far a loader has run, so a resumed run needs its step number only, and ranks that
ask for the same batch get the same one.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache


@lru_cache(maxsize=4)
def _epoch_permutation(seed: int, epoch: int, n_examples: int) -> tuple[int, ...]:
    # Hashed, so that neighbouring seeds and epochs have nothing in common. `random.Random` keeps its
    # sequence across Python versions and platforms.
    digest = hashlib.sha256(f"refragkit order {seed} {epoch}".encode()).digest()
    permutation = list(range(n_examples))
    random.Random(int.from_bytes(digest, "little")).shuffle(permutation)
    return tuple(permutation)


def batch_indices(seed: int, index: int, n_examples: int, batch_size: int) -> list[int]:
    """The examples of batch ``index``.

    Epochs are independent permutations laid end to end; a batch may cross from one into the next, so every
    batch is full and every example is seen once per epoch.

    Args:
        seed: of the run.
        index: of the batch, from 0, without end.
        n_examples: how many examples there are.
        batch_size: length of the result.

    Raises:
        ValueError: a negative index, or no examples, or an empty batch.
    """
    if index < 0 or n_examples < 1 or batch_size < 1:
        raise ValueError(
            "batch_indices: expected index >= 0, n_examples >= 1 and batch_size >= 1, got "
            f"index={index}, n_examples={n_examples}, batch_size={batch_size}"
        )
    positions = range(index * batch_size, (index + 1) * batch_size)
    return [_epoch_permutation(seed, p // n_examples, n_examples)[p % n_examples] for p in positions]
