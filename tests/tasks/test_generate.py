"""``task=generate`` as a run: text, samples, metrics, errors."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import refragkit.console
from refragkit.adapters.lora import LoRA, lora_layers
from refragkit.adapters.peft_format import save_adapter
from refragkit.data.conversation import conversation_from_hops, render_prompt
from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.checkpoint import load_model
from tests.tasks.conftest import Result

PROMPT = "Who wrote it, and don't you know when (roughly)?"
Execute = Callable[..., Result]


def _expected(folder: Path, tokenizer: Tokenizer, ids: list[int], n: int, **options: float) -> str:
    config = GenerationConfig(n, stop_ids=(tokenizer.end_id,), **options)  # type: ignore[arg-type]
    ((completion,),) = generate(load_model(folder), [ids], config, pad_id=tokenizer.pad_id)
    return tokenizer.decode(completion.content_ids)


def test_it_answers_a_user_turn(execute: Execute, run_folder: Path, tokenizer: Tokenizer) -> None:
    result = execute(
        "task=generate",
        f"model.path={run_folder}",
        f"prompt={PROMPT}",
        "max_new_tokens=12",
        "system=Be kind.",
    )
    assert result.summary["status"] == "finished", result.err
    ids = render_prompt(conversation_from_hops(PROMPT, system="Be kind."), tokenizer, 1000, 12)
    want = _expected(run_folder / "model", tokenizer, ids, 12)
    (sample,) = result.samples
    assert sample["completion"] == want
    assert want + "\n" in result.out
    assert sample["prompt"] == PROMPT
    assert [message["role"] for message in sample["messages"]] == ["system", "user"]
    assert (sample["ended_by"], sample["new_tokens"]) == ("max_new_tokens", 12)
    metrics = result.summary["metrics"]
    assert metrics["generate/prompt_tokens"] == len(ids)
    assert metrics["generate/new_tokens"] == 12
    assert metrics["generate/tokens_per_second"] > 0
    assert metrics["generate/prefill_seconds"] > 0
    assert result.summary["artifacts"] == {"samples": "samples.jsonl"}
    assert result.summary["total_parameters"] > 0


def test_raw_continues_the_text(execute: Execute, mamba_folder: Path, tokenizer: Tokenizer) -> None:
    result = execute(
        "task=generate", f"model.path={mamba_folder}", f"prompt={PROMPT}", "raw=true", "max_new_tokens=9"
    )
    assert result.samples[0]["completion"] == _expected(mamba_folder, tokenizer, tokenizer.encode(PROMPT), 9)
    assert "messages" not in result.samples[0]


def test_samples_follow_the_seed(execute: Execute, run_folder: Path) -> None:
    common = ["task=generate", f"model.path={run_folder}", "prompt=Who?", "max_new_tokens=10"]
    sampled = [*common, "num_samples=3", "temperature=1.3", "top_p=0.95", "top_k=50"]
    first, again, other = execute(*sampled), execute(*sampled), execute(*sampled, "seed=1")
    texts = [[sample["completion"] for sample in result.samples] for result in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3
    assert "--- sample 2" in first.out
    assert first.summary["metrics"]["generate/new_tokens"] == sum(s["new_tokens"] for s in first.samples)
    greedy = execute(*common, "num_samples=2")
    assert greedy.samples[0]["completion"] == greedy.samples[1]["completion"]
    assert "all 2 samples are the same" in greedy.out


def test_a_stop_string_ends_the_text(execute: Execute, run_folder: Path) -> None:
    common = ["task=generate", f"model.path={run_folder}", "prompt=Who?", "max_new_tokens=16"]
    whole = execute(*common).samples[0]
    stop = whole["completion"][4:7]
    # An apostrophe and a bracket would each break Hydra's grammar.
    result = execute(*common, f"stop={stop}") if "[" not in stop[:1] else execute(*common, f"stop=['{stop}']")
    (sample,) = result.samples
    assert sample["completion"] == whole["completion"][: whole["completion"].index(stop)]
    assert sample["ended_by"] == "stop_string"
    assert 0 < sample["new_tokens"] < whole["new_tokens"]


def test_a_terminal_sees_it_grow(execute: Execute, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["task=generate", f"model.path={run_folder}", "prompt=Who?", "max_new_tokens=16"]
    whole = execute(*common).samples[0]["completion"]
    pieces: list[str] = []
    write = refragkit.console.write_text
    monkeypatch.setattr(refragkit.console, "write_text", lambda text: (pieces.append(text), write(text)))
    monkeypatch.setattr(refragkit.console, "is_terminal", lambda: True)
    result = execute(*common)
    assert "".join(pieces) == whole + "\n"
    assert len(pieces) > 5
    # What a model writes can't steer the terminal.
    assert not any(ord(c) < 0x20 and c not in "\n\t" for c in result.out)


def test_documents_of_the_retriever(execute: Execute, run_folder: Path) -> None:
    result = execute(
        "task=generate",
        f"model.path={run_folder}",
        "prompt=Which magazine was started first, Arthur's Magazine or First for Women?",
        "use_retrieval=true",
        "retriever=bm25",
        "retriever.top_k_per_hop=2",
        "max_new_tokens=4",
        "max_seq_len=1024",
    )
    assert result.summary["status"] == "finished", result.err
    retrievals = [m for m in result.samples[0]["messages"] if m["role"] == "retrieval"]
    assert retrievals
    assert all(m["documents"] for m in retrievals)
    assert "hop 1: " in result.out


@pytest.mark.parametrize("retriever", ["bm25", "hybrid"])
def test_documents_of_ones_own(execute: Execute, run_folder: Path, tmp_path: Path, retriever: str) -> None:
    docs = tmp_path / "my docs"
    (docs / "sub").mkdir(parents=True)
    filler = "Nothing of note happened on that day. " * 60
    (docs / "sub" / "plan.md").write_text(
        f"# Plan\n\n{filler}\n\n## Bridges\n\nThe Quillon bridge opens in May.\n"
    )
    (docs / "notes.txt").write_text(filler)
    (docs / "broken.jsonl").write_text('{"text"')
    common = ["task=generate", f"model.path={run_folder}", "prompt=When does the Quillon bridge open?"]
    common += [
        "data=chat",
        f"retriever={retriever}",
        "use_retrieval=true",
        "max_new_tokens=2",
        "max_seq_len=2000",
    ]
    result = execute(*common, f"data.corpus={docs}", "retriever.max_hops=1", "retriever.top_k_per_hop=2")
    assert result.summary["status"] == "finished", result.err
    (found,) = [m for m in result.samples[0]["messages"] if m["role"] == "retrieval"]
    best = found["documents"][0]
    assert best["doc_id"].startswith("sub/plan.md#") and best["title"] == "Plan > Bridges"
    assert best["text"] == "## Bridges\n\nThe Quillon bridge opens in May."
    assert "broken.jsonl:1: expected one JSON object" in result.out and "1 bad lines" in result.out
    failed = execute(*common)
    assert "data=chat has none; set data.corpus=FILE_OR_FOLDER" in failed.summary["error"]


def test_generate_reads_no_data_without_retrieval(
    execute: Execute, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    real = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda file, *a, **k: (opened.append(str(file)), real(file, *a, **k))[1]
    )
    result = execute(
        "task=generate", f"model.path={run_folder}", "prompt=Who?", "max_new_tokens=2", "data.path=/nowhere"
    )
    assert result.summary["status"] == "finished"
    assert not any("corpus" in file for file in opened)


def test_an_adapter_goes_on_its_base(
    execute: Execute, run_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import torch

    model = load_model(run_folder / "model")
    LoRA(rank=4, alpha=64, blocks="all").apply(model, seed=1)
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_B.normal_()
    save_adapter(model, tmp_path / "lora" / "adapter")
    common = ["task=generate", "prompt=Who?", "max_new_tokens=10"]
    plain = execute(*common, f"model.path={run_folder}").samples[0]["completion"]
    adapted = execute(*common, f"model.path={run_folder}", f"adapter_path={tmp_path / 'lora'}")
    ids = render_prompt(conversation_from_hops("Who?"), tokenizer, 1000, 10)
    ((want,),) = generate(
        model, [ids], GenerationConfig(10, stop_ids=(tokenizer.end_id,)), pad_id=tokenizer.pad_id
    )
    assert adapted.samples[0]["completion"] == tokenizer.decode(want.content_ids) != plain
    # Exported with the adapter merged, it says the same.
    exported = execute("task=export", f"model.path={run_folder}", f"adapter_path={tmp_path / 'lora'}")
    assert exported.summary["status"] == "finished", exported.err
    assert (
        execute(*common, f"model.path={exported.folder}").samples[0]["completion"]
        == adapted.samples[0]["completion"]
    )
    # The run of an adapter is no model: the message says what to give instead.
    failed = execute(*common, f"model.path={tmp_path / 'lora'}")
    assert "holds an adapter only" in failed.summary["error"]
    assert f"adapter_path={tmp_path / 'lora' / 'adapter'}" in failed.summary["error"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["prompt="], ["prompt: task=generate needs a text"]),
        (["prompt=   "], ["prompt: task=generate needs a text"]),
        ([], ["prompt: task=generate needs a text"]),
        (["prompt=x", "model.path=null"], ["task=generate needs a trained model", "model.path=DIR"]),
        (["prompt=x", "model.path=/nowhere"], ["model.path: /nowhere does not exist"]),
        (["prompt=x", "adapter_path=/nowhere"], ["adapter_path: /nowhere does not exist"]),
        (["prompt=x", "dry_run=true"], ["dry_run=true is for task=train"]),
        (["prompt=x", "adapter=lora"], ["adapter=lora", "adapter_path=DIR"]),
        (["prompt=x", "num_samples=0"], ["num_samples: expected at least 1, got 0"]),
        (["prompt=x", "max_new_tokens=0"], ["max_new_tokens: expected at least 1, got 0"]),
        (["prompt=x", "temperature=-1"], ["temperature: expected", "got -1"]),
        (["prompt=x", "top_p=2"], ["top_p: expected"]),
        (["prompt=x", "stop="], ["stop: expected strings"]),
        (["prompt=x", "raw=true", "system=y"], ["raw=true continues the prompt as it is"]),
        (["prompt=x", "raw=true", "max_seq_len=10"], ["max_seq_len=10"]),
        (["prompt=x", "max_seq_len=10"], ["don't fit into 10 tokens"]),
        (["prompt=x", "use_retrieval=true", "retriever=none"], ["retriever=none has none"]),
    ],
)
def test_errors_say_what_to_change(
    execute: Execute, run_folder: Path, overrides: list[str], parts: list[str]
) -> None:
    result = execute("task=generate", f"model.path={run_folder}", *overrides)
    assert result.summary["status"] == "failed"
    for part in parts:
        assert part in result.summary["error"]
    assert result.err.count("error:") == 1
    assert "Traceback" not in result.err


def test_a_run_without_a_model_says_so(execute: Execute, tmp_path: Path) -> None:
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "summary.json").write_text("{}")
    result = execute("task=generate", "prompt=x", f"model.path={tmp_path / 'failed'}")
    assert "saved no model" in result.summary["error"]
    (tmp_path / "empty").mkdir()
    result = execute("task=generate", "prompt=x", f"model.path={tmp_path / 'empty'}")
    assert "is not a model folder" in result.summary["error"]


def test_another_tokenizer_that_is_too_large_is_refused(
    execute: Execute, run_folder: Path, tmp_path: Path
) -> None:
    large = Tokenizer.train(
        ["a whole lot of other words, to be merged into tokens one after the other"] * 5, 320
    )
    assert large.vocab_size > 300
    large.save(tmp_path / "large")
    result = execute(
        "task=generate", "prompt=x", f"model.path={run_folder}", f"data.tokenizer={tmp_path / 'large'}"
    )
    assert "has a vocabulary of" in result.summary["error"]
    assert str(large.vocab_size) in result.summary["error"]


def test_the_command_line_takes_text_as_it_is(run_folder: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        [
            sys.executable,
            str(root / "run.py"),
            "task=generate",
            f"model.path={run_folder}",
            f"prompt={PROMPT}",
            "max_new_tokens=3",
            "tracking=none",
            f"paths.outputs={tmp_path}",
            f"hydra.run.dir={tmp_path}/run",
        ],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0, shown.stderr
    (sample,) = Result(tmp_path / "run", {}, shown.stdout, shown.stderr).samples
    assert sample["prompt"] == PROMPT
