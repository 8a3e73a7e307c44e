"""Whole runs in this process: what they write, and what they refuse."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit import build_model, compose, load_model
from refragkit.config import instantiate
from refragkit.experiment import run_experiment
from tests.integration.small import small

METRICS = {
    "train/loss",
    "val/loss",
    "val/f1",
    "val/em",
    "val/support_recall",
    "reward/total",
    "reward/answer",
    "reward/relevance",
    "reward/efficiency",
}
TIMES = ("time/", "train/tokens_per_second")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


def run(outputs: Path, name: str, *overrides: str) -> tuple[dict[str, Any], Path]:
    folder = outputs / name
    run_experiment(compose(small(outputs, *overrides)), folder, "python run.py ...")
    return json.loads((folder / "summary.json").read_text()), folder


@pytest.fixture(scope="module")
def refrag(outputs: Path) -> tuple[dict[str, Any], Path]:
    return run(outputs, "refrag", "method=refrag", "model=hybrid")


def test_a_run_writes_what_the_design_says(refrag: tuple[dict[str, Any], Path]) -> None:
    summary, folder = refrag
    assert summary["status"] == "finished"
    assert summary["error"] is None
    assert {summary[k] for k in ("task", "model", "method", "retriever")} == {
        "train",
        "hybrid",
        "refrag",
        "bm25",
    }
    assert set(summary["metrics"]) >= METRICS
    assert all(math.isfinite(summary["metrics"][m]) for m in METRICS)
    assert summary["train_tokens_per_second"] > 0
    assert summary["peak_rss_bytes"] > 10**8
    assert summary["trainable_parameters"] == summary["total_parameters"] > 10**5
    assert summary["mlflow_run_id"]
    for path in summary["artifacts"].values():
        assert (folder / path).exists()
    assert (folder / "train.log").stat().st_size > 0
    assert (folder / "plots" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.rglob("*.tmp"))


def test_metrics_csv_has_a_row_for_each_step(refrag: tuple[dict[str, Any], Path]) -> None:
    with (refrag[1] / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    first, last = (float(row["train/tokens"]) for row in rows[1:])
    assert (
        0
        < first
        < last
        == pytest.approx(
            first + float(rows[2]["train/tokens_per_second"]) * float(rows[2]["time/step_seconds"])
        )
    )
    assert all(float(row["train/loss"]) > 0 for row in rows[1:])
    assert rows[1]["val/loss"] == "" and all(float(rows[step]["val/loss"]) > 0 for step in (0, 2))


def test_the_end_is_compared_with_the_start(outputs: Path, refrag: tuple[dict[str, Any], Path]) -> None:
    from mlflow import MlflowClient

    summary, folder = refrag
    with (folder / "metrics.csv").open() as file:
        start, _, end = csv.DictReader(file)
    for name in ("f1", "em", "support_recall", "loss"):
        before, after = float(start[f"val/{name}"]), float(end[f"val/{name}"])
        assert summary["metrics"][f"before/{name}"] == pytest.approx(before)
        assert summary["metrics"][f"val/{name}"] == pytest.approx(after)
        assert summary["metrics"][f"change/{name}"] == pytest.approx(after - before)
    assert summary["metrics"]["change/loss"] < 0
    page = (folder / summary["artifacts"]["before_after"]).read_text()
    assert "4 validation questions, before and after 2 steps" in page
    assert (
        f"| loss (nats per token) | {float(start['val/loss']):.3f} | {float(end['val/loss']):.3f} |" in page
    )
    client = MlflowClient(tracking_uri=f"sqlite:///{outputs / 'mlflow.db'}")
    assert "before_after.md" in {a.path for a in client.list_artifacts(summary["mlflow_run_id"])}
    history = client.get_metric_history(summary["mlflow_run_id"], "val/f1")
    assert [m.step for m in history] == [0, 2]


def test_the_first_evaluation_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("tracking=none", "model.block_pattern=M", "method.max_steps=1")
    summary, folder = run(tmp_path, "without", "method.eval_at_start=false", *overrides)
    assert summary["status"] == "finished", summary["error"]
    assert not [name for name in summary["metrics"] if name.startswith("before/")]
    assert "before and after" not in capsys.readouterr().out
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {1}


def test_a_rate_of_zero_freezes_what_it_is_for(tmp_path: Path) -> None:
    overrides = ("tracking=none", "model.block_pattern=TM", "method.max_steps=2")
    summary, folder = run(tmp_path, "frozen", "method.embedding_lr=0", *overrides)
    assert summary["status"] == "finished", summary["error"]
    trained = load_model(folder / "model")
    embedding = trained.embed_tokens.weight
    assert summary["trainable_parameters"] == summary["total_parameters"] - embedding.numel()
    start = build_model(compose(small(tmp_path, *overrides)).model, vocab_size=trained.vocab_size, seed=0)
    changed = {
        name
        for (name, new), (_, old) in zip(trained.named_parameters(), start.named_parameters(), strict=True)
        if not torch.equal(new, old)
    }
    assert "embed_tokens.weight" not in changed
    assert len(changed) > 5


def test_frozen_blocks_stay_as_they_are(tmp_path: Path) -> None:
    overrides = ("tracking=none", "model.block_pattern=MTM", "method.max_steps=2")
    summary, folder = run(tmp_path, "blocks", "method.frozen_blocks=2", *overrides)
    assert summary["status"] == "finished", summary["error"]
    trained = load_model(folder / "model")
    start = build_model(compose(small(tmp_path, *overrides)).model, vocab_size=trained.vocab_size, seed=0)
    changed = {
        name
        for (name, new), (_, old) in zip(trained.named_parameters(), start.named_parameters(), strict=True)
        if not torch.equal(new, old)
    }
    assert any(name.startswith("blocks.2.") for name in changed) and "embed_tokens.weight" in changed
    assert not any(name.startswith(("blocks.0.", "blocks.1.")) for name in changed)
    summary, _ = run(tmp_path, "many", "method.frozen_blocks=4", *overrides)
    assert "method.frozen_blocks=4: this model has 3 blocks" in summary["error"]


def test_the_best_checkpoint_survives_a_later_and_worse_one(tmp_path: Path) -> None:
    # Rates so large that the second step destroys what the first one learnt
    overrides = ("tracking=none", "model.block_pattern=M", "method.eval_every=1", "method.max_steps=3")
    _, folder = run(tmp_path, "worse", "method.lr=0.3", "method.schedule=constant", *overrides)
    with (folder / "metrics.csv").open() as file:
        losses = {int(row["step"]): float(row["val/loss"]) for row in csv.DictReader(file)}
    best_step = min((1, 2, 3), key=lambda step: losses[step])
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert (best["global_step"], last["global_step"]) == (best_step, 3)
    assert best_step < 3


def test_samples_hold_the_hops_and_the_answer_of_each_question(refrag: tuple[dict[str, Any], Path]) -> None:
    samples = [json.loads(line) for line in (refrag[1] / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [0] * 4 + [2] * 4
    assert [s["id"] for s in samples[:4]] == [s["id"] for s in samples[4:]]
    for sample in samples:
        assert sample["hops"][0]["query"] == sample["question"]
        assert all(hop["documents"] for hop in sample["hops"])
        assert set(sample["rewards"]) == {"answer", "relevance", "efficiency", "total"}
    follow_ups = [hop["query"] for s in samples for hop in s["hops"][1:]]
    assert follow_ups
    assert all(query not in {s["question"] for s in samples} for query in follow_ups)


def test_mlflow_shows_the_run(outputs: Path, refrag: tuple[dict[str, Any], Path]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{outputs / 'mlflow.db'}")
    recorded = client.get_run(refrag[0]["mlflow_run_id"])
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params["method.max_hops"] == "3"
    assert recorded.data.params["choices.model"] == "hybrid"
    assert recorded.data.tags["mlflow.source.name"] == "python run.py ..."
    assert set(recorded.data.metrics) >= METRICS
    assert len(client.get_metric_history(recorded.info.run_id, "train/loss")) == 2
    uploaded = {a.path for a in client.list_artifacts(recorded.info.run_id)}
    assert uploaded >= {
        "config.yaml",
        "metrics.csv",
        "samples.jsonl",
        "plots",
        "model",
        "summary.json",
        "train.log",
    }
    contexts = {i.tags[0].value for i in recorded.inputs.dataset_inputs}
    assert contexts == {"training", "validation", "knowledge base"}
    traces = client.search_traces(locations=[recorded.info.experiment_id])
    assert {t.info.trace_metadata["mlflow.sourceRun"] for t in traces} == {recorded.info.run_id}


def test_the_exported_model_is_the_trained_one(refrag: tuple[dict[str, Any], Path]) -> None:
    model = load_model(refrag[1] / "model")
    checkpoint = torch.load(refrag[1] / "checkpoints" / "last.ckpt", weights_only=True)
    weights = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert checkpoint["global_step"] == 2


def test_the_same_seed_gives_the_same_metrics(outputs: Path, refrag: tuple[dict[str, Any], Path]) -> None:
    again, _ = run(outputs, "again", "method=refrag", "model=hybrid", "tracking=none")
    other, _ = run(outputs, "other", "method=refrag", "model=hybrid", "tracking=none", "seed=1")
    kept = {k: v for k, v in refrag[0]["metrics"].items() if not k.startswith(TIMES)}
    assert kept == {k: v for k, v in again["metrics"].items() if not k.startswith(TIMES)}
    assert other["metrics"]["train/loss"] != kept["train/loss"]


def test_the_micro_batch_size_changes_no_gradient(outputs: Path) -> None:
    # float32: rounding to bfloat16, where the hardware has it, depends on what is in a micro batch
    metrics = []
    for size in (1, 2, 4):
        overrides = (f"hardware.micro_batch_size={size}", "hardware.precision=32-true", "tracking=none")
        summary, _ = run(outputs, f"micro{size}", "method=refrag", "model=hybrid", *overrides)
        metrics.append(summary["metrics"])
    for name in ("train/loss", "train/objective", "train/grad_norm", "val/loss"):
        for other in metrics[1:]:
            assert other[name] == pytest.approx(metrics[0][name], rel=2e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        ("method=sft", "model=mamba"),
        ("method=sft", "model=transformer", "retriever=none"),
        ("method=refrag", "model=rwkv-qwen"),
        ("method=refrag", "model=hybrid", "hardware.precision=bf16-true"),
        ("method=refrag", "model=hybrid", "method.target=sampled", "method.temperature=1.0"),
        ("method=refrag", "model=mamba", "retriever=gold"),
        ("method=lora", "model=rwkv-qwen"),
        ("method=lora", "model=rwkv-qwen", "adapter.quantize=int8"),
        ("method=lora", "model=hybrid", "adapter.quantize=bf16", "hardware.precision=32-true"),
        ("method=refrag", "adapter=lora", "adapter.blocks=all", "model=hybrid"),
    ],
    ids=" ".join,
)
def test_methods_models_and_retrievers_combine(outputs: Path, overrides: tuple[str, ...]) -> None:
    # The shortest model of each family that has every kind of its blocks.
    summary, folder = run(outputs, "-".join(overrides).replace("=", "_"), *overrides, "tracking=none")
    assert summary["status"] == "finished", summary["error"]
    assert summary["metrics"]["train/loss"] > 0
    if "lora" in "".join(overrides):
        assert summary["trainable_parameters"] < summary["total_parameters"] / 2
        assert (folder / "adapter" / "adapter_model.safetensors").exists()
        # The base had random weights, so the merged model is kept beside the adapter.
        assert load_model(folder / "model").block_pattern
        saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        assert saved and all("lora_" in name for name in saved)


def test_training_lowers_the_loss(outputs: Path) -> None:
    _, folder = run(
        outputs,
        "learns",
        "method=sft",
        "model=hybrid",
        "tracking=none",
        "data.max_train_questions=4",
        "method.max_steps=12",
        "method.epochs=20",
        "method.max_seq_len=128",
        "method.eval_every=6",
    )
    with (folder / "metrics.csv").open() as file:
        losses = [
            float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]
        ]  # not before step 1
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("method=refrag", "model=transformer"), "needs a recurrent block"),
        (("method=refrag", "retriever=none"), "needs a knowledge base"),
        (("data.path=/nowhere",), "/nowhere"),
        (("method.global_batch_size=6", "hardware.micro_batch_size=4"), "not divisible"),
        (("method.max_seq_len=4", "method.max_new_tokens=4"), "leaves no room"),
        (("method.epochs=0",), "method.epochs: expected at least 1"),
        (("method.max_seq_len=12",), "held no supervised token"),
        (("method=lora", "adapter=none"), "has none"),
        (("reward.weights.answer=-1", "dry_run=true"), "reward.weights.answer"),
        (("model.block_pattern=TXQ", "dry_run=true"), "block_pattern"),
        (("method=refrag", "method.weight_floor=1.5"), "method.weight_floor"),
        (("hardware=gpu",), "no CUDA device"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_can_not_work_is_refused_with_the_reason(
    tmp_path: Path, overrides: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "hardware=gpu" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    summary, folder = run(tmp_path, "refused", *overrides, "tracking=none")
    assert summary["status"] == "failed"
    assert message in summary["error"]
    screen = capsys.readouterr()
    assert "Traceback" not in screen.out + screen.err
    assert "Traceback" in (folder / "train.log").read_text()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", "", "corpus.jsonl"),
        ("questions.jsonl", '{"id": "a", "question"\n', "questions.jsonl:1"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "corpus.jsonl").write_text('{"id": "p1", "title": "A", "text": "b"}\n')
    question = {"id": "q1", "question": "a?", "answers": ["b"], "supporting_ids": ["p1"], "hops": 1}
    (data / "questions.jsonl").write_text(json.dumps({**question, "candidate_ids": ["p1"]}) + "\n")
    (data / file).write_text(content)
    summary, _ = run(tmp_path, "broken", f"data.path={data}", "tracking=none")
    assert summary["status"] == "failed"
    assert message in summary["error"]


def test_a_failed_run_is_failed_in_mlflow(outputs: Path) -> None:
    from mlflow import MlflowClient

    summary, _ = run(outputs, "failed", "data.path=/nowhere")
    client = MlflowClient(tracking_uri=f"sqlite:///{outputs / 'mlflow.db'}")
    assert client.get_run(summary["mlflow_run_id"]).info.status == "FAILED"


def test_an_unexpected_error_is_one_line_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from refragkit.methods.sft import SFTModule

    def broken(self: object, batch: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SFTModule, "prepare", broken)
    summary, folder = run(tmp_path, "bug", "tracking=none")
    assert summary["error"] == "ZeroDivisionError: a bug"
    assert "Traceback" not in capsys.readouterr().err
    assert "ZeroDivisionError" in (folder / "train.log").read_text()


def test_a_used_folder_is_not_written_over(outputs: Path, refrag: tuple[dict[str, Any], Path]) -> None:
    before = {p: p.stat().st_mtime_ns for p in refrag[1].rglob("*")}
    summary = run_experiment(compose(small(outputs)), refrag[1])
    assert summary.status == "failed"
    assert "holds an earlier run" in str(summary.error)
    assert before == {p: p.stat().st_mtime_ns for p in refrag[1].rglob("*")}


def test_a_killed_run_leaves_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refragkit.methods.sft import SFTModule

    prepare, seen = SFTModule.prepare, []

    def killed_in_step_3(self: SFTModule, batch: Any) -> Any:
        if batch.index == 2:
            seen.append(json.loads((tmp_path / "runs" / "killed" / "summary.json").read_text()))
        return prepare(self, batch)

    monkeypatch.setattr(SFTModule, "prepare", killed_in_step_3)
    overrides = ("tracking=none", "method.max_steps=3", "method.eval_every=2", "model.block_pattern=M")
    run(tmp_path / "runs", "killed", *overrides)
    assert seen[0]["status"] == "running"
    assert {"metrics", "training_plot", "samples", "best_checkpoint", "last_checkpoint"} <= set(
        seen[0]["artifacts"]
    )


def test_validation_examples_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "corpus.jsonl").write_text('{"id": "p1", "title": "A", "text": "b"}\n')

    def write(file: str, *questions: str) -> None:
        rows = [
            {"id": q[:9] + file, "question": q, "answers": ["b"], "supporting_ids": ["p1"]} for q in questions
        ]
        (data / file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", "a?", "b?", "c?", "d?")
    write("validation.jsonl", "why?", "how? " * 900)
    summary, _ = run(tmp_path, "long", f"data.path={data}", "tracking=none", "model.block_pattern=M")
    assert summary["status"] == "finished", summary["error"]
    assert summary["metrics"]["val/dropped_examples"] == 1


def test_an_interrupted_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from refragkit.methods.sft import SFTModule

    def interrupt(self: object, batch: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SFTModule, "prepare", interrupt)
    summary, _ = run(tmp_path, "interrupted", "tracking=none")
    assert summary["status"] == "interrupted"


def test_dry_run_reports_the_lora_target_of_the_design(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, folder = run(
        outputs, "dry", "method=lora", "model=rwkv-qwen", "model.size=1.5b", "dry_run=true", "tracking=none"
    )
    assert summary["status"] == "finished", summary["error"]
    assert summary["trainable_parameters"] == 9_232_384
    assert summary["metrics"]["dry_run/lora_layers"] == 49
    assert summary["metrics"]["dry_run/memory_bytes"] > 4 * summary["total_parameters"]
    assert "9,232,384" in capsys.readouterr().out
    assert not (folder / "checkpoints").exists()


def test_number_of_steps() -> None:
    recipe = instantiate(compose(["method=refrag"]), "method")
    assert recipe.n_steps(300) == 57  # ceil(3 * 300 / 16)
    assert recipe.n_steps(1_000_000) == 500
    assert recipe.n_steps(1) == 1
