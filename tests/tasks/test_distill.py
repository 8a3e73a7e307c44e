"""``method=distill`` on a tiny random transformer: stages, files, what is trained and what is left alone."""

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
        "method=distill",
        "model=transformer",
        "retriever=none",
        f"model.path={folder}",
        f"convert.text={file}",
        "convert.layers=[1,3]",
        "convert.calibration_tokens=1024",
        "convert.evaluation_tokens=0",
        "method.text_tokens=6144",
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
    result = execute(*overrides, "method.align_tokens=6000", "method.match_tokens=2000")
    assert result.summary["status"] == "finished", result.err
    losses = curves(result.folder)
    assert {name: len(curve) for name, curve in losses.items()} == {
        "align_loss/1": 6,
        "align_loss/3": 6,
        "match_loss": 2,
    }
    metrics = result.summary["metrics"]
    assert metrics["convert/match_loss"] == losses["match_loss"][-1] > 0
    assert metrics["convert/align_loss/3"] == losses["align_loss/3"][-1]
    assert metrics["convert/cache_seconds"] > 0 and metrics["convert/training_seconds"] > 0
    assert (result.folder / "plots" / "distillation.png").read_bytes().startswith(b"\x89PNG")
    assert {"distillation", "distillation_plot"} <= set(result.summary["artifacts"])
    card = (result.folder / "model" / "MODEL_CARD.md").read_text()
    assert "calibration: cal on 1,024 tokens" in card
    assert "alignment of each new mixer on 6,000 tokens, then matching the source's logits on 2,000" in card
    activations = result.folder.parent / "outputs" / "cache" / "activations"
    assert activations.is_dir() and not list(activations.rglob("shard-*"))

    untrained = [o for o in overrides[1:] if not o.startswith("method.")]
    plain = execute("task=convert", *untrained, "convert.calibration=cal", "method=sft")
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
    other = {"match": "align", "align": "match"}[stage]
    result = execute(
        *overrides,
        f"method.{stage}_tokens=513",
        f"method.{other}_tokens=0",
        "convert.calibration=lsq",
        "convert.to=M",
    )
    assert result.summary["status"] == "finished", result.err
    losses = curves(result.folder)
    assert len(losses[loss]) == 1 and not any(name.startswith(other) for name in losses)


def test_short_text_is_read_again(execute: Execute, overrides: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    generator = torch.Generator().manual_seed(0)
    paragraphs = [" ".join(map(str, torch.randint(0, 999, (40,), generator=generator).tolist()))]
    file.write_text("\n".join(paragraphs * 200))
    changes = (
        f"convert.text={file}",
        "method.text_tokens=60000",
        "method.align_tokens=40000",
        "method.match_tokens=1024",
    )
    result = execute(*overrides, *changes, "convert.to=M")
    assert result.summary["status"] == "finished", result.err
    assert "fewer than 60,000" in result.out
    assert {name: len(curve) for name, curve in curves(result.folder).items()} == {
        "align_loss/1": 39,
        "align_loss/3": 39,
        "match_loss": 1,
    }


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (["method.align_tokens=-1"], "method.align_tokens: expected 0 or more, got -1"),
        (
            ["method.align_tokens=0", "method.match_tokens=0"],
            "both 0, which leaves nothing to train; task=convert",
        ),
        (["method.cache_gib=0"], "method.cache_gib: expected at least 1, got 0"),
        (["method.rest_lr=-1"], "method.rest_lr: expected a finite number"),
        (["hardware.precision=bf16-true"], "hardware.precision=bf16-true: method=distill trains in float32"),
        (["hardware.devices=2"], "method=distill runs on one device"),
        (["adapter=lora"], "method.rest=lora"),
        (["convert.text=[3]"], "convert.text: expected a file or folder"),
        (["convert.evaluation_texts={chat: 3}"], "convert.evaluation_texts.chat: expected a file"),
    ],
)
def test_errors_say_what_to_change(
    execute: Execute, overrides: tuple[str, ...], changes: list[str], part: str
) -> None:
    result = execute(*overrides, *changes)
    assert part in result.summary["error"]
    assert not (result.folder / "model").exists()


