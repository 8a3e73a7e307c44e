"""How ``evaluate=rag`` gets its answers: behind documents that were found beforehand, or from live rollouts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from refragkit.data.conversation import read_turn
from refragkit.errors import ConfigError
from refragkit.tasks.rag.prompts import build_prompt, in_front
from refragkit.types import Hop, Question

if TYPE_CHECKING:
    from refragkit.data.conversation import Rendered
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.generation.state_cache import StateCache
    from refragkit.methods.answers import Answer
    from refragkit.methods.rollouts import Rollout
    from refragkit.models.base import SequenceModel
    from refragkit.models.state import ModelState
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.retrievers.planners.model import ModelPlanner
    from refragkit.tasks.rag.settings import Settings

log = logging.getLogger("refragkit")

_SECONDS_BETWEEN_LINES = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answered:
    """One question and how it was answered.

    Attributes:
        hops: the searches.
        text: the answer; empty where there is none.
        prompt_ids: everything in front of the answer; empty where the question didn't fit.
        context_tokens: what the model has read when it writes behind the documents of hop 1, 2 and so on; a single
            value where there were no hops. The last one is the length of ``prompt_ids``.
        new_tokens: what it wrote, queries and answer.
        total_tokens: everything read and written.
        ended_by: ``end_token``, ``max_new_tokens``, ``no_answer`` (it searched where it had to answer) or ``too_long``.
        cut: whether one of its turns, a query or the answer, ran out of tokens.
        searches: queries that it wrote.
        shortened_documents: to fit.
        left_out_documents: to fit.
        tokens_read: tokens that went through the model.
        tokens_reread: as many as would have if each turn read everything in front of it again.
    """

    hops: tuple[Hop, ...]
    text: str
    prompt_ids: list[int]
    context_tokens: list[int]
    new_tokens: int
    total_tokens: int
    ended_by: str
    cut: bool
    searches: int
    shortened_documents: int
    left_out_documents: int
    tokens_read: int
    tokens_reread: int


@dataclass(slots=True)
class Answers:
    """All questions, answered.

    Attributes:
        answered: one for each question, in order.
        generate_seconds: of the batched generation.
        first_token_seconds: for some questions, asked alone: for each of ``context_tokens``, the time to the first
            token that the model writes there.
    """

    answered: list[Answered]
    generate_seconds: float
    first_token_seconds: list[list[float]] = field(default_factory=list)


# --- documents first ----------------------------------------------------------------------------------------


def answer_given(
    model: SequenceModel,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    hops: Sequence[tuple[Hop, ...]],
    settings: Settings,
    seed: int = 0,
    examples: Sequence[Question] = (),
    states: StateCache | None = None,
) -> Answers:
    """Answer greedily, in batches, behind documents that are there.

    Args:
        model: in eval mode, on its device.
        tokenizer: the model's.
        questions: at least one.
        hops: what was retrieved for each.
        settings: how to ask.
        seed: of shuffled documents.
        examples: see `build_prompt`.
        states: where reading goes on from; the timed questions are read whole.
    """
    # The prompt with the documents of the first n hops, for n = 0 .. last; the last one is what is asked.
    prompts = [
        [
            build_prompt(question, trail[:n], tokenizer, settings, seed, examples)
            for n in range(min(1, len(trail)), len(trail) + 1)
        ]
        for question, trail in zip(questions, hops, strict=True)
    ]
    started = time.perf_counter()
    begin = None
    if states is not None:
        begin = states.starter(model, tokenizer, [p[-1] for p in prompts], settings.prefill_tokens)
    answers = answer_all(model, tokenizer, [p[-1].input_ids for p in prompts], settings, begin)
    seconds = time.perf_counter() - started
    answered = [
        _given(trail, prompt, answer, tokenizer)
        for trail, prompt, answer in zip(hops, prompts, answers, strict=True)
    ]
    return Answers(answered, seconds, _first_token_seconds(model, tokenizer, questions, prompts, settings))


def _given(
    hops: tuple[Hop, ...], prompts: Sequence[Rendered], answer: Answer, tokenizer: Tokenizer
) -> Answered:
    prompt, written = prompts[-1], answer.token_ids
    ended = bool(written) and written[-1] == tokenizer.end_id
    searched = bool(written) and read_turn(written[:-1] if ended else written, tokenizer)[0] is not None
    ended_by = "end_token" if ended else "max_new_tokens"
    read = len(prompt) + len(written) - 1 if written else 0
    return Answered(
        hops=hops,
        text=answer.text,
        prompt_ids=prompt.input_ids,
        context_tokens=[len(p) for p in prompts],
        new_tokens=len(written),
        total_tokens=len(prompt) + len(written),
        ended_by="too_long" if prompt.dropped == "too_long" else "no_answer" if searched else ended_by,
        cut=bool(written) and not ended,
        searches=0,
        shortened_documents=prompt.truncated_documents,
        left_out_documents=prompt.left_out_documents,
        tokens_read=read,
        tokens_reread=read,
    )


def answer_all(
    model: SequenceModel,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    settings: Settings,
    begin: Callable[[Sequence[int]], ModelState | None] | None = None,
) -> list[Answer]:
    """Greedy answers in the order of the prompts; similar lengths share a batch of ``batch_tokens``.

    ``begin`` gives the state after the beginnings of a batch, see `refragkit.generation.state_cache`.
    """
    from refragkit.methods.answers import Answer, generate_answers

    answers = [Answer([], [], "") for _ in prompts]
    progress = _Progress(len(prompts))
    for batch in _batches([len(p) for p in prompts], settings.max_new_tokens, settings.batch_tokens):
        found = generate_answers(
            model,
            tokenizer,
            [prompts[i] for i in batch],
            settings.max_new_tokens,
            prefill_tokens=settings.prefill_tokens,
            state=None if begin is None else begin(batch),
        )
        for i, answer in zip(batch, found, strict=True):
            answers[i] = answer
        progress.add(len(batch))
    return answers


def _batches(lengths: Sequence[int], new_tokens: int, batch_tokens: int) -> list[list[int]]:
    """Positions of all prompts, the longest first, in batches of at most ``batch_tokens`` (one prompt at least)."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * (lengths[batches[-1][0]] + new_tokens) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _first_token_seconds(
    model: SequenceModel,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[Rendered]],
    settings: Settings,
) -> list[list[float]]:
    """For some questions, asked alone: seconds from the prompt to the first token, for each of its prompts."""
    from refragkit.methods.answers import generate_answers

    timed = []
    for i in _timed(questions, [bool(p[-1].input_ids) for p in prompts], settings.timed_questions):
        seconds = []
        for prompt in prompts[i]:
            started = time.perf_counter()
            generate_answers(model, tokenizer, [prompt.input_ids], 1, prefill_tokens=settings.prefill_tokens)
            seconds.append(time.perf_counter() - started)
        timed.append(seconds)
    return timed


