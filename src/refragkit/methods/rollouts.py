"""Rollouts: questions are read, searched for and answered, a whole batch at a time, and nothing is read twice.

With ``retriever.planner=model`` the model works live: it reads the question (and the documents of a first search that
asks the question, unless ``first_query`` leaves that to it), writes ``<|search|> query``, receives the hop's documents,
and so on up to ``max_hops``, then answers. Every turn is one batched generation and every hop one batched search over
all questions that are still under way. The samples of one question share what was read before they part: their state is
forked. Each turn goes on from the state of the turn before, and only new tokens are read.

The other planners (``expand``, ``gold``, ...) write the queries themselves; all documents are there before the model
reads, and the samples of a question share the whole prompt.

A search that finds nothing new, or was made before, is the last one. A model that searches where it has to answer has
given no answer.

Room: with H hops allowed, the documents of each hop may take an Hth of what question, turns and headers leave of
``max_seq_len``, and more where earlier hops took less. What was read can't be cut later, so that nothing ever is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

from refragkit.data.conversation import (
    Rendered,
    conversation_from_hops,
    prepare_follow_up,
    prepare_prompt,
    read_turn,
    search_turn,
)
from refragkit.generation.concatenate import concatenate_states
from refragkit.generation.engine import Completion, GenerationConfig, generate, generate_with_state
from refragkit.methods.answers import PREFILL_TOKENS
from refragkit.retrievers.planners.model import ModelPlanner
from refragkit.seeding import derive_seed
from refragkit.types import Conversation, Hit, Hop, Message, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.methods.episodes import EpisodeBuilder
    from refragkit.models.base import SequenceModel
    from refragkit.models.state import ModelState
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.retrievers.planners.base import Trail

Ended = Literal["end_token", "stop_string", "max_new_tokens", "no_answer", "too_long"]


@dataclass(slots=True)
class Rollout:
    """One run through a question.

    Attributes:
        question: what was asked.
        hops: every search, the last one too where it found nothing new.
        token_ids: everything read and written, in order; empty where the question didn't fit.
        written: for each token, whether the model wrote it.
        logprobs: of the written tokens, in order, under the model that wrote them (temperature 1), in nats.
        prompt_tokens: tokens before the first turn of the model, the same for all samples of a question.
        text: the answer without special tokens; empty where the run ended without one.
        ended: by the end token; by the listener; by running out of tokens in the answer; without an answer, because the
            last turn searched again; or because what had to be read didn't fit.
        searches: queries that the model wrote.
        cut_turns: its turns, queries and answer, that ran out of tokens.
        shortened_documents: documents that lost their end.
        left_out_documents: documents that were left out whole.
        tokens_read: tokens that went through the model for it. What a group shares counts for its first rollout.
        tokens_reread: as many as would have without any state kept between turns or shared between samples.
        first_token_seconds: of each turn, from when its batch began to read to its first token.
    """

    question: Question
    hops: tuple[Hop, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    text: str = ""
    ended: Ended = "too_long"
    searches: int = 0
    cut_turns: int = 0
    shortened_documents: int = 0
    left_out_documents: int = 0
    tokens_read: int = 0
    tokens_reread: int = 0
    first_token_seconds: list[float] = field(default_factory=list)

    @property
    def documents_cut(self) -> int:
        """Documents that were shortened or left out."""
        return self.shortened_documents + self.left_out_documents

    @property
    def turn_starts(self) -> list[int]:
        """How many tokens stand in front of each turn of the model."""
        return [n for n, (before, now) in enumerate(pairwise((False, *self.written))) if now and not before]

    def as_example(self) -> Rendered:
        """Everything in order, of which what the model wrote is learnt."""
        return Rendered(list(self.token_ids), list(self.written))


@dataclass(slots=True)
class Rollouts:
    """The rollouts of a batch and what they cost.

    Attributes:
        groups: ``[question][sample]``.
        turns: batched generations.
        generate_seconds: in the model.
        retrieve_seconds: in the retriever.
    """

    groups: list[list[Rollout]]
    turns: int = 0
    generate_seconds: float = 0.0
    retrieve_seconds: float = 0.0

    @property
    def all(self) -> list[Rollout]:
        """Question by question, sample by sample."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def tokens_read(self) -> int:
        """Real tokens that went through the model."""
        return sum(rollout.tokens_read for rollout in self.all)

    @property
    def tokens_reread(self) -> int:
        """As many as would have without any state kept between turns or shared between samples."""
        return sum(rollout.tokens_reread for rollout in self.all)


