from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import refragkit
from refragkit.errors import CheckpointError
from refragkit.models.build import build_from_config
from refragkit.models.config import ModelConfig

CONFIG = ModelConfig(
    block_pattern="RTM",
    d_model=32,
    vocab_size=40,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    d_state=8,
    ssm_head_dim=16,
    wkv_head_dim=16,
    dt_limit=(0.001, 0.5),
)


def test_round_trip_in_another_dtype(tmp_path: Path) -> None:
    model = build_from_config(CONFIG, seed=1)
    refragkit.save_model(model, tmp_path)
    loaded = refragkit.load_model(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.config == CONFIG
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig.from_dict({**CONFIG.to_dict(), "tie_embeddings": tied})
    refragkit.save_model(build_from_config(config), tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = refragkit.load_model(tmp_path)
    assert (loaded.head_weight is loaded.get_parameter("embed_tokens.weight")) is tied


def test_a_file_of_mixed_types_gives_a_model_that_runs(tmp_path: Path) -> None:
    refragkit.save_model(build_from_config(CONFIG).bfloat16(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):
        if "norm" in name or name.endswith(("A_log", "decay.bias", "x_r")):
            tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors")
    model = refragkit.load_model(tmp_path)
    assert model.get_parameter("blocks.2.mixer.A_log").dtype == torch.float32
    assert model.get_parameter("blocks.0.mixer.decay.bias").dtype == torch.float32
    assert model.get_parameter("norm.weight").dtype == torch.bfloat16
    assert model(torch.ones(1, 5, dtype=torch.int64)).logits.dtype == torch.bfloat16
    whole = refragkit.load_model(tmp_path, dtype="float32")
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}


def test_saving_twice_replaces_and_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_from_config(CONFIG, seed=1)
    refragkit.save_model(first, tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("refragkit.models.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        refragkit.save_model(build_from_config(CONFIG, seed=2), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = refragkit.load_model(tmp_path)
    assert torch.equal(loaded.head_weight, first.head_weight)


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    model = build_from_config(CONFIG)
    model.blocks[1].mixer.q_proj = torch.nn.Sequential(model.blocks[1].mixer.q_proj)
    with pytest.raises(CheckpointError, match=r"lacks blocks\.1\.mixer\.q_proj\.weight.*merge the adapter"):
        refragkit.save_model(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_keys_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    refragkit.save_model(build_from_config(CONFIG), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["blocks.9.odd"] = tensors.pop("blocks.0.mixer.k_k")
    tensors["norm.weight"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        refragkit.load_model(tmp_path)
    for part in ("Missing: blocks.0.mixer.k_k", "Unknown: blocks.9.odd", "norm.weight (5,) instead of (32,)"):
        assert part in str(caught.value)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        refragkit.load_model(tmp_path / "absent")
    refragkit.save_model(build_from_config(CONFIG), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(CheckpointError, match="is broken"):
        refragkit.load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        refragkit.load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"format_version": 99}, "format_version 99"),
        ({"odd": 1}, r"unknown keys \['odd'\]"),
        ({"d_model": None}, "d_model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            refragkit.load_model(tmp_path)
    with pytest.raises(CheckpointError, match="not a torch dtype"):
        refragkit.load_model(tmp_path, dtype="floaty")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        refragkit.load_model(tmp_path)
