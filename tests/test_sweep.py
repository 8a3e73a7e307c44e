"""Sweeps: where jobs lie, what they are called, the leaderboard and its intervals, resumed ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from scipy import stats

from refragkit.sweep import Job, finish_sweep, half_width, labels, leaderboard, note_job, read_jobs
from refragkit.tracking.leaderboard_plot import plot_leaderboard


def job(number: int, overrides: dict[str, str], status: str = "finished", **metrics: float) -> Job:
    named = {name.replace("_", "/", 1): value for name, value in metrics.items()}
    return Job(number, Path(), overrides, {"status": status, "task": "train", "metrics": named})


JOBS = [
    job(0, {"method": "sft", "model": "hybrid", "seed": "0"}, val_f1=0.25, val_loss=2.0),
    job(1, {"method": "sft", "model": "hybrid", "seed": "1"}, val_f1=0.5, val_loss=1.0),
    job(2, {"method": "refrag", "model": "hybrid", "seed": "0"}, val_f1=0.75, val_loss=3.0),
    job(3, {"method": "refrag", "model": "hybrid", "seed": "1"}, "failed", val_f1=0.9),
    job(4, {"method": "rft", "model": "hybrid", "seed": "0"}, "failed"),
]


def test_labels_say_what_differs() -> None:
    assert labels(JOBS) == ["method=sft", "method=sft", "method=refrag", "method=refrag", "method=rft"]
    assert labels(JOBS[:2]) == ["all", "all"]  # seeds only
    more = [*JOBS, job(5, {"method": "sft", "model": "mamba", "seed": "0"})]
    assert labels(more)[0] == "method=sft model=hybrid"


def test_the_leaderboard_has_means_and_intervals_over_seeds() -> None:
    rows = leaderboard(JOBS)
    assert [row["job"] for row in rows] == ["method=refrag", "method=sft", "method=rft"]
    refrag, sft, rft = rows
    assert (refrag["seeds"], refrag["not_finished"], refrag["val/f1"]) == (1, 1, 0.75)
    assert "val/f1_plus_minus" not in refrag  # one seed has no interval
    assert (sft["seeds"], sft["val/f1"], sft["val/loss"]) == (2, 0.375, 1.5)
    low, high = stats.t.interval(0.95, 1, loc=0.375, scale=stats.sem([0.25, 0.5]))
    assert sft["val/f1_plus_minus"] == pytest.approx((high - low) / 2)
    assert (rft["seeds"], rft["not_finished"]) == (0, 1) and "val/f1" not in rft


def test_without_answers_the_least_loss_comes_first() -> None:
    rows = leaderboard([job(0, {"method": "sft"}, val_loss=2.0), job(1, {"method": "lora"}, val_loss=1.0)])
    assert [row["job"] for row in rows] == ["method=lora", "method=sft"]


def test_half_width_is_students() -> None:
    values = [1.0, 2.0, 4.0]
    low, high = stats.t.interval(0.95, 2, loc=sum(values) / 3, scale=stats.sem(values))
    assert half_width(values) == pytest.approx((high - low) / 2)


def test_jobs_are_found_wherever_they_lie(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for number, (method, value) in enumerate([("sft", 0.5), ("refrag", 0.75)]):
        folder = tmp_path / f"elsewhere-{number}"
        folder.mkdir()
        summary = {"status": "finished", "task": "train", "metrics": {"val/f1": value}}
        (folder / "summary.json").write_text(json.dumps(summary))
        note_job(sweep, number, folder, [f"method={method}", "resume=auto"])
    note_job(sweep, 10, tmp_path / "gone", ["method=lora", "resume=auto"])
    assert [(j.number, dict(j.overrides)) for j in read_jobs(sweep)][2] == (
        10,
        {"method": "lora", "resume": "auto"},
    )
    (line,) = finish_sweep(sweep)
    assert line.startswith("job 10 (method=lora")
    with (sweep / "leaderboard.csv").open() as file:
        assert [(row["job"], row["val/f1"]) for row in csv.DictReader(file)] == [
            ("method=refrag", "0.75"),
            ("method=sft", "0.5"),
            ("method=lora", ""),
        ]
    assert (sweep / "leaderboard.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_plot_is_no_plot(tmp_path: Path) -> None:
    assert plot_leaderboard(leaderboard([JOBS[4]]), tmp_path / "plot.png") is None
    assert not (tmp_path / "plot.png").exists()
