"""The command line as a user meets it: help, errors, sweeps, the installed console script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.small import small

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_py(*arguments: str, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_help_lists_every_group_and_option() -> None:
    shown = run_py("--help")
    assert shown.returncode == 0
    for word in ("method", "refrag", "rwkv-qwen", "bm25", "mlflow", "dry_run", "*hybrid"):
        assert word in shown.stdout


def test_help_and_import_load_nothing_heavy() -> None:
    code = (
        "import sys; import refragkit; assert not {'torch', 'hydra', 'omegaconf'} & set(sys.modules); "
        "from refragkit.experiment import main; main(['--help']); "
        "assert not {'torch', 'transformers', 'lightning'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("methud=sft", "did you mean 'method'"),
        ("method=sfft", "did you mean 'sft'"),
        ("method.max_stepz=3", "did you mean 'method.max_steps'"),
    ],
)
def test_a_typo_is_one_message_and_exit_code_1(tmp_path: Path, argument: str, message: str) -> None:
    shown = run_py(argument, f"paths.outputs={tmp_path}")
    assert shown.returncode == 1
    assert message in shown.stderr
    assert "Traceback" not in shown.stdout + shown.stderr
    assert not any(tmp_path.iterdir())


def test_a_run_that_fails_exits_with_1_and_leaves_its_summary(tmp_path: Path) -> None:
    shown = run_py(*small(tmp_path, "data.path=/nowhere", "tracking=none", f"hydra.run.dir={tmp_path}/run"))
    assert shown.returncode == 1
    assert shown.stderr.count("error:") == 1
    assert "/nowhere" in shown.stderr
    assert "Traceback" not in shown.stdout + shown.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_sweep_makes_a_folder_and_an_mlflow_row_for_each_job(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    # One job of the three can't work; the others must not suffer.
    shown = run_py(
        "-m", *small(tmp_path, "method=sft,refrag", "model=hybrid,transformer", "method.max_steps=1")
    )
    assert shown.returncode == 1, shown.stderr
    summaries = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("sweeps/*/*/summary.json"))]
    outcome = {(s["method"], s["model"]): s["status"] for s in summaries}
    assert outcome == {
        ("sft", "hybrid"): "finished",
        ("sft", "transformer"): "finished",
        ("refrag", "hybrid"): "finished",
        ("refrag", "transformer"): "failed",
    }
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("refragkit")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    jobs = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(r.info.status for r in jobs) == ["FAILED", "FINISHED", "FINISHED", "FINISHED"]
    assert {r.info.run_id for r in jobs} == {s["mlflow_run_id"] for s in summaries}
    assert {a.path for a in client.list_artifacts(parent.info.run_id)} == {
        "leaderboard.csv",
        "leaderboard.png",
    }
    assert parent.info.status == "FAILED"  # as one of its jobs
    assert shown.stderr.count("in this sweep failed") == 1 and "leaderboard" in shown.stdout

    again = run_py(
        "-m",
        *small(tmp_path, "method=sft,refrag", "model=hybrid,transformer", "method.max_steps=1"),
        "resume=auto",
    )
    assert again.returncode == 1, again.stderr
    assert again.stdout.count("is finished, and not done again") == 3
    assert (
        len(list(tmp_path.glob("sweeps/*/*/summary.json"))) == 4
    )  # the failed one was repeated where it lay
    first, second = (path.read_text() for path in sorted(tmp_path.glob("sweeps/*/leaderboard.csv")))
    assert first == second


def test_sigterm_ends_as_interrupted(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "run.py"),
            *small(
                tmp_path,
                "tracking=none",
                "method.max_steps=500",
                "method.epochs=500",
                f"hydra.run.dir={tmp_path}/run",
            ),
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "run" / "train.log"
    deadline = time.monotonic() + 200
    while not (log.exists() and "step 1/" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (tmp_path / "run" / "metrics.csv").exists()


def test_the_wheel_works_from_any_folder(tmp_path: Path) -> None:
    """Installed alone into an empty environment; the dependencies come from this one's folder, not resolved anew."""
    wheels, home, elsewhere = tmp_path / "wheels", tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"refragkit/conf/config.yaml", "refragkit/py.typed"} <= names
    assert "refragkit/data/samples/multihop_qa/corpus.jsonl" in names
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python), "install",
         "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    site = next(p for p in sys.path if p.endswith("site-packages"))
    environment = {**ENVIRONMENT, "PYTHONPATH": site}
    script = str(home / "bin" / "refragkit")

    def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300
        )

    assert "rwkv-qwen" in installed("--help").stdout
    shown = installed("method=refrag", "retriever=bm25", "tracking=none", "dry_run=true", "hydra.run.dir=run")
    assert shown.returncode == 0, shown.stderr
    assert (
        str(home)
        in subprocess.run(
            [str(python), "-c", "import refragkit; print(refragkit.__file__)"],
            env=environment,
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    summary = json.loads((elsewhere / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["command"].startswith("refragkit method=refrag")
