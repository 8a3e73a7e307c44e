"""The text of a completion while it is generated: handed on as it comes, ended at a stop string.

A stop string is found in the text, not among the tokens, so it may begin and end in the middle of tokens. While
the end of the text could still become a stop string it is held back: nobody sees half of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.generation.engine import Completion
from refragkit.generation.incremental_decoder import IncrementalDecoder


class TextStream:
    """Collects one completion.

    Args:
        tokenizer: of the model.
        stop: strings that end the text; the one that is complete first does (of several, the longest), and is left
            out with all that follows.
        write: called with each piece of text as soon as it is certain; None only collects.

    Attributes:
        text: what was handed on so far.
        stopped: a stop string was found.

    Raises:
        ConfigError: an empty stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), write: Callable[[str], object] | None = None
    ) -> None:
        if "" in stop:
            raise ConfigError("stop: expected strings of at least one character, got an empty one.")
        self.text = ""
        self.stopped = False
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = tuple(stop)
        self._write = write
        self._held = ""

    def push(self, token_id: int) -> bool:
        """Add a token; returns whether the text has ended."""
        self._take(self._decoder.push(token_id))
        return self.stopped

    def finish(self) -> str:
        """Hand on what was held back and return the whole text."""
        self._take(self._decoder.finish())
        self._hand_on(len(self._held))
        return self.text

    def _take(self, piece: str) -> None:
        if self.stopped or not piece:
            return
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)[1]]
        self._hand_on(len(self._held) - self._undecided())

    def _undecided(self) -> int:
        """Characters at the end of the held text that a stop string may begin with."""
        if self.stopped:
            return 0
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _hand_on(self, length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        if piece and self._write is not None:
            self._write(piece)


def ended_by(completion: Completion) -> str:
    """Why a completion whose listener was a `TextStream` ended: ``stop_token``, ``stop_string``, ``max_new_tokens``."""
    if completion.finished:
        return "stop_token"
    return "stop_string" if completion.interrupted else "max_new_tokens"


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    r"""The stop strings of a configuration: none, one or several, in which ``\n``, ``\t`` and ``\\`` are escapes.

    Raises:
        ConfigError: an empty one, which would stop at once.
    """
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    if "" in strings:
        raise ConfigError(
            "stop: expected strings of at least one character, got an empty one; stop=null stops nowhere"
        )
    escapes = {"n": "\n", "t": "\t", "\\": "\\"}
    return tuple(re.sub(r"\\([nt\\])", lambda m: escapes[m.group(1)], text) for text in strings)
