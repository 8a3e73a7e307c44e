from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import refragkit
from refragkit.data.datamodule import SAMPLE_DIR
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import CheckpointError, ConfigError
from refragkit.models.build import build_from_config, build_model
from refragkit.models.checkpoint import load_model
from refragkit.models.config import ModelConfig
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.int8 import Int8Embedding, Int8Linear
from refragkit.models.quantize import is_int8, quantize_int8
from refragkit.ops.cross_entropy import linear_cross_entropy, weighted_linear_cross_entropy
from refragkit.ops.int8 import quantize_rows

CONFIG = ModelConfig(
    block_pattern="TRTM",
    d_model=64,
    vocab_size=160,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=96,
    d_state=8,
    ssm_head_dim=16,
    wkv_head_dim=16,
    qkv_bias=True,
)
IDS = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(0))


def configured(**changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**CONFIG.to_dict(), **changes})


def quantised(config: ModelConfig = CONFIG, seed: int = 1) -> HybridLM:
    model = build_from_config(config, seed=seed)
    quantize_int8(model)
    return model


def dequantised(model: HybridLM) -> HybridLM:
    """The same weights in float32 layers: an independent computation of what an int8 model stands for."""
    plain = build_from_config(model.config)
    state = model.state_dict()
    weights = {
        name: model.get_submodule(name.rpartition(".")[0]).dequantized() if t.dtype == torch.int8 else t
        for name, t in state.items()
        if not (name.endswith(".scale") and name[:-5] + "weight" in state)
    }
    plain.load_state_dict(weights)
    return plain.eval()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(functional.cosine_similarity(a.detach().flatten(), b.detach().flatten(), dim=0))


@pytest.mark.parametrize("tied", [True, False])
def test_one_copy_of_each_weight_and_the_rest_in_floating_point(tied: bool) -> None:
    model = quantised(configured(tie_embeddings=tied))
    assert is_int8(model) and not is_int8(build_from_config(CONFIG))
    assert isinstance(model.embed_tokens, Int8Embedding) and isinstance(model.lm_head, Int8Linear)
    assert (model.lm_head.weight is model.embed_tokens.weight) is tied
    assert not any(parameter.requires_grad for parameter in model.parameters())
    floats = {name for name, p in model.named_parameters() if p.is_floating_point() and p.dim() == 2}
    assert all("conv1d" in n or "r_k" in n or ".up." in n or ".down." in n for n in floats), floats
    before = build_from_config(configured(tie_embeddings=tied))
    assert model.parameter_counts() == before.parameter_counts()
    matrices = sum(p.numel() for n, p in before.named_parameters() if p.dim() == 2 and n not in floats)
    assert sum(p.numel() for p in model.parameters() if p.dtype == torch.int8) == matrices


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_dequantised_weights(tied: bool) -> None:
    model = quantised(configured(tie_embeddings=tied)).eval()
    logits, wanted = model(IDS).logits, dequantised(model)(IDS).logits
    assert logits.dtype == torch.float32
    assert cosine(logits, wanted) > 0.999
    assert (
        cosine(wanted, build_from_config(configured(tie_embeddings=tied), seed=1).eval()(IDS).logits) > 0.99
    )


def test_padding_and_state_change_nothing_but_roundings() -> None:
    model = quantised().eval()
    whole = model(IDS, return_state=True)
    first = model(IDS[:, :9], return_state=True)
    second = model(IDS[:, 9:], state=first.state)
    torch.testing.assert_close(second.logits, whole.logits[:, 9:], atol=0.05, rtol=0)
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[:, :6] = 0
    padded = functional.pad(IDS, (6, 0))
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, 6:], whole.logits, atol=0.05, rtol=0
    )
    assert whole.state is not None
    assert whole.state.nbytes == model.state_bytes(2, 24)
    assert {t.dtype for t in (whole.state[0].keys, model.empty_state(2)[0].keys)} == {torch.float32}


