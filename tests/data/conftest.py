from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from refragkit.data.datamodule import SAMPLE_DIR, MultiHopQA
from refragkit.data.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def sample() -> MultiHopQA:
    data = MultiHopQA()
    data.prepare()
    return data


@pytest.fixture(scope="session")
def tokenizer(sample: MultiHopQA) -> Tokenizer:
    return Tokenizer.train(sample.tokenizer_texts()[:400], 1000)


@pytest.fixture(scope="session")
def pretrained_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a real Hugging Face tokenizer folder, with or without a chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    return Tokenizer.load(pretrained_folder(CHATML))
