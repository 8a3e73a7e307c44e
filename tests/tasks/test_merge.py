"""``task=merge``: adapters of real runs into one, and into the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit.adapters.lora import LoRA, lora_layers
from refragkit.adapters.peft_format import load_adapter, read_adapter, save_adapter
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.weights_hash import weights_hash
from tests.tasks.conftest import Result

Execute = Callable[..., Result]
IDS = torch.tensor([[5, 9, 200, 33, 270, 1, 0, 64]])


@torch.no_grad()
def _logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = load_model(folder)
    if adapter is not None:
        load_adapter(model, adapter)
    logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def _adapter(base: Path, folder: Path, seed: int, rank: int, alpha: float, known: bool = True) -> Path:
    model = load_model(base)
    LoRA(rank=rank, alpha=alpha).apply(model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.normal_(0, 0.05, generator=generator)
    return save_adapter(model, folder, weights_hash(base) if known else None)


@pytest.fixture(scope="module")
def adapters(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two runs: one is given by its folder, the other by the run's."""
    root = tmp_path_factory.mktemp("adapters")
    base = run_folder / "model"
    _adapter(base, root / "run" / "adapter", 2, rank=3, alpha=2)
    return [_adapter(base, root / "a", 1, rank=4, alpha=8), root / "run"]


def _given(paths: list[Path]) -> str:
    return f"adapters=[{','.join(map(str, paths))}]"


def test_an_average_that_loads_and_merges(
    execute: Execute, run_folder: Path, adapters: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    target = tmp_path / "merged"
    result = execute(
        "task=merge",
        _given(adapters),
        "weights=[0.75,0.25]",
        f"model.path={run_folder}",
        f"merge_into={target}",
    )
    assert result.summary["status"] == "finished", result.err
    assert result.summary["artifacts"]["adapter"] == "adapter"
    assert (result.folder / result.summary["artifacts"]["model"]).resolve() == target.resolve()
    metrics = result.summary["metrics"]
    assert metrics["merge/adapters"] == 2 and metrics["merge/rank"] == 7
    assert metrics["merge/relative_error"] < 1e-6
    # By hand: the base's weights plus the average of the dense updates.
    base = run_folder / "model"
    by_hand = load_model(base).eval()
    for share, folder in zip((0.75, 0.25), (adapters[0], adapters[1] / "adapter"), strict=True):
        model = load_model(base)
        load_adapter(model, folder)
        with torch.no_grad():
            for path, layer in lora_layers(model):
                by_hand.get_parameter(f"{path}.weight").add_(share * layer.delta())
    with torch.no_grad():
        want = by_hand(IDS).logits
    torch.testing.assert_close(_logits(target), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(_logits(base, result.folder / "adapter"), want, rtol=1e-4, atol=1e-4)
    assert (_logits(base) - want).abs().max() > 1e-2
    assert Tokenizer.load(target).fingerprint == tokenizer.fingerprint
    assert read_adapter(result.folder / "adapter").base_hash == weights_hash(base)
    # What was merged into is another base: the adapter is not put onto it a second time.
    again = execute("task=export", f"model.path={target}", f"adapter_path={result.folder}")
    assert "was trained on another base model" in again.summary["error"]
    exported = execute("task=export", f"model.path={run_folder}", f"adapter_path={result.folder}")
    torch.testing.assert_close(_logits(exported.folder / "model"), want, rtol=1e-4, atol=1e-4)


def test_without_a_model(execute: Execute, adapters: list[Path], tmp_path: Path) -> None:
    result = execute(
        "task=merge", _given(adapters), "average=svd", "rank=2", f"output={tmp_path / 'two' / 'adapter'}"
    )
    assert result.summary["status"] == "finished", result.err
    merged = read_adapter(tmp_path / "two" / "adapter")
    assert {update.rank for update in merged.layers.values()} == {2}
    found = result.folder / result.summary["artifacts"]["adapter"]
    assert found.resolve() == (tmp_path / "two" / "adapter").resolve()
    assert 0.1 < result.summary["metrics"]["merge/relative_error"] < 1
    assert "relative error to the weighted average of the updates" in result.out


def test_factors(execute: Execute, run_folder: Path, adapters: list[Path], tmp_path: Path) -> None:
    other = _adapter(run_folder / "model", tmp_path / "b", 3, rank=4, alpha=8, known=False)
    result = execute("task=merge", _given([adapters[0], other]), "average=factors")
    assert result.summary["status"] == "finished", result.err
    layers = read_adapter(result.folder / "adapter").layers
    one, two = (read_adapter(folder).layers for folder in (adapters[0], other))
    for path, update in layers.items():
        torch.testing.assert_close(update.B, (one[path].B + two[path].B) / 2)
    assert result.summary["metrics"]["merge/relative_error"] > 0.5
    refused = execute("task=merge", _given(adapters), "average=factors")
    assert "average=factors needs adapters of the same rank and alpha" in refused.summary["error"]
    assert not (refused.folder / "adapter").exists()


@pytest.mark.slow
def test_an_adapter_of_a_training_run_knows_its_base(execute: Execute, run_folder: Path) -> None:
    trained = execute(
        "method=lora",
        f"model.path={run_folder}",
        "retriever=none",
        "data.max_train_questions=4",
        "data.max_validation_questions=2",
        "method.max_steps=1",
        "method.max_new_tokens=2",
        "method.global_batch_size=2",
    )
    assert trained.summary["status"] == "finished", trained.err
    assert read_adapter(trained.folder / "adapter").base_hash == weights_hash(run_folder / "model")
    merged = execute("task=merge", f"adapters=[{trained.folder}]", f"model.path={run_folder}")
    assert merged.summary["status"] == "finished", merged.err


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["adapters=[]"], "adapters: expected at least one adapter"),
        (["weights=[6,2]"], "weights: expected numbers that sum to 1"),
        (["weights=[1]"], "weights: expected one number for each of the 2 adapters"),
        (["weights=[1.5,-0.5]"], "weights: expected positive finite numbers"),
        (["rank=3"], "rank=3 belongs to average=svd"),
        (["average=svd", "rank=0"], "rank: expected null or at least 1"),
        (["average=mean"], "average: expected one of exact, svd, factors, got 'mean'"),
        (["adapters=[/nowhere]"], "adapters[0]: /nowhere does not exist; expected an adapter's folder"),
        (
            ["merge_into=/tmp/nowhere"],
            "merge_into=/tmp/nowhere writes a model, and there is none to merge into",
        ),
        (["dry_run=true"], "dry_run=true is for task=train"),
    ],
)
def test_errors_say_what_to_change(
    overrides: list[str], part: str, execute: Execute, adapters: list[Path]
) -> None:
    given = dict(override.split("=", 1) for override in [_given(adapters), *overrides])
    try:
        result = execute("task=merge", *(f"{key}={value}" for key, value in given.items()))
    except ConfigError as error:  # what a type can't hold is refused when the configuration is composed
        assert part in str(error)
        return
    assert part in result.summary["error"]
    assert not (result.folder / "adapter").exists()


