"""The progress bar of training: loss, reward, tokens/s and the time left, drawn with rich where a person watches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from refragkit.console import console, is_terminal
from refragkit.methods.base import MethodModule

if TYPE_CHECKING:
    from refragkit.types import Batch


class TrainingProgress(pl.Callback):
    """One line below the log lines. It shares their console, so that neither overwrites the other.

    Lightning's own bar counts epochs of a known length and folds its metrics over several lines.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the bar, where there is a terminal."""
        assert isinstance(pl_module, MethodModule)
        if not (is_terminal() and trainer.is_global_zero):
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._task = self._progress.add_task("training", total=pl_module.components.n_steps, shown="")
        self._progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Move on by a step."""
        assert isinstance(pl_module, MethodModule)
        if self._progress is not None:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in pl_module.shown.items())
            self._progress.update(self._task, completed=trainer.global_step, shown=shown)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the last state on the screen."""
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back before the error is printed."""
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
