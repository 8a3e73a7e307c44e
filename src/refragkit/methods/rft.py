"""Rejection-sampling fine-tuning: sample answers, score them, keep the good ones, learn them.

One optimiser step, streaming (``rounds: null``), for ``num_prompts_per_step`` prompts:

1. retrieve for the questions, where there is a retriever, and read each prompt once;
2. fork its state into ``num_samples_per_prompt`` samples, decoded together, in eval mode;
3. reward the samples of a prompt in one call; reject those below ``min_reward``, those whose equations are wrong, and
   those that say what an earlier one does;
4. keep ``top_k`` of a prompt (``selection``); loss = mean over all tokens of the kept samples of
   -log p(y_t | prompt, y_<t), end tokens included.

A step in which no sample is kept changes no weight; with ``min_kept: N`` neither do steps until N examples have been
kept since the last update, which then learns all of them (they are still samples of the same weights). With
``rounds: R`` the run's steps fall into R parts. Each begins by sampling for all training prompts with the model as it
is then; its steps draw ``global_batch_size`` examples each from what was kept, as often as their number takes.
``add_given`` puts the given answers among them.

Everything sampled is written to ``rollouts/*.jsonl``. With ``rollouts: FILE`` nothing is sampled: the samples of the
file are selected from and learnt, and the same settings give the weights of the run that wrote it.

Source: Yuan et al. 2023 (arXiv 2308.01825), section 3.3.
Differs: the paper samples once, from the fine-tuned model, and trains the base model on originals and samples together
(``rounds: 1``, ``add_given: true``, ``selection: all_correct``); streaming learns while it samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from refragkit.adapters.lora import lora_layers
from refragkit.data.conversation import Rendered, prepare_prompt
from refragkit.data.order import batch_indices
from refragkit.errors import ConfigError, DataError
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.methods.answers import PREFILL_TOKENS, Answer, episode, reward_parts
from refragkit.methods.base import Components, Learnt, MethodModule, Prepared, tail
from refragkit.methods.pass_at_k import mean_pass_at_k
from refragkit.methods.rollout_file import (
    Sample,
    SampledPrompt,
    by_step,
    drop_rollouts,
    read_rollouts,
    write_rollouts,
)
from refragkit.methods.selection import mark, select
from refragkit.rewards.base import says_nothing
from refragkit.seeding import derive_seed
from refragkit.training.ema import WeightAverage
from refragkit.types import Batch, Conversation, Hop, Question

if TYPE_CHECKING:
    from refragkit.methods.recipes import Rft

log = logging.getLogger("refragkit")

_WARN_AFTER_EMPTY_STEPS = 10
# Given answers that are looked at to see whether samples have room to be as long
_LOOKED_AT = 64


@dataclass(frozen=True)
class Prompt:
    """What is sampled from.

    Attributes:
        question: with the given answers; of a conversation, its last user turn and what the assistant said to it.
        hops: what was retrieved.
        ids: the tokens up to where the answer begins; empty where they don't fit.
        given_ids: the given answer and its end token; empty where there is none or it wasn't asked for.
    """

    question: Question
    hops: tuple[Hop, ...]
    ids: list[int]
    given_ids: list[int]


class RftModule(MethodModule):
    """Trains on the best of the model's own answers."""

    recipe: Rft

    def __init__(self, recipe: Rft, components: Components) -> None:
        super().__init__(recipe, components)
        self.ema = WeightAverage(self.model, recipe.ema_decay) if recipe.ema_decay else None
        self._updated = False
        self._empty_steps = 0
        self._seen = self._too_long = 0
        self._best_reward = 0.0
        self._recorded: list[SampledPrompt] | None = None
        self._steps: list[list[SampledPrompt]] = []
        self._pool: list[Answer] = []
        self._pool_round = 0
        self._waiting: list[Answer] = []

    # --- sampling ---------------------------------------------------------------------------------------

    def prompts(self, examples: Sequence[Question | Conversation]) -> list[Prompt]:
        """Retrieve for questions, and render each example up to where its answer begins."""
        questions = [e for e in examples if isinstance(e, Question)]
        found = iter(self.episodes.retrieve(questions))
        return [
            self._asked(e, next(found)) if isinstance(e, Question) else self._continued(e) for e in examples
        ]

    def _asked(self, question: Question, hops: tuple[Hop, ...]) -> Prompt:
        given: list[int] = []
        if self.recipe.add_given:
            given = _last_answer(self.episodes.example(question, hops, question.answers[0]))
        return Prompt(question, hops, self.episodes.prompt(question, hops), given)

    def _continued(self, conversation: Conversation) -> Prompt:
        recipe, messages = self.recipe, conversation.messages
        has_answer = messages[-1].role == "assistant"
        asked = [m.content for m in messages if m.role == "user"]
        answers = (messages[-1].content,) if has_answer else ()
        given = has_answer and recipe.add_given
        return Prompt(
            Question(conversation.id, asked[-1] if asked else "", answers),
            (),
            prepare_prompt(
                conversation,
                self.tokenizer,
                recipe.max_seq_len,
                recipe.max_new_tokens,
                max_document_tokens=recipe.max_document_tokens,
            ).input_ids,
            _last_answer(self.episodes.conversation(conversation)) if given else [],
        )

    def sample(self, prompts: Sequence[Prompt], n_samples: int, seed: int) -> list[list[Sample]]:
        """``n_samples`` answers to each prompt: one prefill, forked states, one batch; eval mode, no gradients.

        Args:
            prompts: none of them empty.
            n_samples: of each.
            seed: sample s of prompt i draws from a generator of its own, seeded by (seed, i, s).
        """
        recipe = self.recipe
        completions = generate(
            self.model,
            [p.ids for p in prompts],
            GenerationConfig(
                recipe.max_new_tokens,
                recipe.temperature,
                recipe.top_p,
                stop_ids=(self.tokenizer.end_id,),
            ),
            pad_id=self.tokenizer.pad_id,
            seed=seed,
            num_samples=n_samples,
            max_batch_tokens=PREFILL_TOKENS,
        )
        return [
            [
                Sample(self.tokenizer.decode(c.content_ids).strip(), list(c.token_ids), c.finished)
                for c in group
            ]
            for group in completions
        ]

    def score(self, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Reward the samples of one prompt, in one call."""
        parts = reward_parts(
            self.reward, [episode(prompt.question, prompt.hops, s.text, self.max_hops) for s in samples]
        )
        for n, sample in enumerate(samples):
            sample.rewards = {name: values[n] for name, values in parts.items()}

    def _sampled(
        self, examples: Sequence[Question | Conversation], number: int, step: int
    ) -> tuple[list[SampledPrompt], dict[str, float]]:
        """Samples and scores ``num_prompts_per_step`` prompts at a time.

        Args:
            examples: what to sample for.
            number: of the round, from 1.
            step: that will learn from it, from 1; 0 for a whole round.

        Returns:
            The rollouts, not selected yet, and what measuring them gave.
        """
        recipe, at_once = self.recipe, self.recipe.num_prompts_per_step
        rollouts: list[SampledPrompt] = []
        retrieve_seconds = sample_seconds = score_seconds = 0.0
        too_long = 0
        for start in range(0, len(examples), at_once):
            started = time.perf_counter()
            every = self.prompts(examples[start : start + at_once])
            prompts = [p for p in every if p.ids]
            too_long += len(every) - len(prompts)
            rendered = time.perf_counter()
            seed = derive_seed(self.components.seed, self.global_step, self.global_rank, f"rollouts {start}")
            groups = self.sample(prompts, recipe.num_samples_per_prompt, seed) if prompts else []
            sampled = time.perf_counter()
            for prompt, samples in zip(prompts, groups, strict=True):
                self.score(prompt, samples)
                asked = prompt.question
                rollouts.append(
                    SampledPrompt(
                        asked.id,
                        asked.question,
                        asked.answers,
                        prompt.ids,
                        samples,
                        number,
                        step,
                        prompt.given_ids,
                    )
                )
            retrieve_seconds += rendered - started
            sample_seconds += sampled - rendered
            score_seconds += time.perf_counter() - sampled
        self._seen += len(examples)
        self._too_long += too_long
        self.dropped_examples += too_long
        n_tokens = sum(len(s.token_ids) for r in rollouts for s in r.samples)
        return rollouts, {
            "rollout/too_long_prompts": too_long,
            "rollout/tokens_per_second": n_tokens / max(sample_seconds, 1e-9),
            "time/retrieve_seconds": retrieve_seconds,
            "time/sample_seconds": sample_seconds,
            "time/score_seconds": score_seconds,
        }

    def _select(self, rollouts: Sequence[SampledPrompt], step: int) -> dict[str, float]:
        """Mark what is kept, and measure it; ``step`` is the first, from 0, that learns from it."""
        recipe = self.recipe
        for rollout in rollouts:
            if recipe.selection != "recorded":
                mark(rollout, recipe.min_reward, recipe.distinct_by, recipe.check_equations)
        seed = derive_seed(self.components.seed, step, self.global_rank, "selection")
        select(rollouts, recipe.selection, recipe.kept_per_prompt, seed)
        samples = [s for r in rollouts for s in r.samples]
        if not samples:
            return {}
        self._best_reward = max(self._best_reward, *(s.reward for s in samples))
        kept = [s for s in samples if s.kept]
        metrics = {
            f"reward/{name}": _mean([s.rewards[name] for s in samples if name in s.rewards])
            for name in samples[0].rewards
        }
        if kept:
            metrics["reward/kept"] = _mean([s.reward for s in kept])
        metrics["reward/empty_completions"] = _mean([says_nothing(s.text) for s in samples])
        return metrics | {
            "rollout/acceptance_rate": _mean([s.accepted for s in samples]),
            "rollout/distinct_rate": _mean([s.distinct for s in samples]),
            "rollout/distinct_accepted_per_prompt": len([s for s in samples if s.accepted and s.distinct])
            / len(rollouts),
            "rollout/kept": len(kept),
            "rollout/prompts": len(rollouts),
            "rollout/prompts_without_kept": sum(not r.kept for r in rollouts),
            "rollout/prompts_without_kept_share": _mean([not r.kept for r in rollouts]),
            "rollout/completion_tokens": _mean([len(s.token_ids) for s in samples]),
            "rollout/finished_rate": _mean([s.finished for s in samples]),
        }

    def _file(self, name: str) -> Path | None:
        if self.components.folder is None:
            return None
        rank = f"-rank{self.global_rank}" if self.global_rank else ""
        return self.components.folder / "rollouts" / f"{name}{rank}.jsonl"

    # --- what a step learns ------------------------------------------------------------------------------

    def _lessons(self, batch: Batch) -> tuple[list[Answer], dict[str, float]]:
        """The prompts and answers that this step learns, and what finding them measured."""
        if self.recipe.rounds is not None:
            return self._drawn()
        if self.recipe.rollouts is not None:
            rollouts = self._recorded_steps()[self.global_step % len(self._recorded_steps())]
            metrics: dict[str, float] = {}
        else:
            rollouts, metrics = self._sampled(batch.examples, 1, self.global_step + 1)
        metrics |= self._select(rollouts, self.global_step)
        if self.recipe.rollouts is None and (file := self._file("streaming")) is not None:
            write_rollouts(file, rollouts, append=True)
        return self._answers(rollouts), metrics

    def _answers(self, rollouts: Sequence[SampledPrompt]) -> list[Answer]:
        answers = [Answer(r.prompt_ids, s.token_ids, s.text) for r in rollouts for s in r.kept]
        if self.recipe.add_given:
            given = [Answer(r.prompt_ids, r.given_ids, "") for r in rollouts if r.given_ids]
            answers += [g for g in given if len(g.prompt_ids) + len(g.token_ids) <= self.recipe.max_seq_len]
        return answers

    def _read_recorded(self) -> list[SampledPrompt]:
        if self._recorded is None:
            source = str(self.recipe.rollouts)
            self._recorded = read_rollouts(source, self.model.vocab_size)
            for rollout in self._recorded:
                for sample in rollout.samples:
                    ids = sample.token_ids[:-1] if sample.finished else sample.token_ids
                    if self.tokenizer.decode(ids).strip() != sample.text:
                        raise DataError(
                            f"method.rollouts={source}: the tokens of a sample of {rollout.id!r} don't read"
                            f" {sample.text[:60]!r} but {self.tokenizer.decode(ids).strip()[:60]!r}; the file was"
                            " written with another tokenizer"
                        )
            if self.recipe.add_given and not any(r.given_ids for r in self._recorded):
                raise DataError(
                    f"method.rollouts={source} holds no given answers (given_ids), which method.add_given=true asks"
                    " for; sample with method.add_given=true, or set it to false"
                )
        return self._recorded

    def _recorded_steps(self) -> list[list[SampledPrompt]]:
        if not self._steps:
            self._steps = by_step(self._read_recorded(), str(self.recipe.rollouts))
        return self._steps

    # --- rounds ------------------------------------------------------------------------------------------

    def _drawn(self) -> tuple[list[Answer], dict[str, float]]:
        """A batch of what this step's round has kept; its first step samples."""
        rounds, n_steps = self.recipe.rounds or 1, self.components.n_steps
        number = self.global_step * rounds // n_steps + 1
        first = -(-(number - 1) * n_steps // rounds)
        metrics: dict[str, float] = {}
        if number != self._pool_round:
            self._pool, metrics = self._filled(number, first)
            self._pool_round = number
        if not self._pool:
            return [], metrics
        seed = derive_seed(self.components.seed, number, self.global_rank, "pool")
        size = self.recipe.global_batch_size
        chosen = batch_indices(seed, self.global_step - first, len(self._pool), size)
        metrics["rollout/round"] = number
        metrics["rollout/passes"] = (self.global_step - first + 1) * size / len(self._pool)
        return [self._pool[i] for i in chosen], metrics

    def _filled(self, number: int, first: int) -> tuple[list[Answer], dict[str, float]]:
        """What round ``number`` may learn: sampled now, or read from a file where it is there already.

        Args:
            number: from 1.
            first: its first step, from 0.
        """
        file = self._file(f"round-{number:03d}")
        metrics: dict[str, float] = {}
        if self.recipe.rollouts is not None:
            every = self._read_recorded()
            rollouts = [r for r in every if r.round == number]
            if not rollouts:
                rounds = len({r.round for r in every})
                raise ConfigError(
                    f"method.rounds={self.recipe.rounds}: method.rollouts={self.recipe.rollouts} holds {rounds} rounds"
                )
        elif file is not None and file.is_file():  # a resumed run: the weights that sampled it are gone
            rollouts = read_rollouts(file, self.model.vocab_size)
        else:
            if not self.components.train:
                raise ConfigError("method.rounds needs the training prompts (Components.train), and got none")
            log.info("round %d: sampling for %d prompts", number, len(self.components.train))
            rollouts, metrics = self._sampled(self.components.train, number, 0)
        metrics |= self._select(rollouts, first)
        if self.recipe.rollouts is None and file is not None:
            write_rollouts(file, rollouts)
        answers = self._answers(rollouts)
        log.info(
            "round %d: %d samples of %d prompts kept, %d prompts without any; %d examples to learn",
            number,
            metrics.get("rollout/kept", 0),
            len(rollouts),
            metrics.get("rollout/prompts_without_kept", 0),
            len(answers),
        )
        return answers, metrics

    # --- learning ----------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Prepared:
        """Sample, score and select; the kept samples as examples."""
        answers, metrics = self._lessons(batch)
        return Prepared([a.as_example() for a in answers], metrics=metrics)

    def learn(self, batch: Batch) -> Learnt:
        """`prepare` and the gradient; a prompt of which several samples are kept is read once for all of them."""
        too_long = self._too_long
        found, metrics = self._lessons(batch)
        started = time.perf_counter()
        answers = self._enough(found)
        if self._waiting:
            metrics["rollout/waiting"] = len(self._waiting)
        n_read = 0
        if answers:
            self.model.train()
            more, n_read = self._backward_over(answers)
            metrics |= more
        seconds = metrics["time/learn_seconds"] = time.perf_counter() - started
        if n_read:
            metrics["train/learn_tokens_per_second"] = n_read / seconds
        self._updated = bool(answers)
        self._empty_steps = 0 if found else self._empty_steps + 1
        if self._empty_steps == _WARN_AFTER_EMPTY_STEPS:
            log.warning(
                "nothing was kept for %d steps: no sample reaches method.min_reward=%g (the best reward so far is"
                " %.3g); look at rollouts/",
                self._empty_steps,
                self.recipe.min_reward,
                self._best_reward,
            )
        return Learnt(metrics, len(answers) + self._too_long - too_long, len(answers), n_read)

    def _enough(self, answers: list[Answer]) -> list[Answer]:
        """What this step learns: nothing, until ``min_kept`` answers have come together or the run ends."""
        last = self.global_step + 1 == self.components.n_steps
        self._waiting += answers
        if self.recipe.rounds is None and not last and len(self._waiting) < self.recipe.min_kept:
            return []
        ready, self._waiting = self._waiting, []
        return ready

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what waits to be learnt."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["rft_waiting"] = [[a.prompt_ids, a.token_ids, a.text] for a in self._waiting]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it up again."""
        super().on_load_checkpoint(checkpoint)
        self._waiting = [Answer(*parts) for parts in checkpoint["rft_waiting"]]

    def _backward_over(self, answers: Sequence[Answer]) -> tuple[dict[str, float], int]:
        """The gradient of the mean loss over all answer tokens, micro batch by micro batch.

        Returns:
            Metrics, and how many tokens were read.
        """
        examples = [a.as_example() for a in answers]
        n_tokens = sum(e.supervised_tokens for e in examples)
        # With dropout the samples of a prompt would share its mask
        may_share = not any(layer.dropout for _, layer in lora_layers(self.model))
        cross_entropy, n_read = 0.0, 0
        for group in self._groups(answers):
            prompts = {tuple(answers[i].prompt_ids): 0 for i in group}
            if may_share and len(prompts) < len(group) and all(len(p) > 1 for p in prompts):
                rows = {prompt: row for row, prompt in enumerate(prompts)}
                state = self._read(list(prompts)).select([rows[tuple(answers[i].prompt_ids)] for i in group])
                tails = [tail(answers[i].prompt_ids, examples[i]) for i in group]
                supervised = self._supervised(tails, state)
                n_read += sum(len(p) - 1 for p in prompts) + sum(map(len, tails))
            else:
                supervised = self._supervised([examples[i] for i in group])
                n_read += sum(len(examples[i]) for i in group)
            cross_entropy += self._backward(*supervised, [1.0 / n_tokens] * len(group))[0]
        return {"train/loss": cross_entropy / n_tokens, "train/kept_tokens": n_tokens}, n_read

    def _groups(self, answers: Sequence[Answer]) -> list[list[int]]:
        """Micro batches of at most ``micro_batch_size`` answers; those to one prompt together, long prompts first."""
        of_prompt: dict[tuple[int, ...], list[int]] = {}
        for i, answer in enumerate(answers):
            of_prompt.setdefault(tuple(answer.prompt_ids), []).append(i)
        size = self.micro_batch_size
        groups: list[list[int]] = []
        for _, same in sorted(of_prompt.items(), key=lambda item: -len(item[0])):
            for start in range(0, len(same), size):
                part = same[start : start + size]
                if groups and len(groups[-1]) + len(part) <= size:
                    groups[-1] += part
                else:
                    groups.append(part)
        return groups

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One step, and the average of the weights after it where any weight changed."""
        super().training_step(batch, batch_idx)
        if self.ema is not None and self._updated and self.global_step > self.recipe.ema_start_step:
            self.ema.update()

    def _nothing_learnt(self, steps: int) -> None:
        """Prompts that don't fit never will; samples may well get better."""
        if self._waiting:
            return
        if self._seen and self._too_long == self._seen:
            raise DataError(
                f"none of the {self._too_long} prompts of the first {steps} steps fits into method.max_seq_len="
                f"{self.recipe.max_seq_len} beside method.max_new_tokens={self.recipe.max_new_tokens} for the answer;"
                " raise the first, or lower the second"
            )
        log.warning(
            "nothing was kept in the first %d steps, so nothing was learnt: no sample reaches method.min_reward=%g (the"
            " best reward was %.3g); look at rollouts/, start from a model that answers some questions (method=sft"
            " first), sample more, or lower method.min_reward",
            steps,
            self.recipe.min_reward,
            self._best_reward,
        )

    # --- evaluation and Lightning's hooks ----------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """As every method, and pass@k, by the averaged weights where there is an average."""
        with self._averaged():
            metrics, records = super().evaluate()
            metrics |= self._pass_at_k()
        return metrics, records

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else self.ema.applied()

    def _pass_at_k(self) -> dict[str, float]:
        """pass@k of samples for the validation prompts, the same random numbers in every evaluation.

        A sample is right where its reward reaches ``min_reward`` and is not 0; a prompt that doesn't fit has none.
        """
        recipe = self.recipe
        n_samples = recipe.eval_samples_per_prompt
        examples = self.components.validation[: recipe.eval_batches * recipe.global_batch_size]
        if not n_samples or not examples:
            return {}
        at_once = max(1, recipe.num_prompts_per_step * recipe.num_samples_per_prompt // n_samples)
        correct: list[int] = []
        rewards: list[float] = []
        for start in range(0, len(examples), at_once):
            every = self.prompts(examples[start : start + at_once])
            prompts = [p for p in every if p.ids]
            correct += [0] * (len(every) - len(prompts))
            if not prompts:
                continue
            seed = derive_seed(self.components.seed, start, self.global_rank, "validation")
            for prompt, samples in zip(prompts, self.sample(prompts, n_samples, seed), strict=True):
                self.score(prompt, samples)
                rewards += [s.reward for s in samples]
                correct.append(sum(s.reward >= recipe.min_reward and s.reward > 0 for s in samples))
        metrics = {f"val/pass@{k}": value for k, value in mean_pass_at_k(n_samples, correct).items()}
        return metrics | ({"val/sampled_reward": _mean(rewards)} if rewards else {})

    def on_train_start(self) -> None:
        """Take out of the rollouts what steps to come will sample again, and warn where answers have no room."""
        if self.recipe.rollouts is None and (file := self._file("streaming")) is not None:
            drop_rollouts(file, self.global_step + 1)
        answers = [e.answers[0] for e in self.components.train[:_LOOKED_AT] if isinstance(e, Question)]
        lengths = [len(ids) + 1 for ids in self.tokenizer.encode_batch(answers)] if answers else [0]
        if median(lengths) > self.recipe.max_new_tokens:
            log.warning(
                "half of the given answers are longer than %d tokens, and method.max_new_tokens=%d cuts samples there;"
                " raise it",
                median(lengths) - 1,
                self.recipe.max_new_tokens,
            )

    def on_train_end(self) -> None:
        """What is exported are the averaged weights."""
        if self.ema is not None:
            self.ema.apply_for_good()


def _last_answer(example: Rendered) -> list[int]:
    """The tokens of the last supervised stretch: the last answer and its end token."""
    end = len(example)
    while end and not example.loss_mask[end - 1]:
        end -= 1
    start = end
    while start and example.loss_mask[start - 1]:
        start -= 1
    return example.input_ids[start:end]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