@pytest.mark.parametrize("rest", ["lora", "full"])
def test_the_rest_is_trained_from_the_first_new_mixer_on(
    execute: Execute, overrides: tuple[str, ...], rest: str
) -> None:
    stages = ("method.align_tokens=1024", "method.match_tokens=4096", "method.rest_lr=0.01", "convert.to=M")
    plain, more = (execute(*overrides, *stages, f"method.rest={name}") for name in ("frozen", rest))
    assert more.summary["status"] == "finished", more.err
    before, after = (load_model(r.folder / "model").state_dict() for r in (plain, more))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert before.keys() == after.keys()  # LoRA is merged
    assert {
        "blocks.1.mixer.out_proj.weight",
        "blocks.2.mixer.q_proj.weight",
        "blocks.2.mlp.up_proj.weight",
    } <= changed
    assert not any(name.startswith(("blocks.0.", "embed_tokens", "lm_head")) for name in changed)
    assert ("norm.weight" in changed) == (rest == "full")
    source = load_model(
        next(o for o in overrides if o.startswith("model.path=")).partition("=")[2]
    ).state_dict()
    kept = "blocks.0.mixer.q_proj.weight"
    assert torch.equal(after[kept], source[kept])


def test_a_kept_cache_is_used_again(execute: Execute, overrides: tuple[str, ...]) -> None:
    stages = ("method.align_tokens=1024", "method.match_tokens=0", "method.keep_cache=true")
    first = execute(*overrides, *stages)
    activations = first.folder.parent / "outputs" / "cache" / "activations"
    (shard,) = activations.rglob("shard-*")
    made = shard.stat().st_mtime_ns
    again = execute(*overrides, *stages, "seed=1")  # another run on the same text
    assert again.summary["status"] == "finished", again.err
    assert shard.stat().st_mtime_ns == made
    last = execute(*overrides, *stages, "method.keep_cache=false")
    assert not shard.exists()
    assert curves(last.folder) == curves(first.folder)


def test_a_dry_run_counts_steps_and_bytes(execute: Execute, overrides: tuple[str, ...]) -> None:
    result = execute(*overrides, "dry_run=true", "method.align_tokens=10240", "method.match_tokens=5120")
    assert result.summary["status"] == "finished", result.err
    metrics = result.summary["metrics"]
    assert (metrics["dry_run/align_steps"], metrics["dry_run/match_steps"]) == (10, 5)
    assert metrics["dry_run/cache_bytes"] == 6144 * 3 * 2 * 48 * 2
    assert not (result.folder / "model").exists()


def test_task_convert_with_the_method_trains_too(execute: Execute, overrides: tuple[str, ...]) -> None:
    result = execute("task=convert", *overrides, "method.align_tokens=1024", "method.match_tokens=0")
    assert result.summary["status"] == "finished", result.err
    assert len(curves(result.folder)["align_loss/1"]) == 1


def test_in_bfloat16_weights_are_updated_as_in_float32(execute: Execute, overrides: tuple[str, ...]) -> None:
    """Autocast may keep casted weights, and would then never see an update."""
    stages = (
        "method.align_tokens=12288",
        "method.match_tokens=6144",
        "method.align_matrix_lr=0.01",
        "method.match_matrix_lr=0.01",
    )
    exact, rounded = (
        curves(execute(*overrides, *stages, f"hardware.precision={p}").folder)
        for p in ("32-true", "bf16-mixed")
    )
    for name in ("align_loss/1", "align_loss/3"):
        curve = exact[name]
        change = curve[-1] - curve[0]
        assert abs(change) > 0.02 * curve[0]  # better or worse: updates show
        assert rounded[name][-1] - rounded[name][0] == pytest.approx(change, rel=0.4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("convert.layers=[]",), "convert.layers is empty"),
        (("convert.layers=auto", "convert.count=9"), "convert.count=9: this model has 4 attention blocks"),
        (("convert.text=/nowhere",), "convert.text=/nowhere: expected a .txt"),
        (
            ("convert.evaluation_texts={a: /nowhere.txt}",),
            "convert.evaluation_texts.a=/nowhere.txt: expected",
        ),
        (("convert.evaluation_texts={held-out text: a.txt}",), "choose another name"),
        (
            ("convert.layers=[3]", "method.rest=lora"),
            "method.rest=lora trains the attention blocks above block 3",
        ),
        (("model.d_model=64",), "model.d_model: the model that is converted"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    execute: Execute, overrides: tuple[str, ...], changes: tuple[str, ...], message: str
) -> None:
    result = execute(*overrides, *changes, "dry_run=true")
    assert result.summary["status"] == "failed"
    assert message in " ".join(result.summary["error"].split())