def _timed(questions: Sequence[Question], fits: Sequence[bool], n: int) -> list[int]:
    """Positions of n questions that fit, the same ones in every run."""
    from refragkit.data.split import subset_positions

    fitting = [i for i, fit in enumerate(fits) if fit]
    return [fitting[i] for i in subset_positions([questions[i].id for i in fitting], n)] if n else []


# --- live -----------------------------------------------------------------------------------------------------


def check_live(settings: Settings) -> None:
    """Refuse what needs all documents at once.

    Raises:
        ConfigError: naming the keys.
    """
    unfit = {
        f"rag.order={settings.order}": settings.order != "question_first",
        "rag.shuffle_documents=true": settings.shuffle_documents,
        "rag.instruction": bool(settings.instruction),
    }
    problems = [key for key, wrong in unfit.items() if wrong]
    if problems:
        raise ConfigError(
            f"{' and '.join(problems)}: needs all documents at once, and with retriever.planner=model they come hop by"
            " hop behind the question; leave the default, or choose planner expand"
        )


def answer_live(
    model: SequenceModel,
    tokenizer: Tokenizer,
    retriever: MultiHopRetriever,
    planner: ModelPlanner,
    questions: Sequence[Question],
    settings: Settings,
    examples: Sequence[Question] = (),
) -> Answers:
    """Answer greedily from rollouts in which the model writes the queries, as training's evaluation does.

    Args:
        model: in eval mode, on its device.
        tokenizer: the model's.
        retriever: with its index open.
        planner: the retriever's.
        questions: at least one.
        settings: how to ask.
        examples: see `build_prompt`.

    Raises:
        ConfigError: a setting that needs all documents at once.
    """
    from refragkit.methods.episodes import EpisodeBuilder
    from refragkit.methods.rollouts import roll_out

    check_live(settings)
    planner.first_query = settings.first_query
    episodes = EpisodeBuilder(
        retriever,
        tokenizer,
        settings.max_seq_len,
        settings.max_new_tokens,
        settings.max_document_tokens,
        front=partial(in_front, settings=settings, examples=examples),
    )
    rollouts: list[Rollout] = []
    seconds, progress = 0.0, _Progress(len(questions))
    while len(rollouts) < len(questions):
        size = _next_batch([len(r.token_ids) for r in rollouts], settings)
        batch = questions[len(rollouts) : len(rollouts) + size]
        rolled = roll_out(model, tokenizer, episodes, batch, prefill_tokens=settings.prefill_tokens)
        rollouts += rolled.all
        seconds += rolled.generate_seconds
        progress.add(len(batch))
    timed = []
    for i in _timed(questions, [bool(r.token_ids) for r in rollouts], settings.timed_questions):
        alone = roll_out(model, tokenizer, episodes, [questions[i]], prefill_tokens=settings.prefill_tokens)
        timed.append(_behind_hops(alone.all[0], alone.all[0].first_token_seconds, settings))
    return Answers([_live(r, settings) for r in rollouts], seconds, timed)


