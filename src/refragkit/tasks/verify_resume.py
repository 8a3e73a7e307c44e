"""``task=verify_resume``: one run from end to end, the same one killed at random moments and resumed, bit by bit.

Both are processes of their own, so that the kill is a real one.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.errors import CheckpointError, ConfigError
from refragkit.experiment import Run
from refragkit.seeding import derive_seed

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("refragkit")

#: Parts of the names of metrics that depend on the clock.
CLOCK = ("time/", "seconds", "tokens_per_second")
_SECONDS_BETWEEN_LOOKS = 0.05


def verify_resume(run: Run, steps: int = 6, kills: int = 2) -> None:
    """Train ``steps`` steps twice, once with ``kills`` kills on the way, and compare what both left.

    Args:
        run: the run, whose configuration both have, but for the number of steps and of checkpoints.
        steps: optimiser steps of each.
        kills: SIGKILLs of the second run.

    Raises:
        ConfigError: ``steps`` or ``kills`` out of their range, or a method that has no steps to resume from.
        CheckpointError: the two runs differ, or one of them failed.
    """
    for name, value, least in (("steps", steps, 2), ("kills", kills, 1)):
        if value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
    if run.cfg.choices.method == "distill":
        raise ConfigError("task=verify_resume: method=distill begins its stages anew and has no exact resume")
    cfg = _training(run.cfg, steps)
    started = time.perf_counter()
    whole, killed = run.folder / "whole", run.folder / "killed"
    _train(cfg, whole)
    log.info("not interrupted: %d steps in %.0f s", steps, time.perf_counter() - started)
    choose = random.Random(derive_seed(run.seed, "kills"))
    # A kill comes anywhere in the time that the whole run took behind its first checkpoint, hence too late at times
    took, done = time.perf_counter() - started, 0
    while done < kills and (wait := _train(cfg, killed, choose.uniform(0.05, 0.95) * took)):
        done += 1
        log.info("killed %.1f s behind its start (%d of %d)", wait, done, kills)
    if done == kills:
        _train(cfg, killed)
    found = differences(whole, killed)
    run.log_metrics({"verify_resume/kills": done, "verify_resume/differences": len(found)}, step=0)
    if found:
        raise CheckpointError(
            f"the run that was killed {done} times does not end like the one that was not:\n"
            + "\n".join(f"  {line}" for line in found)
            + f"\nboth are in {run.folder}"
        )
    log.info(
        "killed %d times and resumed: weights, optimiser, metrics and samples are those of the uninterrupted run",
        done,
    )


def _training(cfg: DictConfig, steps: int) -> DictConfig:
    """The same configuration as a training run."""
    from omegaconf import OmegaConf, open_dict

    from refragkit.config import task_keys

    training: DictConfig = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[assignment]
    with open_dict(training):
        for key in task_keys(cfg):
            del training[key]
        training.task = {"_target_": "refragkit.tasks.train.train"}
        training.choices.task = "train"
        training.method.max_steps = steps
        training.method.save_every = 2
        training.method.eval_every = min(int(training.method.eval_every), max(1, steps // 2))
    return training


def _train(cfg: DictConfig, folder: Path, kill_after: float | None = None) -> float:
    """Run a process that trains in ``folder``, from where an earlier one got to.

    Returns:
        Seconds after which it was killed; 0 where it came to its end.
    """
    from omegaconf import OmegaConf

    file = folder.with_suffix(".yaml")
    cfg.resume = str(folder) if (folder / "summary.json").exists() else None
    file.write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")
    with folder.with_suffix(".log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(file), str(folder)],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        started = time.perf_counter()
        try:
            while process.poll() is None:
                waited = time.perf_counter() - started
                if kill_after is not None and waited >= kill_after:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return waited
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise CheckpointError(
            f"a run of this configuration failed ({folder.with_suffix('.log')}): {lines[-1] if lines else 'no output'}"
        )
    return 0.0


_CHILD = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from refragkit.config import register_resolvers
from refragkit.experiment import run_experiment
register_resolvers()
summary = run_experiment(OmegaConf.load(sys.argv[1]), Path(sys.argv[2]), "task=verify_resume")
sys.exit(summary.status != "finished")
"""


def differences(whole: Path, other: Path) -> list[str]:
    """What two run folders don't have in common, times aside: one line for each kind of difference."""
    import torch

    found = []
    for name in sorted(
        {file.relative_to(f).as_posix() for f in (whole, other) for file in f.glob("*/*.safetensors")}
    ):
        if _bytes(whole / name) != _bytes(other / name):
            found.append(f"{name}: other weights")
    last = Path("checkpoints") / "last.ckpt"
    mine, theirs = (
        torch.load(folder / last, map_location="cpu", weights_only=True) for folder in (whole, other)
    )
    if mine["global_step"] != theirs["global_step"]:
        found.append(f"{last}: step {mine['global_step']} and step {theirs['global_step']}")
    for part in ("state_dict", "optimizer_states", "rft_waiting", "start_model", "alarms", "workers"):
        if not _same(mine.get(part), theirs.get(part)):
            found.append(f"{last}: {part} differs")
    for name, read in (("metrics.csv", read_metrics), ("samples.jsonl", read_samples)):
        if read(whole / name) != read(other / name):
            found.append(f"{name}: other values")
    for file in sorted({file.name for f in (whole, other) for file in f.glob("rollouts/*.jsonl")}):
        if _bytes(whole / "rollouts" / file) != _bytes(other / "rollouts" / file):
            found.append(f"rollouts/{file}: other samples")
    return found


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a ``metrics.csv`` without what depends on the clock."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {k: v for k, v in row.items() if not any(c in k for c in CLOCK)} for row in csv.DictReader(file)
        ]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The records of a ``samples.jsonl`` without what depends on the clock; none where there is no file."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        for hop in record["hops"]:
            del hop["latency_seconds"]
    return records


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors bit by bit."""
    import torch

    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
