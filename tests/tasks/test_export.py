"""``task=export`` and back: the same logits from what was written, here and in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refragkit.data.tokenizer import Tokenizer
from refragkit.models.checkpoint import load_model
from tests.tasks.conftest import Result

Execute = Callable[..., Result]
IDS = torch.tensor([[5, 9, 200, 33, 270, 1, 0, 64]])


@torch.no_grad()
def _logits(folder: Path) -> torch.Tensor:
    logits: torch.Tensor = load_model(folder).eval()(IDS).logits
    return logits


def test_our_own_format(execute: Execute, run_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    result = execute("task=export", f"model.path={run_folder}", f"export_dir={target}")
    assert result.summary["status"] == "finished", result.err
    assert torch.equal(_logits(target), _logits(run_folder / "model"))
    assert Tokenizer.load(target).fingerprint == tokenizer.fingerprint
    assert (result.folder / result.summary["artifacts"]["model"]).resolve() == target.resolve()
    assert result.summary["metrics"]["export/bytes"] == sum(f.stat().st_size for f in target.iterdir())


def test_the_default_is_the_run_folder(execute: Execute, mamba_folder: Path) -> None:
    result = execute("task=export", f"model.path={mamba_folder}")
    assert result.summary["artifacts"] == {"model": "model"}
    # What a run exports is where another can start.
    again = execute("task=export", f"model.path={result.folder}")
    assert torch.equal(_logits(again.folder / "model"), _logits(mamba_folder))


def test_hugging_face_format_loads_in_transformers(
    execute: Execute, mamba_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "hf"
    result = execute("task=export", f"model.path={mamba_folder}", "format=hf", f"export_dir={target}")
    assert result.summary["status"] == "finished", result.err
    theirs = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, _logits(mamba_folder), rtol=1e-4, atol=1e-3)
    assert AutoTokenizer.from_pretrained(target).decode([5, 9]) is not None
    assert torch.equal(_logits(target), _logits(mamba_folder))  # and back


def test_what_no_layout_holds_is_refused_before_anything_is_written(
    execute: Execute, run_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "hf"
    result = execute("task=export", f"model.path={run_folder}", "format=hf", f"export_dir={target}")
    assert "no Hugging Face layout holds this" in result.summary["error"]
    assert not target.exists()


def test_weights_without_a_tokenizer(execute: Execute, run_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((run_folder / "model" / name).read_bytes())
    result = execute("task=export", f"model.path={bare}")
    assert result.summary["status"] == "finished", result.err
    assert "has no tokenizer" in result.out
    assert sorted(f.name for f in (result.folder / "model").iterdir()) == ["config.json", "model.safetensors"]
    added = execute("task=export", f"model.path={bare}", f"data.tokenizer={run_folder / 'model'}")
    assert (added.folder / "model" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.path=null", "task=export needs a trained model"),
        ("dry_run=true", "dry_run=true is for task=train"),
        ("adapter=lora", "adapter_path=DIR"),
    ],
)
def test_errors_say_what_to_change(execute: Execute, run_folder: Path, override: str, part: str) -> None:
    result = execute("task=export", f"model.path={run_folder}", override)
    assert part in result.summary["error"]


def test_nothing_is_overwritten(execute: Execute, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for target in (tmp_path / "full", tmp_path / "full" / "file", run_folder / "model"):
        result = execute("task=export", f"model.path={run_folder}", f"export_dir={target}")
        assert "is not an empty folder" in result.summary["error"]
