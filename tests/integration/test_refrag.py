"""Whole runs of refrag's other objectives and of live rollouts."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from refragkit import compose
from refragkit.experiment import run_experiment
from tests.integration.small import small

TINY = ("model=hybrid", "model.block_pattern=TM", "tracking=none", "method.max_document_tokens=20",
        "method.eval_at_start=false", "data.max_validation_questions=2")  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("method.objective=policy_gradient", "method.group_size=3", "retriever.planner=model",
             "method.warmup=gold_traces", "method.trace_steps=1"),
            {"rollouts/without_search", "rollouts/entropy", "rollouts/tokens_reread", "train/kl", "reward/total",
             "alarm/equal_rewards", "val/searches"},
        ),
        (
            ("method.objective=policy_gradient", "method.group_size=3", "adapter=lora"),
            {"rollouts/equal_reward_groups", "train/clip_fraction", "train/kl", "reward/relevance"},
        ),
        (("method.objective=none", "method.order=sandwich"), {"train/loss", "val/f1"}),
    ],
    ids=["live", "adapter", "control"],
)  # fmt: skip
def test_a_run_of_each_kind(tmp_path: Path, overrides: tuple[str, ...], expected: set[str]) -> None:
    run_experiment(
        compose(small(tmp_path, "method=refrag", *TINY, *overrides)), tmp_path / "run", "python run.py ..."
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished", summary["error"]
    assert set(summary["metrics"]) >= expected
    assert all(math.isfinite(value) for value in summary["metrics"].values())
    assert any(name.startswith("reward/") for name in summary["metrics"]) == ("none" not in overrides[0])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 and all(s["hops"] for s in samples)
