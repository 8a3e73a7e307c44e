"""Lightning callbacks: evaluation at fixed steps, log lines, files of metrics."""

from __future__ import annotations

import csv
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from refragkit.data.jsonl import append_jsonl
from refragkit.methods.base import MethodModule

if TYPE_CHECKING:
    from refragkit.types import Batch

log = logging.getLogger("refragkit")


@dataclass(frozen=True)
class Evaluated:
    """What one evaluation found.

    Attributes:
        step: optimiser steps taken before it.
        metrics: under ``val/``, and its time.
        records: one for each question, as in ``samples.jsonl``; empty where the data has no questions.
    """

    step: int
    metrics: dict[str, float]
    records: list[dict[str, Any]]


class Evaluation(pl.Callback):
    """Evaluates before the first step, every ``eval_every`` steps and after the last one.

    Args:
        folder: the run folder; answers go to ``samples.jsonl``.
        monitor: metric that decides which evaluation is best, lower is better.
        on_records: called with the records of each evaluation and its step.

    Attributes:
        best_step: step of the best evaluation so far, 0 before any.
        first: the evaluation before the first step; None where ``eval_at_start`` is off.
        last: the latest one after a step.
    """

    def __init__(
        self,
        folder: Path,
        monitor: str = "val/loss",
        on_records: Callable[[list[dict[str, Any]], int], None] | None = None,
    ) -> None:
        self.folder = folder
        self.monitor = monitor
        self.on_records = on_records
        self.best = float("inf")
        self.best_step = 0
        self.first: Evaluated | None = None
        self.last: Evaluated | None = None

    def state_dict(self) -> dict[str, Any]:
        """What was found so far; the records are in ``samples.jsonl``."""
        evaluations = {"first": self.first, "last": self.last}
        return {
            "best": self.best,
            "best_step": self.best_step,
            **{name: [e.step, e.metrics] for name, e in evaluations.items() if e is not None},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
        self.first, self.last = (self._restored(state_dict.get(name)) for name in ("first", "last"))

    def _restored(self, saved: tuple[int, dict[str, float]] | None) -> Evaluated | None:
        if saved is None:
            return None
        step, metrics = saved
        path = self.folder / "samples.jsonl"
        records = [] if not path.exists() else map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return Evaluated(step, dict(metrics), [record for record in records if record["step"] == step])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the model that training starts from."""
        assert isinstance(pl_module, MethodModule)
        if pl_module.recipe.eval_at_start and trainer.global_step == 0:
            self.first = self._evaluate(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Evaluate where the step asks for it."""
        assert isinstance(pl_module, MethodModule)
        step, n_steps = trainer.global_step, pl_module.components.n_steps
        if step % pl_module.recipe.eval_every and step != n_steps:
            return
        self.last = self._evaluate(trainer, pl_module)
        value = self.last.metrics.get(self.monitor, float("nan"))
        if value < self.best:
            self.best, self.best_step = value, step

    def _evaluate(self, trainer: pl.Trainer, module: MethodModule) -> Evaluated:
        step = trainer.global_step
        started = time.perf_counter()
        with trainer.precision_plugin.forward_context():
            metrics, records = module.evaluate()
        metrics["time/evaluate_seconds"] = time.perf_counter() - started
        module._record(metrics, step)
        log.info(
            "step %d/%d evaluation: %s (%s)",
            step,
            module.components.n_steps,
            _line(metrics, _SHOWN_IN_EVALUATION),
            _duration(metrics["time/evaluate_seconds"]),
        )
        append_jsonl(self.folder / "samples.jsonl", records)
        if self.on_records is not None:
            self.on_records(records, step)
        return Evaluated(step, metrics, records)


class StepLog(pl.Callback):
    """One log line every ``log_every`` steps: loss, reward, tokens/s and the time left."""

    def __init__(self) -> None:
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Start the clock with the first step, behind the evaluation that comes before it."""
        if batch_idx == 0:
            self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Write the line."""
        assert isinstance(pl_module, MethodModule)
        step, n_steps = trainer.global_step, pl_module.components.n_steps
        if step % pl_module.recipe.log_every and step not in (1, n_steps):
            return
        row = next(r for r in reversed(pl_module.history) if "train/tokens_per_second" in r)
        left = (time.perf_counter() - self._started) / (batch_idx + 1) * (n_steps - step)
        log.info("step %d/%d %s, %s left", step, n_steps, _line(row, _SHOWN_IN_TRAINING), _duration(left))


_SHOWN_IN_TRAINING = {
    "train/loss": "loss",
    "reward/total": "reward",
    "reward/answer": "answer",
    "train/tokens_per_second": "tok/s",
}
_SHOWN_IN_EVALUATION = {
    "val/loss": "loss",
    "val/em": "EM",
    "val/f1": "F1",
    "val/support_recall": "support recall",
    "val/reward_total": "reward",
}


def _line(metrics: Mapping[str, float], shown: Mapping[str, str]) -> str:
    return ", ".join(f"{label} {metrics[key]:.4g}" for key, label in shown.items() if key in metrics)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def write_metrics_csv(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write one row for each step, training and evaluation metrics of a step joined; NaN-free blanks elsewhere.

    Args:
        path: the CSV file.
        history: rows with a ``step`` each, in order.
    """
    rows: dict[int, dict[str, float]] = {}
    for entry in history:
        rows.setdefault(int(entry["step"]), {}).update(entry)
    columns = ["step", *sorted({key for row in rows.values() for key in row} - {"step"})]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({**row, "step": int(row["step"])} for row in rows.values())
    temporary.replace(path)
