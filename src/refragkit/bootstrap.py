"""Bootstrap intervals: how far a mean over questions would move with other questions of the same kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BLOCK_ELEMENTS = 1 << 22  # drawn at once, which bounds memory


def bootstrap_interval(
    values: Sequence[float], samples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean.

    The resamples depend on the number of values and the seed only: measures of the same questions are resampled
    together. Where all values are equal the interval has no width, however few they are.

    Args:
        values: one for each question, at least one.
        samples: resamples, at least 1.
        seed: of the resampling.
        level: share of the resampled means inside.

    Returns:
        (low, high).

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK_ELEMENTS // len(data))
    means = [
        data[generator.integers(0, len(data), (min(block, samples - start), len(data)))].mean(axis=1)
        for start in range(0, samples, block)
    ]
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)
