"""The settings of the methods: what a YAML of ``conf/method`` holds, checked without loading torch or Lightning.

The mathematics of each method is in its own file beside this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from refragkit.errors import ConfigError

if TYPE_CHECKING:
    from refragkit.methods.base import Components, MethodModule
    from refragkit.methods.refrag import RefragModule
    from refragkit.methods.rft import RftModule
    from refragkit.methods.sft import SFTModule

Schedule = Literal["linear", "cosine", "constant"]


def _check_finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"method.{name}: expected a finite number, 0 or more, got {value}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings that every method has; a YAML of ``conf/method`` holds exactly these.

    Attributes:
        epochs: passes over the training examples.
        max_steps: cap on optimiser steps; null: only ``epochs`` counts.
        global_batch_size: examples in one optimiser step of the whole run.
        max_seq_len: tokens of a training example; documents are cut to make room.
        max_document_tokens: tokens of one document; null: no limit of its own.
        max_new_tokens: longest generated answer.
        order: where a question stands, one of ``refragkit.data.conversation.ORDERS``.
        lr: one learning rate for every parameter; null: the three below.
        embedding_lr: for the (tied) embedding; 0 freezes it, and no gradient of it is computed. The others likewise.
        unembedding_lr: for an untied output head.
        matrix_lr: for everything else.
        init_lr_frac: factor on all rates when weights are pretrained.
        scratch_lr_frac: factor on all rates when weights are random: nothing is there to be preserved.
        frozen_blocks: blocks, counted from the input, that stay as they are.
        weight_decay: AdamW's.
        schedule: shape of the decay to 0 after warmup.
        warmup_steps: linear warmup.
        grad_clip: largest gradient norm; 0 switches clipping off.
        eval_at_start: evaluate the model before the first step too, so that the end can be compared with it.
        eval_every: optimiser steps between evaluations; the last step is always evaluated.
        eval_batches: evaluate at most this many global batches.
        save_every: optimiser steps between checkpoints; null: one with each evaluation.
        log_every: optimiser steps between log lines.
    """

    epochs: int
    max_steps: int | None
    global_batch_size: int
    max_seq_len: int
    max_document_tokens: int | None
    max_new_tokens: int
    order: Literal["question_first", "documents_first", "sandwich"]
    lr: float | None
    embedding_lr: float
    unembedding_lr: float
    matrix_lr: float
    init_lr_frac: float
    scratch_lr_frac: float
    frozen_blocks: int
    weight_decay: float
    schedule: Schedule
    warmup_steps: int
    grad_clip: float
    eval_at_start: bool
    eval_every: int
    eval_batches: int
    save_every: int | None
    log_every: int

    needs_recurrence: ClassVar[bool] = False
    needs_retriever: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive = (
            "epochs",
            "global_batch_size",
            "max_new_tokens",
            "eval_every",
            "eval_batches",
            "log_every",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"method.{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("max_steps", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"method.{name}: expected null or at least 1, got {value}")
        rates = ("embedding_lr", "unembedding_lr", "matrix_lr", "init_lr_frac", "scratch_lr_frac")
        for name in (
            "frozen_blocks",
            "weight_decay",
            "warmup_steps",
            "grad_clip",
            *rates,
            *(["lr"] if self.lr is not None else []),
        ):
            _check_finite(name, getattr(self, name))
        if self.max_document_tokens is not None and self.max_document_tokens < 1:
            raise ConfigError(
                f"method.max_document_tokens: expected null or at least 1, got {self.max_document_tokens}; for no"
                " documents at all use method=sft retriever=none"
            )
        if self.max_seq_len <= self.max_new_tokens:
            raise ConfigError(
                f"method.max_seq_len={self.max_seq_len} leaves no room for a prompt beside"
                f" method.max_new_tokens={self.max_new_tokens}; raise the first or lower the second"
            )

    @property
    def examples_per_step(self) -> int:
        """Training examples that one step takes from the data."""
        return self.global_batch_size

    def n_steps(self, n_examples: int) -> int:
        """Optimiser steps of a run over ``n_examples``: ``epochs`` passes, at most ``max_steps``."""
        steps = max(1, -(-self.epochs * n_examples // self.examples_per_step))
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def module(self, components: Components) -> MethodModule:
        """The Lightning module that trains ``components.model``."""
        raise TypeError(f"{type(self).__name__} is not a method of its own")


@dataclass(frozen=True, kw_only=True)
class SFT(Recipe):
    """Settings of supervised fine-tuning; see ``Recipe``."""

    def module(self, components: Components) -> SFTModule:
        """The Lightning module."""
        from refragkit.methods.sft import SFTModule

        return SFTModule(self, components)


@dataclass(frozen=True, kw_only=True)
class Refrag(Recipe):
    """Settings of refrag; see ``Recipe`` for the shared ones.

    Attributes:
        objective: how rewards enter the loss; with ``none`` they don't.
        target: which answer is trained on: the ``given`` gold one or the ``sampled`` one that was rewarded; of
            ``reward_weighted`` only.
        weight_floor: weight of an example whose answer earned nothing, in [0, 1); used with ``target: given`` only.
        temperature: of the rewarded answers; 0 is greedy. Null: 0, and 1 for ``policy_gradient``, which takes no other.
        group_size: rollouts of one question; of ``policy_gradient`` only, as are the next two.
        clip_range: how far the ratio of probabilities counts, around 1.
        kl_coef: weight of the divergence from the start model; 0 does without that model.
        warmup: what the first ``trace_steps`` optimiser steps learn instead of the objective.
        trace_steps: steps on gold traces.
        first_query: who writes the first query where ``retriever.planner=model``; the model writes all later ones.
        max_hops: searches for one question at most.
        top_k_per_hop: passages of one search.
    """

    objective: Literal["reward_weighted", "policy_gradient", "none"]
    target: Literal["given", "sampled"]
    weight_floor: float
    temperature: float | None
    group_size: int
    clip_range: float
    kl_coef: float
    warmup: Literal["none", "gold_traces"]
    trace_steps: int
    first_query: Literal["question", "model"]
    max_hops: int
    top_k_per_hop: int

    needs_recurrence: ClassVar[bool] = True
    needs_retriever: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_hops", "top_k_per_hop", "trace_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.weight_floor < 1:
            raise ConfigError(f"method.weight_floor: expected a number in [0, 1), got {self.weight_floor}")
        if self.temperature is not None:
            _check_finite("temperature", self.temperature)
        if not 0 < self.clip_range < 1:
            raise ConfigError(f"method.clip_range: expected a number in (0, 1), got {self.clip_range}")
        _check_finite("kl_coef", self.kl_coef)
        if self.objective == "policy_gradient":
            if self.group_size < 2:
                raise ConfigError(
                    f"method.group_size: expected at least 2, got {self.group_size}; policy_gradient compares the"
                    " rollouts of a question with each other"
                )
            if self.temperature not in (None, 1):
                raise ConfigError(
                    f"method.temperature={self.temperature}: policy_gradient samples from the very probabilities that"
                    " it changes, at temperature 1; leave it null"
                )

    @property
    def rollout_temperature(self) -> float:
        """``temperature``, or the objective's own."""
        if self.temperature is not None:
            return float(self.temperature)
        return 1.0 if self.objective == "policy_gradient" else 0.0

    def module(self, components: Components) -> RefragModule:
        """The Lightning module."""
        if self.objective == "policy_gradient":
            from refragkit.methods.policy_gradient import PolicyGradientModule

            return PolicyGradientModule(self, components)
        from refragkit.methods.refrag import RefragModule

        return RefragModule(self, components)


@dataclass(frozen=True, kw_only=True)
class Rft(Recipe):
    """Settings of rft; see ``Recipe`` for the shared ones.

    Attributes:
        num_prompts_per_step: prompts that are sampled from and learnt in one optimiser step, where there are no rounds.
        num_samples_per_prompt: answers sampled from each.
        top_k: of which at most so many are learnt; null: half of them, rounded up.
        temperature: of the samples.
        top_p: sample from the fewest likeliest tokens that hold this much probability.
        min_reward: of a sample that is good enough to be learnt.
        selection: which of those are learnt, see ``refragkit.methods.selection``.
        distinct_by: what makes two samples of a prompt the same.
        check_equations: reject samples whose equations are wrong.
        add_given: learn the given answer of each prompt too.
        min_kept: examples that an update takes at least, without rounds; fewer wait for those of the next steps.
        rounds: sample for all prompts, learn, and begin again, so many times in the run; null: sample in every step.
        rollouts: a file or folder of samples to learn from instead of sampling.
        ema_decay: of the average of the weights that is evaluated and exported; 0: no average.
        ema_start_step: first optimiser steps that the average leaves out.
        eval_samples_per_prompt: samples for pass@k in each evaluation; 0: none.
    """

    num_prompts_per_step: int
    num_samples_per_prompt: int
    top_k: int | None
    temperature: float
    top_p: float
    min_reward: float
    selection: Literal["best", "random", "best_overall", "all_correct", "recorded"]
    distinct_by: Literal["equations", "text"]
    check_equations: bool
    add_given: bool
    min_kept: int
    rounds: int | None
    rollouts: str | None
    ema_decay: float
    ema_start_step: int
    eval_samples_per_prompt: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts_per_step", "num_samples_per_prompt", "min_kept"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.{name}: expected at least 1, got {getattr(self, name)}")
        samples = self.num_samples_per_prompt
        if self.top_k is not None and not 1 <= self.top_k <= samples:
            raise ConfigError(
                f"method.top_k: expected null or 1 to method.num_samples_per_prompt={samples}, got {self.top_k};"
                " with none kept there is nothing to learn"
            )
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"method.rounds: expected null or at least 1, got {self.rounds}")
        for name in ("temperature", "ema_start_step", "eval_samples_per_prompt"):
            _check_finite(name, getattr(self, name))
        if self.temperature == 0 and samples > 1 and self.rollouts is None:
            raise ConfigError(
                f"method.temperature=0 makes all {samples} samples of a prompt the same; raise it, or set"
                " method.num_samples_per_prompt=1"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"method.top_p: expected a number in (0, 1], got {self.top_p}")
        if not 0 <= self.min_reward <= 1:
            raise ConfigError(f"method.min_reward: expected a number from 0 to 1, got {self.min_reward}")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"method.ema_decay: expected a number in [0, 1), got {self.ema_decay}")
        if self.selection == "recorded" and self.rollouts is None:
            raise ConfigError(
                "method.selection=recorded takes the samples that a file marks as kept; set method.rollouts=FILE"
            )

    @property
    def kept_per_prompt(self) -> int:
        """``top_k``, or its default."""
        return self.top_k or (self.num_samples_per_prompt + 1) // 2

    @property
    def examples_per_step(self) -> int:
        """Prompts of one step."""
        return self.num_prompts_per_step

    def n_steps(self, n_examples: int) -> int:
        """Optimiser steps of a run over ``n_examples`` prompts.

        ``epochs`` passes over them, in each round anew, at most ``max_steps``. Without rounds, a file of rollouts has
        as many steps as were taken when it was sampled; ``max_steps`` may ask for more and goes through it again.

        Raises:
            DataError: the file can't be read.
            ConfigError: there are more rounds than steps.
        """
        if self.rounds is None and self.rollouts is not None:
            from refragkit.methods.rollout_file import by_step, read_rollouts

            return self.max_steps or len(by_step(read_rollouts(self.rollouts), self.rollouts))
        rounds = self.rounds or 1
        steps = rounds * max(1, -(-self.epochs * n_examples // self.num_prompts_per_step))
        steps = steps if self.max_steps is None else min(steps, self.max_steps)
        if steps < rounds:
            raise ConfigError(
                f"method.rounds={rounds} is more than the {steps} steps of the run; raise method.max_steps"
            )
        return steps

    def module(self, components: Components) -> RftModule:
        """The Lightning module."""
        from refragkit.methods.rft import RftModule

        return RftModule(self, components)


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Settings of distill, which trains on text and not on examples.

    Attributes:
        text_tokens: that the source reads; the stages go through them as often as they need.
        recall_share: of the windows, how many repeat their first half in another order.
        align_tokens: of stage 1, alignment of each new mixer; 0 for none.
        align_matrix_lr: peak rate of the mixers' matrices in stage 1.
        align_other_lr: of their other parameters.
        match_tokens: of stage 2, matching the source's logits; 0 for none.
        match_matrix_lr: peak rate of the mixers' matrices in stage 2.
        match_other_lr: of their other parameters.
        rest: what stage 2 trains beside the mixers.
        rest_lr: its peak rate.
        lora_rank: of ``rest: lora``.
        cache_gib: the most room that the source's activations may take.
        keep_cache: whether they stay when the run has finished.
        log_every: steps between log lines.
    """

    text_tokens: int
    recall_share: float
    align_tokens: int
    align_matrix_lr: float
    align_other_lr: float
    match_tokens: int
    match_matrix_lr: float
    match_other_lr: float
    rest: Literal["frozen", "lora", "full"]
    rest_lr: float
    lora_rank: int
    cache_gib: int
    keep_cache: bool
    log_every: int

    def __post_init__(self) -> None:
        for name in ("align_tokens", "match_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"method.{name}: expected 0 or more, got {getattr(self, name)}")
        if not 0 <= self.recall_share <= 1:
            raise ConfigError(f"method.recall_share: expected a number from 0 to 1, got {self.recall_share}")
        if not self.align_tokens + self.match_tokens:
            raise ConfigError(
                "method.align_tokens and method.match_tokens are both 0, which leaves nothing to train; task=convert"
                " converts without training"
            )
        for name in ("text_tokens", "lora_rank", "cache_gib", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.{name}: expected at least 1, got {getattr(self, name)}")
        for name in (
            "align_matrix_lr",
            "align_other_lr",
            "match_matrix_lr",
            "match_other_lr",
            "rest_lr",
        ):
            _check_finite(name, getattr(self, name))
