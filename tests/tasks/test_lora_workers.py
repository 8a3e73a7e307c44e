"""``method=lora`` with several workers: real processes on a tiny model."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refragkit.adapters.low_rank import AdapterWeights
from refragkit.adapters.merge import merge_adapters
from refragkit.adapters.peft_format import read_adapter
from refragkit.config import compose, instantiate
from refragkit.errors import ConfigError
from refragkit.experiment import run_experiment
from refragkit.methods.lora_workers import LoraWorkersModule
from refragkit.tasks.verify_resume import differences
from refragkit.training.resume import stored_config
from tests.tasks.conftest import TEXTS, Result

Execute = Callable[..., Result]
STEPS = 6


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Conversations of many lengths, as overrides."""
    folder = tmp_path_factory.mktemp("chat")
    for name, first, count in (("train", 0, 12), ("held", 12, 4)):
        rows = []
        for i in range(first, first + count):
            turns = [("user", f"{i}? {TEXTS[0][i : i + 20]}"), ("assistant", TEXTS[0][: 5 + 4 * i])]
            rows.append({"id": str(i), "messages": [{"role": r, "content": c} for r, c in turns]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "data=chat",
        f"data.path={folder / 'train.jsonl'}",
        f"data.validation_path={folder / 'held.jsonl'}",
    ]


@pytest.fixture
def settings(run_folder: Path, chat: list[str]) -> list[str]:
    return [
        "model=hybrid",
        "retriever=none",
        "method=lora",
        f"model.path={run_folder}",
        *chat,
        "adapter.rank=4",
        "adapter.alpha=8",
        "method.lr=0.01",
        "method.warmup_steps=0",
        "method.global_batch_size=4",
        "method.max_seq_len=128",
        f"method.max_steps={STEPS}",
        "method.save_every=4",
        "hardware.precision=32-true",
        "hardware.threads=1",
    ]


@pytest.fixture
def lora(execute: Execute, settings: list[str]) -> Execute:
    def lora(*overrides: str) -> Result:
        changed = {override.split("=")[0] for override in overrides}
        return execute(*(s for s in settings if s.split("=")[0] not in changed), *overrides)

    return lora


def rows_of(result: Result) -> list[dict[str, str]]:
    with (result.folder / "metrics.csv").open() as f:
        return [row for row in csv.DictReader(f) if row["train/loss"]]


def adapter(result: Result, name: str) -> AdapterWeights:
    return read_adapter(result.folder / "adapter" / f"{name}.safetensors")


def furthest(a: AdapterWeights, b: AdapterWeights) -> float:
    """The largest difference of two factors."""
    assert set(a.layers) == set(b.layers)
    return max(
        float((getattr(a.layers[path], name) - getattr(b.layers[path], name)).abs().max())
        for path in a.layers
        for name in "AB"
    )


def test_adapters_are_averaged_by_tokens(lora: Execute) -> None:
    result = lora("method.workers=2", "method.worker_weights=[3,1]")
    assert result.summary["status"] == "finished", result.summary["error"]
    rows = rows_of(result)
    assert [row["step"] for row in rows] == [str(step + 1) for step in range(STEPS)]
    assert float(rows[-1]["train/loss"]) < 0.7 * float(rows[0]["train/loss"])
    assert all({row["worker_0/loss"], row["worker_1/loss"]} & {""} == set() for row in rows)
    learnt = [float(rows[-1][f"worker_{i}/learnt_tokens"]) for i in range(2)]
    assert 1.5 < learnt[0] / learnt[1] < 6  # three examples of four
    threads = [adapter(result, f"thread_{i}") for i in range(2)]
    wanted = merge_adapters(threads, [count / sum(learnt) for count in learnt]).adapter
    for name in ("adapter_final", "adapter_model"):
        found = adapter(result, name)
        for path, update in found.layers.items():
            assert update.rank == 8
            torch.testing.assert_close(update.delta(), wanted.layers[path].delta(), rtol=1e-4, atol=1e-6)
    config = json.loads((result.folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8)
    early = adapter(result, "checkpoint_4")
    assert furthest(early, adapter(result, "adapter_final")) > 0


def test_averaged_gradients_are_those_of_one_process(lora: Execute) -> None:
    """So are Adam's moments and the clipping, and with these all steps."""
    alone = lora()
    apart = lora("method.workers=2", "method.worker_weights=[3,1]", "method.sync_every=1")
    assert (alone.summary["status"], apart.summary["status"]) == ("finished", "finished"), apart.err
    for one, two in zip(rows_of(alone), rows_of(apart), strict=True):
        for key in ("train/loss", "train/grad_norm", "lr/matrix", "train/tokens"):
            assert float(one[key]) == pytest.approx(float(two[key]), rel=2e-4), (one["step"], key)
    assert furthest(adapter(apart, "thread_0"), adapter(apart, "thread_1")) == 0
    assert furthest(adapter(apart, "thread_0"), adapter(apart, "adapter_final")) == 0
    for name in ("checkpoint_4", "adapter_final"):
        found, wanted = adapter(apart, name), adapter(alone, name)
        for path, update in found.layers.items():
            torch.testing.assert_close(update.delta(), wanted.layers[path].delta(), rtol=1e-3, atol=2e-5)
    assert apart.summary["metrics"]["val/loss"] == pytest.approx(
        alone.summary["metrics"]["val/loss"], rel=1e-4
    )


@pytest.mark.parametrize("average", ["factors", "svd"])
def test_workers_go_on_from_their_average(average: str, lora: Execute) -> None:
    result = lora(
        "method.workers=2",
        "method.sync_every=4",
        f"method.average={average}",
        "method.max_steps=5",
        "method.schedule=linear",
    )
    assert result.summary["status"] == "finished", result.summary["error"]
    last_lr = float(rows_of(result)[-1]["lr/matrix"])
    assert last_lr == pytest.approx(0.002)
    middle = adapter(result, "checkpoint_4")
    threads = [adapter(result, f"thread_{i}") for i in range(2)]
    # One step of Adam moves no number by much more than the learning rate; four more do, and not alike in both
    assert all(0 < furthest(middle, thread) < 1.5 * last_lr for thread in threads)
    assert furthest(*threads) > 0.1 * last_lr
    assert {update.rank for update in adapter(result, "adapter_final").layers.values()} == {4}


def test_a_killed_worker_is_reported_and_the_others_go_on(
    lora: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = LoraWorkersModule._record_step

    def kill_then_record(module: LoraWorkersModule, step: int, taken: Any) -> None:
        if step == 2:
            assert module.workers is not None
            os.kill(module.workers.process_ids[1], signal.SIGKILL)
        record(module, step, taken)

    monkeypatch.setattr(LoraWorkersModule, "_record_step", kill_then_record)
    result = lora("method.workers=2", "method.log_every=1")
    assert result.summary["status"] == "finished", result.summary["error"]
    rows = rows_of(result)
    assert [row["workers/alive"] for row in rows] == ["2.0", "2.0", *["1.0"] * (STEPS - 2)]
    # From the next batch on, what it would have learnt goes to the other
    read, whole = ([float(row["train/tokens"]) for row in found] for found in (rows, rows_of(lora())))
    assert [y - x for x, y in pairwise(read[2:])] == [y - x for x, y in pairwise(whole[2:])]
    log = (result.folder / "train.log").read_text()
    assert "worker 1 was ended by SIGKILL" in log and "(after step 2); 1 others go on" in log
    assert "adapter/thread_1.safetensors; it is not part of the average" in log
    final, kept = adapter(result, "adapter_final"), adapter(result, "thread_0")
    for path, update in final.layers.items():
        torch.testing.assert_close(update.delta(), kept.layers[path].delta(), rtol=1e-4, atol=1e-6)
    assert furthest(kept, adapter(result, "thread_1")) > 0


def test_a_run_without_workers_left_fails(lora: Execute) -> None:
    result = lora("method.workers=2", "method.lr=1.0e+30", "method.grad_clip=0")
    assert result.summary["status"] == "failed"
    error = result.summary["error"]
    assert (
        "no worker is left: worker 0 The norm of the gradient is" in error and "; worker 1 The norm" in error
    )
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_figures_of_workers_go_to_the_run_of_their_leader(settings: list[str], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    outputs = tmp_path / "outputs"
    summary = run_experiment(
        compose([*settings, "method.workers=2", f"paths.outputs={outputs}"]), tmp_path / "run"
    )
    assert summary.status == "finished", summary.error
    client = MlflowClient(tracking_uri=f"sqlite:///{outputs / 'mlflow.db'}")
    runs = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
    assert [run.info.run_id for run in runs] == [summary.mlflow_run_id]
    for name in ("worker_0/loss", "worker_1/loss", "train/loss"):
        history = client.get_metric_history(runs[0].info.run_id, name)
        assert [point.step for point in history] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_ctrl_c_ends_every_process_behind_a_checkpoint(settings: list[str], tmp_path: Path) -> None:
    """Sent to all of them, as a terminal does."""
    folder = tmp_path / "run"
    kept = [s for s in settings if not s.startswith("method.max_steps")]
    overrides = [
        *(*kept, "method.epochs=100000", "method.workers=2", "method.log_every=1", "tracking=none"),
        *(f"hydra.run.dir={folder}", f"paths.outputs={tmp_path}"),
    ]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[2] / "run.py"), *overrides],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (log := folder / "train.log").exists() or "step 2/" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert "worker" not in log.read_text().split("Ctrl-C", 1)[1]  # none of them was lost
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and session_members(process.pid):
        time.sleep(0.1)
    assert not session_members(process.pid)


def session_members(session: int) -> list[str]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(stat.parent.name)
    return found


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the package catches it as an error of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("sync", [["average=svd", "sync_every=3"], ["sync_every=1"]])
def test_a_run_that_was_ended_goes_on_exactly(
    sync: list[str], lora: Execute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters and moments of all workers are in the checkpoint."""
    overrides = ["method.workers=2", "method.save_every=2", *(f"method.{o}" for o in sync)]
    whole = lora(*overrides)
    step = LoraWorkersModule.training_step

    def killing(module: LoraWorkersModule, *arguments: Any) -> None:
        if module.global_step == 5:
            raise Killed
        step(module, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LoraWorkersModule, "training_step", killing)
        lora(*overrides)
    assert not multiprocessing.active_children()
    folder = max(tmp_path.glob("run-*"), key=lambda path: path.stat().st_mtime)
    assert folder != whole.folder and not (folder / "adapter" / "adapter_final.safetensors").exists()
    cfg = stored_config(folder)
    cfg.resume = str(folder)
    summary = run_experiment(cfg, folder)
    assert summary.status == "finished" and summary.resumed == 1, summary.error
    for name in ("thread_0", "thread_1", "checkpoint_4", "adapter_final", "adapter_model"):
        mine, wanted = (load_file(f / "adapter" / f"{name}.safetensors") for f in (folder, whole.folder))
        assert mine.keys() == wanted.keys() and all(torch.equal(mine[k], wanted[k]) for k in mine), name
    assert differences(whole.folder, folder) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workers=0"], "method.workers: expected at least 1"),
        (["workers=8"], "method.global_batch_size=4 has not an example for each of method.workers=8"),
        (["workers=2", "worker_weights=[1]"], "method.worker_weights: expected a positive number for each"),
        (
            ["workers=2", "worker_weights=[1,0]"],
            "method.worker_weights: expected a positive number for each",
        ),
        (["workers=2", "sync_every=3"], "method.sync_every=3 goes on from averages"),
        (["sync_every=3"], "method.sync_every=3 is about several workers"),
        (["workers=2", "sync_every=0"], "method.sync_every: expected null or at least 1"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    cfg = compose(["method=lora", "method.global_batch_size=4", *(f"method.{o}" for o in overrides)])
    with pytest.raises(ConfigError, match=re.escape(message)):
        instantiate(cfg, "method")


def test_hardware_that_workers_are_not_for(lora: Execute) -> None:
    result = lora("method.workers=2", "hardware.precision=bf16-true")
    assert "hardware.precision=bf16-true is not for them" in result.summary["error"]
