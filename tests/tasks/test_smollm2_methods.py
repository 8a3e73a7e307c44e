"""The script that compares methods on the SmolLM2 hybrid: its commands compose, its tables are right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from refragkit.config import compose, instantiate

FOLDER = Path(__file__).parents[2] / "experiments" / "smollm2_hybrid"


@pytest.fixture(scope="module")
def methods() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("smollm2_methods", FOLDER / "methods.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_every_run_composes(methods: ModuleType, tmp_path: Path) -> None:
    for name in methods.TRAININGS:
        job = methods.training_job(name, 1, tmp_path, tmp_path / "out", ["hardware.threads=1"])
        cfg = compose(job.overrides)
        recipe = instantiate(cfg, "method")
        assert cfg.data.path == str(tmp_path) and recipe.max_steps is not None
        started = methods.TRAININGS[name].start is not None
        assert (cfg.model.path is not None) == started and cfg.seed == (101 if started else 1)
        assert cfg.choices.model == ("transformer" if name.startswith("transformer") else "hybrid")
    for name in methods.UNTRAINED:
        for job in methods.evaluation_jobs(name, None, tmp_path, tmp_path / "out", [], methods.ASKED_WITH):
            cfg = compose(job.overrides)
            assert (cfg.choices.task, cfg.evaluate) == ("evaluate", "rag")


def test_tables_are_over_questions_and_seeds(methods: ModuleType, tmp_path: Path) -> None:
    def asked(name: str, seed: int | None, f1: list[float]) -> list[object]:
        (job,) = methods.evaluation_jobs(name, seed, tmp_path, tmp_path / "out", [], ["none"])
        job.folder.mkdir(parents=True)
        lines = [json.dumps({"id": str(i), "f1": value}) for i, value in enumerate(f1)]
        (job.folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
        return [job]

    jobs = {
        "hybrid: no training": asked("hybrid: no training", None, [0.0, 0.5]),
        "sft": [*asked("sft", 0, [0.5, 0.5]), *asked("sft", 1, [1.0, 0.5])],
        "reward_weighted": asked("reward_weighted", 1, [0.5, 0.5]),
    }
    text = methods.table(jobs, ["hybrid: no training", "sft"])
    assert "| hybrid: no training | 0.250 (0.000 to 0.500) [1] |" in text
    assert "| sft | 0.625 (0.500 to 0.750) [2] |" in text  # of questions: their means over seeds
    assert "| reward_weighted | +0.250 (+0.000 to +0.500) [1] |" in text
    assert "| reward_weighted | -0.250 (-0.500 to +0.000) [1] |" in text  # of sft, the same seed only
