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
regression on samples, Peters & Schaal 2007, with the reward itself as the weight). Where the model writes the queries
(``retriever.planner=model``), 1 and 2 are a live rollout (``rollouts.py``), and y includes the queries of that rollout.

Objective ``none`` is the plain supervised control: gold answers behind the same passages, every token alike; with
``planner=model``, gold traces (``gold_traces.py``), whose queries are learnt too.

Objective ``policy_gradient``: ``policy_gradient.py``.

Differs: the token-mean is taken inside each example before weighting, so that a reward weighs an answer and not its
length; the reward comes from a generated answer, never from the shape of the conversation. The floor keeps gold answers
teaching a model that can't answer anything yet: with none, a model that has learnt to stop at once earns 0 everywhere
and never changes again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from refragkit.adapters.lora import lora_layers
from refragkit.data.collate import micro_batch_indices
from refragkit.data.conversation import Rendered, conversation_from_hops
from refragkit.errors import ConfigError, DataError
from refragkit.methods.alarms import Alarms
from refragkit.methods.answers import Answer, episode, reward_parts, score_answers
from refragkit.methods.base import Components, Learnt, MethodModule, Prepared, follows, tail
from refragkit.methods.gold_traces import GoldTraces
from refragkit.methods.rollouts import Rollouts, first_written_hop, roll_out
from refragkit.retrievers.planners.model import ModelPlanner
from refragkit.rewards.base import says_nothing
from refragkit.seeding import derive_seed
from refragkit.types import Batch, Hop, Question

if TYPE_CHECKING:
    from refragkit.methods.recipes import Refrag


