"""A real tokenizer with a chat template, small enough for tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from refragkit.data.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def pretrained_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Tokenizer]:
    """Loads a real Hugging Face tokenizer with a chat template of the caller's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def load(chat_template: str | None) -> Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(["the user asks and the assistant answers the user"] * 3, trainer=trainer)
        pretrained = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
        )
        pretrained.chat_template = chat_template
        folder = tmp_path_factory.mktemp("tokenizer")
        pretrained.save_pretrained(str(folder))
        return Tokenizer.load(folder)

    return load


@pytest.fixture(scope="session")
def chatml() -> str:
    return CHATML


@pytest.fixture(scope="session")
def chat_tokenizer(pretrained_tokenizer: Callable[[str | None], Tokenizer]) -> Tokenizer:
    return pretrained_tokenizer(CHATML)


@pytest.fixture(scope="session")
def base_tokenizer(pretrained_tokenizer: Callable[[str | None], Tokenizer]) -> Tokenizer:
    """Of a model that has met no conversations: our special tokens are added to it, unknown to the model."""
    return pretrained_tokenizer(None)
