"""Merged adapters against dense matrices, against PEFT's own, and on models."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from refragkit.adapters.lora import LoRA, lora_layers, merge_into_base
from refragkit.adapters.low_rank import AdapterWeights, LowRank
from refragkit.adapters.merge import merge_adapters, merge_weights
from refragkit.adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_weights,
    load_adapter,
    put_adapter,
    read_adapter,
    save_adapter,
    write_adapter,
)
from refragkit.errors import CheckpointError, ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid, rwkv_qwen, transformer
from refragkit.models.checkpoint import load_model

VOCAB = 64
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))
SHAPES = {"blocks.0.mixer.q_proj": (24, 16), "blocks.0.mlp.down_proj": (16, 40)}


def random_adapter(
    seed: int, rank: int, alpha: float, rslora: bool = False, **changes: Any
) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    layers = {
        path: LowRank(
            torch.randn(rank, n_in, generator=generator),
            torch.randn(n_out, rank, generator=generator),
            alpha,
            rslora,
        )
        for path, (n_out, n_in) in SHAPES.items()
    }
    return AdapterWeights(**{"layers": layers, "source": f"adapter {seed}", **changes})


ADAPTERS = [random_adapter(0, 4, 8), random_adapter(1, 2, 3.5), random_adapter(2, 6, 5, rslora=True)]
SHARES = [0.5, 0.3, 0.2]


def dense(adapters: list[AdapterWeights], shares: list[float], path: str) -> torch.Tensor:
    """The average of the updates as a matrix, from their definition, in float64."""
    total = torch.zeros(SHAPES[path], dtype=torch.float64)
    for adapter, share in zip(adapters, shares, strict=True):
        update = adapter.layers[path]
        scaling = update.alpha / (update.A.shape[0] ** 0.5 if update.rslora else update.A.shape[0])
        total += share * scaling * update.B.double() @ update.A.double()
    return total


def product(update: LowRank) -> torch.Tensor:
    scaling = update.alpha / (update.A.shape[0] ** 0.5 if update.rslora else update.A.shape[0])
    return scaling * update.B.double() @ update.A.double()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_exact_is_the_average_of_the_updates() -> None:
    merged = merge_adapters(ADAPTERS, SHARES)
    for path in SHAPES:
        update = merged.adapter.layers[path]
        assert update.rank == 12 and update.scaling == 1 and update.A.dtype == torch.float32
        error = relative(product(update), dense(ADAPTERS, SHARES, path))
        assert error < 1e-6
        assert merged.layer_errors[path] == pytest.approx(error, rel=0.05)
    assert merged.relative_error < 1e-6


@given(
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    alphas=st.lists(st.floats(0.01, 100), min_size=5, max_size=5),
    parts=st.lists(st.integers(1, 20), min_size=5, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_exact_for_any_ranks_scalings_and_weights(
    ranks: list[int], alphas: list[float], parts: list[int]
) -> None:
    adapters = [random_adapter(i, rank, alphas[i], rslora=i % 2 == 1) for i, rank in enumerate(ranks)]
    shares = [part / sum(parts[: len(ranks)]) for part in parts[: len(ranks)]]
    merged = merge_adapters(adapters, shares)
    for path in SHAPES:
        assert relative(product(merged.adapter.layers[path]), dense(adapters, shares, path)) < 1e-6
    assert merged.relative_error < 1e-6


@pytest.mark.parametrize("rank", [1, 5, 11, 12, 99])
def test_svd_is_the_best_update_of_its_rank(rank: int) -> None:
    merged = merge_adapters(ADAPTERS, SHARES, "svd", rank)
    lost = total = 0.0
    for path in SHAPES:
        wanted = dense(ADAPTERS, SHARES, path)
        left, values, right = torch.linalg.svd(wanted, full_matrices=False)
        best = left[:, :rank] * values[:rank] @ right[:rank]
        update = merged.adapter.layers[path]
        assert update.rank == min(rank, 12) and update.scaling == 1
        torch.testing.assert_close(product(update), best, rtol=1e-4, atol=1e-5)
        error = relative(best, wanted)
        assert merged.layer_errors[path] == pytest.approx(error, rel=1e-4, abs=1e-6)
        lost, total = lost + float((best - wanted).square().sum()), total + float(wanted.square().sum())
    assert merged.relative_error == pytest.approx((lost / total) ** 0.5, rel=1e-4, abs=1e-6)
    assert (merged.relative_error < 1e-6) == (rank >= 12)


def test_svd_takes_the_highest_rank_of_the_adapters() -> None:
    merged = merge_adapters(ADAPTERS, SHARES, "svd")
    assert {update.rank for update in merged.adapter.layers.values()} == {6}
    # Two adapters that differ by a factor lie in one space: nothing is lost.
    first = ADAPTERS[0]
    double = {p: LowRank(u.A, 2 * u.B, u.alpha) for p, u in first.layers.items()}
    assert merge_adapters([first, AdapterWeights(double)], average="svd").relative_error < 1e-6


def test_factors_are_the_seeds_mean_and_what_it_loses_is_said() -> None:
    adapters = [random_adapter(i, 4, 8) for i in range(2)]
    merged = merge_adapters(adapters, average="factors")
    for path, update in merged.adapter.layers.items():
        a, b = ([getattr(x.layers[path], name) for x in adapters] for name in "AB")
        torch.testing.assert_close(update.A, (a[0] + a[1]) / 2)
        torch.testing.assert_close(update.B, (b[0] + b[1]) / 2)
        assert (update.alpha, update.rank) == (8, 4)
        error = relative(product(update), dense(adapters, [0.5, 0.5], path))
        assert merged.layer_errors[path] == pytest.approx(error, rel=1e-6)
    assert 0.6 < merged.relative_error < 0.8  # 1 / sqrt(2) for independent ones
    weighted = merge_adapters(adapters, [0.75, 0.25], "factors").adapter.layers
    for path, update in weighted.items():
        expected = 0.75 * adapters[0].layers[path].A + 0.25 * adapters[1].layers[path].A
        torch.testing.assert_close(update.A, expected)


def test_one_adapter_is_itself() -> None:
    for average in ("exact", "svd", "factors"):
        merged = merge_adapters(ADAPTERS[:1], average=average)  # type: ignore[arg-type]
        assert merged.relative_error < 1e-6
        for path in SHAPES:
            torch.testing.assert_close(
                product(merged.adapter.layers[path]), product(ADAPTERS[0].layers[path]), rtol=1e-5, atol=1e-5
            )


def test_a_layer_that_only_some_have() -> None:
    path, other = SHAPES
    some = AdapterWeights({path: ADAPTERS[1].layers[path]}, target_modules=("q_proj",))
    for average, limit in (("exact", 1e-6), ("svd", 1)):
        merged = merge_adapters([ADAPTERS[0], some], [0.5, 0.5], average, 99 if average == "svd" else None)  # type: ignore[arg-type]
        torch.testing.assert_close(
            product(merged.adapter.layers[other]),
            0.5 * product(ADAPTERS[0].layers[other]),
            rtol=1e-5,
            atol=1e-5,
        )
        assert merged.relative_error < limit
        assert merged.adapter.target_modules == ()
    with pytest.raises(ConfigError, match=rf"average=factors needs adapters of the same layers, and {other}"):
        merge_adapters([ADAPTERS[0], some], average="factors")


def test_adapters_that_have_not_learnt_yet_keep_their_a() -> None:
    new = {p: LowRank(u.A, torch.zeros_like(u.B), u.alpha) for p, u in ADAPTERS[0].layers.items()}
    for average in ("exact", "svd", "factors"):
        merged = merge_adapters([AdapterWeights(new)] * 2, average=average)  # type: ignore[arg-type]
        assert merged.relative_error == 0
        for update in merged.adapter.layers.values():
            assert torch.isfinite(update.A).all() and not product(update).any()
    exact = merge_adapters([AdapterWeights(new), ADAPTERS[1]]).adapter
    for path in SHAPES:
        assert torch.equal(exact.layers[path].A[:4], ADAPTERS[0].layers[path].A)


def test_factors_of_the_exact_average_are_balanced() -> None:
    for update in merge_adapters(ADAPTERS, SHARES).adapter.layers.values():
        torch.testing.assert_close(update.A.norm(dim=1), update.B.norm(dim=0))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5], r"expected one number for each of the 2 adapters, got 1"),
        ([6, 2], r"expected numbers that sum to 1, got \[6, 2\], which sum to 8; .* weights=\[0.75,0.25\]"),
        ([0.5, 0.49], "sum to 0.99"),
        ([1.5, -0.5], "expected positive finite numbers"),
        ([1.0, 0.0], "expected positive finite numbers"),
        ([float("nan"), 1], "expected positive finite numbers"),
        ([float("inf"), 1], "expected positive finite numbers"),
    ],
)
def test_weights_that_cannot_be(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^weights: .*{message}"):
        merge_adapters(ADAPTERS[:2], weights)


def test_weights() -> None:
    assert merge_weights(4, None) == [0.25] * 4
    assert merge_weights(3, [0.3333333, 0.3333333, 0.3333334]) == pytest.approx([1 / 3] * 3)
    with pytest.raises(ConfigError, match="adapters: expected at least one"):
        merge_weights(0, None)


def test_what_factors_cannot_average() -> None:
    with pytest.raises(
        ConfigError, match=r"the rank of blocks.0.mixer.q_proj is 4 in adapter 0 and 2 in adapter 1"
    ):
        merge_adapters(ADAPTERS[:2], average="factors")
    with pytest.raises(ConfigError, match=r"the scaling of .* is 2 in adapter 0 and 4 in adapter 1"):
        merge_adapters([random_adapter(0, 4, 8), random_adapter(1, 4, 16)], average="factors")
    with pytest.raises(ConfigError, match="rank=3 belongs to average=svd"):
        merge_adapters(ADAPTERS, rank=3)
    with pytest.raises(ConfigError, match="rank: expected null or at least 1, got 0"):
        merge_adapters(ADAPTERS, average="svd", rank=0)
    with pytest.raises(ConfigError, match="average: expected one of exact, svd, factors, got 'mean'"):
        merge_adapters(ADAPTERS, average="mean")  # type: ignore[arg-type]


def test_adapters_of_other_bases_are_refused() -> None:
    bases = [random_adapter(i, 2, 2, base_hash=h) for i, h in enumerate(["aa", "aa", None, "bb"])]
    assert merge_adapters(bases[:3]).adapter.base_hash == "aa"
    assert merge_adapters(bases[2:3]).adapter.base_hash is None
    with pytest.raises(
        CheckpointError, match=r"adapter 0 and adapter 3 were trained on different base models"
    ):
        merge_adapters(bases)
    path = next(iter(SHAPES))
    odd = AdapterWeights({path: LowRank(torch.zeros(2, 15), torch.zeros(24, 2), 2)}, source="odd")
    with pytest.raises(CheckpointError, match=rf"{path} is \[24, 16\] in adapter 0 and \[24, 15\] in odd"):
        merge_adapters([ADAPTERS[0], odd])
    with pytest.raises(CheckpointError, match="adapter 0 and else have no layer in common"):
        merge_adapters([ADAPTERS[0], AdapterWeights({"other": ADAPTERS[0].layers[path]}, source="else")])


# --- on models -----------------------------------------------------------------------------------------


def adapted(factory: Callable[..., SequenceModel], seed: int, **options: Any) -> SequenceModel:
    """A trained adapter on the one base."""
    model = factory(size="tiny", vocab_size=VOCAB).eval()
    LoRA(**{"rank": 4, "alpha": 8, **options}).apply(model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.normal_(0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("factory", [transformer, hybrid, rwkv_qwen])
def test_the_merged_adapter_and_the_merged_weights_say_the_same(
    factory: Callable[..., SequenceModel], tmp_path: Path
) -> None:
    adapters = [adapter_weights(adapted(factory, 1)), adapter_weights(adapted(factory, 2, rank=2, alpha=3))]
    merged = merge_adapters(adapters, [0.6, 0.4]).adapter
    write_adapter(merged, tmp_path)
    on = factory(size="tiny", vocab_size=VOCAB).eval()
    report = load_adapter(on, tmp_path)
    assert {layer.rank for _, layer in lora_layers(on)} == {6} and len(report.layers) == len(merged.layers)
    # By hand: the weights plus the average of the dense updates.
    by_hand = factory(size="tiny", vocab_size=VOCAB).eval()
    models = [adapted(factory, 1), adapted(factory, 2, rank=2, alpha=3)]
    updates = [{path: layer.delta() for path, layer in lora_layers(model)} for model in models]
    with torch.no_grad():
        for path in updates[0]:
            by_hand.get_submodule(path).weight.add_(0.6 * updates[0][path] + 0.4 * updates[1][path])  # type: ignore[operator, union-attr]
    want = by_hand(IDS).logits
    torch.testing.assert_close(on(IDS).logits, want, rtol=1e-4, atol=1e-5)
    merge_into_base(on)
    torch.testing.assert_close(on(IDS).logits, want, rtol=1e-4, atol=1e-5)
    assert (factory(size="tiny", vocab_size=VOCAB).eval()(IDS).logits - want).abs().max() > 1e-3


def test_training_can_go_on_from_a_merged_adapter() -> None:
    merged = merge_adapters([adapter_weights(adapted(hybrid, seed)) for seed in (1, 2)]).adapter
    model = hybrid(size="tiny", vocab_size=VOCAB)
    put_adapter(model, merged, trainable=True)
    model(IDS).logits.sum().backward()
    for _, layer in lora_layers(model):
        assert layer.lora_A.grad is not None and layer.lora_A.grad.abs().sum() > 0
        assert layer.lora_B.grad is not None and layer.lora_B.grad.abs().sum() > 0


# PEFT reads an attribute that transformers 5.2x renames.
peft_parity = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def _qwen2() -> Any:
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
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def _saved(peer: Any, folder: Path, seed: int, **options: Any) -> Path:
    """One of our adapters on PEFT's base."""
    with tempfile.TemporaryDirectory() as base:
        peer.save_pretrained(base)
        model = load_model(base)
    LoRA(**options).apply(model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.normal_(0, 0.1, generator=generator)
    return save_adapter(model, folder)


@peft_parity
@pytest.mark.parametrize("average", ["exact", "svd"])
def test_peft_merges_to_the_same_and_loads_ours_with_equal_logits(average: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    folders = [
        _saved(_qwen2(), tmp_path / "a", 1, rank=4, alpha=12),
        _saved(
            _qwen2(), tmp_path / "b", 2, rank=4, alpha=4, targets=["q", "k", "v", "o", "gate", "up", "down"]
        ),
    ]
    rank = 5 if average == "svd" else None
    merged = merge_adapters([read_adapter(f) for f in folders], [0.7, 0.3], average, rank)
    write_adapter(merged.adapter, tmp_path / "merged")
    ours = PeftModel.from_pretrained(_qwen2(), str(tmp_path / "merged")).eval()
    theirs = PeftModel.from_pretrained(_qwen2(), str(folders[0]), adapter_name="a")
    theirs.load_adapter(str(folders[1]), "b")
    combination = {"exact": "cat", "svd": "svd"}[average]
    options = {"svd_rank": rank} if rank else {}
    theirs.add_weighted_adapter(["a", "b"], [0.7, 0.3], "both", combination_type=combination, **options)
    theirs.set_adapter("both")
    theirs.eval()
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "merged" / CONFIG_FILE).read_text())
    assert config["r"] == (rank or 8) and config["target_modules"] == read_target_modules(folders[0])
    # and here
    with tempfile.TemporaryDirectory() as base:
        _qwen2().save_pretrained(base)
        model = load_model(base).eval()
    load_adapter(model, tmp_path / "merged")
    torch.testing.assert_close(model(IDS).logits, ours(IDS).logits, rtol=1e-4, atol=1e-5)


