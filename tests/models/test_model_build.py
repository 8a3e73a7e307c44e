from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from refragkit.errors import ConfigError
from refragkit.models import build
from refragkit.models.build import build_model
from refragkit.models.config import SIZES, ModelConfig
from refragkit.models.hybrid import HybridLM

FOLDER = Path(__file__).parents[2] / "conf" / "model"
OPTIONS = ["mamba", "hybrid", "rwkv-qwen", "transformer"]


def node(name: str, **overrides: Any) -> dict[str, Any]:
    return {**yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), **overrides}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_yaml_is_the_signature(name: str) -> None:
    cfg = node(name)
    function = getattr(build, cfg.pop("_target_").rpartition(".")[2])
    parameters = inspect.signature(function).parameters
    assert list(cfg) == [key for key in parameters if key not in ("seed", "device")]
    assert {key: parameters[key].default for key in cfg} == cfg


def test_without_a_tokenizer_the_vocabulary_has_the_size_that_data_trains() -> None:
    data = yaml.safe_load((FOLDER.parent / "data" / "multihop_qa.yaml").read_text())
    assert build_model(node("hybrid"), device="meta").vocab_size == data["vocab_size"]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", ["tiny", "small", "130m", "1.5b"])
def test_every_size_builds_on_the_meta_device(name: str, size: str) -> None:
    model = build_model(node(name, size=size), vocab_size=5000, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == sum(model.parameter_counts().values())
    low, high = {"tiny": (1e6, 4e6), "small": (1e7, 5e7), "130m": (0.8e8, 2e8), "1.5b": (1.4e9, 1.8e9)}[size]
    assert low < total < high, total


def test_mamba_130m_is_the_released_shape() -> None:
    model = build_model(node("mamba", size="130m"), device="meta")
    assert sum(model.parameter_counts().values()) == 128_989_632


def test_rwkv_qwen_is_the_design() -> None:
    model = build_model(node("rwkv-qwen", size="1.5b"), device="meta")
    config = model.config
    assert config.block_pattern == "RRRT" * 7
    assert (config.d_model, config.n_heads, config.n_kv_heads, config.head_dim) == (1536, 12, 2, 128)
    assert (config.d_ff, config.vocab_size, config.tie_embeddings) == (8960, 151936, True)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    shapes = [
        module.weight.shape
        for block in model.get_submodule("blocks")
        if block.kind == "T"
        for name, module in block.named_modules()
        if name.rpartition(".")[2] in targets
    ]
    assert len(shapes) == 49
    assert sum(32 * (rows + columns) for rows, columns in shapes) == 9_232_384


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_depend_on_the_seed_only(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = build_model(node(name), vocab_size=50, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    b = build_model(node(name), vocab_size=50, seed=7)
    c = build_model(node(name), vocab_size=50, seed=8)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)
    assert any(not torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


def test_every_weight_is_drawn() -> None:
    for family, sizes in SIZES.items():
        model = HybridLM(ModelConfig(**{"vocab_size": 50, **sizes["tiny"], "tie_embeddings": False}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        model.init_weights(0)
        left = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        assert not left, (family, left)


def test_a_fresh_model_is_near_the_uniform_loss() -> None:
    ids = torch.randint(0, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    for name in OPTIONS:
        model = build_model(node(name), vocab_size=500).eval()
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(
                model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
        assert abs(float(loss) - torch.tensor(500.0).log()) < 0.3, name


def test_omegaconf_nodes_are_read() -> None:
    model = build_model(OmegaConf.create(node("hybrid", block_pattern="MT")), vocab_size=50, device="meta")
    assert model.block_pattern == "MT"


@pytest.mark.parametrize(
    ("overrides", "vocab_size", "message"),
    [
        ({"size": "huge"}, 50, "sizes are tiny, small, 130m, 1.5b"),
        ({"vocab_size": 40}, 50, "model.vocab_size is 40, but the tokenizer has 50"),
        ({"block_pattern": "TXM"}, 50, "got 'TXM' with 'X'"),
        ({"block_pattern": ""}, 50, "block_pattern"),
        ({"n_kv_heads": 3}, 50, r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ({"d_state": -1}, 50, "model.d_state must be an integer of at least 1"),
        ({"layers": 3}, 50, "layers"),
        ({"_target_": "os.system"}, 50, "_target_"),
        ({"_target_": "refragkit.models.build.nothing"}, 50, "there is no"),
    ],
)
def test_contradictions_are_refused(overrides: dict[str, Any], vocab_size: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(node("hybrid", **overrides), vocab_size=vocab_size, device="meta")


def test_a_presets_vocabulary_must_hold_the_tokenizers() -> None:
    assert build_model(node("mamba", size="130m"), vocab_size=5000, device="meta").vocab_size == 50288
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 50288, but the tokenizer has 60000"):
        build_model(node("mamba", size="130m"), vocab_size=60000, device="meta")
