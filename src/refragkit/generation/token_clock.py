"""Times a generation: how long the prompt took to read, how fast the tokens came after that."""

from __future__ import annotations

import time


class TokenClock:
    """Started when made; ``tick`` it for each token.

    Attributes:
        tokens: ticks so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._started = self._last = time.perf_counter()
        self._first: float | None = None

    def tick(self) -> None:
        """A token was chosen."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.tokens += 1

    @property
    def prefill_seconds(self) -> float:
        """From the start to the first token."""
        return (self._first or self._last) - self._started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self._last - (self._first or self._last)

    def tokens_per_second(self, rows: int = 1) -> float:
        """Speed after the first token of each of ``rows``, which the prefill gives; 0 without further tokens."""
        further = self.tokens - rows
        return further / self.decode_seconds if further > 0 and self.decode_seconds > 0 else 0.0
