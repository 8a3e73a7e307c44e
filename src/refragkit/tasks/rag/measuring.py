"""What ``evaluate=rag`` measures: answers, scores with intervals, and what they cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refragkit.bootstrap import bootstrap_interval
from refragkit.errors import DataError
from refragkit.rewards.relevance import support_recall
from refragkit.seeding import derive_seed
from refragkit.tasks.evaluate_retrieval import Row, question_groups
from refragkit.tasks.rag.prompts import build_prompt
from refragkit.tasks.rag.tables import SCORES
from refragkit.types import Hop, Question

if TYPE_CHECKING:
    from refragkit.data.conversation import Rendered
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.methods.answers import Answer
    from refragkit.models.base import SequenceModel
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.rewards.base import Reward
    from refragkit.tasks.rag.settings import Settings

log = logging.getLogger("refragkit")

_SECONDS_BETWEEN_LINES = 20


@dataclass(frozen=True, slots=True)
class RagEvaluation:
    """What was measured.

    Attributes:
        rows: one per group: ``all``, each ``metadata["dataset"]`` where there are several, each hop count
            (``2 hops``). Every row has ``group``, ``questions`` and means over its questions:

            - ``f1``, ``em`` and, where supporting passages are annotated, ``support_recall``, each with the ends of its
              95% bootstrap interval (``f1_low``, ``f1_high``); ``support_recall_hop_<n>`` after hop n;
            - ``reward_<part>`` of the run's reward;
            - ``hops``, ``documents``, and ``shortened_documents``, ``left_out_documents`` to fit;
            - ``prompt_tokens``, ``prompt_tokens_hop_<n>`` (of a prompt with the documents of the first n hops),
              ``new_tokens``, ``state_bytes`` after prompt and answer, ``state_bytes_hop_<n>`` after that prompt;
            - ``ended``: the share of answers that the model ended itself; ``empty``: of those without a word;
              ``too_long``: of questions that didn't fit, and got no answer;
            - ``retrieval_seconds``: a question's share of the batched searches.

            A question that stopped early keeps its last value in later hops. The row ``all`` also has
            ``first_token_seconds`` and ``first_token_seconds_hop_<n>``, the median over ``timed_questions`` that were
            asked one at a time, from prompt to first token, without retrieval; and ``generate_seconds`` and
            ``questions_per_second`` of the batched generation.
        records: one per question, as in ``samples.jsonl``.
        first_prompt: token ids of the first question's prompt.
    """

    rows: list[Row]
    records: list[dict[str, Any]]
    first_prompt: list[int]


def evaluate_rag(
    model: SequenceModel,
    tokenizer: Tokenizer,
    retriever: MultiHopRetriever | None,
    questions: Sequence[Question],
    reward: Reward,
    settings: Settings,
    *,
    seed: int = 0,
    examples: Sequence[Question] = (),
    precision: AbstractContextManager[Any] | None = None,
) -> RagEvaluation:
    """Retrieve for all questions in batches, answer them greedily in batches, and measure.

    Args:
        model: in eval mode, on its device.
        tokenizer: the model's.
        retriever: with its index open; None answers from the question alone.
        questions: at least one; support recall is measured on those with ``supporting_ids``.
        reward: scores the answers.
        settings: how to ask.
        seed: of shuffled documents and of the intervals.
        examples: questions that stand in front of each prompt with their answers, see `build_prompt`.
        precision: what the model computes under, such as autocast.

    Raises:
        DataError: no question.
    """
    from refragkit.methods.answers import episode, score_answers
    from refragkit.rewards.base import says_nothing

    if not questions:
        raise DataError("evaluate=rag: there are no questions; expected at least one in data.path")
    hops: list[tuple[Hop, ...]] = [()] * len(questions)
    if retriever is not None:
        retriever.warm_up()
        hops = retriever.retrieve(questions)
    last = max(map(len, hops))
    # The prompt with the documents of the first n hops, for n = 0 .. last; the last one is what is asked.
    prompts = [
        [
            build_prompt(question, trail[:n], tokenizer, settings, seed, examples)
            for n in range(min(1, len(trail)), len(trail) + 1)
        ]
        for question, trail in zip(questions, hops, strict=True)
    ]
    asked = [p[-1].input_ids for p in prompts]
    with precision or nullcontext():
        started = time.perf_counter()
        answers = answer_all(model, tokenizer, asked, settings)
        generate_seconds = time.perf_counter() - started
        timed = _first_token_seconds(model, tokenizer, questions, prompts, settings.timed_questions)
        fixed_bytes, bytes_per_token = _state_size(model)
    max_hops = 0 if retriever is None else retriever.max_hops
    episodes = [episode(q, h, a.text, max_hops) for q, h, a in zip(questions, hops, answers, strict=True)]
    _, records = score_answers(episodes, reward, step=0)

    measured: list[dict[str, float]] = []
    for question, record, e, prompt, answer in zip(
        questions, records, episodes, prompts, answers, strict=True
    ):
        lengths = [len(p) for p in prompt]
        read = [float(fixed_bytes + bytes_per_token * n) for n in lengths]
        ended = bool(answer.token_ids) and answer.token_ids[-1] == tokenizer.end_id
        recall = {}
        if e.supporting_ids:
            after = [support_recall(replace(e, hops=e.hops[:n])) for n in range(1, len(e.hops) + 1)]
            recall = {"support_recall": support_recall(e), **_by_hop("support_recall", after, last)}
        values = {
            "f1": record["f1"],
            "em": record["em"],
            **recall,
            **{f"reward_{name}": value for name, value in record["rewards"].items()},
            "hops": float(len(e.hops)),
            "documents": float(len(e.documents)),
            "shortened_documents": float(prompt[-1].truncated_documents),
            "left_out_documents": float(prompt[-1].left_out_documents),
            "prompt_tokens": float(lengths[-1]),
            **_by_hop("prompt_tokens", lengths, last),
            "new_tokens": float(len(answer.token_ids)),
            "state_bytes": float(fixed_bytes + bytes_per_token * (lengths[-1] + len(answer.token_ids))),
            **_by_hop("state_bytes", read, last),
            "ended": float(ended),
            "empty": float(says_nothing(answer.text)),
            "too_long": float(prompt[-1].dropped == "too_long"),
            "retrieval_seconds": sum(hop.latency_seconds for hop in e.hops),
        }
        measured.append(values)
        shown = ("prompt_tokens", "new_tokens", "state_bytes", "shortened_documents", "left_out_documents")
        record |= {
            "dataset": question.metadata.get("dataset"),
            "hops_needed": question.hops,
            "support_recall": values.get("support_recall"),
            **{key: int(values[key]) for key in shown},
            "ended_by": "too_long" if values["too_long"] else "end_token" if ended else "max_new_tokens",
        }
        del record["step"]
    rows = [
        _row(group, [measured[i] for i in members], settings.bootstrap_samples, seed)
        for group, members in question_groups(questions, by_hops=True).items()
    ]
    if timed:
        final = _median([seconds[-1] for seconds in timed])
        rows[0]["first_token_seconds"] = final
        for n in range(last):
            seconds_after = [seconds[min(n, len(seconds) - 1)] for seconds in timed]
            rows[0][f"first_token_seconds_hop_{n + 1}"] = _median(seconds_after)
    rows[0]["generate_seconds"] = generate_seconds
    rows[0]["questions_per_second"] = len(questions) / generate_seconds
    return RagEvaluation(rows, records, asked[0])


def answer_all(
    model: SequenceModel, tokenizer: Tokenizer, prompts: Sequence[list[int]], settings: Settings
) -> list[Answer]:
    """Greedy answers in the order of the prompts; similar lengths share a batch of ``batch_tokens``."""
    from refragkit.methods.answers import Answer, generate_answers

    answers = [Answer([], [], "") for _ in prompts]
    batches = _batches([len(p) for p in prompts], settings.max_new_tokens, settings.batch_tokens)
    done, shown = 0, time.perf_counter()
    for batch in batches:
        found = generate_answers(model, tokenizer, [prompts[i] for i in batch], settings.max_new_tokens)
        for i, answer in zip(batch, found, strict=True):
            answers[i] = answer
        done += len(batch)
        if done < len(prompts) and time.perf_counter() - shown > _SECONDS_BETWEEN_LINES:
            shown = time.perf_counter()
            log.info("answered %d of %d questions", done, len(prompts))
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
    n: int,
) -> list[list[float]]:
    """For n questions, asked alone: seconds from the prompt to the first token, for each of its prompts."""
    from refragkit.data.split import subset_positions
    from refragkit.methods.answers import generate_answers

    fitting = [i for i, p in enumerate(prompts) if p[-1].input_ids]
    chosen = subset_positions([questions[i].id for i in fitting], n) if n else []
    timed = []
    for position in chosen:
        seconds = []
        for prompt in prompts[fitting[position]]:
            started = time.perf_counter()
            generate_answers(model, tokenizer, [prompt.input_ids], 1)
            seconds.append(time.perf_counter() - started)
        timed.append(seconds)
    return timed


def _state_size(model: SequenceModel) -> tuple[int, int]:
    """Bytes of a state that don't depend on what was read, and bytes that each token adds, from two real states."""
    import torch

    sizes = []
    with torch.inference_mode():
        for n in (1, 2):
            ids = torch.zeros((1, n), dtype=torch.int64, device=model.head_weight.device)
            state = model(ids, return_state=True, logits_to_keep=1).state
            sizes.append(int(state.nbytes))
    per_token = sizes[1] - sizes[0]
    return sizes[0] - per_token, per_token


def _by_hop(name: str, values: Sequence[float], last: int) -> dict[str, float]:
    """``name_hop_1`` .. ``name_hop_<last>``; what is missing at the end repeats the last value (0 without any)."""
    padded = [*values, *[values[-1] if values else 0.0] * (last - len(values))]
    return {f"{name}_hop_{n}": float(value) for n, value in enumerate(padded[:last], 1)}


def _row(group: str, measured: Sequence[Mapping[str, float]], samples: int, seed: int) -> Row:
    row: Row = {"group": group, "questions": float(len(measured))}
    for key in dict.fromkeys(key for m in measured for key in m):
        values = [m[key] for m in measured if key in m]
        row[key] = sum(values) / len(values)
        if key in SCORES:
            interval = bootstrap_interval(values, samples, derive_seed(seed, "bootstrap", group))
            row[f"{key}_low"], row[f"{key}_high"] = interval
    return row


def _median(values: Sequence[float]) -> float:
    middle = sorted(values)
    n = len(middle)
    return (middle[(n - 1) // 2] + middle[n // 2]) / 2
