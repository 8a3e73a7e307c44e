"""Times a generation: how long the prompt took to read, how fast the tokens came after that."""

from __future__ import annotations

import time


class TokenClock:
    """Started when made; ``tick`` it for each token, and ``begin`` anew before it reads again.

    Attributes:
        tokens: ticks so far.
        turns: how often it was started.
        prefill_seconds: up to the first token behind each start.
        decode_seconds: the rest.
    """

    def __init__(self) -> None:
        self.tokens = self.turns = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._last = time.perf_counter()
        self.begin()

    def begin(self) -> None:
        """What comes before the next token is reading, and looking for what is read."""
        self._reading = True
        self.turns += 1

    def tick(self) -> None:
        """A token was chosen."""
        now = time.perf_counter()
        if self._reading:
            self.prefill_seconds += now - self._last
        else:
            self.decode_seconds += now - self._last
        self._last, self._reading = now, False
        self.tokens += 1

    def tokens_per_second(self, rows: int = 1) -> float:
        """Speed after the first token of each turn of ``rows``, which reading gives; 0 without further tokens."""
        further = self.tokens - rows * self.turns
        return further / self.decode_seconds if further > 0 and self.decode_seconds > 0 else 0.0
