"""RWKV-7 against two independent pure-PyTorch packages, and the ARWKV layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from refragkit.errors import CheckpointError
from refragkit.models.build import build_from_config
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.config import ModelConfig
from refragkit.models.formats import RWKV7_ORIGINAL
from refragkit.models.hybrid import HybridLM

VOCAB = 53
CONFIG = ModelConfig(
    block_pattern="RRR",
    d_model=128,
    vocab_size=VOCAB,
    mlp="channel_mix",
    d_ff=160,
    wkv_head_dim=64,
    decay_rank=12,
    iclr_rank=10,
    value_rank=8,
    gate_rank=20,
    norm="layer",
    embedding_norm=True,
    tie_embeddings=False,
)


def random_model(config: ModelConfig) -> HybridLM:
    model = build_from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def write_original(model: HybridLM, path: Path) -> None:
    weights = model.state_dict()
    tensors = {e.theirs: e.dump(weights[e.ours]).contiguous() for e in RWKV7_ORIGINAL.entries(model.config)}
    for i in range(3):  # stored by the original trainer, never used
        tensors[f"blocks.0.att.v{i}"] = torch.zeros_like(tensors[f"blocks.1.att.v{i}"])
    torch.save(tensors, path)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-6))


RUN_RWKV = """
import sys, torch
from rwkv.model import RWKV
model = RWKV(model=sys.argv[1], strategy="cpu fp32")
tokens = [int(token) for token in sys.argv[2].split(",")]
with torch.no_grad():
    whole, _ = model.forward(tokens, None, full_output=True)
    state, steps = None, []
    for token in tokens:
        out, state = model.forward([token], state)
        steps.append(out)
torch.save({"whole": whole, "steps": torch.stack(steps), "wkv": torch.stack(state[1::3]),
            "shift": torch.stack(state[0::3]), "ffn": torch.stack(state[2::3])}, sys.argv[3])
"""


def test_the_rwkv_package_gives_the_same_logits_and_state(tmp_path: Path) -> None:
    pytest.importorskip("rwkv", reason="pip install --no-deps rwkv")
    model = random_model(CONFIG)
    write_original(model, tmp_path / "x.pth")
    batch = ids(1, 45)
    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            RUN_RWKV,
            str(tmp_path / "x"),
            ",".join(map(str, batch[0].tolist())),
            str(tmp_path / "out.pt"),
        ],
        check=True,
        capture_output=True,
        env={
            **os.environ,
            "RWKV_V7_ON": "1",
            "RWKV_JIT_ON": "0",
            "RWKV_CUDA_ON": "0",
            "OMP_NUM_THREADS": "1",
        },
    )
    theirs = torch.load(tmp_path / "out.pt", weights_only=True)
    ours = load_model(tmp_path / "x.pth")
    assert ours.config == CONFIG
    with torch.no_grad():
        out = ours(batch, return_state=True)
    assert relative(out.logits[0], theirs["whole"]) < 1e-4
    assert relative(out.logits[0], theirs["steps"]) < 1e-4
    assert out.state is not None
    for key, name in (("wkv", "wkv_state"), ("shift", "shift_state"), ("ffn", "ffn_shift_state")):
        mine = torch.stack([getattr(block, name)[0] for block in out.state])
        assert relative(mine, theirs[key]) < 1e-4, key


def test_rwkv7_hf_gives_the_same_logits_loss_and_gradients(tmp_path: Path) -> None:
    rwkv7_hf = pytest.importorskip("rwkv7_hf", reason="pip install --no-deps rwkv7-hf")
    model = random_model(CONFIG)
    save_model(model, tmp_path, format="hf")
    theirs = rwkv7_hf.RWKV7ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = load_model(tmp_path)
    batch = ids(2, 45)
    their_output = theirs(batch, labels=batch)
    logits = ours(batch).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    assert relative(logits, their_output.logits) < 1e-4
    assert relative(loss, their_output.loss) < 1e-4
    their_output.loss.backward()
    loss.backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    save_model(ours, tmp_path / "gradients", format="hf")
    gradients = load_file(tmp_path / "gradients" / "model.safetensors")
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert set(gradients) == set(wanted)
    floor = 1e-3 * max(float(g.norm()) for g in wanted.values())
    for name, gradient in wanted.items():
        error = float((gradients[name].view_as(gradient) - gradient).norm())
        assert error < 1e-4 * max(float(gradient.norm()), floor), name


def test_original_and_fla_layouts_agree(tmp_path: Path) -> None:
    model = random_model(CONFIG)
    write_original(model, tmp_path / "x.pth")
    save_model(model, tmp_path / "fla", format="hf")
    for path in (tmp_path / "x.pth", tmp_path / "fla"):
        loaded = load_model(path)
        assert loaded.config == CONFIG
        assert torch.equal(loaded(ids(2, 9)).logits, model(ids(2, 9)).logits)


ARWKV = {
    "block_pattern": "RRTR",
    "d_model": 32,
    "vocab_size": VOCAB,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
    "qkv_bias": True,
    "wkv_head_dim": 16,
    "decay_rank": 6,
    "iclr_rank": 5,
    "value_rank": 4,
    "gate_rank": 7,
    "norm_eps": 1e-6,
}


@pytest.mark.parametrize("gate", ["none", "sigmoid", "one_plus"])
@pytest.mark.parametrize("group_norm", [False, True])
def test_the_arwkv_layout_round_trips(tmp_path: Path, gate: str, group_norm: bool) -> None:
    config = ModelConfig.from_dict({**ARWKV, "wkv_gate": gate, "wkv_group_norm": group_norm})
    model = random_model(config)
    save_model(model, tmp_path, format="hf")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    mixer = "model.layers.1.self_attn.time_mixer."
    assert tensors[mixer + "x_r"].shape == (1, 1, 32)
    assert tensors[mixer + "w1"].shape == (32, 6)
    assert (mixer + "g1" in tensors) == (gate != "none")
    assert (mixer + "ln_x.weight" in tensors) == group_norm
    assert "model.layers.2.self_attn.q_proj.bias" in tensors
    # what real files also carry: an unused value residual in layer 0, and x_g without a gate
    tensors["model.layers.0.self_attn.time_mixer.v0"] = torch.zeros(1, 1, 32)
    tensors.setdefault(mixer + "x_g", torch.zeros(1, 1, 32))
    save_file(tensors, file)
    loaded = load_model(tmp_path)
    assert torch.equal(loaded(ids(2, 9)).logits, model(ids(2, 9)).logits)

    broken = dict(tensors)
    broken["model.layers.1.self_attn.time_mixer.odd"] = broken.pop(mixer + "k_a")
    save_file(broken, file)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert f"Missing: {mixer}k_a." in str(caught.value) and f"Unknown: {mixer}odd." in str(caught.value)
    save_file(tensors, file)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "wkv_version": 6}))
    with pytest.raises(CheckpointError, match="wkv_version=6"):
        load_model(tmp_path)


def test_a_hybrid_has_no_hugging_face_layout_and_is_told_so(tmp_path: Path) -> None:
    config = ModelConfig.from_dict({**ARWKV, "block_pattern": "MT", "d_state": 4, "ssm_head_dim": 16})
    with pytest.raises(CheckpointError, match="no Hugging Face layout holds this MT model"):
        save_model(build_from_config(config), tmp_path, format="hf")
