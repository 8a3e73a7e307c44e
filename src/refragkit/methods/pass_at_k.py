"""pass@k: how likely one of k samples solves a prompt.

Source: Chen et al. 2021 (arXiv 2107.03374), section 2.1, equation 1: with n samples of which c are right,
``1 - C(n - c, k) / C(n, k)`` is unbiased, where the share of solved groups of k would not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The estimate for one prompt.

    Args:
        n: samples.
        correct: how many of them are right.
        k: tries.

    Raises:
        ValueError: not 0 <= correct <= n or not 1 <= k <= n.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k: expected 0 <= correct <= n and 1 <= k <= n, got {correct=}, {n=}, {k=}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def mean_pass_at_k(n: int, correct: Sequence[int]) -> dict[int, float]:
    """The mean over prompts for k = 1, 2, 4, ... and n itself.

    Args:
        n: samples of each prompt.
        correct: how many of them are right, for each prompt; not empty.
    """
    ks = sorted({n, *(2**i for i in range(n.bit_length()) if 2**i <= n)})
    return {k: sum(pass_at_k(n, c, k) for c in correct) / len(correct) for k in ks}