def read_target_modules(folder: Path) -> list[str]:
    names: list[str] = json.loads((folder / CONFIG_FILE).read_text())["target_modules"]
    return names


@peft_parity
def test_peft_loads_a_merge_of_adapters_of_different_layers_and_ranks(tmp_path: Path) -> None:
    from peft import PeftModel

    folders = [
        _saved(_qwen2(), tmp_path / "a", 1, rank=4, alpha=12, targets=["q", "v"]),
        _saved(_qwen2(), tmp_path / "b", 2, rank=2, alpha=3, targets=["v", "down"], rslora=True),
    ]
    merged = merge_adapters([read_adapter(f) for f in folders], [0.7, 0.3])
    assert sorted({update.rank for update in merged.adapter.layers.values()}) == [2, 4, 6]
    write_adapter(merged.adapter, tmp_path / "merged")
    theirs = PeftModel.from_pretrained(_qwen2(), str(tmp_path / "merged")).eval()
    by_hand = _qwen2()
    with torch.no_grad():
        for share, folder in zip((0.7, 0.3), folders, strict=True):
            for path, update in read_adapter(folder).layers.items():
                by_hand.get_submodule(path).weight.add_(share * product(update).float())
    torch.testing.assert_close(theirs(IDS).logits, by_hand(IDS).logits, rtol=1e-4, atol=1e-5)


