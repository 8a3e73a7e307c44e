"""Answers to questions: generated in one batch, seen as episodes, scored.

Apart from the Lightning modules, so that an evaluation of a trained model needs neither them nor Lightning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refragkit.data.conversation import Rendered
from refragkit.rewards.composite import CompositeReward
from refragkit.types import Episode, Hop, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.generation.engine import TokenListener
    from refragkit.models.base import SequenceModel
    from refragkit.models.state import ModelState
    from refragkit.rewards.base import Reward

# Prompts are read in groups of so many tokens, which bounds the memory of a large evaluation.
PREFILL_TOKENS = 16384


@dataclass(frozen=True)
class Answer:
    """What the model generated for one prompt.

    Attributes:
        prompt_ids: what it read; empty where the question didn't fit.
        token_ids: what it wrote, the end token included where it came to one.
        text: the same without special tokens.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str

    def as_example(self) -> Rendered:
        """The very tokens that were generated, as a training example: an answer cut short does not learn to end."""
        return Rendered(
            self.prompt_ids + self.token_ids,
            [False] * len(self.prompt_ids) + [True] * len(self.token_ids),
        )


def generate_answers(
    model: SequenceModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    prefill_tokens: int = PREFILL_TOKENS,
    on_token: TokenListener | None = None,
    state: ModelState | None = None,
) -> list[Answer]:
    """The model's answer to each prompt, in one batched generation; an empty prompt is answered with nothing.

    Args:
        model: what answers.
        tokenizer: whose end token ends an answer.
        prompts: token ids, one list for each answer.
        max_new_tokens: tokens of an answer at most, the end token included.
        temperature: 0 is greedy.
        seed: of the sampling; each row has a generator of its own.
        prefill_tokens: prompts are read in groups of at most so many tokens, which bounds memory.
        on_token: hears of each token as (prompt, sample, id), prompts counted without the empty ones.
        state: a row for each prompt that isn't empty, which has read a beginning of it (``lengths`` of its tokens).
    """
    from refragkit.generation.engine import GenerationConfig, generate

    answerable = [i for i, prompt in enumerate(prompts) if prompt]
    answers = [Answer([], [], "") for _ in prompts]
    if not answerable:
        return answers
    read_tokens = [0] * len(answerable) if state is None else state.lengths.tolist()
    samples = generate(
        model,
        [prompts[i][n:] for i, n in zip(answerable, read_tokens, strict=True)],
        GenerationConfig(max_new_tokens, temperature, stop_ids=(tokenizer.end_id,)),
        pad_id=tokenizer.pad_id,
        seed=seed,
        max_batch_tokens=prefill_tokens,
        on_token=on_token,
        state=state,
    )
    for i, (completion,) in zip(answerable, samples, strict=True):
        text = tokenizer.decode(completion.content_ids).strip()
        answers[i] = Answer(list(prompts[i]), list(completion.token_ids), text)
    return answers


def episode(question: Question, hops: Sequence[Hop], completion: str, max_hops: int) -> Episode:
    """What a reward sees of one answered question."""
    return Episode(
        question=question.question,
        answers=question.answers,
        supporting_ids=question.supporting_ids,
        hops=tuple(hops),
        completion=completion,
        id=question.id,
        max_hops=max_hops,
        metadata=question.metadata,
    )


def score_answers(
    episodes: Sequence[Episode], reward: Reward, step: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Exact match, F1, rewards and support recall by hop of answered questions.

    Args:
        episodes: one or more answered questions.
        reward: the run's reward.
        step: optimiser step of the model that answered, for the records.

    Returns:
        metrics under ``val/``, and one record for each episode as in ``samples.jsonl``.
    """
    from refragkit.rewards.answer import exact_match, token_f1

    em = [exact_match(e.completion, e.answers) for e in episodes]
    f1 = [token_f1(e.completion, e.answers) for e in episodes]
    parts = reward_parts(reward, episodes)
    metrics = {"val/em": _mean(em), "val/f1": _mean(f1)}
    metrics |= {f"val/reward_{name}": _mean(values) for name, values in parts.items()}
    deepest = max((len(e.hops) for e in episodes), default=0)
    annotated = [e for e in episodes if e.supporting_ids]
    if deepest and annotated:
        for hop in range(1, deepest + 1):
            metrics[f"val/support_recall_hop{hop}"] = _mean([_support_recall(e, hop) for e in annotated])
        metrics["val/support_recall"] = metrics[f"val/support_recall_hop{deepest}"]
        metrics["val/hops"] = _mean([len(e.hops) for e in episodes])
        metrics["val/documents"] = _mean([len(e.documents) for e in episodes])
    records = [
        {
            "step": step,
            "id": e.id,
            "question": e.question,
            "answers": list(e.answers),
            "completion": e.completion,
            "em": em[i],
            "f1": f1[i],
            "rewards": {name: values[i] for name, values in parts.items()},
            "hops": [
                {
                    "hop": h.hop,
                    "query": h.query,
                    "latency_seconds": h.latency_seconds,
                    "documents": [
                        {
                            "doc_id": d.doc_id,
                            "title": d.document.title,
                            "text": d.document.text,
                            "score": d.score,
                            "supporting": d.doc_id in e.supporting_ids,
                        }
                        for d in h.new_documents
                    ],
                }
                for h in e.hops
            ],
        }
        for i, e in enumerate(episodes)
    ]
    return metrics, records


def reward_parts(reward: Reward, episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Each part of a composite reward by its name, and the ``total``; one value per episode."""
    if isinstance(reward, CompositeReward):
        parts = reward.parts(episodes)
        return {**parts, "total": reward.combine(parts)}
    return {"total": reward(episodes)}


def _support_recall(e: Episode, hops: int) -> float:
    found = {hit.doc_id for hop in e.hops[:hops] for hit in hop.new_documents}
    return len(found & set(e.supporting_ids)) / len(set(e.supporting_ids))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
