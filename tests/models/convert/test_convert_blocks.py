"""Attention blocks that have become recurrent: what they start from, what stays, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.build import build_from_config, hybrid, transformer
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.config import ModelConfig
from refragkit.models.convert import convert_blocks, converted_config, run_mixer, teacher_activations
from refragkit.models.convert.activations import mixer_activations
from refragkit.models.convert.blocks import mixer_of
from refragkit.models.convert.calibrate import mixer_features
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.attention import Attention

VOCAB = 61
SHAPES: dict[str, dict[str, Any]] = {  # odd heads, shared keys and values, biases
    "mha": {"n_heads": 3, "n_kv_heads": 3, "head_dim": 16, "d_model": 48},
    "gqa": {"n_heads": 9, "n_kv_heads": 3, "head_dim": 8, "d_model": 72},
    "mqa-bias": {"n_heads": 4, "n_kv_heads": 1, "head_dim": 12, "d_model": 48, "qkv_bias": True},
}
IDS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


def teacher(shape: str = "gqa", n_layers: int = 4) -> HybridLM:
    model = transformer(n_layers=n_layers, vocab_size=VOCAB, d_ff=64, seed=1, **SHAPES[shape])
    assert isinstance(model, HybridLM)
    with torch.no_grad():  # biases and norms off their initial zeros and ones
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def linear_attention(attention: Attention, x: Tensor, rate: float, key_bias: bool) -> Tensor:
    """``sum_s e^(-rate (t - s)) (q_t . k_s) v_s`` for every head: ``[B, T, heads, head_dim]``."""
    batch, T, _ = x.shape
    groups = attention.n_heads // attention.n_kv_heads
    k_projected = attention.k_proj(x)
    if attention.k_proj.bias is not None and not key_bias:
        k_projected = k_projected - attention.k_proj.bias
    q = attention.q_proj(x).view(batch, T, attention.n_heads, -1)
    k = k_projected.view(batch, T, attention.n_kv_heads, -1).repeat_interleave(groups, 2)
    v = attention.v_proj(x).view(batch, T, attention.n_kv_heads, -1).repeat_interleave(groups, 2)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.exp(-rate * distance).masked_fill(distance < 0, 0).to(x)
    return torch.einsum("bthc,bshc,ts,bshv->bthv", q, k, decay, v)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("to", ["R", "M"])
def test_a_new_mixer_is_attention_without_softmax_and_positions(
    shape: str, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refragkit.models.convert.from_attention._ICLR", 1e-12)  # nothing is removed
    model = teacher(shape)
    student = convert_blocks(model, [1], to)
    with torch.no_grad():
        x, _ = mixer_activations(model, [1], IDS)[1]
        found = mixer_features(mixer_of(student, 1), x)
        attention = mixer_of(model, 1)
        assert isinstance(attention, Attention)
        heads = linear_attention(attention, x, 0.005, key_bias=to == "M")
        heads = heads - heads.mean(-1, keepdim=True) if to == "R" else heads * 0.05  # the step size
        eps = model.config.norm_eps if to == "M" else 64e-5
        wanted = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(found, wanted.flatten(2), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            mixer_of(student, 1).get_submodule("o_proj" if to == "R" else "out_proj").weight,
            attention.o_proj.weight,
        )


@pytest.mark.parametrize("to", ["R", "M"])
def test_everything_else_is_kept_bit_for_bit_and_shared(to: Any) -> None:
    model = teacher()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    student = convert_blocks(model, [0, 2], to)
    assert student.block_pattern == f"{to}T{to}T"
    ours = student.state_dict()
    kept = [name for name in before if not name.startswith(("blocks.0.mixer.", "blocks.2.mixer."))]
    assert len(kept) > 20
    for name in kept:
        assert torch.equal(ours[name], before[name])
        assert ours[name].data_ptr() == model.state_dict()[name].data_ptr()  # not copied
    assert {n for n in ours if n not in kept} == {n for n in ours if ".mixer." in n and n[7] in "02"}
    assert student.lm_head.weight is student.embed_tokens.weight  # tied as before
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.block_pattern == "TTTT"
    # Blocks below the first new one compute what they did
    with torch.no_grad():
        x_before, _ = mixer_activations(model, [0, 1], IDS)[0]
        torch.testing.assert_close(mixer_activations(student, [0, 1], IDS)[0][0], x_before, rtol=0, atol=0)


def test_new_weights_depend_on_the_seed_only() -> None:
    model = teacher()
    one, same, other = (convert_blocks(model, [1, 3], "R", seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    changed = [name for name in one if not torch.equal(one[name], other[name])]
    assert changed and all(".decay." in n or ".iclr." in n or ".gate." in n for n in changed)


def test_every_new_weight_but_those_that_zeros_hide_gets_a_gradient() -> None:
    model = teacher()
    for to in ("R", "M"):
        student = convert_blocks(model, [1], to)  # type: ignore[arg-type]
        student(IDS).logits.square().mean().backward()
        silent = {n for n, p in mixer_of(student, 1).named_parameters() if p.grad is None or not p.grad.any()}
        # What is behind the half of a low-rank map that starts at zero moves once that half has
        hidden = {"decay.up.weight", "iclr.up.weight", "gate.down.weight", "x_w", "x_a", "x_g"}
        assert silent == (hidden if to == "R" else set())


@pytest.mark.parametrize("to", ["R", "M"])
def test_saved_and_loaded_it_gives_the_same_logits(to: Any, tmp_path: Path) -> None:
    student = convert_blocks(teacher("mqa-bias"), [1, 2], to)
    loaded = load_model(save_model(student, tmp_path)).eval()
    assert loaded.config == student.config
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, student(IDS).logits)


def test_a_converted_model_can_be_converted_again_into_the_other_kind() -> None:
    student = convert_blocks(convert_blocks(teacher(), [1], "R"), [3], "M")
    assert student.block_pattern == "TRTM"
    assert torch.isfinite(student(IDS).logits).all()
    assert convert_blocks(student, [0], "R").block_pattern == "RRTM"


def test_activations_are_what_mixers_read_and_write() -> None:
    model = teacher()
    (got,) = teacher_activations(model, [1, 3], [IDS])
    assert sorted(got) == [1, 3]
    x, y = got[3]
    assert x.dtype == y.dtype == torch.bfloat16 and x.shape == y.shape == (2, 24, 72)
    block = model.blocks[3]
    exact_x, exact_y = mixer_activations(model, [3], IDS)[3]
    found: list[Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    with torch.no_grad():
        model(IDS)
        handle.remove()
        torch.testing.assert_close(block.mixer_norm(found[0]), exact_x)
        torch.testing.assert_close(x, exact_x.bfloat16())
        torch.testing.assert_close(y, exact_y.bfloat16())
        student = convert_blocks(model, [3], "R")
        new = mixer_activations(student, [3], IDS)[3]
        torch.testing.assert_close(run_mixer(mixer_of(student, 3), exact_x), new[1])
    assert not model.blocks[3].mixer._forward_hooks  # nothing is left behind


@pytest.mark.parametrize(
    ("layers", "part"),
    [
        ([], "convert.layers is empty"),
        ([4], "4 is not a block of this model; blocks are numbered 0 to 3"),
        ([-1, 2], "-1 is not a block"),
        (["a"], "a is not a block"),
        ([True], "True is not a block"),
        ([1, 2, 1], "names 1 more than once"),
    ],
)
def test_wrong_layers_are_refused(layers: list[Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        convert_blocks(teacher(), layers, "R")


def test_other_blocks_and_kinds_are_refused() -> None:
    model = hybrid(vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=r"1 \(Mamba-2\), 3 \(Mamba-2\) is none; this model's are 0, 2"):
        convert_blocks(model, [3, 0, 1], "R")
    with pytest.raises(ConfigError, match=r"convert\.to must be R"):
        convert_blocks(teacher(), [1], "T")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"M blocks of another shape.*n_groups=1, not 4"):
        convert_blocks(model, [0], "M")


def test_widths_that_no_such_block_has_are_refused() -> None:
    config = ModelConfig(
        block_pattern="TT", d_model=64, vocab_size=VOCAB, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64
    )
    with pytest.raises(ConfigError, match="4 x 32 = 128 and d_model 64"):
        converted_config(config, [1], "R")
    student = convert_blocks(build_from_config(config), [1], "M")  # twice as wide inside
    assert student.config.ssm_expand == 2 and torch.isfinite(student(IDS).logits).all()
    narrow = ModelConfig(
        block_pattern="TT", d_model=64, vocab_size=VOCAB, n_heads=3, n_kv_heads=3, head_dim=16, d_ff=64
    )
    with pytest.raises(ConfigError, match="to be a multiple of d_model"):
        converted_config(narrow, [1], "M")
