"""``task=tokenize`` as a user runs it: which files it leaves, what they hold, what it refuses."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refragkit.data.conversation import render
from refragkit.data.conversation_file import load_conversations
from refragkit.data.token_file import open_token_file
from refragkit.data.tokenizer import Tokenizer
from tests.tasks.conftest import TEXTS, Result

Execute = Callable[..., Result]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    rows: list[dict[str, Any]] = [
        {
            "id": str(n),
            "messages": [
                {"role": "user", "content": f"Who is {n}? {TEXTS[0][: 3 * n]}"},
                {"role": "assistant", "content": f"She is {n}."},
            ],
        }
        for n in range(16)
    ]
    rows.append({"id": "unanswered", "messages": [{"role": "user", "content": "Anyone?"}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def expected(chat: Path, tokenizer: Tokenizer) -> list[list[int]]:
    rendered = [render(c, tokenizer, 33) for c in load_conversations(chat)]
    kept = [r.input_ids for r in rendered if not r.dropped]
    assert 8 < len(kept) < 16
    return kept


def seed_examples(path: Path) -> list[list[int]]:
    data = path.read_bytes()
    (count,), at, examples = struct.unpack_from("<I", data), 4, []
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        examples.append(list(struct.unpack_from(f"<{length}I", data, at + 4)))
        at += 4 + 4 * length
    assert at == len(data)
    return examples


def test_the_seeds_file_and_its_manifest(
    execute: Execute, chat: Path, run_folder: Path, expected: list[list[int]], tokenizer: Tokenizer
) -> None:
    result = execute(
        "task=tokenize", f"data.path={chat}", f"tokenizer={run_folder / 'model'}", "max_seq_len=33"
    )
    assert result.summary["status"] == "finished", result.err
    assert seed_examples(result.folder / "tokens.bin") == expected
    assert result.summary["artifacts"] == {"tokens": "tokens.bin", "manifest": "tokens.json"}
    manifest = json.loads((result.folder / "tokens.json").read_text())
    assert manifest["layout"] == "seed" and manifest["tokenizer_sha256"] == tokenizer.fingerprint
    assert manifest["counts"]["conversations"] == 17
    assert manifest["counts"]["dropped_no_supervised_token"] == 1
    assert manifest["counts"]["dropped_too_long"] == 16 - len(expected)
    assert manifest["source"] == {
        "name": "chat.jsonl",
        "sha256": hashlib.sha256(chat.read_bytes()).hexdigest(),
    }
    (entry,) = manifest["files"]
    assert entry == {
        "name": "tokens.bin",
        "examples": len(expected),
        "tokens": sum(map(len, expected)),
        "sha256": hashlib.sha256((result.folder / "tokens.bin").read_bytes()).hexdigest(),
    }
    metrics = result.summary["metrics"]
    assert metrics["tokenize/examples"] == len(expected)
    assert metrics["tokenize/tokens"] == entry["tokens"]
    assert metrics["tokenize/supervised_tokens"] == entry["tokens"] - len(expected)
    assert f"{16 - len(expected)} too long for max_seq_len, dropped" in result.out
    assert "format=v2 keeps it" in result.out


@pytest.mark.parametrize(
    ("split", "weights"), [("split=3", [1, 1, 1]), ("split_weights=[6,2]", [6, 2]), ("split=1", [1])]
)
@pytest.mark.parametrize("layout", ["seed", "v2"])
def test_parts(
    split: str,
    weights: list[int],
    layout: str,
    execute: Execute,
    chat: Path,
    run_folder: Path,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    result = execute(
        "task=tokenize",
        f"data.path={chat}",
        f"tokenizer={run_folder}",  # a run's folder will do
        "max_seq_len=33",
        f"format={layout}",
        f"output={tmp_path / 'cut' / 'train.bin'}",
        split,
    )
    assert result.summary["status"] == "finished", result.err
    names = [f"train_{i}.bin" for i in range(len(weights))]
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == sorted([*names, "train.json"])
    parts = [open_token_file(tmp_path / "cut" / name) for name in names]
    assert [p.format for p in parts] == [layout] * len(parts)
    together = [part.example(i)[0].tolist() for part in parts for i in range(len(part))]
    assert together == expected
    for part, weight in zip(parts, weights, strict=True):
        assert abs(len(part) - len(expected) * weight / sum(weights)) <= 1
    for i, name in enumerate(names):
        found = result.folder / result.summary["artifacts"][f"tokens_{i}"]
        assert found.resolve() == (tmp_path / "cut" / name).resolve()


def test_the_tokenizer_of_the_model(execute: Execute, chat: Path, run_folder: Path, tmp_path: Path) -> None:
    shared = ["task=tokenize", f"data.path={chat}", "format=v2"]
    outputs = []
    for n, source in enumerate(
        (f"model.path={run_folder}", f"data.tokenizer={run_folder / 'model'}", f"tokenizer={run_folder}")
    ):
        outputs.append(tmp_path / f"{n}.bin")
        result = execute(*shared, source, f"output={tmp_path / str(n)}")  # .bin is added
        assert result.summary["status"] == "finished", result.err
    assert len({path.read_bytes() for path in outputs}) == 1


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["data.path=null"], "data.path: expected the JSONL file of conversations"),
        (
            ["data.path=/nowhere"],
            "data.path: /nowhere: expected a JSONL file of conversations, but there is no",
        ),
        (["tokenizer=null"], "give its folder or that of the model as tokenizer=DIR, or tokenizer=smollm2"),
        (["tokenizer=/nowhere"], "tokenizer: /nowhere: expected a tokenizer folder"),
        (["split=2", "split_weights=[1,2]"], "leave one null"),
        (["split=0"], "split: expected at least 1 part"),
        (["split_weights=[1,-2]"], "split_weights: expected a positive number"),
        (["split=40"], "can't be cut into parts"),
        (["max_seq_len=1"], "max_seq_len: expected at least 2"),
        (["max_seq_len=5"], "none of its 17 conversations is left: 17 don't fit into max_seq_len=5"),
        (["max_document_tokens=0"], "max_document_tokens: expected null or at least 1"),
        (["workers=0"], "workers: expected null or at least 1"),
        (["dry_run=true"], "dry_run=true is for task=train"),
        (["output=/"], "output: expected a file such as /tokens.bin, got the folder"),
    ],
)
def test_bad_input_leaves_nothing(
    overrides: list[str], part: str, execute: Execute, chat: Path, run_folder: Path
) -> None:
    given = {"data.path": str(chat), "tokenizer": str(run_folder / "model")}
    given |= dict(override.split("=", 1) for override in overrides)
    result = execute("task=tokenize", *(f"{key}={value}" for key, value in given.items()))
    assert result.summary["status"] == "failed"
    assert part in result.summary["error"]
    left = {path.name for path in result.folder.iterdir()}
    assert left <= {".lock", "config.yaml", "summary.json", "train.log"}


def test_nothing_is_overwritten(execute: Execute, chat: Path, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine_1.bin").write_text("mine")
    shared = ["task=tokenize", f"data.path={chat}", f"tokenizer={run_folder}", f"output={tmp_path / 'mine'}"]
    result = execute(*shared, "split=2")
    assert f"output: {tmp_path / 'mine_1.bin'} exists" in result.summary["error"]
    assert (tmp_path / "mine_1.bin").read_text() == "mine" and not (tmp_path / "mine_0.bin").exists()
    assert execute(*shared).summary["status"] == "finished"
    assert "mine.bin exists" in execute(*shared).summary["error"]