def test_gradients_reach_the_input_through_every_kind_of_block() -> None:
    model = quantised()
    stream = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(3))
    gradients = []
    for stack in (model, dequantised(model)):
        stack.requires_grad_(False)
        x = stream.clone().requires_grad_()
        upstream = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(4))
        stack.hidden_states_from(x, 0).backward(upstream)
        gradients.append(x.grad)
    assert gradients[0] is not None and gradients[1] is not None
    assert cosine(gradients[0], gradients[1]) > 0.995


def test_a_change_of_type_leaves_scales_precise() -> None:
    model = quantised().to(torch.bfloat16)
    head = model.lm_head
    assert (
        isinstance(head, Int8Linear) and head.scale.dtype == torch.float32 and head.weight.dtype == torch.int8
    )
    assert model.get_parameter("norm.weight").dtype == torch.bfloat16
    assert "160, 64" in repr(model.embed_tokens)


@pytest.mark.parametrize("layer", [nn.Linear(64, 10), nn.Linear(7, 3, bias=False)])
def test_a_layer_and_back(layer: nn.Linear) -> None:
    rounded = Int8Linear.of(layer)
    back = rounded.to_linear()
    assert (back.bias is None) is (layer.bias is None)
    assert cosine(back.weight, layer.weight) > 0.999
    x = torch.randn(5, layer.in_features)
    assert cosine(rounded(x), back(x)) > 0.999
    again = Int8Linear.of(back)
    assert torch.equal(again.weight, rounded.weight)


def test_weights_that_are_not_finite_and_fresh_ones_are_refused() -> None:
    model = build_from_config(CONFIG)
    with torch.no_grad():
        model.get_parameter("blocks.2.mlp.up_proj.weight")[5, 3] = float("nan")
    with pytest.raises(ConfigError, match=r"blocks\.2\.mlp\.up_proj\.weight: row 5 holds values"):
        quantize_int8(model)
    with pytest.raises(ConfigError, match="quantise one that has"):
        Int8Linear.of(nn.Linear(8, 8)).reset_parameters()
    with pytest.raises(ConfigError, match="quantise one that has"):
        Int8Embedding.of(nn.Embedding(8, 8)).reset_parameters()


@pytest.mark.parametrize("chunk", [40 * 160, 7 * 160])
def test_cross_entropy_over_an_int8_head(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refragkit.ops.cross_entropy._INT8_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(40, 64, generator=generator)
    values, scale = quantize_rows(torch.randn(160, 64, generator=generator) * 0.2)
    targets = torch.randint(0, 160, (40,), generator=generator)
    targets[::4] = -100
    weights = torch.rand(40, generator=generator)
    exact = hidden.double().requires_grad_()
    weight = quantised_weight(values, scale)
    losses = functional.cross_entropy(exact @ weight.T, targets, reduction="none")
    (losses * weights).sum().backward()
    assert exact.grad is not None
    x = hidden.clone().requires_grad_()
    total, reported = weighted_linear_cross_entropy(x, values, targets, weights, scale)
    total.backward()
    y = hidden.clone().requires_grad_()
    plain = linear_cross_entropy(y, values, targets, scale=scale)
    (plain * weights).sum().backward()
    for got in (reported, plain.detach()):
        torch.testing.assert_close(got.double(), losses.detach(), atol=0.1, rtol=0.02)
    assert float(total.detach()) == pytest.approx(float((losses.detach() * weights).sum()), rel=0.01)
    for leaf in (x, y):
        assert leaf.grad is not None and cosine(leaf.grad.double(), exact.grad) > 0.999
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, values, targets, scale=scale), plain.detach())


def quantised_weight(values: Tensor, scale: Tensor) -> Tensor:
    layer = Int8Linear.of(nn.Linear(values.shape[1], values.shape[0], bias=False))
    layer.weight, layer.scale = nn.Parameter(values, requires_grad=False), scale
    return layer.dequantized(torch.float64)


def test_cross_entropy_refuses_a_head_without_its_scale() -> None:
    values, scale = quantize_rows(torch.randn(20, 8))
    hidden, targets = torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)
    for weight, given in ((values, None), (values.float(), scale), (values, scale[:3])):
        with pytest.raises(ValueError, match="needs its scale"):
            linear_cross_entropy(hidden, weight, targets, scale=given)