TurnListener = Callable[[Rollout, int], bool]
"""Called as ``listener(rollout, token_id)`` for each token as it is written, before the rollout holds any of its turn.
What it returns says whether the turn ends here. Greedy samples that have not parted are heard of once, as the first."""


def first_written_hop(episodes: EpisodeBuilder) -> int | None:
    """The number of the first hop whose query is the model's to write; None where none is."""
    if episodes.retriever is None or not isinstance(episodes.retriever.planner, ModelPlanner):
        return None
    return 1 if episodes.retriever.planner.first_query == "model" else 2


def roll_out(
    model: SequenceModel,
    tokenizer: Tokenizer,
    episodes: EpisodeBuilder,
    questions: Sequence[Question],
    *,
    group_size: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    return_logprobs: bool = False,
    prefill_tokens: int = PREFILL_TOKENS,
    listener: TurnListener | None = None,
) -> Rollouts:
    """Answer each question ``group_size`` times, with searches on the way.

    Args:
        model: what reads, searches and answers; in eval mode meanwhile, and without gradients.
        tokenizer: the model's.
        episodes: retriever, context length, tokens of a turn (``max_new_tokens``), tokens of a document.
        questions: N questions.
        group_size: G rollouts of each.
        temperature: 0 is greedy, and then all samples are the same.
        top_p: sample from the fewest likeliest tokens that hold this much probability.
        top_k: sample from this many of the likeliest tokens; 0 from all.
        seed: of the sampling.
        return_logprobs: keep the log-probability of each written token.
        prefill_tokens: at most so many tokens are read at once, which bounds memory.
        listener: hears of every token.
    """
    config = GenerationConfig(episodes.max_new_tokens, temperature, top_p, top_k, (tokenizer.end_id,))
    work = _Work(
        model, tokenizer, episodes, group_size, config, seed, return_logprobs, prefill_tokens, listener
    )
    retriever = episodes.retriever
    if retriever is not None and isinstance(retriever.planner, ModelPlanner):
        return work.live(questions, retriever, retriever.planner)
    return work.given(questions)


@dataclass(slots=True, eq=False)
class _Row:
    """A rollout under way."""

    rollout: Rollout
    place: int = -1  # its row in the state after its last turn
    unread: list[int] = field(default_factory=list)  # what its next turn begins with
    query: str = ""  # what it has just asked for
    ended_turn: bool = True  # whether its last turn wrote the end token
    must_answer: bool = False
    done: bool = False

    def stop(self, ended: Ended, text: str = "") -> None:
        self.rollout.ended, self.rollout.text, self.done = ended, text, True


