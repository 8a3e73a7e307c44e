"""Token ids to text, piece by piece: what was given out is never taken back.

A token may end in the middle of a character: its bytes decode to U+FFFD until the next tokens complete it. Such
an end is held back, but never for long: a character has at most four bytes, so whatever stands before the last
three replacement characters is final. A model that writes bytes that are no text is streamed, too.
"""

from __future__ import annotations

from refragkit.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_OPEN_BYTES = 3
"""An incomplete UTF-8 character has at most this many bytes."""


class IncrementalDecoder:
    """Decodes one growing sequence; the pieces joined are ``tokenizer.decode`` of all its ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # What is decoded again each time: the tokens of the last piece, since some decoders drop a space at the
        # start of whatever they are given, and those after it.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._given = 0  # characters of the window that were given out

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now, which may be empty."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending)
        open_end = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._pending) > _MAX_OPEN_BYTES:
            open_end = min(open_end, _MAX_OPEN_BYTES)
        piece = text[self._given : len(text) - open_end]
        self._given += len(piece)
        if open_end == 0 and piece:
            self._context, self._pending = self._pending, []
            self._given = len(self._tokenizer.decode(self._context))
        return piece

    def finish(self) -> str:
        """The rest: an incomplete character at the end is given out as U+FFFD."""
        text = self._tokenizer.decode(self._context + self._pending)
        piece = text[self._given :]
        self._given += len(piece)
        return piece