def _next_batch(lengths: Sequence[int], settings: Settings) -> int:
    """How many questions to go on with: what fits if they get as long as the longest so far.

    How long a rollout gets shows only at its end, so the first batch expects the most.
    """
    return max(1, settings.batch_tokens // max(lengths, default=settings.max_seq_len))


def _live(rollout: Rollout, settings: Settings) -> Answered:
    starts = rollout.turn_starts
    prompt = rollout.token_ids[: starts[-1]] if starts else []
    return Answered(
        hops=rollout.hops,
        text=rollout.text,
        prompt_ids=prompt,
        context_tokens=_behind_hops(rollout, starts or [0], settings),
        new_tokens=sum(rollout.written),
        total_tokens=len(rollout.token_ids),
        ended_by=rollout.ended,
        cut=rollout.cut_turns > 0,
        searches=rollout.searches,
        shortened_documents=rollout.shortened_documents,
        left_out_documents=rollout.left_out_documents,
        tokens_read=rollout.tokens_read,
        tokens_reread=rollout.tokens_reread,
    )


def _behind_hops(rollout: Rollout, by_turn: list[T], settings: Settings) -> list[T]:
    """Of one value for each turn, those of the turns behind a hop; the only one where there was no hop."""
    before = int(settings.first_query == "model" and bool(rollout.hops))
    return by_turn[before:] or by_turn


class _Progress:
    """A line in the log now and then."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.shown = time.perf_counter()

    def add(self, n: int) -> None:
        """So many more are answered."""
        self.done += n
        if self.done < self.total and time.perf_counter() - self.shown > _SECONDS_BETWEEN_LINES:
            self.shown = time.perf_counter()
            log.info("answered %d of %d questions", self.done, self.total)
