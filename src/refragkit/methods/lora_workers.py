"""LoRA by several workers: each learns its share of every batch, and their adapters are averaged by tokens.

    sync_every null   each worker trains an adapter of its own from first to last; one average at the end
    sync_every k      local SGD (Stich 2019, arXiv 1805.09767): every k steps the average replaces all of them
    sync_every 1      gradients are averaged instead, in each step: the same as one process with whole batches

This process leads: it renders examples (and retrieves for them), reads the adapters in shared memory, averages,
evaluates, and writes everything that is written, figures of the workers included.

Differs from the seed: data are not cut into chunks beforehand. Every batch is shared out, so that in each epoch every
example is learnt once, by one worker or another. The share of a lost worker goes to the others from the next batch on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from refragkit.adapters.lora import lora_layers
from refragkit.adapters.low_rank import AdapterWeights, LowRank
from refragkit.adapters.merge import merge_adapters
from refragkit.adapters.peft_format import adapter_weights, write_adapter
from refragkit.data.conversation import Rendered
from refragkit.errors import ConfigError
from refragkit.methods.base import STEPS_WITHOUT_A_TOKEN, Components, Prepared
from refragkit.methods.lora import Lora
from refragkit.methods.lora_module import LoraModule
from refragkit.training.optim import learning_rate_factor
from refragkit.training.workers import Workers
from refragkit.training.workers_process import Done, Job
from refragkit.types import Batch

log = logging.getLogger("refragkit")

# Steps that are given out before they are due, so that a worker whose share was short need not wait.
_AHEAD = 4


class LoraWorkersModule(LoraModule):
    """Leads ``method.workers`` processes; the model here holds their average, from one evaluation to the next."""

    def __init__(self, recipe: Lora, components: Components) -> None:
        _check_hardware(components)
        super().__init__(recipe, components)
        self.workers: Workers | None = None
        self._template = adapter_weights(self.model)
        self._tokens = [0] * recipe.workers  # learnt since the workers last had one adapter
        self._learnt = [0] * recipe.workers  # in all
        self._begun: dict[int, dict[int, Done]] = {}
        self._recorded = 0
        self._peaks: dict[str, float] = {}
        self._written: set[int] = set()  # lost workers whose adapters are on the disk
        self._restored: list[dict[str, Tensor]] | None = None

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one forward pass of a worker."""
        cuts = self.settings.cuts(self.settings.weights)
        share = max(end - begin for begin, end in pairwise(cuts))
        return min(self.components.hardware.micro_batch_size, share)

    def configure_callbacks(self) -> list[pl.Callback]:
        """What ends the workers when training ends badly."""
        return [_Ending()]

    def on_train_start(self) -> None:
        """Start the workers."""
        hardware = self.components.hardware
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self._peaks = {str(group["name"]): group["initial_lr"] for group in optimizer.param_groups}
        job = Job(
            learning_rates=self.learning_rates,
            weight_decay=self.recipe.weight_decay,
            grad_clip=self.recipe.grad_clip,
            micro_batch_size=self.micro_batch_size,
            pad_id=self.tokenizer.pad_id,
            bfloat16=hardware.resolved_precision() == "bf16-mixed",
            threads=hardware.threads or 1,
            seed=self.components.seed,
            shared_gradients=self.settings.sync_every == 1,
        )
        self._recorded = self.global_step
        self.workers = Workers(self.model, self.settings.workers, job, self.global_step, start=self._restored)
        self._restored = None
        log.info(
            "%d workers of %d threads share a base of %.0f MiB",
            self.settings.workers,
            job.threads,
            self.workers.base.size / 2**20,
        )

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Share a global batch out; wait for the workers where something is due, else let them go on."""
        assert self.workers is not None
        started = time.perf_counter()
        step = self.global_step
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self.workers.order(step, self._factor(step), self._shares(batch))
        optimizer.step()  # counts the step: nothing has a gradient here
        recipe, done = self.settings, step + 1
        last = done == self.components.n_steps
        syncing = _due(done, recipe.sync_every) and not last
        used = last or _due(done, recipe.eval_every, recipe.save_every)
        self._collect(step if syncing or used or done == 1 or _due(done, recipe.log_every) else step - _AHEAD)
        if recipe.sync_every == 1:  # gradients were averaged, and adapters need not be
            syncing = False
        if syncing or used:
            self._average(done, replace_all=syncing)
            self._save_checkpoint(done)
        self.training_seconds += time.perf_counter() - started

    def on_train_end(self) -> None:
        """Write each worker's adapter and their average, and end them."""
        super().on_train_end()
        if self.workers is not None:
            for index in self.workers.alive:
                self._write_thread(index)
            self.workers.close(ended_well=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add adapter and moments of every worker."""
        if self.workers is not None:
            self._collect(self.global_step - 1)
        super().on_save_checkpoint(checkpoint)
        if self.workers is not None:
            checkpoint["workers"] = {
                "state": self.workers.state(),
                "tokens": self._tokens,
                "learnt": self._learnt,
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added; the average may have another rank than a worker's adapter."""
        super().on_load_checkpoint(checkpoint)
        self._restored = checkpoint["workers"]["state"]
        self._tokens = list(checkpoint["workers"]["tokens"])
        self._learnt = list(checkpoint["workers"]["learnt"])
        for path, layer in lora_layers(self.model):
            a, b = (checkpoint["state_dict"][f"model.{path}.{name}"] for name in ("lora_A", "lora_B"))
            layer.replace(LowRank(a, b, layer.alpha, layer.rslora))

    def _shares(self, batch: Batch) -> dict[int, list[Rendered]]:
        """The examples of each living worker."""
        assert self.workers is not None
        prepared = self.prepare(batch)
        alive = self.workers.alive
        cuts = self.settings.cuts([self.settings.weights[index] for index in alive])
        return {
            index: [example for example, _ in self._keep(Prepared(prepared.examples[begin:end]))]
            for index, (begin, end) in zip(alive, pairwise(cuts), strict=True)
        }

    def _factor(self, step: int) -> float:
        recipe = self.recipe
        return learning_rate_factor(recipe.schedule, step, self.components.n_steps, recipe.warmup_steps)

    def _collect(self, step: int) -> None:
        """Wait for a step, and record those that every living worker has taken."""
        assert self.workers is not None
        try:
            done = self.workers.wait(step)
        finally:
            for index in self.workers.lost.keys() - self._written:
                self._written.add(index)
                self._write_thread(index)
        for index, report in done:
            self._begun.setdefault(report.step, {})[index] = report
            self._tokens[index] += report.tokens
        while (taken := self._begun.get(self._recorded, {})).keys() >= set(self.workers.alive):
            del self._begun[self._recorded]
            self._recorded += 1
            self._record_step(self._recorded, taken)

    def _record_step(self, step: int, taken: Mapping[int, Done]) -> None:
        done = list(taken.values())
        tokens, read = sum(d.tokens for d in done), sum(d.read for d in done)
        loss = sum(d.loss * d.tokens for d in done) / max(tokens, 1)
        self.trained_tokens += read
        if not self.trained_tokens and step == min(STEPS_WITHOUT_A_TOKEN, self.components.n_steps):
            self._nothing_learnt(step)
        factor = self._factor(step - 1)
        row = {f"lr/{kind}": peak * factor for kind, peak in self._peaks.items()} | {
            "train/grad_norm": sum(d.grad_norm for d in done) / len(done),
            "train/tokens": float(self.trained_tokens),
            "train/tokens_per_second": sum(d.read / d.seconds for d in done),
            "time/step_seconds": max(d.seconds for d in done),
            "workers/alive": float(len(done)),
        }
        if tokens:
            row |= {"train/loss": loss, "train/objective": loss}
        for index, d in taken.items():
            self._learnt[index] += d.tokens
            row[f"worker_{index}/learnt_tokens"] = float(self._learnt[index])
            row[f"worker_{index}/tokens_per_second"] = d.read / d.seconds
            if d.tokens:
                row[f"worker_{index}/loss"] = d.loss
        self._record(row, step)
        self.shown = {"loss": loss, "tok/s": row["train/tokens_per_second"], "workers": float(len(done))}

    def _average(self, step: int, replace_all: bool) -> None:
        """Give the model here the average of the waiting workers' adapters, and them too where asked for."""
        assert self.workers is not None
        alive = self.workers.alive
        adapters = [self._adapter(index) for index in alive]
        tokens = [self._tokens[index] for index in alive]
        if self.settings.sync_every == 1 or not sum(tokens):  # they are the same
            average = adapters[0]
        else:
            learnt = [i for i, count in enumerate(tokens) if count]
            weights = [tokens[i] / sum(tokens) for i in learnt]
            merged = merge_adapters([adapters[i] for i in learnt], weights, self.settings.average)
            average = merged.adapter
            self._record({"workers/merge_error": merged.relative_error}, step)
        for (_, layer), path in zip(lora_layers(self.model), self._template.layers, strict=True):
            layer.replace(average.layers[path].rescaled(layer.alpha, layer.rslora))
        if not replace_all:
            return
        for index in alive:
            for path, own in self._adapter(index).layers.items():
                _overwrite(own, average.layers[path])
        if self.settings.average == "svd":  # other directions: what was known of the old ones says nothing
            self.workers.forget_moments()
        self._tokens = [0] * len(self._tokens)

    def _adapter(self, index: int) -> AdapterWeights:
        """A worker's adapter: its shared tensors, not copied."""
        assert self.workers is not None
        values = self.workers.values(index)
        layers = {
            path: replace(update, A=values[f"{here}.lora_A"], B=values[f"{here}.lora_B"])
            for (here, _), (path, update) in zip(
                lora_layers(self.model), self._template.layers.items(), strict=True
            )
        }
        return replace(self._template, layers=layers, source=f"worker {index}")

    def _write_thread(self, index: int) -> None:
        assert self.workers is not None
        if self.adapter_folder is None:
            return
        adapter = replace(self._adapter(index), base_hash=self.base_hash)
        name = f"thread_{index}.safetensors"
        write_adapter(adapter, self.adapter_folder, name)
        if index in self.workers.lost:
            log.error(
                "worker %d: its adapter as it was is in adapter/%s; it is not part of the average",
                index,
                name,
            )


class _Ending(pl.Callback):
    """Ends the workers of a run that fails or is interrupted."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        assert isinstance(pl_module, LoraWorkersModule)
        if pl_module.workers is not None:
            pl_module.workers.close()


def _due(step: int, *every: int | None) -> bool:
    """Whether a step is a multiple of any of some numbers."""
    return any(step % n == 0 for n in every if n is not None)


@torch.no_grad()
def _overwrite(own: LowRank, average: LowRank) -> None:
    """Write an average into a worker's factors, whose rank it may not reach: the rest of A may be learnt later."""
    missing = own.rank - average.rank
    a = torch.cat([average.A, own.A[own.rank - missing :]]) if missing else average.A
    b = torch.nn.functional.pad(average.B, (0, missing))
    same = replace(average, A=a, B=b, alpha=average.alpha * own.rank / average.rank).rescaled(
        own.alpha, own.rslora
    )
    own.A.copy_(same.A)
    own.B.copy_(same.B)


def _check_hardware(components: Components) -> None:
    """Refuse what workers don't do.

    Raises:
        ConfigError: names the key.
    """
    hardware = components.hardware
    for wrong, key, instead in (
        (hardware.accelerator != "cpu", f"accelerator={hardware.accelerator}", "hardware=cpu"),
        (hardware.world_size > 1, f"devices={hardware.devices}", "hardware.devices=1 and num_nodes=1"),
        (hardware.compile, "compile=true", "hardware.compile=false"),
        (hardware.precision == "bf16-true", "precision=bf16-true", "hardware.precision=bf16-mixed"),
    ):
        if wrong:
            raise ConfigError(
                f"method.workers are processes on one machine's CPU, and hardware.{key} is not for them; choose"
                f" {instead}, or method.workers=1"
            )
