"""``task=chat`` with turns piped in, as in a script, and as in a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import refragkit.console
from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.checkpoint import load_model
from tests.tasks.conftest import Result

Execute = Callable[..., Result]
QUESTIONS = ["Who wrote it?", "And when, my friend?", "/usr/bin is what?"]


def _type(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_conversation_equals_reading_it_again(
    execute: Execute, run_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _type(monkeypatch, *QUESTIONS)  # the end of the input ends the chat
    result = execute("task=chat", f"model.path={run_folder}", "max_new_tokens=8", "temperature=0")
    assert result.summary["status"] == "finished", result.err
    model, special = load_model(run_folder / "model"), tokenizer.special_ids
    config = GenerationConfig(8, stop_ids=(tokenizer.end_id,))
    text: list[int] = []
    read = 0
    for sample, question in zip(result.samples, QUESTIONS, strict=True):
        text += [special["<|user|>"], *tokenizer.encode(question), tokenizer.end_id, special["<|assistant|>"]]
        ((again,),) = generate(model, [text], config, pad_id=tokenizer.pad_id)
        assert sample["completion"] == tokenizer.decode(again.content_ids)
        assert sample["completion"] + "\n" in result.out
        assert sample["read_tokens"] == len(text) - read
        text += again.token_ids
        read = len(text)
        text += [] if again.finished else [tokenizer.end_id]
    metrics = result.summary["metrics"]
    assert metrics["chat/turns"] == 3
    assert metrics["chat/read_tokens"] == sum(sample["read_tokens"] for sample in result.samples)
    assert metrics["chat/new_tokens"] == sum(sample["new_tokens"] for sample in result.samples)
    assert metrics["chat/tokens_per_second"] > 0


def test_commands(execute: Execute, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _type(monkeypatch, QUESTIONS[0], "", "/rest", "/reset", QUESTIONS[0], "/exit", "never read")
    result = execute("task=chat", f"model.path={run_folder}", "max_new_tokens=6", "temperature=0")
    first, second = result.samples
    assert (first["conversation"], first["turn"]) == (0, 1)
    assert (second["conversation"], second["turn"]) == (1, 1)
    assert (first["completion"], first["read_tokens"]) == (second["completion"], second["read_tokens"])
    assert "/rest is not a command; there are /reset, /exit" in result.out


def test_in_a_terminal(execute: Execute, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refragkit.console, "is_terminal", lambda: True)
    _type(monkeypatch, QUESTIONS[0])
    result = execute("task=chat", f"model.path={run_folder}", "max_new_tokens=6")
    assert "/reset: forget the conversation" in result.out
    assert "you> " in result.out
    assert "model> " in result.out


def test_nothing_said(execute: Execute, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _type(monkeypatch)
    result = execute("task=chat", f"model.path={run_folder}")
    assert result.summary["status"] == "finished"
    assert result.summary["metrics"]["chat/turns"] == 0
    assert result.summary["artifacts"] == {}


def test_an_interrupted_chat_keeps_what_was_said(
    execute: Execute, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keyboard(io.StringIO):
        def readline(self, *limit: int) -> str:  # type: ignore[override]
            line = super().readline(*limit)
            if not line:
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr("sys.stdin", Keyboard(f"{QUESTIONS[0]}\n"))
    result = execute("task=chat", f"model.path={run_folder}", "max_new_tokens=4")
    assert result.summary["status"] == "interrupted"
    assert json.loads((result.folder / "samples.jsonl").read_text())["prompt"] == QUESTIONS[0]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.path=null", "task=chat needs a trained model"),
        ("dry_run=true", "dry_run=true is for task=train"),
        ("max_new_tokens=0", "max_new_tokens: expected at least 1"),
        ("top_k=-1", "top_k: expected"),
    ],
)
def test_errors_say_what_to_change(execute: Execute, run_folder: Path, override: str, part: str) -> None:
    result = execute("task=chat", f"model.path={run_folder}", override)
    assert result.summary["status"] == "failed"
    assert part in result.summary["error"]
