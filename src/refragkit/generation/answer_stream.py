"""A turn of the model while it is written: an answer is handed on as it comes, a search is not.

A turn that searches says so at its beginning (`refragkit.data.conversation.read_turn`). With special tokens its first
one tells; with a chat template the first few do, and until they have, nothing is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refragkit.data.chat_template import SEARCH_PREFIX
from refragkit.data.conversation import read_turn
from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.text_stream import TextStream


class AnswerStream:
    """Collects one turn.

    Args:
        tokenizer: of the model.
        stop: strings that end an answer, as in `TextStream`; they don't end a query.
        write: called with each piece of an answer as soon as it is certain; None only collects.

    Attributes:
        searches: whether the turn is a search; None while that isn't certain.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), write: Callable[[str], object] | None = None
    ) -> None:
        self.searches: bool | None = None
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, stop, write)
        self._held: list[int] = []

    def push(self, token_id: int) -> bool:
        """Add a token; returns whether the answer has ended at a stop string."""
        if self.searches is None:
            self._held.append(token_id)
            self.searches = self._certain()
            return self._hand_on() if self.searches is False else False
        return False if self.searches else self._stream.push(token_id)

    def finish(self) -> str:
        """Hand on what was held back and return the answer; nothing where the turn is a search."""
        if self.searches is None:
            self.searches = False
            self._hand_on()
        return "" if self.searches else self._stream.finish()

    def _hand_on(self) -> bool:
        for token_id in self._held:
            self._stream.push(token_id)
        return self._stream.stopped

    def _certain(self) -> bool | None:
        if read_turn(self._held, self._tokenizer)[0] is not None:
            return True
        if not self._tokenizer.chat_template:
            return False
        text = self._tokenizer.decode(self._held).lstrip()
        return None if SEARCH_PREFIX.startswith(text) else False
