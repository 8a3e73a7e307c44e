"""A conversation whose state is kept: each turn reads its new tokens only, however long the conversation is.

What the model has read is one growing sequence of tokens: the rendered turns, and between them its answers as it
wrote them, token by token. Reading that sequence again from the start gives the same state.

Differs: an answer is never encoded again from its text, which might split it into other tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refragkit.data.conversation import render_follow_up, render_prompt
from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.engine import GenerationConfig, generate_with_state
from refragkit.generation.text_stream import TextStream, ended_by
from refragkit.generation.token_clock import TokenClock
from refragkit.models.base import SequenceModel
from refragkit.models.state import ModelState
from refragkit.seeding import derive_seed
from refragkit.types import Conversation, Message


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the model.

    Attributes:
        text: without control tokens and without the stop string.
        token_ids: as generated.
        ended_by: as `refragkit.generation.text_stream.ended_by` says.
        read_tokens: new tokens that were read for it.
        clock: how long reading and writing took.
    """

    text: str
    token_ids: tuple[int, ...]
    ended_by: str
    read_tokens: int
    clock: TokenClock


class ChatSession:
    """A conversation with one model.

    Args:
        model: reads and writes.
        tokenizer: the model's.
        config: sampling; ``stop_ids`` must hold the tokenizer's end token and nothing else.
        system: text of a system turn in front, none if empty.
        stop: strings that end an answer. What the model wrote of a stop string stays in its state.
        seed: of the sampling; turn n of a conversation draws from a generator seeded by (seed, n).

    Attributes:
        messages: the turns so far.
        history_ids: every token that the state has read.
        turns: answers given since the start or the last reset.
    """

    def __init__(
        self,
        model: SequenceModel,
        tokenizer: Tokenizer,
        config: GenerationConfig,
        *,
        system: str = "",
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.system = system
        self.stop = tuple(stop)
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system turn."""
        self.messages = [Message("system", self.system)] if self.system else []
        self.history_ids: list[int] = []
        self.turns = 0
        self._state: ModelState | None = None
        self._closed = True

    def ask(self, text: str, write: Callable[[str], object] | None = None) -> Answer:
        """Add a user turn and let the model answer.

        Args:
            text: of the user turn.
            write: called with each piece of the answer as it is generated.

        Returns:
            The answer. If generation fails or is interrupted, the conversation stays as it was.
        """
        messages = [*self.messages, Message("user", text)]
        conversation = Conversation("chat", tuple(messages))
        if self._state is None:
            new = render_prompt(conversation, self.tokenizer, max_tokens=sys.maxsize, reserve_tokens=0)
        else:
            closing, opening = render_follow_up(conversation, self.tokenizer)
            new = opening if self._closed else closing + opening

        stream = TextStream(self.tokenizer, self.stop, write)
        clock = TokenClock()

        def hear(prompt: int, sample: int, token_id: int) -> bool:
            clock.tick()
            return stream.push(token_id)

        generated = generate_with_state(
            self.model,
            [new],
            self.config,
            pad_id=self.tokenizer.pad_id,
            seed=derive_seed(self.seed, "chat", self.turns),
            state=self._state,
            on_token=hear,
        )
        ((completion,),) = generated.completions
        answer = stream.finish()
        self.messages = [*messages, Message("assistant", answer)]
        self.history_ids += [*new, *completion.token_ids]
        self.turns += 1
        self._state = generated.state
        self._closed = completion.finished
        return Answer(
            text=answer,
            token_ids=completion.token_ids,
            ended_by=ended_by(completion),
            read_tokens=len(new),
            clock=clock,
        )
