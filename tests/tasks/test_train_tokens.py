"""Training from token files: the same as from the conversations that they were made of."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refragkit.data.tokenizer import Tokenizer
from tests.tasks.conftest import TEXTS, Result

Execute = Callable[..., Result]
SHORT = [
    "model=hybrid",
    "retriever=none",
    "method.epochs=2",
    "method.global_batch_size=4",
    "method.max_seq_len=64",
    "method.eval_every=3",
    "hardware.precision=32-true",
]


def _conversations(path: Path, first: int, n: int) -> Path:
    rows: list[dict[str, Any]] = []
    for i in range(first, first + n):
        turns = [("user", f"{i}? {TEXTS[0][i : i + 20]}"), ("assistant", f"She, {i}."), ("user", "And?")]
        messages = [
            {"role": role, "content": text} for role, text in [*turns, ("assistant", TEXTS[0][: 9 + i])]
        ]
        rows.append({"id": str(i), "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _metrics(result: Result) -> list[dict[str, str]]:
    with (result.folder / "metrics.csv").open() as f:
        rows = list(csv.DictReader(f))
    keys = [key for key in rows[0] if not key.startswith("time/") and not key.endswith("per_second")]
    return [{key: row[key] for key in keys} for row in rows]


@pytest.mark.parametrize("method", ["sft", pytest.param("lora", marks=pytest.mark.slow)])
def test_our_files_train_as_their_conversations_do(
    method: str, execute: Execute, run_folder: Path, tmp_path: Path
) -> None:
    files = {
        "data.path": _conversations(tmp_path / "train.jsonl", 0, 10),
        "data.validation_path": _conversations(tmp_path / "held.jsonl", 10, 3),
    }
    shared = [*SHORT, f"method={method}", f"model.path={run_folder}"]
    from_text = execute(*shared, "data=chat", *(f"{key}={path}" for key, path in files.items()))
    assert from_text.summary["status"] == "finished", from_text.err
    for path in files.values():
        made = execute(
            "task=tokenize",
            f"data.path={path}",
            f"tokenizer={run_folder}",
            "max_seq_len=64",
            "format=v2",
            f"output={path.with_suffix('.bin')}",
        )
        assert made.summary["status"] == "finished", made.err
        assert made.summary["metrics"]["tokenize/dropped_too_long"] == 0
    tokens = [f"{key}={path.with_suffix('.bin')}" for key, path in files.items()]
    from_ids = execute(*shared, "data=tokens", *tokens)
    assert from_ids.summary["status"] == "finished", from_ids.err
    assert _metrics(from_ids) == _metrics(from_text)
    assert len(_metrics(from_ids)) >= 5 and float(_metrics(from_ids)[-1]["train/loss"] or 0) > 0
    name = "model/model.safetensors" if method == "sft" else "adapter/adapter_model.safetensors"
    one, other = (load_file(result.folder / name) for result in (from_text, from_ids))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_seeds_files_train(execute: Execute, run_folder: Path, tmp_path: Path) -> None:
    chat = _conversations(tmp_path / "train.jsonl", 0, 12)
    made = execute("task=tokenize", f"data.path={chat}", f"tokenizer={run_folder}", "split=2")
    assert made.summary["status"] == "finished", made.err
    shared = [*SHORT, "method=lora", f"model.path={run_folder}", "data=tokens", f"data.path={made.folder}"]
    result = execute(*shared)
    assert result.summary["status"] == "finished", result.err
    assert (result.folder / "adapter" / "adapter_config.json").is_file()
    assert result.summary["metrics"]["val/loss"] > 0


def test_what_is_refused(execute: Execute, run_folder: Path, mamba_folder: Path, tmp_path: Path) -> None:
    chat = _conversations(tmp_path / "train.jsonl", 0, 12)
    Tokenizer.train([*TEXTS, "another"], 300).save(tmp_path / "other")
    made = execute("task=tokenize", f"data.path={chat}", f"tokenizer={tmp_path / 'other'}", "format=v2")
    file = made.folder / "tokens.bin"
    shared = [*SHORT, "method=sft", f"model.path={run_folder}", "data=tokens"]
    result = execute(*shared, f"data.path={file}")
    assert f"{file}: was written with another tokenizer" in result.summary["error"]
    file.write_bytes(file.read_bytes()[:-7])
    result = execute(*shared, f"data.path={file}")
    assert f"data.path: {file}: byte {file.stat().st_size}: the file ends here" in result.summary["error"]
    result = execute(*shared, f"data.path={file}", "method=refrag", "retriever=bm25")
    assert "method=refrag works on text, and data=tokens holds ids only" in result.summary["error"]