@peft_parity
def test_pefts_adapters_of_some_blocks_stay_on_these(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    options = {"target_modules": ["q_proj"], "layers_to_transform": [1], "task_type": "CAUSAL_LM"}
    adapters = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        theirs = get_peft_model(_qwen2(), LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **options))
        theirs.save_pretrained(str(tmp_path / str(seed)))
        adapters.append(read_adapter(tmp_path / str(seed)))
    write_adapter(merge_adapters(adapters).adapter, tmp_path / "merged")
    assert read_target_modules(tmp_path / "merged") == ["model.layers.1.self_attn.q_proj"]
    loaded = PeftModel.from_pretrained(_qwen2(), str(tmp_path / "merged"))
    names = {name for name, _ in loaded.named_parameters() if "lora_A" in name}
    assert len(names) == 1 and "layers.1.self_attn.q_proj" in names.pop()


# --- files ---------------------------------------------------------------------------------------------


def test_a_file_of_weights_beside_the_configuration(tmp_path: Path) -> None:
    model = adapted(hybrid, 1)
    write_adapter(adapter_weights(model, "ab" * 32), tmp_path, "thread_0.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG_FILE, "thread_0.safetensors"]
    found = read_adapter(tmp_path / "thread_0.safetensors")
    assert found.base_hash == "ab" * 32
    for path, update in adapter_weights(model).layers.items():
        assert torch.equal(found.layers[path].A, update.A) and found.layers[path].alpha == update.alpha
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS_FILE}: no such file"):
        read_adapter(tmp_path)


