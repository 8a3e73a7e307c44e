"""Checkpoints of a run: when they are written, and what they hold beside the weights.

``checkpoints/last.ckpt`` is a Lightning checkpoint: weights, optimiser, step, state of the method and of the callbacks,
the metrics so far, and how long the run's files were. What draws random numbers is seeded by seed and step, so no
generator has a state to keep.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from refragkit.errors import CheckpointError
from refragkit.methods.base import MethodModule

if TYPE_CHECKING:
    from refragkit.training.callbacks import Evaluation
    from refragkit.training.stop import StopRequest
    from refragkit.types import Batch

#: Files that grow, and are cut back to where a checkpoint was.
GROWING = ("samples.jsonl",)


class Checkpoints(pl.Callback):
    """Keeps ``last.ckpt`` and ``best.ckpt``; behind `Evaluation` in the list of callbacks.

    Args:
        folder: the run folder; checkpoints go to ``checkpoints/``.
        evaluation: decides which is best.
        save_every: steps between two checkpoints; None for one with each evaluation.
        fingerprint: of the data, which a resumed run must find again.
        stop: when asked to, the run ends behind a checkpoint.
        on_saved: called after each.
    """

    def __init__(
        self,
        folder: Path,
        evaluation: Evaluation,
        save_every: int | None,
        fingerprint: str,
        stop: StopRequest | None = None,
        on_saved: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self.evaluation = evaluation
        self.save_every = save_every
        self.fingerprint = fingerprint
        self.stop = stop
        self.on_saved = on_saved

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to find, and to cut back."""
        sizes = {
            name: (self.folder / name).stat().st_size for name in GROWING if (self.folder / name).exists()
        }
        return {"fingerprint": self.fingerprint, "sizes": sizes, "torch": str(torch.__version__)}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the folder."""
        (self.folder / "checkpoints").mkdir(exist_ok=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let others know of what the evaluation before the first step left."""
        if self.evaluation.first is not None and trainer.global_step == 0 and self.on_saved is not None:
            self.on_saved()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Save where the step asks for it, or somebody else does.

        Raises:
            KeyboardInterrupt: somebody has asked the run to stop.
        """
        assert isinstance(pl_module, MethodModule)
        step = trainer.global_step
        evaluated = self.evaluation.last is not None and self.evaluation.last.step == step
        due = self.save_every is not None and step % self.save_every == 0
        stopping = self.stop is not None and self.stop.requested
        if not (evaluated or due or stopping):
            return
        last = self.folder / "checkpoints" / "last.ckpt"
        save_checkpoint(trainer, last)
        if evaluated and self.evaluation.best_step == step and trainer.is_global_zero:
            same_file(last, last.with_name("best.ckpt"))
        if self.on_saved is not None:
            self.on_saved()
        if stopping and step < pl_module.components.n_steps:
            raise KeyboardInterrupt


def read_header(path: Path) -> dict[str, Any]:
    """A checkpoint without the memory of its tensors.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(found, dict) or not {"global_step", "state_dict", "progress"} <= set(found):
            raise ValueError("it is no checkpoint of a run")
    except Exception as error:
        raise CheckpointError(
            f"{path}: can't be read ({type(error).__name__}: {str(error).splitlines()[0]}); delete it to begin the run"
            " anew in its folder, or put best.ckpt in its place to go on from there"
        ) from error
    return found


def callback_state(header: Mapping[str, Any], callback: type[pl.Callback]) -> dict[str, Any]:
    """What a callback of this class has put into a checkpoint; empty where it did not."""
    states: Mapping[str, Any] = header.get("callbacks", {})
    return dict(states.get(callback.__qualname__) or {})


def cut_back(folder: Path, sizes: Mapping[str, int]) -> None:
    """Take out of a run's growing files what came after a checkpoint.

    Raises:
        CheckpointError: a file is shorter than it was.
    """
    for name in GROWING:
        path, size = folder / name, sizes.get(name, 0)
        now = path.stat().st_size if path.exists() else 0
        if now < size:
            raise CheckpointError(
                f"{path}: has {now} bytes, and had {size} when the checkpoint was written; put it back, or begin a new"
                " run"
            )
        if now > size:
            os.truncate(path, size)


def save_checkpoint(trainer: pl.Trainer, path: Path) -> None:
    """Save a Lightning checkpoint under a temporary name, then rename, so that ``path`` is always whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        trainer.save_checkpoint(temporary)
        if trainer.is_global_zero:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        if trainer.is_global_zero:
            temporary.unlink(missing_ok=True)


def same_file(source: Path, path: Path) -> None:
    """Let ``path`` be what ``source`` is now: a second name where the file system has links, else a copy.

    ``source`` may be replaced later, as ``save_checkpoint`` does, without a change to ``path``.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    temporary.replace(path)
