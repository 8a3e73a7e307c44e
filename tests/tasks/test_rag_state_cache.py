"""``evaluate=rag`` with ``retriever.state_cache``: the rows it gives without, in less reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from refragkit.data.tokenizer import Tokenizer
from refragkit.models.build import hybrid
from refragkit.models.checkpoint import save_model
from tests.tasks.conftest import Result, spread

Execute = Callable[..., Result]

TEXT = "{} is a drama film directed by Marta Lindqvist, who was born in Sweden and lived near the harbour for years."
DOCUMENTS = [(f"film_{n}", f"Film {n}", TEXT.format(f"Film {n}")) for n in range(3)]
# Two about the same documents, one about others, one about the first two's in another order of words
QUESTIONS = [
    ("q1", "Who directed this film?", ["film_0", "film_1"]),
    ("q2", "In which country was the director born?", ["film_0", "film_1"]),
    ("q3", "Where did the director live?", ["film_2"]),
    ("q4", "How long?", ["film_0", "film_1"]),
]


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    _write(folder / "corpus.jsonl", [{"id": i, "title": t, "text": x} for i, t, x in DOCUMENTS])
    rows: list[dict[str, object]] = [
        {"id": i, "question": q, "answers": ["Sweden"], "supporting_ids": s, "hops": len(s)}
        for i, q, s in QUESTIONS
    ]
    _write(folder / "train.jsonl", [row | {"id": f"t{n}"} for n, row in enumerate(rows)])
    _write(folder / "validation.jsonl", rows)
    return folder


def _common(model: Path, data: Path, *more: str) -> list[str]:
    return [
        "task=evaluate",
        "evaluate=rag",
        f"model.path={model}",
        f"data.path={data}",
        "retriever=gold",
        "rag.order=documents_first",
        "rag.max_new_tokens=6",
        "rag.timed_questions=0",
        "rag.bootstrap_samples=50",
        "hardware.precision=32-true",
        *more,
    ]


def _measured(result: Result) -> dict[str, float]:
    """All metrics but times and the cache's own."""
    assert result.summary["status"] == "finished", result.err
    return {
        name: value
        for name, value in result.summary["metrics"].items()
        if not name.endswith(("seconds", "per_second")) and "state_cache" not in name
    }


def _samples(result: Result) -> list[dict[str, object]]:
    samples = result.samples
    for sample in samples:
        for hop in sample["hops"]:
            del hop["latency_seconds"]
    return samples


@pytest.mark.parametrize("batch_tokens", [1, 16384])  # one by one, and all beside each other
def test_the_same_rows_with_and_without(
    batch_tokens: int, execute: Execute, run_folder: Path, data: Path
) -> None:
    more = [f"rag.batch_tokens={batch_tokens}"]
    without = execute(*_common(run_folder, data, *more))
    assert not any("state_cache" in name for name in without.summary["metrics"])
    result = execute(*_common(run_folder, data, *more, "retriever.state_cache.max_bytes=100_000_000"))
    assert _measured(result) == _measured(without) and _samples(result) == _samples(without)
    metrics = result.summary["metrics"]
    assert (
        metrics["rag/state_cache_hit_rate"] == 0.5
    )  # the second and the third question about the same documents
    assert 0 < metrics["rag/state_cache_tokens_not_read"] < metrics["rag/prompt_tokens"]
    assert 0 < metrics["rag/state_cache_bytes"] <= 100_000_000
    log = (result.folder / "train.log").read_text(encoding="utf-8")
    assert "state cache: 2 of 4 prompts went on from kept documents (hit rate 50.0%)" in log
    header = (result.folder / "rag.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "state_cache_hit_rate" in header


def test_the_next_run_reads_no_document(
    execute: Execute, run_folder: Path, data: Path, tmp_path: Path
) -> None:
    states = tmp_path / "states"
    more = ["retriever.state_cache.max_bytes=100_000_000", f"retriever.state_cache.path={states}"]
    first = execute(*_common(run_folder, data, *more))
    second = execute(*_common(run_folder, data, *more))
    assert _measured(second) == _measured(first) and _samples(second) == _samples(first)
    assert first.summary["metrics"]["rag/state_cache_hit_rate"] == 0.5
    assert second.summary["metrics"]["rag/state_cache_hit_rate"] == 1.0
    # What is left to read: the question, and the turn's marks
    left = (
        second.summary["metrics"]["rag/prompt_tokens"]
        - second.summary["metrics"]["rag/state_cache_tokens_not_read"]
    )
    assert 0 < left < 60
    assert len(list(states.glob("*.safetensors"))) == 2


def test_another_model_reads_for_itself(
    execute: Execute, run_folder: Path, data: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(run_folder / "model")
    model = spread(hybrid, tokenizer)
    model.get_parameter("norm.weight").data[0] += 0.5
    other = save_model(model, tmp_path / "other", tokenizer)
    more = [
        "retriever.state_cache.max_bytes=100_000_000",
        f"retriever.state_cache.path={tmp_path / 'states'}",
    ]
    execute(*_common(run_folder, data, *more))
    result = execute(*_common(other, data, *more))
    assert result.summary["metrics"]["rag/state_cache_hit_rate"] == 0.5
    without = execute(*_common(other, data))
    assert _measured(result) == _measured(without) and _samples(result) == _samples(without)


@pytest.mark.parametrize("order", ["question_first", "sandwich"])
def test_a_question_in_front_serves_itself_only(
    order: str, execute: Execute, run_folder: Path, data: Path, tmp_path: Path
) -> None:
    more = [f"rag.order={order}", "retriever.state_cache.max_bytes=100_000_000"]
    more.append(f"retriever.state_cache.path={tmp_path / 'states'}")
    rates = [
        execute(*_common(run_folder, data, *more)).summary["metrics"]["rag/state_cache_hit_rate"]
        for _ in range(2)
    ]
    assert rates == [0.0, 1.0]


def test_examples_in_front_are_read_once(execute: Execute, run_folder: Path, data: Path) -> None:
    more = ["retriever=none", "rag.examples=2", "rag.system=Answer in one word, as briefly as you can."]
    without = execute(*_common(run_folder, data, *more))
    result = execute(*_common(run_folder, data, *more, "retriever.state_cache.max_bytes=100_000_000"))
    assert _measured(result) == _measured(without) and _samples(result) == _samples(without)
    assert result.summary["metrics"]["rag/state_cache_hit_rate"] == 0.75


def test_mistakes_are_told_before_anything_is_read(execute: Execute, run_folder: Path, data: Path) -> None:
    for retriever in ("gold", "none"):
        overrides = [f"retriever={retriever}", "retriever.state_cache.max_bytes=0"]
        result = execute(*_common(run_folder, data, *overrides))
        assert result.summary["status"] == "failed"
        assert "retriever.state_cache.max_bytes: expected at least 1 byte" in result.summary["error"]


def test_live_hops_keep_states_of_their_own(execute: Execute, run_folder: Path, data: Path) -> None:
    overrides = ["retriever=bm25", "retriever.planner=model", "rag.order=question_first"]
    result = execute(*_common(run_folder, data, *overrides, "retriever.state_cache.max_bytes=1000"))
    assert result.summary["status"] == "failed"
    assert "retriever.state_cache.max_bytes=null, or choose planner expand" in result.summary["error"]
