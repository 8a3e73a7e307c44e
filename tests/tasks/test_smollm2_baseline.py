"""The base line's script on a tiny model: the jobs, what is done again and what is not, the larger set."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from refragkit.data.datamodule import SAMPLE_DIR

SCRIPT = Path(__file__).parents[2] / "experiments" / "smollm2_hybrid" / "baseline.py"


@pytest.fixture(scope="module")
def baseline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_baseline", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_finished_jobs_are_not_done_again(
    baseline: ModuleType,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = [
        "rag.max_new_tokens=2",
        "data.max_validation_questions=3",
        "tracking=none",
        "rag.timed_questions=0",
    ]
    arguments = [
        "baseline.py",
        "--no-teacher",
        f"--model=one={run_folder}",
        f"--model=two={run_folder}",
        f"--out={tmp_path / 'out'}",
        "--only=random",
        *fixed,
        f"paths.outputs={tmp_path / 'outputs'}",
    ]
    monkeypatch.setattr(baseline, "ASKED", ["rag.max_document_tokens=20"])
    monkeypatch.setattr(sys, "argv", arguments)
    baseline.main()
    shown = capsys.readouterr().out
    assert "2 of 2 jobs run now" in shown
    (table,) = (tmp_path / "out").rglob("baseline.md")
    lines = [line.split(" | ") for line in table.read_text().splitlines() if line.startswith("| ")]
    rows = {(line[0].strip("| "), line[1]): line for line in lines if len(line) > 5}
    assert rows["one", "random"][5] == rows["two", "random"][5] == "3.0"
    # The same model twice: no difference.
    assert "+0.000 (+0.000 to +0.000)" in table.read_text()

    baseline.main()
    assert "0 of 2 jobs run now" in capsys.readouterr().out
    # A job that was killed, and one whose model has changed since.
    (summary,) = (tmp_path / "out").rglob("one/random/summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "running"}))
    baseline.main()
    assert "1 of 2 jobs run now" in capsys.readouterr().out
    weights = run_folder / "model" / "model.safetensors"
    before = weights.stat()
    try:
        os.utime(weights)
        baseline.main()
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "2 of 2 jobs run now" in capsys.readouterr().out


def test_the_larger_set_holds_nothing_that_was_learnt_from(baseline: ModuleType, tmp_path: Path) -> None:
    from refragkit.retrievers.planners.fit_expand import in_tuning_part

    bundled = (SAMPLE_DIR / "train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    taught = json.loads(bundled[0])["supporting_ids"][0]
    new = [
        {"id": f"new_{n}", "question": "Who?", "answers": ["Ada"], "supporting_ids": [f"p{n}"]}
        for n in range(60)
    ]
    new.append({"id": "near", "question": "Who?", "answers": ["Ada"], "supporting_ids": [taught]})
    source = tmp_path / "source"
    source.mkdir()
    (source / "questions.jsonl").write_text("\n".join([*bundled, *map(json.dumps, new)]) + "\n")
    (source / "corpus.jsonl").write_text('{"id": "p0", "title": "", "text": "x"}\n')
    folder = baseline.larger_set(source, 10, tmp_path / "set")
    ids = {
        part: [json.loads(line)["id"] for line in (folder / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "validation")
    }
    assert len(ids["validation"]) == 10 and all(i.startswith("new_") for i in ids["validation"])
    assert not any(map(in_tuning_part, ids["validation"])) and all(map(in_tuning_part, ids["train"]))
    whole = baseline.larger_set(source, 1000, tmp_path / "whole")
    asked = (whole / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(asked) == sum(not in_tuning_part(f"new_{n}") for n in range(60))
    assert (whole / "corpus.jsonl").read_bytes() == (source / "corpus.jsonl").read_bytes()


@pytest.mark.parametrize("given", ["", "name", "=dir", "name=/nowhere", "a/b=dir"])
def test_a_model_that_is_none_is_refused(
    baseline: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["baseline.py", "--model", given])
    with pytest.raises(SystemExit):
        baseline.main()
    assert "NAME=DIR" in capsys.readouterr().err or "/nowhere" in given
