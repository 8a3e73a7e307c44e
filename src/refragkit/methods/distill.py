"""distill: recurrent mixers in the place of attention learn from the model they were made of.

Stage 1 (``models/convert/align.py``) teaches each new mixer to put out what the attention that it replaces puts out,
all at once and none depending on another. Stage 2 (``models/convert/match.py``) teaches the whole model to predict what
its source predicts. Neither runs the source: what it read, put out and predicted is cached once.

Source: MOHAWK (Bick et al. 2024, arXiv 2408.10189), RADLADS (Goldstein et al. 2025, arXiv 2505.03005), ARWKV (Yueyu et
al. 2025, arXiv 2501.15570), Mamba in the Llama (Wang et al. 2024, arXiv 2408.15237).
Differs: see both stages; no third stage of ordinary training (the other methods are that); some attention blocks stay.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from refragkit.adapters.lora import LoRA, merge_into_base
from refragkit.console import route_library_logs
from refragkit.errors import RefragError
from refragkit.models.convert.activation_cache import ActivationCache
from refragkit.models.convert.align import Alignment, trained_mixers
from refragkit.models.convert.match import Matching
from refragkit.models.hybrid import HybridLM

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from refragkit.methods.recipes import Distill
    from refragkit.training.hardware import Hardware

log = logging.getLogger("refragkit")

Losses = dict[str, list[float]]


class Stage(Protocol):
    """A part of the training with an optimiser and a number of steps of its own.

    Attributes:
        name: what the log calls it.
        steps: how many there are.
        step_tokens: tokens of each.
        optimizer: what its steps step.
    """

    name: str
    steps: int
    step_tokens: int
    optimizer: Any

    def step(self, step: int) -> Mapping[str, float]:
        """Update number ``step``; returns the losses before it by name."""


class DistillModule(pl.LightningModule):
    """Walks through the stages, one update a step.

    Args:
        student: the model that they train.
        stages: in order.
        on_step: called after each update with the stage, the update's number in it, how many it has, the losses and
            tokens per second.
    """

    def __init__(
        self,
        student: HybridLM,
        stages: Sequence[Stage],
        on_step: Callable[[str, int, int, Mapping[str, float], float], None],
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model: nn.Module = student
        self._stages = list(stages)
        self._on_step = on_step

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each stage."""
        return [stage.optimizer for stage in self._stages]

    def train_loader(self) -> DataLoader[int]:
        """The numbers of all updates: what each reads is a function of its number."""
        steps: Any = range(sum(stage.steps for stage in self._stages))
        return DataLoader(steps, batch_size=None)

    def training_step(self, batch: int, batch_idx: int) -> None:
        """One update of the stage that ``batch`` falls into."""
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        step = int(batch)
        number = 0
        while step >= self._stages[number].steps:
            step -= self._stages[number].steps
            number += 1
        stage = self._stages[number]
        stage.optimizer = optimizers[number]  # Lightning's, which counts the updates
        started = time.perf_counter()
        try:
            losses = stage.step(step)
        except RefragError as error:
            keys = f"method.{stage.name.removesuffix('ing')}_*_lr"
            raise RefragError(f"{stage.name}, step {step + 1} of {stage.steps}: {error} ({keys})") from error
        seconds = time.perf_counter() - started
        self._on_step(stage.name, step, stage.steps, losses, stage.step_tokens / seconds)


def train_stages(
    student: HybridLM,
    cache: ActivationCache,
    recipe: Distill,
    hardware: Hardware,
    *,
    seed: int,
    folder: Path,
    log_metrics: Callable[[Mapping[str, float], int], None],
    progress: Callable[[str, int], AbstractContextManager[Callable[[], None]]],
) -> tuple[HybridLM, Losses]:
    """Train a converted model in the stages that a recipe asks for.

    Args:
        student: converted and calibrated, in float32. Its new mixers change; everything else that is trained is copied
            first, as the source may hold the same tensors.
        cache: the source's activations in the converted blocks.
        recipe: stages, rates, and what is trained beside the mixers.
        hardware: one device.
        seed: of the windows' order and of LoRA's start.
        folder: of the run.
        log_metrics: called with losses and rates after each update, and with its number, counted through.
        progress: opens a bar of so many steps; yields what moves it on.

    Returns:
        The trained model, and each loss's values by name.

    Raises:
        ConfigError: weights in less than float32.
        RefragError: training diverged.
    """
    more = recipe.rest != "frozen" and bool(recipe.match_tokens)
    if more:
        student = copy.deepcopy(student)
    with trained_mixers(student, cache.layers) as mixers:
        if more:
            _train_rest(student, mixers, cache.first, recipe, seed)
        stages: list[Stage] = []
        if recipe.align_tokens:
            stages.append(
                Alignment(
                    mixers,
                    cache,
                    tokens=recipe.align_tokens,
                    matrix_lr=recipe.align_matrix_lr,
                    other_lr=recipe.align_other_lr,
                    seed=seed,
                )
            )
        if recipe.match_tokens:
            stages.append(
                Matching(
                    student,
                    mixers,
                    cache,
                    tokens=recipe.match_tokens,
                    matrix_lr=recipe.match_matrix_lr,
                    other_lr=recipe.match_other_lr,
                    rest_lr=recipe.rest_lr,
                    seed=seed,
                )
            )
        losses: Losses = {}
        done = 0
        total = sum(stage.steps for stage in stages)
        with progress("distilling", total) as advance:

            def on_step(
                name: str, step: int, steps: int, values: Mapping[str, float], tokens_per_second: float
            ) -> None:
                nonlocal done
                done += 1
                for key, value in values.items():
                    losses.setdefault(key, []).append(value)
                log_metrics({**values, "tokens_per_second": tokens_per_second}, done)
                mean = sum(values.values()) / len(values)
                if step + 1 in (1, steps) or not (step + 1) % recipe.log_every:
                    log.info(
                        "%s, step %d/%d loss %.4f, %.0f tok/s", name, step + 1, steps, mean, tokens_per_second
                    )
                advance()

            module = DistillModule(student, stages, on_step)
            route_library_logs()
            trainer = pl.Trainer(
                accelerator=hardware.accelerator,
                devices=1,
                precision=hardware.resolved_precision(),
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
                default_root_dir=folder,
            )
            student.train()
            trainer.fit(module, module.train_loader())
    if more and recipe.rest == "lora":
        merge_into_base(student)
    student.requires_grad_(True)
    return student.eval(), losses


def _train_rest(student: HybridLM, mixers: nn.ModuleList, first: int, recipe: Distill, seed: int) -> None:
    """Make trainable what stage 2 trains beside the mixers, from block ``first`` on: below, the cache stands."""
    if recipe.rest == "lora":
        LoRA(rank=recipe.lora_rank, alpha=2 * recipe.lora_rank, blocks="T").apply(student, seed=seed)
        student.blocks[:first].requires_grad_(False)
        mixers.requires_grad_(True)
    else:
        student.blocks[first:].requires_grad_(True)
        student.norm.requires_grad_(True)
