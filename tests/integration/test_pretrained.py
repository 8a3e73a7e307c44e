"""Whole runs that start from a pretrained model: ``model.init``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from refragkit import compose, load_model, save_model
from refragkit.data.datamodule import SAMPLE_DIR
from refragkit.data.tokenizer import Tokenizer
from refragkit.experiment import run_experiment
from refragkit.models.build import hybrid, transformer
from tests.integration.small import small

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(outputs: Path, name: str, *overrides: str) -> tuple[dict[str, Any], Path]:
    folder = outputs / name
    run_experiment(compose([f"paths.outputs={outputs}", "tracking=none", *overrides]), folder)
    return json.loads((folder / "summary.json").read_text()), folder


def pretrained(folder: Path, kind: Any, template: str | None, dtype: torch.dtype = torch.float32) -> Path:
    """A folder as a hub would have it, the vocabulary padded unless tokens have to be added."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        (SAMPLE_DIR / "README.md").read_text(encoding="utf-8").splitlines(),
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    padding = 0 if template is None else 16
    save_model(kind(size="tiny", vocab_size=backend.get_vocab_size() + padding).to(dtype), folder)
    return folder


@pytest.mark.parametrize(
    ("method", "option", "template", "dtype"),
    [
        ("sft", "transformer", TEMPLATE, torch.bfloat16),
        ("sft", "transformer", None, torch.float32),
        ("refrag", "hybrid", TEMPLATE, torch.float32),
    ],
    ids=["chat", "plain", "refrag"],
)
def test_training_starts_from_the_weights_and_keeps_the_tokenizer(
    tmp_path: Path, method: str, option: str, template: str | None, dtype: torch.dtype
) -> None:
    init = pretrained(
        tmp_path / "init", {"transformer": transformer, "hybrid": hybrid}[option], template, dtype
    )
    overrides = small(
        tmp_path, f"method={method}", f"model={option}", f"model.init={init}", "method.lr=0.0001"
    )
    overrides = [o for o in overrides if not o.startswith("data.vocab_size")]
    summary, folder = run(tmp_path, "run", *overrides)
    assert summary["error"] is None and summary["status"] == "finished"
    start, trained = load_model(init), load_model(folder / "model")
    tokenizer = Tokenizer.load(folder / "model")
    assert tokenizer.fingerprint == Tokenizer.load(init).fingerprint
    assert tokenizer.chat_template == template and trained.block_pattern == start.block_pattern
    added = 0 if template is not None else 8
    assert trained.vocab_size == start.vocab_size + added
    before, after = start.state_dict(), trained.state_dict()
    # Two steps of 1e-4 in float32, whatever the start was kept in
    for name, weight in after.items():
        assert weight.dtype == torch.float32
        change = (weight[: len(before[name])] - before[name].float()).abs().max()
        assert change < 3e-4, name
    moved = after["blocks.0.mixer.q_proj.weight"] != before["blocks.0.mixer.q_proj.weight"].float()
    assert moved.float().mean() > 0.9


def test_an_adapter_on_a_pretrained_model_is_used_with_it(tmp_path: Path) -> None:
    init = pretrained(tmp_path / "init", transformer, None)
    overrides = small(tmp_path, "method=lora", "model=transformer", f"model.init={init}")
    summary, folder = run(tmp_path, "run", *overrides, "method.lr=0.01")
    assert summary["error"] is None
    assert summary["trainable_parameters"] < summary["total_parameters"] / 2
    assert (folder / "adapter" / "adapter_model.safetensors").is_file() and not (folder / "model").exists()
    common = ("task=generate", f"model.init={init}", "prompt=Who?", "max_new_tokens=8")
    plain, _ = run(tmp_path, "plain", *common)
    adapted, answer = run(tmp_path, "adapted", *common, f"adapter_path={folder}")
    assert plain["error"] is None and adapted["error"] is None
    exported, merged = run(tmp_path, "merged", "task=export", f"model.init={init}", f"adapter_path={folder}")
    assert exported["error"] is None
    again, same = run(tmp_path, "again", *common[:1], f"model.path={merged}", *common[2:])
    assert again["error"] is None
    text = [json.loads((f / "samples.jsonl").read_text())["completion"] for f in (answer, same)]
    assert text[0] == text[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=mamba", "model.init=INIT"), "model=mamba does not fit model.init="),
        (("model=transformer", "model.init=INIT", "model.path=INIT"), "both name a model to start from"),
        (("model=transformer", "model.init=INIT", "model.n_layers=3"), "brings its own sizes"),
        (("model=transformer", "model.init=/nowhere"), "model.init: /nowhere does not exist"),
        (("model=transformer", "model.init=BARE"), "a model without a tokenizer; give the folder"),
        (("task=generate", "prompt=x", "model.init=some/model"), "the hub cache doesn't hold it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_is_one_message(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    places = {
        "INIT": str(pretrained(tmp_path / "init", transformer, TEMPLATE)),
        "BARE": str(save_model(transformer(size="tiny", vocab_size=400), tmp_path / "bare")),
    }
    for name, place in places.items():
        overrides = tuple(override.replace(name, place) for override in overrides)
    summary, _ = run(tmp_path, "run", *overrides)
    assert summary["status"] == "failed"
    assert message in summary["error"]


# The real one


@pytest.fixture
def outputs(tmp_path: Path, smollm2: Path) -> Path:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "pretrained").symlink_to(smollm2.parent)
    return tmp_path


def test_smollm2_answers_in_english(outputs: Path) -> None:
    overrides = ("task=generate", "model.init=smollm2", "prompt=What is the capital of France?")
    summary, folder = run(outputs, "run", *overrides, "max_new_tokens=24")
    assert summary["error"] is None
    sample = json.loads((folder / "samples.jsonl").read_text())
    assert "Paris" in sample["completion"]
    assert sample["ended_by"] == "stop_token"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "highest_loss"), [("sft", 2.0), ("lora", 3.5)])
def test_smollm2_is_trained(outputs: Path, method: str, highest_loss: float) -> None:
    overrides = small(
        outputs, f"method={method}", "model=transformer", "model.init=smollm2", "method.lr=0.0001"
    )
    summary, folder = run(outputs, "run", *overrides, "method.max_document_tokens=40")
    assert summary["error"] is None
    assert summary["total_parameters"] > 134_000_000
    # The first step's is 2.9; an adapter starts at zero and has hardly moved
    assert summary["metrics"]["train/loss"] < highest_loss
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert any(sample["completion"].strip() for sample in samples)