def same(a: HybridLM, b: HybridLM) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_gives_what_rounding_the_loaded_model_gives(
    tmp_path: Path, tied: bool, stored: torch.dtype
) -> None:
    config = configured(tie_embeddings=tied)
    refragkit.save_model(build_from_config(config, seed=1).to(stored), tmp_path)
    loaded = refragkit.load_model(tmp_path, quantize="int8")
    plain = refragkit.load_model(tmp_path, dtype="float32")
    quantize_int8(plain)
    assert isinstance(loaded, HybridLM) and isinstance(plain, HybridLM)
    assert same(loaded, plain)
    assert (loaded.head_weight is loaded.get_parameter("embed_tokens.weight")) is tied
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_bf16_is_the_dtype(tmp_path: Path) -> None:
    refragkit.save_model(build_from_config(CONFIG), tmp_path)
    model = refragkit.load_model(tmp_path, quantize="bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert same(model, refragkit.load_model(tmp_path, dtype="bfloat16"))


def test_hugging_face_folders_round_as_they_are_read(tmp_path: Path) -> None:
    config = configured(block_pattern="TT")
    model = build_from_config(config, seed=2)
    refragkit.save_model(model, tmp_path, format="hf")
    loaded = refragkit.load_model(tmp_path, quantize="int8")
    quantize_int8(model)
    assert isinstance(loaded, HybridLM) and same(loaded, model)


def test_a_stored_head_must_be_the_embedding_where_they_are_tied(tmp_path: Path) -> None:
    refragkit.save_model(build_from_config(CONFIG), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    save_file(tensors, file)
    refragkit.load_model(tmp_path, quantize="int8")
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="differs from it"):
        refragkit.load_model(tmp_path, quantize="int8")


def test_broken_weights_and_unknown_forms_are_refused(tmp_path: Path) -> None:
    refragkit.save_model(build_from_config(CONFIG), tmp_path)
    for quantize in ("int4", "", 8):
        with pytest.raises(ConfigError, match=r"quantize: expected null, int8 or bf16, got"):
            refragkit.load_model(tmp_path, quantize=quantize)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="quantize=int8 keeps what it doesn't round in float32; got dtype=bfloat16"
    ):
        refragkit.load_model(tmp_path, quantize="int8", dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["blocks.0.mlp.up_proj.weight"][5, 3] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: blocks\.0\.mlp\.up_proj\.weight: row 5 holds"
    ):
        refragkit.load_model(tmp_path, quantize="int8")


@pytest.mark.parametrize("format", ["refragkit", "hf"])
def test_saving_writes_floating_point_that_rounds_to_the_same_integers(tmp_path: Path, format: str) -> None:
    model = quantised(configured(block_pattern="TT"))
    refragkit.save_model(model, tmp_path, format=format)  # type: ignore[arg-type]
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    if format == "hf":
        assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"
    again = refragkit.load_model(tmp_path, quantize="int8")
    assert all(
        torch.equal(again.state_dict()[n], t) for n, t in model.state_dict().items() if t.dtype == torch.int8
    )
    plain = refragkit.load_model(tmp_path)
    assert isinstance(plain, HybridLM)
    assert cosine(plain.eval()(IDS).logits, model.eval()(IDS).logits) > 0.999


@pytest.mark.parametrize("pattern", ["TRTM", "MM", "R"])
def test_random_weights_part_by_part_are_those_of_the_whole(pattern: str) -> None:
    config = configured(block_pattern=pattern, tie_embeddings=pattern == "R")
    model = build_from_config(config, seed=7, quantize="int8", gradient_checkpointing=True)
    assert same(model, quantised(config, seed=7)) and model.gradient_checkpointing
    halves = build_from_config(config, seed=7, quantize="bf16")
    assert same(halves, build_from_config(config, seed=7).bfloat16())


