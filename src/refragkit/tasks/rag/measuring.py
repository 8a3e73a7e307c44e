"""What ``evaluate=rag`` measures: answers, scores with intervals, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refragkit.bootstrap import bootstrap_interval
from refragkit.errors import DataError
from refragkit.rewards.relevance import support_recall
from refragkit.seeding import derive_seed
from refragkit.tasks.evaluate_retrieval import Row, question_groups
from refragkit.tasks.rag.answering import Answered, answer_given, answer_live
from refragkit.tasks.rag.tables import SCORES
from refragkit.types import Episode, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.generation.state_cache import StateCache
    from refragkit.models.base import SequenceModel
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.rewards.base import Reward
    from refragkit.tasks.rag.settings import Settings

# What samples.jsonl says of a question beside its scores.
_IN_RECORDS = (
    "prompt_tokens",
    "new_tokens",
    "tokens_read",
    "state_bytes",
    "shortened_documents",
    "left_out_documents",
    "searches",
)


@dataclass(frozen=True, slots=True)
class RagEvaluation:
    """What was measured.

    Attributes:
        rows: one per group: ``all``, each ``metadata["dataset"]`` where there are several, each hop count
            (``2 hops``). Every row has ``group``, ``questions`` and means over its questions:

            - ``f1``, ``em`` and, where supporting passages are annotated, ``support_recall``, each with the ends of its
              95% bootstrap interval (``f1_low``, ``f1_high``); ``support_recall_hop_<n>`` after hop n;
            - ``reward_<part>`` of the run's reward;
            - ``hops``, ``searches`` (queries that the model wrote), ``documents``, and ``shortened_documents``,
              ``left_out_documents`` to fit;
            - ``prompt_tokens``, ``prompt_tokens_hop_<n>`` (of a prompt with the documents of the first n hops, and what
              the model wrote between them), ``new_tokens`` (queries and answer), ``state_bytes`` at the end,
              ``state_bytes_hop_<n>`` after that prompt;
            - ``tokens_read``: tokens that went through the model; ``tokens_reread``: as many as would have if each turn
              read everything in front of it again;
            - ``ended``: the share of answers that the model ended itself; ``cut``: of questions of which a query or the
              answer ran out of tokens; ``no_answer``: of those where it searched and had to answer; ``empty``: of
              answers without a word; ``too_long``: of questions that didn't fit, and got no answer;
            - ``retrieval_seconds``: a question's share of the batched searches.

            A question that stopped early keeps its last value in later hops. The row ``all`` also has
            ``first_token_seconds`` and ``first_token_seconds_hop_<n>``, the median over ``timed_questions`` that were
            asked one at a time, from prompt to first token, without retrieval (where the model writes the queries, from
            the documents of a hop, which is all that it has to read there); and ``generate_seconds`` and
            ``questions_per_second`` of the batched generation; and, with a state cache, the share of prompts whose
            documents needn't be read (``state_cache_hit_rate``), ``state_cache_tokens_not_read`` a question, and
            ``state_cache_bytes`` of memory at the end.
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
    states: StateCache | None = None,
) -> RagEvaluation:
    """Retrieve for all questions in batches, answer them greedily in batches, and measure.

    Where the model writes the queries, both happen in rollouts, see `refragkit.methods.rollouts`.

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
        states: where reading goes on from in the batched generation; the timed questions are read whole.

    Raises:
        DataError: no question.
        ConfigError: a setting that the planner can't follow.
    """
    from refragkit.methods.answers import episode, score_answers
    from refragkit.retrievers.planners.model import ModelPlanner

    if not questions:
        raise DataError("evaluate=rag: there are no questions; expected at least one in data.path")
    if retriever is not None:
        retriever.warm_up()
    with precision or nullcontext():
        if retriever is not None and isinstance(retriever.planner, ModelPlanner):
            answers = answer_live(
                model, tokenizer, retriever, retriever.planner, questions, settings, examples
            )
        else:
            hops = [()] * len(questions) if retriever is None else retriever.retrieve(questions)
            answers = answer_given(model, tokenizer, questions, hops, settings, seed, examples, states)
        state_size = _state_size(model)
    answered = answers.answered
    last = max(len(a.hops) for a in answered)
    max_hops = 0 if retriever is None else retriever.max_hops
    episodes = [episode(q, a.hops, a.text, max_hops) for q, a in zip(questions, answered, strict=True)]
    _, records = score_answers(episodes, reward, step=0)
    measured = [
        _values(record, e, a, last, state_size)
        for record, e, a in zip(records, episodes, answered, strict=True)
    ]
    for question, record, values, a in zip(questions, records, measured, answered, strict=True):
        record |= {
            "dataset": question.metadata.get("dataset"),
            "hops_needed": question.hops,
            "support_recall": values.get("support_recall"),
            **{key: int(values[key]) for key in _IN_RECORDS},
            "ended_by": a.ended_by,
        }
        del record["step"]
    rows = [
        _row(group, [measured[i] for i in members], settings.bootstrap_samples, seed)
        for group, members in question_groups(questions, by_hops=True).items()
    ]
    if timed := answers.first_token_seconds:
        rows[0]["first_token_seconds"] = _median([seconds[-1] for seconds in timed])
        for n in range(last):
            seconds_after = [seconds[min(n, len(seconds) - 1)] for seconds in timed]
            rows[0][f"first_token_seconds_hop_{n + 1}"] = _median(seconds_after)
    rows[0]["generate_seconds"] = answers.generate_seconds
    rows[0]["questions_per_second"] = len(questions) / answers.generate_seconds
    rows[0] |= {} if states is None else states.metrics()
    return RagEvaluation(rows, records, answered[0].prompt_ids)


def _values(
    record: Mapping[str, Any], e: Episode, a: Answered, last: int, state_size: tuple[int, int]
) -> dict[str, float]:
    """Everything that is measured of one question.

    Args:
        record: with its scores.
        e: what the reward saw.
        a: how it was answered.
        last: the most hops that any question took.
        state_size: bytes of a state, and those that each token adds.
    """
    from refragkit.rewards.base import says_nothing

    fixed, per_token = state_size
    recall = {}
    if e.supporting_ids:
        after = [support_recall(replace(e, hops=e.hops[:n])) for n in range(1, len(e.hops) + 1)]
        recall = {"support_recall": support_recall(e), **_by_hop("support_recall", after, last)}
    return {
        "f1": record["f1"],
        "em": record["em"],
        **recall,
        **{f"reward_{name}": value for name, value in record["rewards"].items()},
        "hops": float(len(e.hops)),
        "searches": float(a.searches),
        "documents": float(len(e.documents)),
        "shortened_documents": float(a.shortened_documents),
        "left_out_documents": float(a.left_out_documents),
        "prompt_tokens": float(len(a.prompt_ids)),
        **_by_hop("prompt_tokens", a.context_tokens, last),
        "new_tokens": float(a.new_tokens),
        "tokens_read": float(a.tokens_read),
        "tokens_reread": float(a.tokens_reread),
        "state_bytes": float(fixed + per_token * a.total_tokens),
        **_by_hop("state_bytes", [float(fixed + per_token * n) for n in a.context_tokens], last),
        "ended": float(a.ended_by == "end_token"),
        "cut": float(a.cut),
        "no_answer": float(a.ended_by == "no_answer"),
        "empty": float(says_nothing(a.text)),
        "too_long": float(a.ended_by == "too_long"),
        "retrieval_seconds": sum(hop.latency_seconds for hop in e.hops),
    }


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
