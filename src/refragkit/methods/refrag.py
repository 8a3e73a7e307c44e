"""REFRAG: recursive, reinforced retrieval-augmented fine-tuning.

The word stands here for multi-hop retrieval in which each hop's documents inform the next query, trained with rewards
on what the model answered. The 2025 paper of the same name (arXiv 2509.01092) compresses chunks into embeddings; that
is a different idea and is not what this method does.

Objective ``reward_weighted``, for each question of a global batch of N:

1. retrieve up to ``max_hops`` rounds of ``top_k_per_hop`` passages;
2. let the model answer from the question and these passages;
3. reward that answer: 0.6 answer + 0.3 relevance + 0.1 efficiency (``conf/reward/refrag.yaml``);
4. loss = 1/N sum_i w_i * (1/|y_i|) sum_t -log p(y_it | question, passages, y_i<t),
   w_i = weight_floor + (1 - weight_floor) * reward_i.

y is the gold answer (``target: given``) or the model's own (``target: sampled``; then this is reward-weighted
regression on samples, Peters & Schaal 2007, with the reward itself as the weight).

Differs: the token-mean is taken inside each example before weighting, so that a reward weighs an answer and not its
length; the reward comes from a generated answer, never from the shape of the conversation. The floor keeps gold answers
teaching a model that can't answer anything yet: with none, a model that has learnt to stop at once earns 0 everywhere
and never changes again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from refragkit.adapters.lora import lora_layers
from refragkit.data.collate import micro_batch_indices
from refragkit.data.conversation import Rendered
from refragkit.errors import DataError
from refragkit.methods.answers import Answer, episode, reward_parts
from refragkit.methods.base import Learnt, MethodModule, Prepared, follows, tail
from refragkit.rewards.base import says_nothing
from refragkit.seeding import derive_seed
from refragkit.types import Batch, Hop, Question

if TYPE_CHECKING:
    from refragkit.methods.recipes import Refrag

log = logging.getLogger("refragkit")

_WARN_AFTER_ZERO_STEPS = 10


class RefragModule(MethodModule):
    """Trains on answers weighted by the reward of what the model answered."""

    recipe: Refrag
    _zero_steps = 0

    def prepare(self, batch: Batch) -> Prepared:
        """Retrieve, answer, reward, and weight the target answers of a global batch.

        Raises:
            DataError: the data holds conversations instead of questions.
        """
        recipe = self.recipe
        started = time.perf_counter()
        questions, hops = self._searched(batch)
        retrieved = time.perf_counter()
        seed = derive_seed(self.components.seed, self.global_step, self.global_rank, "rollouts")
        answers = self.answer(questions, hops, recipe.temperature, seed)
        answered = time.perf_counter()
        parts = self._rewards(questions, hops, answers)
        weights = self._weights(parts["total"])
        sampled = recipe.target == "sampled"
        examples = [a.as_example() for a in answers] if sampled else self._given(questions, hops)
        metrics = self._reward_metrics(parts, answers, weights)
        metrics["time/retrieve_seconds"] = retrieved - started
        metrics["time/generate_seconds"] = answered - retrieved
        return Prepared(examples, weights=weights, metrics=metrics)

    def learn(self, batch: Batch) -> Learnt:
        """`prepare` and the gradient; what the model reads to answer it does not read again to learn, where it can.

        The state after the prompt, forked off without gradients, is continued to the model's own answer; the same
        state, with gradients, is continued to the given one. That is the plain way's gradient without a quarter of its
        work. It takes greedy answers, a given target that follows the very prompt, and no dropout.
        """
        started = time.perf_counter()
        questions, hops = self._searched(batch)
        retrieved = time.perf_counter()
        prompts = [self.episodes.prompt(q, h) for q, h in zip(questions, hops, strict=True)]
        examples = self._given(questions, hops)
        if not self._reads_once(prompts, examples):
            return super().learn(batch)
        kept = [example for example, _ in self._keep(Prepared(examples))]
        assert len(kept) == len(questions)  # each of them holds an answer
        self.model.train()
        answers = [Answer([], [], "") for _ in questions]
        parts: dict[str, list[float]] = {}
        weights = [0.0] * len(questions)
        cross_entropy = objective = generate_seconds = 0.0
        for group in micro_batch_indices([len(e) for e in examples], self.micro_batch_size):
            asked = [prompts[i] for i in group]
            state = self._read(asked)
            generating = time.perf_counter()
            own = self._answer(asked, 0.0, 0, state.detach())
            generate_seconds += time.perf_counter() - generating
            rewards = self._rewards([questions[i] for i in group], [hops[i] for i in group], own)
            for n, (i, weight) in enumerate(zip(group, self._weights(rewards["total"]), strict=True)):
                answers[i], weights[i] = own[n], weight
                for name, values in rewards.items():
                    parts.setdefault(name, [0.0] * len(questions))[i] = values[n]
            supervised = self._supervised([tail(prompts[i], examples[i]) for i in group], state)
            scales = [weights[i] / (examples[i].supervised_tokens * len(examples)) for i in group]
            found = self._backward(*supervised, scales)
            cross_entropy, objective = cross_entropy + found[0], objective + found[1]
        finished = time.perf_counter()
        metrics = self._reward_metrics(parts, answers, weights) | {
            "train/loss": cross_entropy / sum(e.supervised_tokens for e in examples),
            "train/objective": objective,
            "time/retrieve_seconds": retrieved - started,
            "time/generate_seconds": generate_seconds,
            "time/learn_seconds": finished - retrieved - generate_seconds,
        }
        return Learnt(metrics, len(examples), len(examples), sum(map(len, examples)))

    def _reads_once(self, prompts: Sequence[Sequence[int]], examples: Sequence[Rendered]) -> bool:
        recipe = self.recipe
        return (
            recipe.target == "given"
            and recipe.temperature == 0
            and all(follows(p, e) for p, e in zip(prompts, examples, strict=True))
            and not any(layer.dropout for _, layer in lora_layers(self.model))
        )

    def _searched(self, batch: Batch) -> tuple[list[Question], list[tuple[Hop, ...]]]:
        questions = [e for e in batch.examples if isinstance(e, Question)]
        if len(questions) != len(batch.examples):
            raise DataError(
                "method=refrag trains on questions with answers; choose data=multihop_qa, or method=sft"
            )
        return questions, self.episodes.retrieve(questions)

    def _given(self, questions: Sequence[Question], hops: Sequence[Sequence[Hop]]) -> list[Rendered]:
        return [self.episodes.example(q, h, q.answers[0]) for q, h in zip(questions, hops, strict=True)]

    def _rewards(
        self, questions: Sequence[Question], hops: Sequence[Sequence[Hop]], answers: Sequence[Answer]
    ) -> dict[str, list[float]]:
        """Each part of the reward and the total, one value for each answer."""
        return reward_parts(
            self.reward,
            [episode(q, h, a.text, self.max_hops) for q, h, a in zip(questions, hops, answers, strict=True)],
        )

    def _weights(self, totals: Sequence[float]) -> list[float]:
        # A sampled answer that earned nothing must not be learnt at all; a gold one always deserves a little.
        floor = self.recipe.weight_floor if self.recipe.target == "given" else 0.0
        return [floor + (1 - floor) * total for total in totals]

    def _reward_metrics(
        self, parts: Mapping[str, Sequence[float]], answers: Sequence[Answer], weights: Sequence[float]
    ) -> dict[str, float]:
        self._zero_steps = self._zero_steps + 1 if max(parts["total"]) == 0 else 0
        if self._zero_steps == _WARN_AFTER_ZERO_STEPS:
            log.warning("every reward has been 0 for %d steps; look at samples.jsonl", self._zero_steps)
        metrics = {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
        metrics["train/weight"] = sum(weights) / len(weights)
        metrics["reward/empty_completions"] = sum(says_nothing(a.text) for a in answers) / len(answers)
        return metrics
