"""``model=hybrid model.size=smollm2``: made once, checked, made again where it was damaged. A tiny model stands in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from refragkit import build_model, compose
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.models.build import model_folder, start_of, transformer
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.convert import ready_made
from refragkit.models.pretrained import resolve_pretrained


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which a tiny transformer is SmolLM2, and a recipe of a few steps."""
    tokenizer = Tokenizer.train(["some text about nothing in particular " * 20], 300)
    model = transformer(
        n_layers=4,
        vocab_size=tokenizer.vocab_size,
        d_model=48,
        n_heads=3,
        n_kv_heads=1,
        head_dim=16,
        d_ff=64,
        seed=1,
    )
    source = save_model(model, tmp_path / "pretrained" / "smollm2-0", tokenizer)
    real = resolve_pretrained

    def resolve(name: Any, cache_dir: Path) -> Path:
        return source if name == "smollm2" else real(name, cache_dir)

    monkeypatch.setattr("refragkit.models.pretrained.resolve_pretrained", resolve)
    for name, value in {
        "LAYERS": (1, 3),
        "CALIBRATION_TOKENS": 1024,
        "ALIGN_TOKENS": 2048,
        "MATCH_TOKENS": 1024,
        "_TEXT_TOKENS": 2048,
    }.items():
        monkeypatch.setattr(ready_made, name, value)
    return tmp_path


def test_the_size_stands_for_the_ready_made_hybrid(cache: Path) -> None:
    cfg = compose(["model=hybrid", "model.size=smollm2"]).model
    assert start_of(cfg) == "smollm2-hybrid"
    folder = model_folder(cfg, cache)
    assert folder is not None and folder.parent == cache / "pretrained"
    model = build_model(cfg, cache_dir=cache)
    assert model.block_pattern == "TMTM"
    stored = load_model(folder).state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    source = load_model(cache / "pretrained" / "smollm2-0").state_dict()
    assert torch.equal(stored["blocks.0.mixer.q_proj.weight"], source["blocks.0.mixer.q_proj.weight"])
    assert (folder / "MODEL_CARD.md").is_file() and Tokenizer.load(folder).vocab_size == model.vocab_size
    assert not list((cache / "activations").rglob("shard-*"))
    assert not list(folder.parent.glob(".*.tmp"))


def test_path_and_init_win_over_the_size(cache: Path) -> None:
    model = compose(["model=hybrid", "model.size=smollm2", "model.path=/nowhere"]).model
    assert start_of(model) is None
    assert start_of(compose(["model=hybrid", "model.size=smollm2", "model.init=x"]).model) == "x"
    assert start_of(compose(["model=hybrid"]).model) is None
    assert start_of(compose(["model=transformer", "model.size=small"]).model) is None


def test_it_is_made_once_and_again_only_where_it_was_damaged(cache: Path) -> None:
    folder = ready_made.smollm2_hybrid(cache)
    weights = folder / "model.safetensors"
    made, content = weights.stat().st_mtime_ns, weights.read_bytes()
    assert ready_made.smollm2_hybrid(cache) == folder and weights.stat().st_mtime_ns == made
    weights.write_bytes(content[:-1] + b"\x01")
    assert ready_made.smollm2_hybrid(cache) == folder
    assert weights.read_bytes() == content  # the same bits again
    (folder / "checksums.json").write_text("{}")  # vouches for nothing
    weights.write_bytes(content[:-1] + b"\x01")
    assert ready_made.smollm2_hybrid(cache) == folder and weights.read_bytes() == content
    (folder / "tokenizer.json").unlink()
    assert ready_made.smollm2_hybrid(cache) == folder and (folder / "tokenizer.json").is_file()


def test_two_at_once_make_one(cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: ready_made.smollm2_hybrid(cache), range(2)))
    assert folders[0] == folders[1]
    assert len(list((cache / "pretrained").glob("smollm2-hybrid-*"))) == 1


def test_sizes_beside_it_are_refused() -> None:
    cfg = compose(["model=hybrid", "model.size=smollm2", "model.d_model=64"]).model
    with pytest.raises(ConfigError, match=r"model\.size=smollm2 brings its own sizes.*model\.d_model"):
        build_model(cfg)
    cfg = compose(["model=hybrid", "model.size=smollm3"]).model
    with pytest.raises(ConfigError, match=r"sizes are .*smollm2"):
        build_model(cfg)
