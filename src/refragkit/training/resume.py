"""``resume``: which earlier run a command goes on with, and whether it is still the same one.

``resume=DIR`` names its folder. ``resume=auto`` looks in ``paths.outputs`` for the latest run of the very
configuration: a finished one is not done again, one that ended early goes on in its folder and its MLflow run, and
without any a new one begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.config import flatten
from refragkit.console import console
from refragkit.errors import ConfigError

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from omegaconf import DictConfig

# What a run may be gone on with differently
_FREE = ("resume", "dry_run")
_MOST_DIFFERENCES = 8


@dataclass(frozen=True)
class EarlierRun:
    """A run that a command goes on with.

    Attributes:
        folder: of the run.
        summary: the content of its ``summary.json``.
    """

    folder: Path
    summary: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return bool(self.summary.get("status") == "finished")

    @property
    def checkpoint(self) -> Path | None:
        """Where to go on; None where it ended before its first one."""
        path = self.folder / "checkpoints" / "last.ckpt"
        return path if path.exists() else None


def config_hash(cfg: DictConfig) -> str:
    """What two runs of the same configuration have in common."""
    text = json.dumps(_comparable(cfg), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _comparable(cfg: Any) -> dict[str, Any]:
    leaves = flatten(cfg)
    return {key: leaves[key] for key in leaves if key.split(".")[0] not in _FREE}


def earlier_run(cfg: DictConfig) -> EarlierRun | None:
    """The run that ``cfg.resume`` asks to go on with, None where that is to begin a new one.

    Raises:
        ConfigError: the folder named holds no run, or one of another configuration.
    """
    if cfg.choices.task != "train":
        raise ConfigError(
            f"resume={cfg.resume}: task={cfg.choices.task} has no steps to go on from; resume is for task=train"
        )
    if cfg.resume != "auto":
        return _named(cfg, Path(str(cfg.resume)).expanduser().absolute())
    wanted = config_hash(cfg)
    found = [run for run in map(read_run, _folders(Path(cfg.paths.outputs))) if run is not None]
    same = [run for run in found if run.summary.get("config_hash") == wanted]
    # One that is finished is worth more than a later one that is not
    latest = max(same, key=lambda r: (r.finished, (r.folder / "summary.json").stat().st_mtime), default=None)
    if latest is None:
        console.print(
            f"resume=auto: no run of this configuration in {cfg.paths.outputs} yet", highlight=False
        )
    return latest


def _folders(outputs: Path) -> list[Path]:
    """Run folders: ``outputs/<task>/<name>/<run>``, ``outputs/sweeps/<sweep>/<job>``, and what people choose."""
    found = [
        path for depth in ("*", "*/*", "*/*/*", "*/*/*/*") for path in outputs.glob(f"{depth}/summary.json")
    ]
    return [path.parent for path in found]


def read_run(folder: Path) -> EarlierRun | None:
    """The run in a folder; None where it holds none that can be read."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return EarlierRun(folder, summary) if isinstance(summary, dict) else None


def _named(cfg: DictConfig, folder: Path) -> EarlierRun:
    run = read_run(folder)
    if run is None or not (folder / "config.yaml").exists():
        raise ConfigError(
            f"resume={cfg.resume}: expected the folder of a run, with its config.yaml and summary.json, or auto"
        )
    if differences := _differences(stored_config(folder), cfg):
        raise ConfigError(
            f"resume={cfg.resume}: this is not the configuration of that run, and going on would make it neither:\n"
            + "\n".join(differences)
            + "\ngive the overrides that the run was begun with (or resume=DIR alone), or begin a new run without it"
        )
    return run


def stored_config(folder: Path) -> DictConfig:
    """The configuration that a run was begun with.

    Raises:
        ConfigError: it can't be read.
    """
    from omegaconf import DictConfig, OmegaConf

    path = folder / "config.yaml"
    try:
        found = OmegaConf.load(path)
        if not isinstance(found, DictConfig):
            raise TypeError("expected keys and values")
    except Exception as error:
        raise ConfigError(f"{path}: can't be read ({error}); give the run's own overrides") from error
    return found


def _differences(before: Any, now: Any) -> list[str]:
    old, new = _comparable(before), _comparable(now)
    lines = [
        f"  {key}: was {old.get(key, '(not there)')!r}, is {new.get(key, '(not there)')!r}"
        for key in sorted(old.keys() | new.keys())
        if (key in old) != (key in new) or old.get(key) != new.get(key)
    ]
    more = len(lines) - _MOST_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MOST_DIFFERENCES], f"  and {more} more"]


def lock_run(folder: Path) -> BaseFileLock:
    """Keep a run folder to this process until it ends.

    Raises:
        ConfigError: another process has it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(f"{folder}: another process is running this run now; wait for it to end") from error
    return lock
