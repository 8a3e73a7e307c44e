"""What the jobs of a sweep have in common: their folder, their parent run in MLflow, and the leaderboard at the end.

A job that goes on with an earlier run (``resume=auto``) lies where that run began. ``jobs/<number>.json`` in the
sweep's folder says where each job lies, so that jobs in other processes and on other machines are found too.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

from refragkit.summary import write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.table import Table

log = logging.getLogger("refragkit")

#: Measures of a job, the first one that the jobs have decides their order; whether more is better, and the heading.
MEASURES: Mapping[str, tuple[bool, str]] = {
    "val/f1": (True, "F1"),
    "val/em": (True, "EM"),
    "val/pass@1": (True, "pass@1"),
    "val/reward_total": (True, "reward"),
    "val/support_recall": (True, "support recall"),
    "val/loss": (False, "loss"),
    "train/tokens": (False, "tokens"),
}
# What tells jobs apart, but not what is compared
_APART = ("seed", "resume")

#: The jobs of the last sweep that didn't come to their end, and why.
unfinished: list[str] = []


class SweepEnd(Callback):
    """What Hydra calls when all jobs of a sweep are done, wherever they ran."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show and write the leaderboard."""
        unfinished[:] = finish_sweep(Path(config.hydra.sweep.dir).absolute())


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        number: in the sweep, from 0.
        folder: of its run.
        overrides: group or key -> value, as in its command.
        summary: the content of its ``summary.json``; empty where it has none.
    """

    number: int
    folder: Path
    overrides: Mapping[str, str]
    summary: Mapping[str, Any]

    def value(self, measure: str) -> float | None:
        """A measure, None where the job has none or has not come to its end."""
        value = self.summary.get("metrics", {}).get(measure)
        return float(value) if value is not None and self.summary.get("status") == "finished" else None


def note_job(sweep: Path, number: int, folder: Path, overrides: Sequence[str]) -> None:
    """Write down where a job lies."""
    (sweep / "jobs").mkdir(parents=True, exist_ok=True)
    write_json(sweep / "jobs" / f"{number}.json", {"folder": str(folder), "overrides": list(overrides)})


def read_jobs(sweep: Path) -> list[Job]:
    """The jobs of a sweep so far, by number."""
    jobs = []
    for path in sweep.glob("jobs/*.json"):
        noted = json.loads(path.read_text(encoding="utf-8"))
        folder = Path(noted["folder"])
        file = folder / "summary.json"
        summary = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        overrides = dict(
            override.lstrip("+").split("=", 1) for override in noted["overrides"] if "=" in override
        )
        jobs.append(Job(int(path.stem), folder, overrides, summary))
    return sorted(jobs, key=lambda job: job.number)


def labels(jobs: Sequence[Job]) -> list[str]:
    """What is different about each job, seeds aside, such as ``method=sft model=hybrid``."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides if key not in _APART))
    telling = [key for key in keys if len({job.overrides.get(key) for job in jobs}) > 1]
    return [
        " ".join(f"{key}={job.overrides[key]}" for key in telling if key in job.overrides) or "all"
        for job in jobs
    ]


def leaderboard(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One row for each label, the best first: means over its seeds, with 95% intervals where there are several.

    The interval is Student's, mean +- t s / sqrt(n); rows without any finished job come last.
    """
    groups: dict[str, list[Job]] = {}
    for job, label in zip(jobs, labels(jobs), strict=True):
        groups.setdefault(label, []).append(job)
    rows = []
    for label, members in groups.items():
        done = [job for job in members if job.summary.get("status") == "finished"]
        row: dict[str, Any] = {"job": label, "seeds": len(done), "not_finished": len(members) - len(done)}
        for measure in MEASURES:
            values = [value for job in done if (value := job.value(measure)) is not None]
            if values:
                row[measure] = sum(values) / len(values)
                if len(values) > 1:
                    row[f"{measure}_plus_minus"] = half_width(values)
        rows.append(row)
    first = next((m for m in MEASURES if any(m in row for row in rows)), None)
    if first is not None:
        sign = -1 if MEASURES[first][0] else 1
        rows.sort(key=lambda row: sign * row[first] if first in row else math.inf)
    return rows


def half_width(values: Sequence[float]) -> float:
    """Half of the 95% interval of a mean of n values, by Student's t with n - 1 degrees of freedom."""
    from scipy.stats import t  # type: ignore[import-untyped]

    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float(t.ppf(0.975, len(values) - 1) * math.sqrt(variance / len(values)))


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The leaderboard for the screen."""
    from rich import box
    from rich.table import Table

    table = Table(title="leaderboard", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("job", overflow="fold")
    table.add_column("seeds", justify="right")
    shown = [measure for measure in MEASURES if any(measure in row for row in rows)]
    for measure in shown:
        table.add_column(MEASURES[measure][1], justify="right")
    for row in rows:
        missing = f" ({row['not_finished']} not finished)" if row["not_finished"] else ""
        table.add_row(
            str(row["job"]), f"{row['seeds']}{missing}", *(_cell(row, measure) for measure in shown)
        )
    return table


def _cell(row: Mapping[str, Any], measure: str) -> str:
    if measure not in row:
        return "-"
    form = "{:,.0f}" if measure == "train/tokens" else "{:.3f}"
    text = form.format(row[measure])
    half = row.get(f"{measure}_plus_minus")
    return text if half is None or measure == "train/tokens" else f"{text} ± {form.format(half)}"


def finish_sweep(sweep: Path) -> list[str]:
    """Write ``leaderboard.csv`` and its plot, show the table, and close the parent run; no leaderboard for one job.

    Returns:
        A line for each job that didn't come to its end.
    """
    jobs = read_jobs(sweep)
    if len(jobs) > 1 and any(job.summary.get("task") == "train" for job in jobs):
        from refragkit.console import console
        from refragkit.tracking.leaderboard_plot import plot_leaderboard

        rows = leaderboard(jobs)
        console.print(as_table(rows))
        write_table(sweep / "leaderboard.csv", rows)
        plot_leaderboard(rows, sweep / "leaderboard.png")
        console.print(f"{sweep / 'leaderboard.csv'}", highlight=False)
    failed = [job for job in jobs if job.summary.get("status") != "finished"]
    close_parent(sweep, failed=bool(failed))
    named = dict(zip((job.number for job in jobs), labels(jobs), strict=True))
    return [f"job {job.number} ({named[job.number]}): {job.summary.get('error')}" for job in failed]


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV under a temporary name, then rename."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)


def close_parent(sweep: Path, failed: bool) -> None:
    """Give the parent run the leaderboard and close it, where the jobs have opened one."""
    path = sweep / "parent.json"
    if not path.exists():
        return
    from mlflow import MlflowClient

    parent = json.loads(path.read_text(encoding="utf-8"))
    try:
        client = MlflowClient(tracking_uri=parent["uri"])
        for name in ("leaderboard.csv", "leaderboard.png"):
            if (sweep / name).exists():
                client.log_artifact(parent["run_id"], str(sweep / name))
        client.set_terminated(parent["run_id"], status="FAILED" if failed else "FINISHED")
    except Exception as error:  # the store may be gone; what it was told is in the folder too
        log.warning("the sweep's run in MLflow could not be closed: %s", error)