def test_broken_adapters(execute: Execute, adapters: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in adapters[0].iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": float("nan")}))
    result = execute("task=merge", _given([adapters[0], bad]))
    assert f"{bad / 'adapter_config.json'}: lora_alpha: expected a finite number" in result.summary["error"]
    (bad / "adapter_config.json").write_text(json.dumps(config))
    weights = bad / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    result = execute("task=merge", _given([adapters[0], bad]))
    assert f"{weights}: not readable as safetensors" in result.summary["error"]
    assert not (result.folder / "adapter").exists()


def test_another_base_is_refused(
    execute: Execute, run_folder: Path, adapters: list[Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model: Any = load_model(run_folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)
    save_model(model, tmp_path / "other", tokenizer)
    result = execute("task=merge", _given(adapters), f"model.path={tmp_path / 'other'}")
    assert "was trained on another base model" in result.summary["error"]
    foreign = _adapter(tmp_path / "other", tmp_path / "foreign", 4, rank=2, alpha=2)
    result = execute("task=merge", _given([adapters[0], foreign]))
    assert "were trained on different base models" in result.summary["error"]


def test_nothing_is_overwritten(
    execute: Execute, run_folder: Path, adapters: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for key in ("output", "merge_into"):
        result = execute(
            "task=merge", _given(adapters), f"model.path={run_folder}", f"{key}={tmp_path / 'full'}"
        )
        assert f"{key}: {tmp_path / 'full'} is not an empty folder" in result.summary["error"]
    same = [f"output={tmp_path / 'x'}", f"merge_into={tmp_path / 'x'}"]
    result = execute("task=merge", _given(adapters), f"model.path={run_folder}", *same)
    assert "give the model a folder of its own" in result.summary["error"]
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["file"] and not (tmp_path / "x").exists()
