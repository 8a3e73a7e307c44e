"""``summary.json``: what a run was and how it ended, written whatever happens."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass
class Summary:
    """The fields of ``summary.json``; see the run section of the README."""

    status: Status = "running"
    task: str = ""
    model: str = ""
    method: str = ""
    retriever: str = ""
    seed: int = 0
    mlflow_run_id: str | None = None
    git_commit: str | None = None
    command: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    trainable_parameters: int | None = None
    total_parameters: int | None = None
    wall_seconds: float = 0.0
    peak_rss_bytes: int = 0
    train_tokens_per_second: float | None = None
    error: str | None = None
    config_hash: str | None = None
    folder: str | None = None
    resumed: int = 0

    @classmethod
    def read(cls, path: Path) -> Summary:
        """What `write` wrote; keys of other versions are left out."""
        known = {f.name for f in fields(cls)}
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{key: value for key, value in found.items() if key in known})

    def write(self, path: Path) -> None:
        """Write as JSON; numbers that JSON lacks (NaN, infinity) become null."""
        write_json(path, asdict(self))


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a temporary name beside ``path``, then rename, so that no half file is ever seen."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def reset_peak_rss() -> None:
    """Start the peak anew where the kernel allows it, since the jobs of a sweep share one process."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak_rss_bytes() -> int:
    """The largest resident set of this process, in bytes (since ``reset_peak_rss`` on Linux)."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, or None outside a checkout."""
    checkout = Path(__file__).parents[2]
    if not (
        checkout / ".git"
    ).exists():  # installed: a repository around the environment is another project's
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