def test_the_base_is_checked_where_both_sides_know_it(tmp_path: Path) -> None:
    model = adapted(hybrid, 1)
    save_adapter(model, tmp_path, "ab" * 32)
    fresh = hybrid(size="tiny", vocab_size=VOCAB)
    with pytest.raises(CheckpointError, match=r"was trained on another base model \(weights hash abab.*cdcd"):
        load_adapter(fresh, tmp_path, base_hash="cd" * 32)
    assert not list(lora_layers(fresh))
    load_adapter(fresh, tmp_path, base_hash="ab" * 32)
    load_adapter(hybrid(size="tiny", vocab_size=VOCAB), tmp_path)
    assert len(load_file(tmp_path / WEIGHTS_FILE)) == 2 * len(list(lora_layers(model)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"lora_alpha": NaN', "lora_alpha: expected a finite number, got nan"),
        ('"lora_alpha": Infinity', "lora_alpha: expected a finite number, got inf"),
        ('"lora_alpha": true', "lora_alpha: expected a finite number, got True"),
        ('"alpha_pattern": {"q_proj": NaN}', r"alpha_pattern\['q_proj'\]: expected a finite number"),
        ('"alpha_pattern": {"(": 3}', r"'\(' is not a regular expression"),
        ('"alpha_pattern": [1]', r"alpha_pattern: expected an object"),
        ('"lora_dropout": 1', r"lora_dropout: expected a number in \[0, 1\), got 1"),
    ],
)
def test_numbers_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    save_adapter(adapted(hybrid, 1), tmp_path)
    config = (tmp_path / CONFIG_FILE).read_text()
    (tmp_path / CONFIG_FILE).write_text(config.rstrip().removesuffix("}") + f", {text}}}")
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path)