class RefragModule(MethodModule):
    """Trains on answers weighted by the reward of what the model answered, or on gold answers alone."""

    recipe: Refrag

    def __init__(self, recipe: Refrag, components: Components) -> None:
        super().__init__(recipe, components)
        self.alarms = Alarms()
        planner = None if components.retriever is None else components.retriever.planner
        if isinstance(planner, ModelPlanner):
            planner.first_query = recipe.first_query
            if recipe.order != "question_first":
                raise ConfigError(
                    f"method.order={recipe.order} needs all documents at once, and with retriever.planner=model they"
                    " come hop by hop behind the question; set method.order=question_first, or choose planner expand"
                )
        #: The first hop whose query is the model's to write; None where another planner writes them all.
        self.written_from_hop = first_written_hop(self.episodes)
        self.traces: GoldTraces | None = None
        if components.retriever is not None and self.written_from_hop is not None:
            self.traces = GoldTraces(components.retriever, recipe.first_query)
        elif recipe.warmup != "none":
            raise ConfigError(
                f"method.warmup={recipe.warmup} teaches to write queries, and here the planner writes them; set"
                " retriever.planner=model, or method.warmup=none"
            )

    @property
    def warms_up(self) -> bool:
        """Whether the run begins with gold traces."""
        return self.recipe.warmup == "gold_traces"

    @property
    def warming_up(self) -> bool:
        """Whether the step to come is one of these."""
        return self.warms_up and self.global_step < self.recipe.trace_steps

    def prepare(self, batch: Batch) -> Prepared:
        """Retrieve, answer, reward, and weight the target answers of a global batch.

        Raises:
            DataError: the data holds conversations instead of questions.
        """
        recipe = self.recipe
        questions = self._questions(batch)
        if self.traces is not None and (self.warming_up or recipe.objective == "none"):
            return Prepared(self._given(questions, self.traces.hops(questions)))
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        if self.written_from_hop is not None:
            rolled = self._roll_out(questions, 1)
            hops = [r.hops for r in rolled.all]
            texts = [r.text for r in rolled.all]
            own = [r.as_example() for r in rolled.all]
            metrics = self._rollout_metrics(rolled)
        else:
            hops = self.episodes.retrieve(questions)
            metrics["time/retrieve_seconds"] = time.perf_counter() - started
            if recipe.objective == "none":
                return Prepared(self._given(questions, hops), metrics=metrics)
            started = time.perf_counter()
            answers = self.answer(questions, hops, self._temperature, self._sampling_seed)
            texts = [a.text for a in answers]
            own = [a.as_example() for a in answers]
            metrics["time/generate_seconds"] = time.perf_counter() - started
        parts = self._rewards(questions, hops, texts)
        weights = self._weights(parts["total"])
        examples = own if recipe.target == "sampled" else self._given(questions, hops)
        metrics |= self._reward_metrics(parts, texts)
        metrics["train/weight"] = sum(weights) / len(weights)
        return Prepared(examples, weights=weights, metrics=metrics | self.alarms.watch(metrics))

    def learn(self, batch: Batch) -> Learnt:
        """`prepare` and the gradient; what the model reads to answer it does not read again to learn, where it can.

        The state after the prompt, forked off without gradients, is continued to the model's own answer; the same
        state, with gradients, is continued to the given one. That is the plain way's gradient without a quarter of its
        work. It takes greedy answers, a given target that follows the very prompt, and no dropout.
        """
        if self.recipe.objective != "reward_weighted" or self.written_from_hop is not None:
            return super().learn(batch)
        started = time.perf_counter()
        questions = self._questions(batch)
        hops = self.episodes.retrieve(questions)
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
            rewards = self._rewards(
                [questions[i] for i in group], [hops[i] for i in group], [a.text for a in own]
            )
            for n, (i, weight) in enumerate(zip(group, self._weights(rewards["total"]), strict=True)):
                answers[i], weights[i] = own[n], weight
                for name, values in rewards.items():
                    parts.setdefault(name, [0.0] * len(questions))[i] = values[n]
            supervised = self._supervised([tail(prompts[i], examples[i]) for i in group], state)
            scales = [weights[i] / (examples[i].supervised_tokens * len(examples)) for i in group]
            found = self._backward(*supervised, scales)
            cross_entropy, objective = cross_entropy + found[0], objective + found[1]
        finished = time.perf_counter()
        metrics = self._reward_metrics(parts, [a.text for a in answers]) | {
            "train/weight": sum(weights) / len(weights),
            "train/loss": cross_entropy / sum(e.supervised_tokens for e in examples),
            "train/objective": objective,
            "time/retrieve_seconds": retrieved - started,
            "time/generate_seconds": generate_seconds,
            "time/learn_seconds": finished - retrieved - generate_seconds,
        }
        metrics |= self.alarms.watch(metrics)
        return Learnt(metrics, len(examples), len(examples), sum(map(len, examples)))

    def _reads_once(self, prompts: Sequence[Sequence[int]], examples: Sequence[Rendered]) -> bool:
        recipe = self.recipe
        return (
            recipe.target == "given"
            and self._temperature == 0
            and all(follows(p, e) for p, e in zip(prompts, examples, strict=True))
            and not any(layer.dropout for _, layer in lora_layers(self.model))
        )

    @property
    def _temperature(self) -> float:
        return self.recipe.rollout_temperature

    @property
    def _sampling_seed(self) -> int:
        return derive_seed(self.components.seed, self.global_step, self.global_rank, "rollouts")

    def _questions(self, batch: Batch) -> list[Question]:
        questions = [e for e in batch.examples if isinstance(e, Question)]
        if len(questions) != len(batch.examples):
            raise DataError(
                "method=refrag trains on questions with answers; choose data=multihop_qa, or method=sft"
            )
        return questions

    def _roll_out(
        self, questions: Sequence[Question], group_size: int, *, return_logprobs: bool = False
    ) -> Rollouts:
        """Rollouts for this step."""
        return roll_out(
            self.model,
            self.tokenizer,
            self.episodes,
            questions,
            group_size=group_size,
            temperature=self._temperature,
            seed=self._sampling_seed,
            return_logprobs=return_logprobs,
        )

    def _given(self, questions: Sequence[Question], hops: Sequence[Sequence[Hop]]) -> list[Rendered]:
        """Gold answers behind what was retrieved, and behind the queries that the model wrote or should write."""
        if self.written_from_hop is None:
            return [self.episodes.example(q, h, q.answers[0]) for q, h in zip(questions, hops, strict=True)]
        return [
            self.episodes.conversation(
                conversation_from_hops(
                    q.question,
                    h,
                    q.answers[0],
                    conversation_id=q.id,
                    written_from_hop=self.written_from_hop,
                )
            )
            for q, h in zip(questions, hops, strict=True)
        ]

    def _rewards(
        self, questions: Sequence[Question], hops: Sequence[Sequence[Hop]], texts: Sequence[str]
    ) -> dict[str, list[float]]:
        """Each part of the reward and the total, one value for each answer."""
        return reward_parts(
            self.reward,
            [episode(q, h, text, self.max_hops) for q, h, text in zip(questions, hops, texts, strict=True)],
        )

    def _weights(self, totals: Sequence[float]) -> list[float]:
        # A sampled answer that earned nothing must not be learnt at all; a gold one always deserves a little.
        floor = self.recipe.weight_floor if self.recipe.target == "given" else 0.0
        return [floor + (1 - floor) * total for total in totals]

    def _reward_metrics(self, parts: Mapping[str, Sequence[float]], texts: Sequence[str]) -> dict[str, float]:
        metrics = {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
        metrics["reward/empty_completions"] = sum(map(says_nothing, texts)) / len(texts)
        return metrics

    def _rollout_metrics(self, rolled: Rollouts) -> dict[str, float]:
        """What rollouts did and cost."""
        runs = rolled.all
        n = len(runs)
        written = sum(sum(r.written) for r in runs)
        metrics = {
            "rollouts/hops": sum(len(r.hops) for r in runs) / n,
            "rollouts/documents": sum(len(h.new_documents) for r in runs for h in r.hops) / n,
            "rollouts/truncated": sum(r.cut_turns > 0 for r in runs) / n,
            "rollouts/no_answer": sum(r.ended == "no_answer" for r in runs) / n,
            "rollouts/too_long": sum(r.ended == "too_long" for r in runs) / n,
            "rollouts/written_tokens": written / n,
            "rollouts/tokens_read": float(rolled.tokens_read),
            "rollouts/tokens_reread": float(rolled.tokens_reread),
            "time/retrieve_seconds": rolled.retrieve_seconds,
            "time/generate_seconds": rolled.generate_seconds,
        }
        if self.written_from_hop is not None:
            metrics["rollouts/searches"] = sum(r.searches for r in runs) / n
            if self.max_hops >= self.written_from_hop:
                metrics["rollouts/without_search"] = sum(not r.searches for r in runs) / n
        if any(r.logprobs for r in runs):
            metrics["rollouts/entropy"] = -sum(sum(r.logprobs) for r in runs) / max(1, written)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """See `MethodModule.evaluate`; where the model writes the queries, answers come from greedy rollouts.

        The loss is then that of gold answers and of the queries in front of them, behind what the rollouts found.
        """
        limit = self.recipe.eval_batches * self.recipe.global_batch_size
        questions = [e for e in self.components.validation[:limit] if isinstance(e, Question)]
        if self.written_from_hop is None or not questions:
            return super().evaluate()
        was_training = self.model.training
        self.model.eval()
        rolled = roll_out(self.model, self.tokenizer, self.episodes, questions)
        hops = [r.hops for r in rolled.all]
        examples = [e for e in self._given(questions, hops) if e.supervised_tokens]
        losses = [0.0, 0.0]
        for indices in micro_batch_indices([len(e) for e in examples], self.micro_batch_size):
            self._add_loss(losses, [examples[i] for i in indices])
        evaluated = [episode(r.question, r.hops, r.text, self.max_hops) for r in rolled.all]
        metrics, records = score_answers(evaluated, self.reward, self.global_step)
        if losses[1]:
            metrics["val/loss"] = losses[0] / losses[1]
        metrics["val/searches"] = sum(r.searches for r in rolled.all) / len(rolled.all)
        metrics["val/tokens_read"] = float(rolled.tokens_read)
        for record, rollout in zip(records, rolled.all, strict=True):
            record |= {"ended": rollout.ended, "searches": rollout.searches, "cut_turns": rollout.cut_turns}
        self.model.train(was_training)
        return metrics, records

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the alarms have seen."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["alarms"] = self.alarms.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it."""
        super().on_load_checkpoint(checkpoint)
        if "alarms" in checkpoint:
            self.alarms.load_state_dict(checkpoint["alarms"])
