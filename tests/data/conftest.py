from __future__ import annotations

import pytest

from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def sample() -> MultiHopQA:
    data = MultiHopQA()
    data.prepare()
    return data


@pytest.fixture(scope="session")
def tokenizer(sample: MultiHopQA) -> Tokenizer:
    return Tokenizer.train(sample.tokenizer_texts()[:400], 1000)
