"""A conversation whose state is kept: each turn reads its new tokens only, however long the conversation is.

What the model has read is one growing sequence of tokens: the rendered turns, and between them its answers as it
wrote them, token by token. Reading that sequence again from the start gives the same state.

With a retriever, each question is searched for. Where the model writes the queries (``retriever.planner=model``) it may
search up to ``max_hops`` times before it answers, as in `refragkit.methods.rollouts`, which does the same for many
single questions at a time; here nothing is cut, and the conversation goes on from the state.

Differs: an answer is never encoded again from its text, which might split it into other tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refragkit.data.conversation import read_turn, render_follow_up, render_prompt, search_turn
from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.answer_stream import AnswerStream
from refragkit.generation.engine import GenerationConfig, generate_with_state
from refragkit.generation.text_stream import TextStream, ended_by
from refragkit.generation.token_clock import TokenClock
from refragkit.models.base import SequenceModel
from refragkit.models.state import ModelState
from refragkit.retrievers.planners.model import ModelPlanner
from refragkit.seeding import derive_seed
from refragkit.types import Conversation, Hop, Message, Question

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.retrievers.planners.base import Trail


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answered.

    Attributes:
        text: without control tokens and without the stop string.
        token_ids: as generated, those of its queries included.
        ended_by: as `refragkit.generation.text_stream.ended_by` says, or ``no_answer`` where it searched once more than
            it may.
        read_tokens: new tokens that were read for it.
        clock: how long reading and writing took.
        hops: its searches, a last one too that found nothing new.
    """

    text: str
    token_ids: tuple[int, ...]
    ended_by: str
    read_tokens: int
    clock: TokenClock
    hops: tuple[Hop, ...] = ()


class ChatSession:
    """A conversation with one model.

    Args:
        model: reads and writes.
        tokenizer: the model's.
        config: sampling; ``stop_ids`` must hold the tokenizer's end token and nothing else.
        system: text of a system turn in front, none if empty.
        stop: strings that end an answer. What the model wrote of a stop string stays in its state.
        seed: of the sampling; turn n of a conversation draws from a generator seeded by (seed, n).
        retriever: with its index open; None answers without documents.

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
        retriever: MultiHopRetriever | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.system = system
        self.stop = tuple(stop)
        self.seed = seed
        self.retriever = retriever
        self.searches = retriever is not None and isinstance(retriever.planner, ModelPlanner)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system turn."""
        self.messages = [Message("system", self.system)] if self.system else []
        self.history_ids: list[int] = []
        self.turns = 0
        self._state: ModelState | None = None
        self._closed = True

    def ask(
        self,
        text: str,
        write: Callable[[str], object] | None = None,
        on_hop: Callable[[Hop], object] | None = None,
    ) -> Answer:
        """Add a user turn and let the model answer.

        Args:
            text: of the user turn.
            write: called with each piece of the answer as it is generated.
            on_hop: called with each search when its documents are there.

        Returns:
            The answer. If generation fails or is interrupted, the conversation stays as it was.
        """
        exchange = _Exchange(self, [*self.messages, Message("user", text)], write, on_hop)
        if self.retriever is None:
            exchange.turn()
        elif isinstance(self.retriever.planner, ModelPlanner):
            exchange.search_live(text, self.retriever, self.retriever.planner)
        else:
            (hops,) = self.retriever.retrieve([Question("chat", text, ())])
            exchange.show(hops)
            exchange.turn()
        self.messages = exchange.messages
        self.history_ids += exchange.token_ids
        self.turns += 1
        self._state = exchange.state
        self._closed = exchange.closed
        return exchange.answer()


class _Exchange:
    """One question and all turns up to the answer, on a copy of the conversation.

    Args:
        session: the conversation so far.
        messages: with the new user turn.
        write: hears of the answer.
        on_hop: hears of searches.
    """

    def __init__(
        self,
        session: ChatSession,
        messages: list[Message],
        write: Callable[[str], object] | None,
        on_hop: Callable[[Hop], object] | None,
    ) -> None:
        self.session = session
        self.messages = messages
        self.write = write
        self.on_hop = on_hop
        self.state = session._state
        self.closed = session._closed
        self.token_ids: list[int] = []  # read and written
        self.written: list[int] = []
        self.hops: list[Hop] = []
        self.generations = 0
        self.clock = TokenClock()
        self.text = self.ended_by = ""
        self.query: str | None = None  # of the last turn, where it searched

    def search_live(self, text: str, retriever: MultiHopRetriever, planner: ModelPlanner) -> None:
        """Let the model search up to ``max_hops`` times, then answer."""

        def write(trails: Sequence[Trail]) -> list[str | None]:
            (trail,) = trails
            self.show(trail.hops[len(self.hops) :])
            self.turn()
            return [self.query]

        with planner.written_by(write):
            (trail,) = retriever.walk([Question("chat", text, ())])
        self.show(trail.hops[len(self.hops) :])
        if self.generations and self.query is None:
            return
        if self.query is not None and self.messages[-1].role == "assistant":  # its search found nothing new
            self.show([Hop(len(self.hops) + 1, self.query, (), ())])
        self.turn()
        if self.query is not None:
            self.ended_by = "no_answer"

    def show(self, hops: Sequence[Hop]) -> None:
        """Let the model read what was found."""
        for hop in hops:
            self.hops.append(hop)
            if hop.new_documents or self.messages[-1].role == "assistant":
                self.messages.append(
                    Message("retrieval", hop=hop.hop, query=hop.query, documents=hop.new_documents)
                )
            if self.on_hop is not None:
                self.on_hop(hop)

    def turn(self) -> None:
        """Read what is new and write a turn: an answer, or the next query."""
        session = self.session
        conversation = Conversation("chat", tuple(self.messages))
        if self.state is None:
            new = render_prompt(conversation, session.tokenizer, max_tokens=sys.maxsize, reserve_tokens=0)
        else:
            closing, opening = render_follow_up(conversation, session.tokenizer)
            new = opening if self.closed else closing + opening
        kind = AnswerStream if session.searches else TextStream
        stream = kind(session.tokenizer, session.stop, self.write)
        if self.generations:
            self.clock.begin()

        def hear(prompt: int, sample: int, token_id: int) -> bool:
            self.clock.tick()
            return stream.push(token_id)

        again = (self.generations,) if self.generations else ()
        generated = generate_with_state(
            session.model,
            [new],
            session.config,
            pad_id=session.tokenizer.pad_id,
            seed=derive_seed(session.seed, "chat", session.turns, *again),
            state=self.state,
            on_token=hear,
        )
        ((completion,),) = generated.completions
        self.text = stream.finish()
        self.query = None
        if isinstance(stream, AnswerStream) and stream.searches:
            self.query = read_turn(completion.content_ids, session.tokenizer)[0]
        self.messages.append(
            Message("assistant", self.text) if self.query is None else search_turn(self.query)
        )
        self.token_ids += [*new, *completion.token_ids]
        self.written += completion.token_ids
        self.state = generated.state
        self.closed = completion.finished
        self.ended_by = ended_by(completion)
        self.generations += 1

    def answer(self) -> Answer:
        """What came of it."""
        return Answer(
            text=self.text,
            token_ids=tuple(self.written),
            ended_by=self.ended_by,
            read_tokens=len(self.token_ids) - len(self.written),
            clock=self.clock,
            hops=tuple(self.hops),
        )
