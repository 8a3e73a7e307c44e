from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit.config import compose
from refragkit.data.tokenizer import Tokenizer
from refragkit.experiment import run_experiment
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid, mamba
from refragkit.models.checkpoint import save_model

TEXTS = ["Who wrote Hamlet, and when? She did, my friend. What is it? I don't know."] * 3


def spread(factory: Any, tokenizer: Tokenizer, **options: Any) -> SequenceModel:
    """A tiny model whose logits lie well apart, so that float noise decides no token."""
    model: SequenceModel = factory(
        size="tiny", vocab_size=tokenizer.vocab_size, tie_embeddings=False, seed=1, **options
    )
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(10)
    return model


@torch.no_grad()
def searching_model(tokenizer: Tokenizer, searching: float = 3.0) -> SequenceModel:
    """Its head likes to search where a turn begins, at some turns more than to answer."""
    model = spread(hybrid, tokenizer).eval()
    special = tokenizer.special_ids
    ids = [
        special["<|user|>"],
        *tokenizer.encode("Who wrote it?"),
        special["<|end|>"],
        special["<|assistant|>"],
    ]
    hidden, _ = model.hidden_states(torch.tensor([ids]))
    head = model.get_parameter("lm_head.weight")
    head[special["<|search|>"]] = searching * hidden[0, -1] / hidden[0, -1].norm()
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """What ``task=train`` leaves: a run with a model in it."""
    folder = tmp_path_factory.mktemp("run")
    save_model(spread(hybrid, tokenizer), folder / "model", tokenizer)
    return folder


@pytest.fixture(scope="session")
def mamba_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return save_model(spread(mamba, tokenizer), tmp_path_factory.mktemp("mamba"), tokenizer)


@dataclass
class Result:
    """How a run ended and what it left."""

    folder: Path
    summary: dict[str, Any]
    out: str
    err: str

    @property
    def samples(self) -> list[dict[str, Any]]:
        lines = (self.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def execute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a configuration and return what happened; the screen's text holds the task's own only."""

    def execute(*overrides: str) -> Result:
        cfg = compose(["tracking=none", f"paths.outputs={tmp_path / 'outputs'}", *overrides])
        number = sum(1 for _ in tmp_path.iterdir())
        folder = tmp_path / f"run-{number}"
        capsys.readouterr()
        run_experiment(cfg, folder)
        shown = capsys.readouterr()
        return Result(folder, json.loads((folder / "summary.json").read_text()), shown.out, shown.err)

    return execute
