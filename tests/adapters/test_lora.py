"""LoRA on the real stacks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from refragkit.adapters.lora import LoRA, LoRALinear, apply_lora, lora_layers, merge_into_base, projections
from refragkit.adapters.none import NoAdapter
from refragkit.adapters.peft_format import save_adapter
from refragkit.errors import CheckpointError, ConfigError, RefragError
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid, mamba, rwkv_qwen, transformer
from refragkit.models.checkpoint import save_model
from refragkit.models.weights_hash import weights_hash

VOCAB = 64
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))


def small(factory: Any, **options: Any) -> SequenceModel:
    return factory(size="tiny", vocab_size=VOCAB, **options)


def fill_b(model: nn.Module, seed: int = 1) -> None:
    """Gives every B values, so that the adapter has an effect."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.normal_(0, 0.1, generator=generator)


def test_1_5b_has_49_layers_and_9_232_384_trainable_parameters() -> None:
    model = rwkv_qwen(size="1.5b", device="meta")
    total = sum(p.numel() for p in model.parameters())
    report = LoRA().apply(model)
    assert len(report.layers) == 49
    assert report.trainable_parameters == 9_232_384
    assert report.total_parameters == total + 9_232_384
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 9_232_384
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.kind for p in report.layers} == {"T"}
    assert {p.block for p in report.layers} == set(range(3, 28, 4))
    lines = [line.split() for line in report.table().splitlines()]
    assert lines[0] == ["projection", "R", "blocks", "T", "blocks"]
    assert ["q_proj", "-", "7/7"] in lines
    assert ["k_proj", "0/21", "7/7"] in lines
    assert ["gate_proj", "0/21", "7/7"] in lines


@pytest.mark.parametrize(
    ("factory", "targets", "blocks"),
    [
        (transformer, ["q", "k", "v", "o", "gate", "up", "down"], "T"),
        (hybrid, ["q", "k", "v", "o", "gate", "up", "down", "in", "out"], "all"),
        (mamba, ["in", "out_proj"], "M"),
        (rwkv_qwen, ["q", "r", "k", "v", "o", "gate", "up", "down", "decay.down"], "all"),
    ],
)
def test_only_adapters_train_and_each_b_gets_a_gradient(
    factory: Any, targets: list[str], blocks: str
) -> None:
    """A projection whose weight is read past the module would leave its B without a gradient."""
    model = small(factory)
    LoRA(rank=4, alpha=8, targets=targets, blocks=blocks).apply(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in trainable)
    model(IDS).logits.square().mean().backward()
    for path, layer in lora_layers(model):
        assert layer.lora_B.grad is not None, path
        assert layer.lora_B.grad.abs().sum() > 0, path
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trainable)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    grads = []
    for checkpointing in (False, True):
        model = small(hybrid, gradient_checkpointing=checkpointing).train()
        LoRA(rank=4, alpha=8).apply(model)
        fill_b(model)
        model(IDS).logits.square().mean().backward()
        grads.append({path: layer.lora_A.grad for path, layer in lora_layers(model)})
    for path, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][path], msg=path)


def test_a_fresh_adapter_changes_nothing_and_a_filled_one_does() -> None:
    model = small(rwkv_qwen).eval()
    before = model(IDS).logits
    LoRA(rank=4).apply(model)
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=0)
    fill_b(model)
    assert (model(IDS).logits - before).abs().max() > 1e-3


@pytest.mark.parametrize("rslora", [False, True])
def test_the_update_is_scaled_b_a(rslora: bool) -> None:
    base = nn.Linear(6, 5)
    layer = LoRALinear(base, rank=4, alpha=8, rslora=rslora)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(2, 3, 6)
    scaling = 8 / (2 if rslora else 4)
    assert layer.scaling == scaling
    want = x @ (base.weight + scaling * layer.lora_B @ layer.lora_A).T + base.bias
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.delta(), scaling * layer.lora_B @ layer.lora_A)
    assert not hasattr(layer, "weight")


def test_float32_adapter_on_a_bfloat16_layer() -> None:
    layer = LoRALinear(nn.Linear(6, 5).bfloat16(), rank=2, alpha=2)
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32
    assert layer(torch.randn(3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_dropout_acts_on_the_update_in_training_only() -> None:
    layer = LoRALinear(nn.Linear(64, 3), rank=2, alpha=2, dropout=0.5)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(1, 64)
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
    layer.train()
    torch.manual_seed(0)
    first = layer(x)
    assert not torch.equal(first, layer(x))
    torch.manual_seed(0)
    assert torch.equal(first, layer(x))


def test_start_depends_on_seed_and_path_only() -> None:
    def start(blocks: str, seed: int) -> dict[str, torch.Tensor]:
        model = small(rwkv_qwen)
        LoRA(rank=4, targets=["k", "up"], blocks=blocks).apply(model, seed=seed)
        return {path: layer.lora_A.detach() for path, layer in lora_layers(model)}

    torch.manual_seed(1)
    few = start("T", 0)
    torch.manual_seed(2)
    many, other = start("all", 0), start("T", 1)
    assert len(many) > len(few)
    for path, a in few.items():
        assert torch.equal(a, many[path])
        assert not torch.equal(a, other[path])
    distinct = {tuple(a.flatten()[:3].tolist()) for a in few.values()}
    assert len(distinct) == len(few)
    bound = 1 / math.sqrt(128)  # Kaiming uniform with a = sqrt(5): 1 / sqrt(in)
    largest = max(a.abs().max().item() for path, a in few.items())
    assert 0.9 * bound < largest <= bound


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (mamba, {}, r"match no linear layer of this model"),
        (hybrid, {"targets": ["q", "qq"]}, r"targets \['qq'\] match no linear layer"),
        (hybrid, {"blocks": "TR"}, r"block types \['R'\] have none of the targets"),
        (rwkv_qwen, {"targets": ["q", "r"]}, r"targets \['r'\] match no linear layer"),
    ],
)
def test_what_matches_nothing_is_an_error_with_the_table(
    factory: Any, options: dict[str, Any], message: str
) -> None:
    model = small(factory)
    with pytest.raises(ConfigError, match=message) as caught:
        LoRA(**options).apply(model)
    assert "projection  " in str(caught.value)
    assert not list(lora_layers(model))
    assert all(p.requires_grad for p in model.parameters())


