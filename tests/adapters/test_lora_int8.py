"""LoRA on a base whose frozen weights are int8 or bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from refragkit.adapters.lora import LoRA, LoRALinear, lora_layers, merge_into_base
from refragkit.adapters.peft_format import load_adapter, save_adapter
from refragkit.errors import ConfigError
from refragkit.models.build import build_model
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.int8 import Int8Linear
from refragkit.models.quantize import is_int8
from refragkit.ops.cross_entropy import weighted_linear_cross_entropy

VOCAB = 96
IDS = torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(5))


def build(option: str, quantize: str | None, **changes: Any) -> HybridLM:
    node = {"_target_": f"refragkit.models.build.{option}", "size": "tiny", **changes}
    model = build_model(node, vocab_size=VOCAB, seed=2, quantize=quantize)
    assert isinstance(model, HybridLM)
    return model


def fill_b(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.normal_(0, 0.05, generator=generator)


def loss_of(model: HybridLM, ids: Tensor) -> Tensor:
    hidden, _ = model.hidden_states(ids[:, :-1])
    targets = ids[:, 1:].flatten()
    weights = torch.full(targets.shape, 1 / len(targets))
    return weighted_linear_cross_entropy(
        hidden.flatten(0, 1), model.head_weight, targets, weights, model.head_scale
    )[0]


def gradients(model: HybridLM) -> Tensor:
    loss_of(model, IDS).backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None and bool(gradient.any()) for gradient in found)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def test_settings() -> None:
    assert LoRA().quantize is None and LoRA(quantize="int8").quantize == "int8"
    with pytest.raises(ConfigError, match=r"adapter\.quantize: expected null, int8 or bf16, got 'fp4'"):
        LoRA(quantize="fp4")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("option", "blocks"), [("rwkv_qwen", "all"), ("hybrid", "TM"), ("transformer", "T")])
def test_every_factor_gets_the_gradient_that_it_has_in_float32(
    option: str, blocks: str, checkpointing: bool
) -> None:
    found = {}
    for quantize in ("int8", None):
        model = build(option, quantize, gradient_checkpointing=checkpointing).train()
        targets = (
            ("q", "k", "v", "o", "gate", "up", "down") if option != "hybrid" else ("q", "in", "out", "down")
        )
        LoRA(rank=4, alpha=8, targets=targets, blocks=blocks).apply(model, seed=1)
        fill_b(model)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        found[quantize] = gradients(model)
    assert functional.cosine_similarity(found["int8"], found[None], dim=0) > 0.98


def test_blocks_below_the_first_adapter_keep_nothing() -> None:
    """The base is frozen, so that autograd starts at the first adapter."""
    model = build("rwkv_qwen", "int8", block_pattern="RRTR").train()
    LoRA(rank=4).apply(model)
    needs: list[bool] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: needs.append(output[0].requires_grad))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        model.blocks[2].register_forward_pre_hook(lambda *_: kept.append(-1))
        loss_of(model, IDS)
    assert needs == [False, False, True, True]
    assert kept[0] == -1


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputing_changes_nothing_and_keeps_less(autocast: bool) -> None:
    """Of a frozen block with an int8 MLP the mixer is computed again, of an adapted one everything."""
    kept, found = {}, {}
    for checkpointing in (False, True):
        model = build(
            "rwkv_qwen", "int8", block_pattern="RTRRT", gradient_checkpointing=checkpointing
        ).train()
        LoRA(rank=4).apply(model)
        fill_b(model)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            loss = loss_of(model, IDS)
        loss.backward()
        weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        kept[checkpointing] = sum(size for pointer, size in storages.items() if pointer not in weights)
        found[checkpointing] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(found[True], found[False])
    assert kept[True] < 0.35 * kept[False]


def test_only_factors_are_kept_by_the_optimiser_and_none_of_the_base_moves() -> None:
    model = build("rwkv_qwen", "int8")
    LoRA(rank=4).apply(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        loss_of(model, IDS).backward()
        optimiser.step()
    after = model.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items() if "lora_" not in n)
    assert all(not torch.equal(after[n], t) for n, t in before.items() if "lora_" in n)
    assert all(isinstance(layer.base_layer, Int8Linear) for _, layer in lora_layers(model))


def curve(quantize: str | None, option: str, autocast: bool) -> list[float]:
    model = (
        build(option, quantize, block_pattern="RT").train()
        if option == "rwkv_qwen"
        else build(option, quantize)
    )
    LoRA(rank=8, alpha=16, blocks="all").apply(model, seed=1)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = loss_of(model, IDS)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("option", ["rwkv_qwen", pytest.param("transformer", marks=pytest.mark.slow)])
def test_training_goes_as_in_float32(option: str) -> None:
    plain = curve(None, option, autocast=False)
    assert plain[-1] < plain[0] - 0.2
    for quantize, autocast in (("int8", False), ("int8", True), ("bf16", False)):
        losses = curve(quantize, option, autocast)
        furthest = max(abs(a - b) for a, b in zip(plain, losses, strict=True))
        assert furthest < 0.03 * plain[0], (quantize, autocast)


def test_adapters_are_those_of_a_float32_base(tmp_path: Path) -> None:
    """Trained on int8, saved in PEFT's format, used on the model as it was stored, and back."""
    model = build("transformer", "int8").eval()
    LoRA(rank=4, alpha=8).apply(model)
    fill_b(model)
    save_adapter(model, tmp_path / "adapter")
    plain = build("transformer", None).eval()
    load_adapter(plain, tmp_path / "adapter")
    logits, wanted = model(IDS).logits, plain(IDS).logits
    assert functional.cosine_similarity(logits.flatten(), wanted.flatten(), dim=0) > 0.995
    for (_, ours), (_, theirs) in zip(lora_layers(model), lora_layers(plain), strict=True):
        assert torch.equal(ours.lora_A, theirs.lora_A) and torch.equal(ours.lora_B, theirs.lora_B)
    again = build("transformer", "int8").eval()
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_loads_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = build("transformer", "int8").eval()
    save_model(model, tmp_path / "base", format="hf")
    LoRA(rank=4, alpha=8).apply(model)
    fill_b(model)
    save_adapter(model, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted, logits = theirs(IDS).logits, model(IDS).logits
    assert functional.cosine_similarity(logits.flatten(), wanted.flatten(), dim=0) > 0.995


def test_merging_adds_the_update_to_the_dequantised_weight(tmp_path: Path) -> None:
    model = build("rwkv_qwen", "int8").eval()
    LoRA(rank=4, alpha=8).apply(model)
    fill_b(model)
    before = model(IDS).logits
    layers = dict(lora_layers(model))
    wanted = {path: layer.base_layer.dequantized() + layer.delta() for path, layer in layers.items()}  # type: ignore[operator]
    assert merge_into_base(model) == len(layers)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    for path, weight in wanted.items():
        merged = model.get_submodule(path)
        assert not isinstance(merged, Int8Linear)
        torch.testing.assert_close(merged.weight, weight)
    assert is_int8(model)  # what no adapter changed
    merged_logits = model(IDS).logits
    assert functional.cosine_similarity(merged_logits.flatten(), before.flatten(), dim=0) > 0.999
    save_model(model, tmp_path)
    stored = load_model(tmp_path).eval()
    assert {p.dtype for p in stored.parameters()} == {torch.float32}
    stored_logits = stored(IDS).logits
    assert functional.cosine_similarity(stored_logits.flatten(), before.flatten(), dim=0) > 0.999
