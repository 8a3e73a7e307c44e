"""``task=convert`` with training of the new mixers, on a tiny random transformer."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit.data.tokenizer import Tokenizer
from refragkit.models.build import transformer
from refragkit.models.checkpoint import load_model, save_model

Execute = Callable[..., Any]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> tuple[str, ...]:
    """A model of four attention blocks, two of them to be converted, and text."""
    model = transformer(
        n_layers=4,
        vocab_size=tokenizer.vocab_size,
        d_model=48,
        n_heads=3,
        n_kv_heads=1,
        head_dim=16,
        d_ff=64,
        seed=1,
    )
    folder = save_model(model, tmp_path_factory.mktemp("source"), tokenizer)
    generator = torch.Generator().manual_seed(0)
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    with file.open("w") as lines:
        for i in range(20):
            numbers = torch.randint(0, 999, (400,), generator=generator).tolist()
            lines.write(json.dumps({"id": f"d{i}", "text": " ".join(map(str, numbers))}) + "\n")
    return (
        "task=convert",
        f"model.path={folder}",
        f"convert.text={file}",
        "convert.layers=[1,3]",
        "convert.calibration_tokens=1024",
        "convert.evaluation_tokens=0",
    )


def curves(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with (folder / "distillation.csv").open() as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["loss"], []).append(float(row["value"]))
    return found


def test_both_stages_train_the_new_mixers_and_leave_nothing_behind(
    execute: Execute, overrides: tuple[str, ...]
) -> None:
    result = execute(*overrides, "convert.align_tokens=6000", "convert.match_tokens=2000")
    assert result.summary["status"] == "finished", result.err
    losses = curves(result.folder)
    assert {name: len(curve) for name, curve in losses.items()} == {
        "align_loss/1": 6,
        "align_loss/3": 6,
        "match_loss": 2,
    }
    for layer in (1, 3):
        assert losses[f"align_loss/{layer}"][-1] < losses[f"align_loss/{layer}"][0]
    metrics = result.summary["metrics"]
    assert metrics["convert/match_loss"] == losses["match_loss"][-1] > 0
    assert metrics["convert/align_loss/3"] == losses["align_loss/3"][-1]
    assert metrics["convert/align_seconds"] > 0 and metrics["convert/match_seconds"] > 0
    assert (result.folder / "plots" / "distillation.png").read_bytes().startswith(b"\x89PNG")
    assert {"distillation", "distillation_plot"} <= set(result.summary["artifacts"])
    card = (result.folder / "model" / "MODEL_CARD.md").read_text()
    assert "calibration: cal on 1,024 tokens" in card
    assert "alignment of each new mixer on 6,000 tokens, then matching the source's logits on 2,000" in card
    activations = result.folder.parent / "outputs" / "cache" / "activations"
    assert activations.is_dir() and not list(activations.rglob("shard-*"))

    plain = execute(*overrides, "convert.calibration=cal")
    assert not (plain.folder / "distillation.csv").exists()
    trained, calibrated = (load_model(r.folder / "model").state_dict() for r in (result, plain))
    moved = ("blocks.1.mixer.", "blocks.3.mixer.")
    for name, value in trained.items():
        assert name.startswith(moved) or torch.equal(value, calibrated[name]), name
    for prefix in moved:
        assert not torch.equal(trained[f"{prefix}o_proj.weight"], calibrated[f"{prefix}o_proj.weight"])


@pytest.mark.parametrize(("stage", "loss"), [("match", "match_loss"), ("align", "align_loss/1")])
def test_one_stage_alone_trains_for_at_least_a_step(
    execute: Execute, overrides: tuple[str, ...], stage: str, loss: str
) -> None:
    result = execute(*overrides, f"convert.{stage}_tokens=513", "convert.calibration=lsq", "convert.to=M")
    assert result.summary["status"] == "finished", result.err
    assert len(curves(result.folder)[loss]) == 1
    assert f"convert/{'align' if stage == 'match' else 'match'}_seconds" not in result.summary["metrics"]


def test_short_text_is_read_again(execute: Execute, overrides: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    generator = torch.Generator().manual_seed(0)
    paragraphs = [" ".join(map(str, torch.randint(0, 999, (40,), generator=generator).tolist()))]
    file.write_text("\n".join(paragraphs * 200))
    changes = (f"convert.text={file}", "convert.align_tokens=40000", "convert.match_tokens=1024")
    result = execute(*overrides, *changes, "convert.to=M")
    assert result.summary["status"] == "finished", result.err
    assert "read again" in result.out
    assert {name: len(curve) for name, curve in curves(result.folder).items()} == {
        "align_loss/1": 39,
        "align_loss/3": 39,
        "match_loss": 1,
    }


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (["convert.align_tokens=-1"], "convert.align_tokens: expected at least 0, got -1"),
        (["convert.match_tokens=true"], "convert.match_tokens: expected a whole number, got True"),
        (["convert.cache_gib=0"], "convert.cache_gib: expected at least 1, got 0"),
        (["convert.match_tokens=1024", "hardware.precision=bf16-true"], "hardware.precision=bf16-true: "),
    ],
)
def test_errors_say_what_to_change(
    execute: Execute, overrides: tuple[str, ...], changes: list[str], part: str
) -> None:
    result = execute(*overrides, *changes)
    assert part in result.summary["error"]
    assert not (result.folder / "model").exists()