def test_build_model_rounds_random_weights_and_trained_ones(tmp_path: Path) -> None:
    node = {"_target_": "refragkit.models.build.transformer", "size": "tiny"}
    built = build_model({**node, "gradient_checkpointing": True}, vocab_size=100, seed=3, quantize="int8")
    plain = build_model(node, vocab_size=100, seed=3)
    refragkit.save_model(plain, tmp_path)
    loaded = build_model({**node, "path": str(tmp_path)}, vocab_size=100, quantize="int8")
    assert isinstance(built, HybridLM) and isinstance(loaded, HybridLM) and isinstance(plain, HybridLM)
    quantize_int8(plain)
    assert same(built, plain) and same(loaded, plain) and built.gradient_checkpointing
    assert not is_int8(build_model(node, vocab_size=100, device="meta", quantize="int8"))
    with pytest.raises(ConfigError, match="quantize: expected"):
        build_model(node, vocab_size=100, quantize="int3")


_PEAK = """
import ctypes, sys, torch
from pathlib import Path
from refragkit.models.build import build_from_config
from refragkit.models.checkpoint import load_model
from refragkit.models.config import ModelConfig
torch.set_num_threads(1)
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
def stack(blocks, vocab_size):
    return ModelConfig(block_pattern="T" * blocks, d_model=512, vocab_size=vocab_size, n_heads=8, n_kv_heads=8,
                       head_dim=64, d_ff=2048)
build_from_config(stack(1, 16), quantize="int8")  # code that is loaded on first use isn't the model's
ctypes.CDLL("libc.so.6").malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
if sys.argv[1:]:
    model = load_model(sys.argv[1], quantize="int8")
else:
    model = build_from_config(stack(12, 8192), quantize="int8")
print(status("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.parametrize("source", ["random", "file"])
@pytest.mark.slow
def test_the_model_is_never_held_in_floating_point(source: str, tmp_path: Path) -> None:
    config = ModelConfig(
        block_pattern="T" * 12, d_model=512, vocab_size=8192, n_heads=8, n_kv_heads=8, head_dim=64, d_ff=2048
    )
    if source == "file":
        refragkit.save_model(build_from_config(config), tmp_path)
    command = [sys.executable, "-c", _PEAK, *([str(tmp_path)] if source == "file" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, size = map(int, done.stdout.split())
    in_float = 4 * size
    if source == "file":
        assert peak < 1.2 * size + 4 * 8192 * 512
    else:  # what is drawn is freed, but the allocator returns small blocks late
        assert peak < 0.75 * in_float


@pytest.mark.slow
def test_a_real_model_loses_less_than_one_percent(smollm2: Path) -> None:
    """SmolLM2-135M on passages of the bundled sample: prose that it has not been trained here to know."""
    tokenizer = Tokenizer.load(smollm2)
    with (SAMPLE_DIR / "corpus.jsonl").open(encoding="utf-8") as file:
        text = "\n\n".join(json.loads(line)["text"] for line in itertools.islice(file, 60))
    ids = torch.tensor(tokenizer.encode(text)[:2048]).view(4, 512)
    losses = {}
    for quantize in (None, "int8", "bf16"):
        model = load_model(smollm2, quantize=quantize).eval()
        assert is_int8(model) == (quantize == "int8")
        with torch.no_grad():
            rows = [
                linear_cross_entropy(
                    model.hidden_states(row[None, :-1])[0][0].float(),
                    model.head_weight if model.head_scale is not None else model.head_weight.float(),
                    row[1:],
                    scale=model.head_scale,
                )
                for row in ids
            ]
        losses[quantize] = float(torch.cat(rows).mean())
    print(losses)
    assert 2 < losses[None] < 4  # it reads English
    for quantize in ("int8", "bf16"):
        assert abs(losses[quantize] - losses[None]) < 0.01 * losses[None], losses


_FREED = """
import sys, torch
from pathlib import Path
from refragkit.models.quantize import return_freed_memory
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
if sys.argv[1:]:
    return_freed_memory()
for count in (2**20, 2**21, 2**22):
    torch.ones(count)  # having seen such tensors freed, glibc takes later ones from its heap
before = resident()
tensors = [torch.ones(2**21) for _ in range(16)]
del tensors[:-1]
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_memory_goes_back() -> None:
    """Fifteen tensors of 8 MiB are freed below one that stays."""
    held = []
    for arguments in ([], ["return"]):
        command = [sys.executable, "-c", _FREED, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        held.append(int(done.stdout))
    assert held[1] < 16 * 2**20 < 100 * 2**20 < held[0]
