"""Tokenizing a file of conversations gives what rendering each of them alone gives, whoever does it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refragkit.data import tokenization
from refragkit.data.conversation import render
from refragkit.data.conversation_file import load_conversations
from refragkit.data.token_file import Format, new_token_file, open_token_file
from refragkit.data.tokenization import Rendering, n_parts, tokenize_conversations, useful_workers
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import DataError

TEXT = "Who wrote Hamlet, and when? She did, my friend; what is it? I don't know. Ünïcode 雪 is fine."
WORDS = TEXT.split()


def conversation(n: int, words: int = 6) -> dict[str, Any]:
    said = [" ".join(WORDS[(n * 7 + m + k) % len(WORDS)] for k in range(words)) for m in range(4)]
    return {
        "id": f"c{n}",
        "messages": [
            {"role": "user", "content": said[0]},
            {"role": "assistant", "content": said[1]},
            {"role": "user", "content": said[2]},
            {"role": "assistant", "content": said[3]},
        ],
    }


def with_documents(n: int, documents: int) -> dict[str, Any]:
    found = [
        {"doc_id": f"d{i}", "title": f"T{i}", "text": " ".join(WORDS), "score": -i} for i in range(documents)
    ]
    asked = conversation(n)
    asked["messages"].insert(
        1, {"role": "retrieval", "hop": 1, "query": WORDS[n % len(WORDS)], "documents": found}
    )
    return asked


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of our own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train([" ".join(WORDS)] * 3, 300).save(folder)
    return folder


def run(
    file: Path, target: Path, tokenizer: Path, layout: Format = "v2", workers: int = 1, **options: Any
) -> dict[str, int]:
    loaded = Tokenizer.load(tokenizer)
    rendering = Rendering(str(tokenizer), **{"max_seq_len": 128, **options})
    with new_token_file(target, layout, loaded.fingerprint, loaded.vocab_size) as writer:
        counts = tokenize_conversations(file, rendering, loaded, writer, workers)
        writer.commit()
    return counts


ROWS = [
    conversation(0),
    conversation(1, words=60),  # too long
    {"id": "no answer", "messages": [{"role": "user", "content": "Anyone?"}]},
    with_documents(3, 4),
    conversation(0),  # the same id again is no matter here
]


@pytest.mark.parametrize("template", [False, True])
def test_each_conversation_is_rendered_as_in_training(
    template: bool,
    folder: Path,
    pretrained_folder: Callable[..., Path],
    chatml: str,
    tmp_path: Path,
) -> None:
    folder = pretrained_folder(chatml) if template else folder
    tokenizer = Tokenizer.load(folder)
    rows = [*ROWS[:-1], conversation(4)]
    file = write(tmp_path / "chat.jsonl", rows)
    counts = run(file, tmp_path / "a.bin", folder, max_seq_len=200)
    rendered = [render(c, tokenizer, 200) for c in load_conversations(file)]
    kept = [r for r in rendered if not r.dropped]
    assert 0 < len(kept) < len(rows)
    tokens = open_token_file(tmp_path / "a.bin")
    assert tokens.tokenizer_hash == tokenizer.fingerprint and tokens.vocab_size == tokenizer.vocab_size
    for i, example in enumerate(kept):
        ids, learnt = tokens.example(i)
        assert ids.tolist() == example.input_ids and learnt.tolist() == example.loss_mask
    assert counts == {
        "conversations": 5,
        "examples": len(kept),
        "dropped_too_long": sum(r.dropped == "too_long" for r in rendered),
        "dropped_no_supervised_token": 1,
        "cut_conversations": 0,
        "truncated_documents": sum(r.truncated_documents for r in rendered),
        "left_out_documents": sum(r.left_out_documents for r in rendered),
    }
    assert counts["truncated_documents"] + counts["left_out_documents"] > 0


def test_groups_are_openings(folder: Path, tmp_path: Path) -> None:
    rows = [conversation(n) for n in range(3)]
    rows[2]["messages"][0]["content"] = " " + rows[0]["messages"][0]["content"]
    run(write(tmp_path / "chat.jsonl", rows), tmp_path / "a.bin", folder)
    groups = open_token_file(tmp_path / "a.bin").groups.tolist()
    assert groups[0] == groups[2] != groups[1]


def test_a_conversation_that_is_cut_is_the_beginning_of_the_whole(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    late = conversation(5, words=60)
    del late["messages"][1]  # nothing learnt within the limit
    rows = [conversation(1, words=20), conversation(2, words=3), late, with_documents(3, 2)]
    file = write(tmp_path / "chat.jsonl", rows)
    counts = run(file, tmp_path / "a.bin", folder, max_seq_len=70, too_long="cut")
    assert counts["cut_conversations"] == 2 and counts["dropped_too_long"] == 1 and counts["examples"] == 3
    assert counts["left_out_documents"] == 2
    whole = render(load_conversations(file)[0], tokenizer, 10_000)
    ids, learnt = open_token_file(tmp_path / "a.bin").example(0)
    assert len(whole) > 70
    assert ids.tolist() == whole.input_ids[:70] and learnt.tolist() == whole.loss_mask[:70]


@pytest.mark.parametrize("layout", ["seed", "v2"])
def test_processes_give_the_same_bytes(
    layout: Format, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "PART_BYTES", 2000)
    file = write(tmp_path / "chat.jsonl", [*ROWS, *(conversation(n, 2 + n % 9) for n in range(200))])
    assert n_parts(file) > 10
    one = run(file, tmp_path / "one.bin", folder, layout)
    two = run(file, tmp_path / "two.bin", folder, layout, workers=2)
    assert one == two
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()
    monkeypatch.setattr(tokenization, "PART_BYTES", 1 << 19)
    run(file, tmp_path / "whole.bin", folder, layout)
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    calls: list[int] = []
    loaded = Tokenizer.load(folder)
    monkeypatch.setattr(tokenization, "PART_BYTES", 2000)
    with new_token_file(tmp_path / "x.bin", layout, loaded.fingerprint, loaded.vocab_size) as writer:
        rendering = Rendering(str(folder), 128)
        tokenize_conversations(file, rendering, loaded, writer, on_part=lambda: calls.append(1))
    assert 10 < len(calls) <= n_parts(file)


def test_blank_lines_and_a_byte_order_mark(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps(conversation(n)) for n in range(6)]
    file = tmp_path / "chat.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n\n  \n\n")
    for part_bytes in (1, 700, 1 << 19):
        monkeypatch.setattr(tokenization, "PART_BYTES", part_bytes)
        assert run(file, tmp_path / "a.bin", folder)["examples"] == 6
    lines[3] = ""
    file.write_text("\n".join(lines))
    for part_bytes in (1, 700, 1 << 19):
        monkeypatch.setattr(tokenization, "PART_BYTES", part_bytes)
        with pytest.raises(DataError, match=rf"{file}:4: expected a JSON object, got an empty line"):
            run(file, tmp_path / "b.bin", folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_reported_together(
    workers: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "PART_BYTES", 400)
    lines = [json.dumps(conversation(n)) for n in range(20)]
    lines[2] = "{"
    lines[7] = json.dumps({"id": "x", "messages": [{"role": "boss", "content": "?"}]})
    for n in range(10, 20):
        lines[n] = json.dumps({"id": "x", "messages": []})
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        run(file, tmp_path / "a.bin", folder, workers=workers)
    message = str(error.value).splitlines()
    assert message[0] == f"12 bad lines in {file}:" and message[-1].strip() == "... and 7 more"
    assert f"{file}:3: expected one JSON object" in message[1]
    assert f"{file}:8: key 'messages[0].role': expected one of system" in message[2]
    assert f"{file}:11: key 'messages': expected at least one message" in message[3]
    assert not list(tmp_path.glob("*a.bin*"))


def test_a_template_that_refuses_names_the_line(
    pretrained_folder: Callable[..., Path], tmp_path: Path
) -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + (
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    rows = [conversation(0), conversation(1)]
    rows[1]["messages"].insert(0, {"role": "system", "content": "Be kind."})
    file = write(tmp_path / "chat.jsonl", rows)
    with pytest.raises(DataError, match=rf"{file}:2: the tokenizer's chat template refuses .*no system turn"):
        run(file, tmp_path / "a.bin", pretrained_folder(strict))


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "_tokenize_in_worker", _killed)
    file = write(tmp_path / "chat.jsonl", [conversation(n) for n in range(3)])
    with pytest.raises(DataError, match="one of the 2 processes that tokenize ended unexpectedly"):
        run(file, tmp_path / "a.bin", folder, workers=2)
    assert not list(tmp_path.glob("*a.bin*"))


def test_a_small_file_is_not_worth_processes(tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", [conversation(0)])
    assert useful_workers(file) == 1
    with file.open("ab") as f:
        f.truncate(1 << 23)
    assert useful_workers(file) == len(os.sched_getaffinity(0))


def test_every_example_fits(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", [conversation(n, 1 + n % 30) for n in range(60)])
    run(file, tmp_path / "a.bin", folder, max_seq_len=50, too_long="cut")
    tokens = open_token_file(tmp_path / "a.bin")
    assert tokens.lengths.max() == 50 and all(tokens.example(i)[1].any() for i in range(len(tokens)))