def test_short_names_never_mean_low_rank_maps() -> None:
    model = small(rwkv_qwen)
    report = LoRA(targets=["up", "down"], blocks="R").apply(model)
    assert {p.name for p in report.layers} == {"up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"rank": True}, "rank"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": "64"}, "alpha"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": math.nan}, "dropout"),
        ({"targets": []}, "targets"),
        ({"targets": "qkv"}, "targets"),
        ({"targets": ["q", "q"]}, "targets"),
        ({"blocks": "X"}, "blocks"),
        ({"blocks": ""}, "blocks"),
    ],
)
def test_bad_values_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"adapter\.{key}: expected"):
        LoRA(**options)


def test_bad_repeated_targets_and_double_adapters() -> None:
    model = small(hybrid)
    apply_lora(model, LoRA(rank=2))
    with pytest.raises(ConfigError, match="already"):
        LoRA(rank=2).apply(model)
    with pytest.raises(ConfigError, match="no block pattern"):
        LoRA().apply(nn.Linear(2, 2))


@pytest.mark.parametrize("factory", [transformer, rwkv_qwen])
def test_merging_keeps_the_logits_and_restores_the_modules(factory: Any) -> None:
    model = small(factory).eval()
    names = list(model.state_dict())
    LoRA(rank=4, alpha=16, rslora=True).apply(model)
    fill_b(model)
    adapted = model(IDS).logits
    layers = len(list(lora_layers(model)))
    assert merge_into_base(model) == layers
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(IDS).logits, adapted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="no LoRA adapter"):
        merge_into_base(model)


def test_projections_are_found_wrapped_or_not() -> None:
    model = small(hybrid)
    before = projections(model)
    report = LoRA(rank=2).apply(model)
    assert projections(model) == before == report.available


def test_no_adapter_counts_and_changes_nothing() -> None:
    model = small(hybrid)
    report = NoAdapter().apply(model, seed=3)
    assert report.layers == ()
    assert (
        report.trainable_parameters == report.total_parameters == sum(p.numel() for p in model.parameters())
    )


@pytest.mark.parametrize("option", ["none", "lora"])
def test_shipped_options_build_and_list_every_parameter(option: str) -> None:
    import inspect

    from hydra.utils import get_class, instantiate
    from omegaconf import OmegaConf

    path = Path(__file__).parents[2] / "conf" / "adapter" / f"{option}.yaml"
    node = OmegaConf.load(path)
    signature = inspect.signature(get_class(node["_target_"]))
    defaults = {name: p.default for name, p in signature.parameters.items()}
    assert set(node) - {"_target_"} == set(defaults)
    adapter = instantiate(node, _convert_="all")
    if option == "lora":
        assert vars(adapter) == vars(LoRA())
    assert adapter.apply(small(rwkv_qwen)).trainable_parameters > 0


def trained(folder: Path, base_hash: str | None = None) -> SequenceModel:
    model = small(hybrid)
    LoRA(rank=2, alpha=4).apply(model)
    fill_b(model)
    save_adapter(model, folder / "adapter", base_hash)
    return model


@pytest.mark.parametrize("name", [".", "adapter", "adapter/adapter_model.safetensors"])
def test_a_run_can_go_on_from_an_adapter(name: str, tmp_path: Path) -> None:
    earlier = trained(tmp_path)
    model = small(hybrid).train()
    found = LoRA(rank=2, alpha=4, path=str(tmp_path / name), dropout=0.1).apply(model, seed=7)
    assert found.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    for (_, mine), (_, theirs) in zip(lora_layers(model), lora_layers(earlier), strict=True):
        assert torch.equal(mine.lora_A, theirs.lora_A) and torch.equal(mine.lora_B, theirs.lora_B)
        assert mine.dropout == 0.1
    assert torch.equal(model.eval()(IDS).logits, earlier.eval()(IDS).logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4, "alpha": 4}, "of rank [2] are not the"),
        ({"rank": 2, "alpha": 8}, "was trained with alpha 4 and rslora false; set adapter.alpha=4"),
        ({"rank": 2, "alpha": 4, "targets": ["q", "k"]}, "Set adapter.rank, adapter.targets"),
        ({"rank": 2, "alpha": 4, "path": "nowhere"}, "adapter.path: nowhere does not exist"),
    ],
)
def test_an_adapter_that_is_not_the_settings_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trained(tmp_path)
    with pytest.raises(RefragError, match=re.escape(message)):
        LoRA(**{"path": str(tmp_path), **settings}).apply(small(hybrid))


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    base = save_model(small(hybrid), tmp_path / "base")
    trained(tmp_path, weights_hash(base))
    lora = LoRA(rank=2, alpha=4, path=str(tmp_path))
    lora.apply(small(hybrid), base=str(base))
    other = small(hybrid)
    with torch.no_grad():
        other.get_parameter("blocks.0.mixer.q_proj.weight").add_(1)
    save_model(other, tmp_path / "other")
    with pytest.raises(CheckpointError, match="was trained on another base model"):
        lora.apply(small(hybrid), base=str(tmp_path / "other"))