class _Work:
    """One batch of rollouts."""

    def __init__(
        self,
        model: SequenceModel,
        tokenizer: Tokenizer,
        episodes: EpisodeBuilder,
        group_size: int,
        config: GenerationConfig,
        seed: int,
        return_logprobs: bool,
        prefill_tokens: int,
        listener: TurnListener | None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.episodes = episodes
        self.group_size = group_size
        self.config = config
        self.seed = seed
        self.return_logprobs = return_logprobs
        self.prefill_tokens = prefill_tokens
        self.listener = listener
        self.result = Rollouts([])
        self.state: ModelState | None = None

    # --- queries of a planner that needs no model -------------------------------------------------------------

    def given(self, questions: Sequence[Question]) -> Rollouts:
        """All documents first, then the answers."""
        started = time.perf_counter()
        hops = self.episodes.retrieve(questions)
        self.result.retrieve_seconds += time.perf_counter() - started
        groups = self._groups(questions)
        for group, question, found in zip(groups, questions, hops, strict=True):
            self._begin(group, found, self.episodes.prepare(question, found))
        return self._finish(groups)

    # --- queries of the model ----------------------------------------------------------------------------------

    def live(
        self, questions: Sequence[Question], retriever: MultiHopRetriever, planner: ModelPlanner
    ) -> Rollouts:
        """Turn by turn and hop by hop."""
        self.max_hops = retriever.max_hops
        closing, opening = self._follow_up("", (), sys.maxsize)
        self.bare_hop_tokens = len(closing) + len(opening.input_ids)
        self.bare_opening_tokens = len(opening.input_ids)
        groups = self._groups(questions)
        waiting: dict[str, list[list[_Row]]] = {}
        for group, question in zip(groups, questions, strict=True):
            waiting.setdefault(question.id, []).append(group)

        def proceed(trails: Sequence[Trail]) -> list[_Row]:
            """The rows of trails, ready for their next turn."""
            searched = time.perf_counter() - self.searching_since
            self.result.retrieve_seconds += searched
            self.search_seconds = searched / max(
                1, sum(row.place >= 0 for row in chain(*groups) if not row.done)
            )
            new: dict[str, list[Trail]] = {}
            for trail in trails:
                if trail.memory is None:
                    new.setdefault(trail.question.id, []).append(trail)
                else:
                    self._go_on(trail.memory, trail.hops)
            for row in chain(*groups):
                if row.place >= 0 and not row.unread:  # its search found nothing new: it left the walk
                    self._go_on(row, row.rollout.hops)
            for question_id, alike in new.items():
                # The samples of a question set out together, and until then they are the same
                for n, group in enumerate(waiting.pop(question_id)):
                    mine = alike[n * self.group_size : (n + 1) * self.group_size]
                    for trail, row in zip(mine, group, strict=True):
                        trail.memory = row
                    self._set_out(group, mine[0])
            return [trail.memory for trail in trails]

        def write(trails: Sequence[Trail]) -> list[str | None]:
            rows = proceed(trails)
            self._turn(groups, last=False)
            self.searching_since = time.perf_counter()
            return [None if row.done else row.query for row in rows]

        self.searching_since = time.perf_counter()
        with planner.written_by(write):
            trails = retriever.walk([q for q in questions for _ in range(self.group_size)])
        # Whoever asked last, or found nothing to begin with, answers now
        proceed(trails)
        return self._finish(groups)

    def _set_out(self, group: list[_Row], trail: Trail) -> None:
        """Give a group its prompt: the question, and what a first search found that the model didn't ask for."""
        question, hops = trail.question, tuple(trail.hops)
        bare = self._prompt(question, (), sys.maxsize)
        later = self.max_hops - len(hops)
        room = self._room(len(bare.input_ids), later)
        if room < 0:
            prompt = Rendered([], [], dropped="too_long")
        elif not hops:
            prompt = bare
        else:
            prompt = self._prompt(question, hops, len(bare.input_ids) + room // (later + 1))
        self._begin(group, hops, prompt)

    def _room(self, read_tokens: int, later_hops: int) -> int:
        """Tokens left for the documents of this hop and of later ones, behind all turns and headers."""
        turns = (later_hops + 1) * self.episodes.max_new_tokens
        return self.episodes.max_seq_len - read_tokens - turns - later_hops * self.bare_hop_tokens

    def _go_on(self, row: _Row, hops: Sequence[Hop]) -> None:
        """Give a row that asked what was found, if it has not answered."""
        if row.done:
            return
        rollout = row.rollout
        number = len(rollout.hops) + 1
        hop = hops[number - 1] if len(hops) >= number else Hop(number, row.query, (), ())
        # The walk counts what the model took to write the query too
        hop = replace(hop, latency_seconds=self.search_seconds)
        rollout.hops = (*rollout.hops, hop)
        row.must_answer = number == self.max_hops or not hop.new_documents
        later = 0 if row.must_answer else self.max_hops - number
        room = self._room(len(rollout.token_ids) + self.bare_hop_tokens, later)
        closing, opening = self._follow_up(
            row.query, hop.new_documents, self.bare_opening_tokens + room // (later + 1)
        )
        rollout.shortened_documents += opening.truncated_documents
        rollout.left_out_documents += opening.left_out_documents
        if opening.dropped:
            row.stop("too_long")
        row.unread = [*([] if row.ended_turn else closing), *opening.input_ids]

    def _prompt(self, question: Question, hops: Sequence[Hop], max_tokens: int) -> Rendered:
        return prepare_prompt(
            self.episodes.with_front(
                question, conversation_from_hops(question.question, hops, conversation_id=question.id)
            ),
            self.tokenizer,
            max_tokens,
            0,
            max_document_tokens=self.episodes.max_document_tokens,
        )

    def _follow_up(self, query: str, documents: Sequence[Hit], max_tokens: int) -> tuple[list[int], Rendered]:
        """What closes a turn that searched, and what the model reads next."""
        messages = (
            Message("user", "question"),
            search_turn(query),
            Message("retrieval", hop=2, query=query, documents=tuple(documents)),
        )
        return prepare_follow_up(
            Conversation("rollout", messages),
            self.tokenizer,
            max_tokens,
            max_document_tokens=self.episodes.max_document_tokens,
        )

    # --- turns -------------------------------------------------------------------------------------------------

    def _groups(self, questions: Sequence[Question]) -> list[list[_Row]]:
        return [[_Row(Rollout(question)) for _ in range(self.group_size)] for question in questions]

    def _begin(self, group: list[_Row], hops: tuple[Hop, ...], prompt: Rendered) -> None:
        for row in group:
            row.rollout.hops = hops
            row.rollout.prompt_tokens = len(prompt.input_ids)
            row.rollout.shortened_documents = prompt.truncated_documents
            row.rollout.left_out_documents = prompt.left_out_documents
            row.unread = prompt.input_ids
            if not prompt.input_ids:
                row.stop("too_long")

    def _turn(self, groups: Sequence[Sequence[_Row]], last: bool) -> None:
        """Everybody who has something to read and has not answered reads it, and writes until the end token."""
        fresh = [group for group in groups if group[0].place < 0 and group[0].unread and not group[0].done]
        going = [row for group in groups for row in group if row.place >= 0 and row.unread and not row.done]
        states: list[ModelState] = []
        if fresh:
            states += self._generate([row for group in fresh for row in group], self.group_size, None, last)
        if going:
            assert self.state is not None
            state = self.state.select([row.place for row in going])
            offset = states[0].batch_size if states else 0
            states += self._generate(going, 1, state, last, offset)
        self.state = concatenate_states(states) if states else None
        self.result.turns += bool(fresh or going)

    def _generate(
        self, rows: Sequence[_Row], samples: int, state: ModelState | None, last: bool, offset: int = 0
    ) -> list[ModelState]:
        """One batched generation; rows that share a prompt are neighbours.

        Returns:
            The new state in a list; an empty one after the last turn.
        """
        prompts = [row.unread for row in rows[::samples]]
        seconds: dict[int, float] = {}

        def hear(prompt: int, sample: int, token_id: int) -> bool:
            row = prompt * samples + sample
            seconds.setdefault(row, time.perf_counter() - started)
            return self.listener is not None and self.listener(rows[row].rollout, token_id)

        settings: dict[str, Any] = {
            "pad_id": self.tokenizer.pad_id,
            "seed": derive_seed(self.seed, "turn", self.result.turns, samples),
            "num_samples": samples,
            "state": state,
            "return_logprobs": self.return_logprobs,
            "max_batch_tokens": self.prefill_tokens,
            "on_token": hear,
        }
        states: list[ModelState] = []
        started = time.perf_counter()
        if last:  # nobody goes on from here: the last token need not be read
            completions = generate(self.model, prompts, self.config, **settings)
        else:
            generated = generate_with_state(self.model, prompts, self.config, **settings)
            completions, states = generated.completions, [generated.state]
        self.result.generate_seconds += time.perf_counter() - started
        decoded = 1 if self.config.temperature == 0 else samples  # greedy samples are decoded once
        for n, (row, completion) in enumerate(zip(rows, chain(*completions), strict=True)):
            row.place = offset + n
            first = n - n % samples
            row.rollout.first_token_seconds.append(seconds.get(n, seconds[first]))
            row.rollout.tokens_read += len(row.unread) if n == first else 0
            row.rollout.tokens_read += len(completion.token_ids) - last if n - first < decoded else 0
            self._hear(row, completion, last)
        return states

    def _hear(self, row: _Row, completion: Completion, last: bool) -> None:
        """Add a turn to a rollout and see whether it asks or answers."""
        rollout, ids = row.rollout, completion.token_ids
        rollout.token_ids += [*row.unread, *ids]
        rollout.written += [False] * len(row.unread) + [True] * len(ids)
        rollout.logprobs += completion.logprobs or ()
        row.unread = []
        rollout.tokens_reread += len(rollout.token_ids) - 1
        row.ended_turn = completion.finished
        rollout.cut_turns += not (completion.finished or completion.interrupted)
        query, text = read_turn(completion.content_ids, self.tokenizer)
        if query is None:
            stopped: Ended = "stop_string" if completion.interrupted else "max_new_tokens"
            row.stop("end_token" if completion.finished else stopped, text)
        elif last or row.must_answer:
            row.stop("no_answer")
        else:
            row.query = query
            rollout.searches += 1

    def _finish(self, groups: list[list[_Row]]) -> Rollouts:
        self._turn(groups, last=True)
        self.result.groups = [[row.rollout for row in group] for group in groups]
        return self.result
