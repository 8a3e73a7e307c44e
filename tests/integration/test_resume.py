"""Exact resume: a run that was ended anywhere and gone on with ends like one that was not."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit.config import compose
from refragkit.experiment import run_experiment
from refragkit.methods.base import MethodModule
from refragkit.tasks.verify_resume import differences, read_metrics
from refragkit.training.resume import lock_run
from tests.integration.small import small


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the package catches it as an error of its own."""


def go(outputs: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    run_experiment(compose(small(outputs, *overrides)), folder, "python run.py ...")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def weights(folder: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in folder.glob("*/*.safetensors")}
    assert found
    return found


METHODS = {
    "sft": ["method=sft", "model=mamba"],
    "reward_weighted": ["method=refrag", "model=hybrid"],
    "policy_gradient": [
        "method=refrag",
        "model=hybrid",
        "method.objective=policy_gradient",
        "method.group_size=2",
        "retriever.planner=model",
        "method.warmup=gold_traces",
        "method.trace_steps=2",
    ],
    "rft": ["method=rft", "model=hybrid", "method.min_reward=0", "method.num_samples_per_prompt=2"],
    "rft waiting": ["method=rft", "model=hybrid", "method.min_reward=0", "method.min_kept=5"],
    "lora": ["method=lora", "model=hybrid", "adapter=lora"],
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store and one cache for all runs."""
    return tmp_path_factory.mktemp("outputs")


#: They hold what the others do, and more.
QUICK = ("policy_gradient", "rft waiting")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_killed_run_ends_like_one_that_was_not(
    name: str, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        *METHODS[name],
        "method.max_steps=5",
        "method.epochs=9",
        "method.eval_every=3",
        "method.save_every=2",
    ]
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    assert go(outputs, whole, *overrides)["status"] == "finished"

    step = MethodModule.training_step
    last, earlier = ended / "checkpoints" / "last.ckpt", tmp_path / "earlier.ckpt"

    def killing(self: MethodModule, *args: Any) -> None:
        if self.global_step == 2:
            shutil.copyfile(last, earlier)
        if self.global_step == 3:
            raise Killed
        step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MethodModule, "training_step", killing)
        with pytest.raises(Killed):
            go(outputs, ended, *overrides)
    assert json.loads((ended / "summary.json").read_text())["status"] != "finished"
    # As if the kill had come before the checkpoint of step 3: what came behind that of step 2 is there, and done again
    earlier.replace(last)
    summary = go(outputs, ended, *overrides, f"resume={ended}")
    assert summary["status"] == "finished" and summary["resumed"] == 1
    assert weights(ended) == weights(whole)
    assert differences(whole, ended) == []


@pytest.fixture(scope="module")
def finished(outputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of two steps and its overrides."""
    overrides = ["method=sft", "model=mamba", "retriever=none", "method.eval_batches=1", "seed=7"]
    folder = outputs / "train" / "sft-mamba" / "first"
    assert go(outputs, folder, *overrides)["status"] == "finished"
    return folder, overrides


def test_auto_finds_the_run_of_the_same_configuration(
    finished: tuple[Path, list[str]], outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, overrides = finished
    before = (folder / "summary.json").read_bytes()
    again = run_experiment(compose(small(outputs, *overrides, "resume=auto")), tmp_path / "new")
    assert again.status == "finished" and not (tmp_path / "new").exists()
    assert "is finished, and not done again" in capsys.readouterr().out
    assert (folder / "summary.json").read_bytes() == before
    other = run_experiment(compose(small(outputs, *overrides, "seed=8", "resume=auto")), tmp_path / "other")
    assert other.status == "finished" and (tmp_path / "other" / "model").exists()


def unfinished(folder: Path, tmp_path: Path) -> Path:
    """A copy of a run that looks as if it had been killed."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    summary = json.loads((copy / "summary.json").read_text()) | {"status": "running"}
    (copy / "summary.json").write_text(json.dumps(summary))
    return copy


def test_a_run_that_ended_behind_its_last_step_is_finished(
    finished: tuple[Path, list[str]], outputs: Path, tmp_path: Path
) -> None:
    folder, overrides = finished
    copy = unfinished(folder, tmp_path)
    shutil.rmtree(copy / "model")
    assert go(outputs, copy, *overrides, f"resume={copy}")["status"] == "finished"
    assert differences(folder, copy) == []


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["method.max_steps=3", "resume=FOLDER"], "method.max_steps: was 2, is 3"),
        (["resume=nowhere"], "expected the folder of a run"),
        (["task=evaluate", "resume=auto"], "resume is for task=train"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    overrides: list[str], part: str, finished: tuple[Path, list[str]], outputs: Path, tmp_path: Path
) -> None:
    folder, given = finished
    changed = [o.replace("FOLDER", str(folder)) for o in overrides]
    summary = run_experiment(compose(small(outputs, *given, *changed)), tmp_path / "new")
    assert summary.status == "failed" and part in str(summary.error)
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_running_is_left_alone(
    finished: tuple[Path, list[str]], outputs: Path, tmp_path: Path
) -> None:
    folder, given = finished
    copy = unfinished(folder, tmp_path)
    with lock_run(copy):
        refused = run_experiment(compose(small(outputs, *given, f"resume={copy}")), tmp_path / "new")
    assert refused.status == "failed" and "another process is running" in str(refused.error)


def test_changed_data_and_lost_files_are_refused(
    finished: tuple[Path, list[str]], outputs: Path, tmp_path: Path
) -> None:
    folder, given = finished
    copy = unfinished(folder, tmp_path)
    (copy / "samples.jsonl").write_text("")
    assert "had" in str(go(outputs, copy, *given, f"resume={copy}")["error"])
    last = copy / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    error = str(go(outputs, copy, *given, f"resume={copy}")["error"])
    assert "last.ckpt: can't be read" in error and "delete it" in error


def test_ctrl_c_ends_behind_a_checkpoint(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        "method=sft",
        "model=mamba",
        "retriever=none",
        "method.max_steps=4",
        "method.epochs=9",
        "seed=9",
    ]
    folder = tmp_path / "run"
    step = MethodModule.training_step

    def interrupting(self: MethodModule, *args: Any) -> None:
        if self.global_step == 1:
            signal.raise_signal(signal.SIGTERM)
        step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MethodModule, "training_step", interrupting)
        summary = go(outputs, folder, *overrides)
    assert summary["status"] == "interrupted"
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 2
    assert go(outputs, folder, *overrides, f"resume={folder}")["status"] == "finished"
    assert go(outputs, tmp_path / "whole", *overrides)["status"] == "finished"
    assert weights(folder) == weights(tmp_path / "whole")


def test_differences_are_found(finished: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert differences(folder, copy) == [] and read_metrics(copy / "metrics.csv")
    saved = torch.load(copy / "checkpoints" / "last.ckpt", weights_only=True)
    saved["optimizer_states"][0]["state"][0]["exp_avg"].view(-1)[0] += 1e-9
    torch.save(saved, copy / "checkpoints" / "last.ckpt")
    rows = (copy / "metrics.csv").read_text().splitlines()
    (copy / "metrics.csv").write_text("\n".join(rows[:-1]) + "\n")
    file = next(copy.glob("model/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert differences(folder, copy) == [
        "model/model.safetensors: other weights",
        "checkpoints/last.ckpt: optimizer_states differs",
        "metrics.csv: other values",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy_gradient", "rft"])
def test_real_kills_at_random_moments(name: str, outputs: Path, tmp_path: Path) -> None:
    overrides = small(
        outputs, "task=verify_resume", *METHODS[name], "kills=3", "tracking=none", "method.epochs=9"
    )
    summary = run_experiment(compose(overrides), tmp_path / "run")
    assert summary.status == "finished", summary.error
    assert summary.metrics["verify_resume/kills"] > 0
    assert json.loads((tmp_path / "run" / "killed" / "summary.json").read_text())["resumed"] > 0
