"""What all methods share: the optimisation step, evaluation by loss and by generated answers, schedules.

One Lightning step is one global batch. The data yields it whole; the module walks its micro batches and steps the
optimiser once, so that token-weighted losses, rollouts, logging and checkpoints all see whole steps, and neither the
micro batch size nor accumulation changes the gradient.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from refragkit.adapters.lora import lora_layers
from refragkit.data.collate import collate, micro_batch_indices, micro_batches
from refragkit.data.conversation import Rendered
from refragkit.errors import ConfigError, DataError
from refragkit.methods.answers import PREFILL_TOKENS, Answer, episode, generate_answers, score_answers
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.ops.cross_entropy import linear_cross_entropy, weighted_linear_cross_entropy
from refragkit.seeding import derive_seed
from refragkit.training.optim import (
    LearningRates,
    build_adamw,
    clip_gradients,
    learning_rate_factor,
    parameter_kinds,
    set_learning_rates,
)
from refragkit.types import Batch, Conversation, Hop, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.methods.recipes import Recipe
    from refragkit.models.base import SequenceModel
    from refragkit.models.state import ModelState
    from refragkit.retrievers.multi_hop import MultiHopRetriever
    from refragkit.rewards.base import Reward
    from refragkit.training.hardware import Hardware

log = logging.getLogger("refragkit")

# A run that has trained on nothing after so many steps will not do better later.
STEPS_WITHOUT_A_TOKEN = 3
# What a checkpoint keeps of a module beside its weights.
_PROGRESS = ("history", "dropped_examples", "truncated_documents", "trained_tokens", "training_seconds")


@dataclass
class Components:
    """The built objects that a method works on.

    For methods that write files of their own there are ``folder``, the run's, and ``model_path``, where the model's
    weights came from (None: they are random).
    """

    model: SequenceModel
    tokenizer: Tokenizer
    retriever: MultiHopRetriever | None
    reward: Reward
    hardware: Hardware
    validation: Sequence[Question | Conversation]
    n_steps: int
    seed: int
    from_scratch: bool
    log_metrics: Callable[[Mapping[str, float], int], None]
    train: Sequence[Question | Conversation] = ()
    folder: Path | None = None
    model_path: str | None = None


@dataclass
class Learnt:
    """What came of a global batch whose gradient is ready.

    Attributes:
        metrics: to be logged.
        examples: how many the batch held.
        kept: how many of them were learnt from.
        tokens: of these.
    """

    metrics: dict[str, float]
    examples: int
    kept: int
    tokens: int


@dataclass
class Prepared:
    """A global batch, ready to train on.

    Attributes:
        examples: rendered conversations.
        weights: one per example: the loss is the mean over examples of weight times token-mean loss. None: the loss is
            the mean over all supervised tokens of the batch.
        metrics: what preparing measured, logged beside the loss.
    """

    examples: list[Rendered]
    weights: list[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class MethodModule(pl.LightningModule, ABC):
    """Base of the methods: subclasses say how a global batch becomes supervised tokens and weights."""

    def __init__(self, recipe: Recipe, components: Components) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recipe = recipe
        self.components = components
        self.model = components.model
        self.tokenizer = components.tokenizer
        self.reward = components.reward
        self.episodes = EpisodeBuilder(
            components.retriever,
            components.tokenizer,
            recipe.max_seq_len,
            recipe.max_new_tokens,
            recipe.max_document_tokens,
            recipe.order,
        )
        self.history: list[dict[str, float]] = []
        self.shown: dict[str, float] = {}
        self.dropped_examples = 0
        self.truncated_documents = 0
        self.trained_tokens = 0
        self.training_seconds = 0.0
        self._freeze()

    @abstractmethod
    def prepare(self, batch: Batch) -> Prepared:
        """Turn a global batch into rendered examples, with weights where the method has them."""

    @property
    def learning_rates(self) -> LearningRates:
        """The peak rate of each kind of parameter."""
        recipe = self.recipe
        if recipe.lr is not None:
            return LearningRates.uniform(recipe.lr)
        scale = recipe.scratch_lr_frac if self.components.from_scratch else recipe.init_lr_frac
        return LearningRates(
            embedding=recipe.embedding_lr,
            unembedding=recipe.unembedding_lr,
            matrix=recipe.matrix_lr,
            other=recipe.matrix_lr,
        ).scaled(scale)

    def _freeze(self) -> None:
        """Freeze the lowest blocks where asked for, and the kinds of parameters whose rate is 0.

        The gradient of a large vocabulary's embedding costs time, and so does that of blocks which need not change.
        Where every rate is 0 the run is a control, and all of it goes on as if it trained.
        """
        frozen = self.recipe.frozen_blocks
        if frozen > self.model.n_layers:
            raise ConfigError(
                f"method.frozen_blocks={frozen}: this model has {self.model.n_layers} blocks; freeze fewer"
            )
        for index in range(frozen):
            self.model.get_submodule(f"blocks.{index}").requires_grad_(False)
        rates, kinds = self.learning_rates, parameter_kinds(self.model)
        if not any(getattr(rates, kind) for kind in kinds.values()):
            return
        parameters = dict(self.model.named_parameters())
        for name, kind in kinds.items():
            if getattr(rates, kind) == 0:
                parameters[name].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with a learning rate for each kind of parameter."""
        return build_adamw(self.model, self.learning_rates, weight_decay=self.recipe.weight_decay)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the progress; of an adapted model, keep what is trained: its base is read or drawn again."""
        checkpoint["progress"] = {name: getattr(self, name) for name in _PROGRESS}
        if any(True for _ in lora_layers(self.model)):
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            state: dict[str, Any] = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name: value
                for name, value in state.items()
                if name in trained or not name.startswith("model.")
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the progress; let what an adapted model's checkpoint leaves out be missing."""
        for name, value in checkpoint["progress"].items():
            setattr(self, name, value)
        _begin_anew(checkpoint["loops"]["fit_loop"])
        if any(True for _ in lora_layers(self.model)):
            self.strict_loading = False

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Leave the questions as they are; tensors are made on the device, micro batch by micro batch."""
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Prepare a global batch, accumulate its gradient over micro batches, step the optimiser once."""
        started = time.perf_counter()
        step = self.global_step
        torch.manual_seed(derive_seed(self.components.seed, step, self.global_rank, "dropout"))
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        factor = learning_rate_factor(
            self.recipe.schedule, step, self.components.n_steps, self.recipe.warmup_steps
        )
        rates = set_learning_rates(optimizer.optimizer, factor)
        optimizer.zero_grad()
        learnt = self.learn(batch)
        metrics = {f"lr/{kind}": rate for kind, rate in rates.items()} | learnt.metrics
        metrics["train/dropped_examples"] = learnt.examples - learnt.kept
        update_started = time.perf_counter()
        if learnt.kept:
            metrics["train/grad_norm"] = clip_gradients(self.model.parameters(), self.recipe.grad_clip)
        elif self.trained_tokens == 0 and step + 1 == min(STEPS_WITHOUT_A_TOKEN, self.components.n_steps):
            self._nothing_learnt(step + 1)
        optimizer.step()
        finished = time.perf_counter()
        metrics["time/update_seconds"] = finished - update_started
        seconds = metrics["time/step_seconds"] = finished - started
        self.trained_tokens += learnt.tokens
        self.training_seconds += seconds
        metrics["train/tokens_per_second"] = learnt.tokens / seconds
        metrics["train/tokens"] = float(self.trained_tokens)
        self._record(metrics, step + 1)
        self.shown = {
            label: metrics[name]
            for label, name in (
                ("loss", "train/loss"),
                ("reward", "reward/total"),
                ("tok/s", "train/tokens_per_second"),
            )
            if name in metrics
        }

    def _nothing_learnt(self, steps: int) -> None:
        """Say why the first steps held nothing to learn.

        Raises:
            DataError: later ones won't either.
        """
        raise DataError(
            f"the first {steps} steps held no supervised token: their {self.dropped_examples} examples don't fit"
            f" into method.max_seq_len={self.recipe.max_seq_len}, or have no assistant turn; raise"
            " method.max_seq_len, or look at the data"
        )

    def learn(self, batch: Batch) -> Learnt:
        """Prepare a global batch and accumulate its gradient."""
        prepared = self.prepare(batch)
        kept = self._keep(prepared)
        metrics = dict(prepared.metrics)
        started = time.perf_counter()
        if kept:
            self.model.train()
            metrics |= self._accumulate(kept)
        metrics["time/learn_seconds"] = time.perf_counter() - started
        return Learnt(metrics, len(prepared.examples), len(kept), sum(len(e) for e, _ in kept))

    def _record(self, metrics: Mapping[str, float], step: int) -> None:
        self.history.append({"step": step, **metrics})
        self.components.log_metrics(metrics, step)

    def _keep(self, prepared: Prepared) -> list[tuple[Rendered, float | None]]:
        """Examples with a supervised token and a weight; the rest is counted and skipped."""
        weights: Sequence[float | None] = prepared.weights or [None] * len(prepared.examples)
        kept = []
        for example, weight in zip(prepared.examples, weights, strict=True):
            self.truncated_documents += example.truncated_documents + example.left_out_documents
            if example.supervised_tokens:
                kept.append((example, weight))
            else:
                self.dropped_examples += 1
        return kept

    def _accumulate(self, kept: Sequence[tuple[Rendered, float | None]]) -> dict[str, float]:
        """Backward over micro batches; the loss is divided by the whole global batch's count first."""
        examples = [example for example, _ in kept]
        n_tokens = sum(e.supervised_tokens for e in examples)
        scales = [
            1.0 / n_tokens if weight is None else weight / (e.supervised_tokens * len(kept))
            for e, weight in kept
        ]
        cross_entropy = objective = 0.0
        for group in micro_batch_indices([len(e) for e in examples], self.micro_batch_size):
            supervised = self._supervised([examples[i] for i in group])
            found = self._backward(*supervised, [scales[i] for i in group])
            cross_entropy, objective = cross_entropy + found[0], objective + found[1]
        return {"train/loss": cross_entropy / n_tokens, "train/objective": objective}

    def _backward(
        self, hidden: Tensor, targets: Tensor, rows: Tensor, scales: Sequence[float]
    ) -> tuple[float, float]:
        """Add the gradient of a micro batch to what there is.

        Args:
            hidden: of its supervised positions ``[N, d]``.
            targets: their tokens ``[N]``.
            rows: the example of each ``[N]``.
            scales: what each token of an example counts, one for each example.

        Returns:
            The sum of the tokens' cross-entropies, and that of the scaled ones.
        """
        scale = torch.tensor(scales, device=hidden.device)[rows]
        loss, losses = weighted_linear_cross_entropy(
            hidden, self.model.head_weight, targets, scale, self.model.head_scale
        )
        # Where every reward is 0 there is nothing to learn: spare the backward pass.
        if bool((scale != 0).any()):
            self.manual_backward(loss)
        return float(losses.sum()), float(loss.detach())

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one forward pass."""
        share = self.recipe.global_batch_size // self.components.hardware.world_size
        return min(self.components.hardware.micro_batch_size, share)

    def _supervised(
        self, examples: Sequence[Rendered], state: ModelState | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``[N, d]`` and targets ``[N]`` of the supervised positions, and the example of each ``[N]``.

        Only these go through the output head. With ``state``, examples are what follows it.
        """
        batch = collate(examples, self.tokenizer.pad_id, self.device)
        hidden, _ = self.model.hidden_states(
            batch.input_ids, state=state, attention_mask=batch.attention_mask
        )
        supervised = batch.labels != -100
        return hidden[supervised], batch.labels[supervised], supervised.nonzero()[:, 0]

    def _read(self, prompts: Sequence[Sequence[int]]) -> ModelState:
        """The state after all but the last token of each prompt, from which it is both answered and learnt."""
        rows = [Rendered(list(p[:-1]), [False] * (len(p) - 1)) for p in prompts]
        batch = collate(rows, self.tokenizer.pad_id, self.device)
        _, state = self.model.hidden_states(
            batch.input_ids, attention_mask=batch.attention_mask, return_state=True
        )
        assert state is not None
        return state

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Loss on gold answers, and exact match, F1 and support recall of generated ones.

        Every validation example counts once, in file order, up to ``eval_batches`` global batches.

        Returns:
            metrics under ``val/``, and one record for each question as in ``samples.jsonl``.
        """
        was_training = self.model.training
        self.model.eval()
        limit = self.recipe.eval_batches * self.recipe.global_batch_size
        examples = list(self.components.validation[:limit])
        questions = [e for e in examples if isinstance(e, Question)]
        hops = self.episodes.retrieve(questions)
        asked = [
            (self.episodes.prompt(q, h), self.episodes.example(q, h, q.answers[0]))
            for q, h in zip(questions, hops, strict=True)
        ]
        rendered = [r for _, r in asked]
        rendered += [self.episodes.conversation(e) for e in examples if isinstance(e, Conversation)]
        answers = [Answer([], [], "") for _ in questions]
        # What was read for the answer is not read again for the loss, wherever the one is a part of the other
        once = [i for i, (prompt, example) in enumerate(asked) if follows(prompt, example)]
        losses = [0.0, 0.0]
        for group in self._prompt_groups([len(asked[i][0]) for i in once]):
            prompts, targets = zip(*(asked[once[i]] for i in group), strict=True)
            state = self._read(prompts)
            self._add_loss(losses, [tail(p, e) for p, e in zip(prompts, targets, strict=True)], state)
            for i, answer in zip(group, self._answer(prompts, 0.0, 0, state), strict=True):
                answers[once[i]] = answer
        others = [i for i in range(len(asked)) if i not in set(once)]
        for i, answer in zip(others, self._answer([asked[i][0] for i in others], 0.0, 0), strict=True):
            answers[i] = answer
        left = [rendered[i] for i in range(len(rendered)) if i not in set(once)]
        usable = [r for r in left if r.supervised_tokens]
        for micro_batch in micro_batches(usable, self.micro_batch_size):
            self._add_loss(losses, micro_batch)
        metrics = {"val/loss": losses[0] / losses[1]} if losses[1] else {}
        if len(usable) < len(left):
            metrics["val/dropped_examples"] = len(left) - len(usable)
            log.warning(
                "%d of %d validation examples have no supervised token within method.max_seq_len=%d and are not in"
                " val/loss",
                len(left) - len(usable),
                len(rendered),
                self.recipe.max_seq_len,
            )
        records: list[dict[str, Any]] = []
        if questions:
            evaluated = [
                episode(q, h, a.text, self.max_hops) for q, h, a in zip(questions, hops, answers, strict=True)
            ]
            more, records = score_answers(evaluated, self.reward, self.global_step)
            metrics |= more
        self.model.train(was_training)
        return metrics, records

    def _add_loss(
        self, losses: list[float], examples: Sequence[Rendered], state: ModelState | None = None
    ) -> None:
        """Add the sum of the losses of the supervised tokens, and their number."""
        hidden, targets, _ = self._supervised(examples, state)
        found = linear_cross_entropy(hidden, self.model.head_weight, targets, scale=self.model.head_scale)
        losses[0] += float(found.sum())
        losses[1] += found.numel()

    def _prompt_groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Prompts of similar length that are read together: ``PREFILL_TOKENS`` at most, and one at least."""
        groups: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= PREFILL_TOKENS:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    @property
    def max_hops(self) -> int:
        """Hops allowed for a question; 0 without retrieval."""
        return self.components.retriever.max_hops if self.components.retriever else 0

    def answer(
        self, questions: Sequence[Question], hops: Sequence[Sequence[Hop]], temperature: float, seed: int
    ) -> list[Answer]:
        """The model's answer to each question, given its documents, in one batched generation.

        A question that does not fit into the context is answered with nothing.

        Args:
            questions: B questions.
            hops: what was retrieved for each.
            temperature: 0 is greedy.
            seed: of the sampling; each row has a generator of its own.
        """
        prompts = [self.episodes.prompt(q, h) for q, h in zip(questions, hops, strict=True)]
        return self._answer(prompts, temperature, seed)

    def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        seed: int,
        state: ModelState | None = None,
    ) -> list[Answer]:
        return generate_answers(
            self.model,
            self.tokenizer,
            prompts,
            self.recipe.max_new_tokens,
            temperature=temperature,
            seed=seed,
            state=state,
        )


def follows(prompt: Sequence[int], example: Rendered) -> bool:
    """Whether an example is its prompt and an answer: not where one of them was cut more than the other."""
    return len(prompt) > 1 and example.input_ids[: len(prompt)] == prompt


def tail(prompt: Sequence[int], example: Rendered) -> Rendered:
    """What is left of an example when all but the last token of its prompt has been read."""
    start = len(prompt) - 1
    return Rendered(example.input_ids[start:], example.loss_mask[start:])


def _begin_anew(fit_loop: dict[str, Any]) -> None:
    """Let Lightning count batches from 0 again, but not steps: the loader begins with the next one."""
    for name in ("epoch_progress", "epoch_loop.batch_progress"):
        for counts in (fit_loop[name]["total"], fit_loop[name]["current"]):
            counts.update(dict.fromkeys(counts, 0))
    fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False
