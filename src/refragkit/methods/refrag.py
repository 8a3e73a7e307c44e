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
from typing import TYPE_CHECKING

from refragkit.errors import DataError
from refragkit.methods.answers import episode, reward_parts
from refragkit.methods.base import MethodModule, Prepared
from refragkit.rewards.base import says_nothing
from refragkit.seeding import derive_seed
from refragkit.types import Batch, Question

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
        questions = [e for e in batch.examples if isinstance(e, Question)]
        if len(questions) != len(batch.examples):
            raise DataError(
                "method=refrag trains on questions with answers; choose data=multihop_qa, or method=sft"
            )
        started = time.perf_counter()
        hops = self.episodes.retrieve(questions)
        retrieved = time.perf_counter()
        seed = derive_seed(self.components.seed, self.global_step, self.global_rank, "rollouts")
        answers = self.answer(questions, hops, recipe.temperature, seed)
        answered = time.perf_counter()
        episodes = [
            episode(q, h, a.text, self.max_hops) for q, h, a in zip(questions, hops, answers, strict=True)
        ]
        parts = reward_parts(self.reward, episodes)
        totals = parts["total"]
        self._zero_steps = self._zero_steps + 1 if max(totals) == 0 else 0
        if self._zero_steps == _WARN_AFTER_ZERO_STEPS:
            log.warning("every reward has been 0 for %d steps; look at samples.jsonl", self._zero_steps)
        # A sampled answer that earned nothing must not be learnt at all; a gold one always deserves a little.
        floor = recipe.weight_floor if recipe.target == "given" else 0.0
        weights = [floor + (1 - floor) * total for total in totals]
        if recipe.target == "sampled":
            examples = [a.as_example() for a in answers]
        else:
            examples = [
                self.episodes.example(q, h, q.answers[0]) for q, h in zip(questions, hops, strict=True)
            ]
        metrics = {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
        metrics["train/weight"] = sum(weights) / len(weights)
        metrics["reward/empty_completions"] = sum(says_nothing(a.text) for a in answers) / len(answers)
        metrics["time/retrieve_seconds"] = retrieved - started
        metrics["time/generate_seconds"] = answered - retrieved
        return Prepared(examples, weights=weights, metrics=metrics)
