"""Adapters on disk: our round trip, and PEFT's files on the same base."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from refragkit.adapters.lora import LoRA, lora_layers
from refragkit.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_adapter,
    read_adapter,
    save_adapter,
)
from refragkit.errors import CheckpointError, ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid, rwkv_qwen, transformer
from refragkit.models.checkpoint import load_model

VOCAB = 64
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))


def small(factory: Any) -> SequenceModel:
    return factory(size="tiny", vocab_size=VOCAB).eval()


def fill_b(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.normal_(0, 0.1, generator=generator)


def adapted(factory: Any, **options: Any) -> SequenceModel:
    model = small(factory)
    LoRA(**{"rank": 4, "alpha": 8, **options}).apply(model)
    fill_b(model)
    return model


def test_key_names_and_config_of_a_pure_attention_stack(tmp_path: Path) -> None:
    model = adapted(transformer, rslora=True)
    save_adapter(model, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert len(tensors) == 2 * 7 * model.n_layers
    root = "base_model.model.model.layers.0"
    assert tensors[f"{root}.self_attn.q_proj.lora_A.weight"].shape == (4, model.d_model)
    assert tensors[f"{root}.mlp.down_proj.lora_B.weight"].shape == (model.d_model, 4)
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert config["target_modules"] == sorted(f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down"))
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == (
        "LORA",
        4,
        8,
        True,
    )


def test_other_stacks_use_our_paths(tmp_path: Path) -> None:
    model = adapted(rwkv_qwen, targets=["k", "o"])
    save_adapter(model, tmp_path)
    paths = {path for path, _ in lora_layers(model)}
    want = {f"base_model.model.{path}.lora_{x}.weight" for path in paths for x in "AB"}
    assert set(load_file(tmp_path / WEIGHTS_FILE)) == want
    # R blocks have a k_proj too: names alone would say more than what is adapted.
    assert set(json.loads((tmp_path / CONFIG_FILE).read_text())["target_modules"]) == paths


@pytest.mark.parametrize("factory", [transformer, hybrid, rwkv_qwen])
@pytest.mark.parametrize("rslora", [False, True])
def test_round_trip(factory: Any, rslora: bool, tmp_path: Path) -> None:
    model = adapted(factory, dropout=0.1, rslora=rslora)
    want = model(IDS).logits
    save_adapter(model, tmp_path)
    fresh = small(factory)
    assert not torch.equal(fresh(IDS).logits, want)
    report = load_adapter(fresh, tmp_path)
    torch.testing.assert_close(fresh(IDS).logits, want, rtol=0, atol=0)
    assert report.trainable_parameters == 0
    assert [p.path for p in report.layers] == [path for path, _ in lora_layers(model)]
    # Onto a model that has an adapter: values are replaced, training can go on.
    again = adapted(factory, alpha=1)
    report = load_adapter(again, tmp_path, trainable=True)
    torch.testing.assert_close(again(IDS).logits, want, rtol=0, atol=0)
    assert report.trainable_parameters == sum(
        layer.lora_A.numel() + layer.lora_B.numel() for _, layer in lora_layers(again)
    )


def test_writing_again_replaces_the_adapter(tmp_path: Path) -> None:
    save_adapter(adapted(transformer), tmp_path)
    model = adapted(transformer, rank=2)
    save_adapter(model, tmp_path)
    fresh = small(transformer)
    load_adapter(fresh, tmp_path)
    torch.testing.assert_close(fresh(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    model = adapted(hybrid)
    files = [save_adapter(model, tmp_path / str(i), "ab" * 32) / WEIGHTS_FILE for i in range(12)]
    assert len({file.read_bytes() for file in files}) == 1
    assert set(load_file(files[0])) and read_adapter(files[0]).base_hash == "ab" * 32


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no LoRA adapter"):
        save_adapter(small(hybrid), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def _spoil_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def _spoil_config(folder: Path, **values: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / WEIGHTS_FILE).unlink(), "no such file"),
        (lambda d: (d / CONFIG_FILE).unlink(), "no such file"),
        (lambda d: (d / WEIGHTS_FILE).write_bytes((d / WEIGHTS_FILE).read_bytes()[:500]), "safetensors"),
        (lambda d: (d / CONFIG_FILE).write_text("{"), "not readable as JSON"),
        (lambda d: _spoil_config(d, peft_type="IA3"), "'IA3'"),
        (lambda d: _spoil_config(d, use_dora=True), "use_dora"),
        (lambda d: _spoil_config(d, bias="all"), "bias='all'"),
        (lambda d: _spoil_config(d, init_lora_weights="pissa_niter_4"), "pissa"),
        (lambda d: _spoil_config(d, lora_alpha=None), "lora_alpha"),
        (lambda d: _spoil_tensors(d, lambda t: t.popitem()), "only; expected lora_A and lora_B"),
        (lambda d: _spoil_tensors(d, lambda t: t.update(odd=torch.zeros(1))), "unexpected key 'odd'"),
        (lambda d: _spoil_tensors(d, lambda t: t[next(iter(t))].fill_(torch.nan)), "not finite"),
        (
            lambda d: _spoil_tensors(d, lambda t: t.update({k: torch.zeros(4, 3) for k in t if "_A" in k})),
            "another base model",
        ),
    ],
)
def test_a_bad_folder_is_refused_and_the_model_left_alone(spoil: Any, message: str, tmp_path: Path) -> None:
    save_adapter(adapted(hybrid), tmp_path)
    spoil(tmp_path)
    model = small(hybrid)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(model, tmp_path)
    assert not list(lora_layers(model))
    assert all(p.requires_grad for p in model.parameters())


def test_an_adapter_of_another_stack_is_refused(tmp_path: Path) -> None:
    save_adapter(adapted(transformer), tmp_path)
    with pytest.raises(CheckpointError, match="do not exist in this model"):
        load_adapter(small(hybrid), tmp_path)
    with pytest.raises(CheckpointError, match="adapted with"):
        load_adapter(adapted(transformer, rank=2), tmp_path)


# PEFT reads an attribute that transformers 5.2x renames.
peft_parity = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def _qwen2(seed: int = 0) -> Any:
    """A small random Qwen2 of transformers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def _ours(peer: Any) -> SequenceModel:
    """The same weights in our stack."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return load_model(folder).eval()


@peft_parity
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_our_adapter_with_equal_logits(rslora: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    peer = _qwen2()
    model = _ours(peer)
    torch.testing.assert_close(model(IDS).logits, peer(IDS).logits, rtol=1e-4, atol=1e-5)
    LoRA(rank=4, alpha=12, rslora=rslora).apply(model)
    fill_b(model)
    save_adapter(model, tmp_path)
    theirs = PeftModel.from_pretrained(peer, str(tmp_path)).eval()
    want = model(IDS).logits
    torch.testing.assert_close(theirs(IDS).logits, want, rtol=1e-4, atol=1e-5)
    with theirs.disable_adapter():
        assert (theirs(IDS).logits - want).abs().max() > 1e-3


@peft_parity
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {
            "target_modules": ["q_proj", "down_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"down_proj": 5, r"layers\.1\.self_attn\.q_proj": 3},
        },
    ],
    ids=["qv", "all-linear", "patterns"],
)
def test_we_load_pefts_adapter_with_equal_logits(options: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    peer = _qwen2()
    model = _ours(peer)
    theirs = get_peft_model(peer, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.normal_(0, 0.1, generator=generator)
    theirs.save_pretrained(str(tmp_path))
    load_adapter(model, tmp_path)
    torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)
    # And back: what we write of it means the same to PEFT.
    from peft import PeftModel

    save_adapter(model, tmp_path / "again")
    back = PeftModel.from_pretrained(_qwen2(), str(tmp_path / "again")).eval()
    torch.testing.assert_close(back(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)
