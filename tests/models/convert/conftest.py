from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from refragkit.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def base_tokenizer(pretrained_folder: Callable[..., Path]) -> Tokenizer:
    """Of a model that has met no conversations: our special tokens are added to it, unknown to the model."""
    return Tokenizer.load(pretrained_folder(None))
