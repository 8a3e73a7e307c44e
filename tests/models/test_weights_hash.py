"""One hash for one model, however it is stored; another for any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit.errors import CheckpointError
from refragkit.models.build import mamba, rwkv_qwen, transformer
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.weights_hash import weights_hash


@pytest.mark.parametrize("factory", [transformer, mamba, rwkv_qwen])
@pytest.mark.parametrize("tied", [False, True])
def test_the_format_and_the_precision_make_no_difference(factory: Any, tied: bool, tmp_path: Path) -> None:
    model = factory(size="tiny", vocab_size=64, tie_embeddings=tied).bfloat16()
    own = weights_hash(save_model(model, tmp_path / "own"))
    assert weights_hash(save_model(load_model(tmp_path / "own", "float32"), tmp_path / "wide")) == own
    assert len(own) == 64
    if factory is not rwkv_qwen:  # whose time mix has settings that no other layout knows
        assert weights_hash(save_model(model, tmp_path / "hf", format="hf")) == own


def test_any_trained_tensor_makes_a_difference(tmp_path: Path) -> None:
    model = rwkv_qwen(size="tiny", vocab_size=64)
    seen = {weights_hash(save_model(model, tmp_path / "base"))}
    for n, (_, parameter) in enumerate(model.named_parameters()):
        with torch.no_grad():
            parameter.add_(1e-3)
        seen.add(weights_hash(save_model(model, tmp_path / "changed")))
        assert len(seen) == n + 2
    seen.add(weights_hash(save_model(transformer(size="tiny", vocab_size=64), tmp_path / "other")))
    assert len(seen) == n + 3


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model folder"):
        weights_hash(tmp_path)
