"""Against implementations that we did not write: transformers, rwkv, rwkv7-hf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from refragkit.errors import CheckpointError
from refragkit.models.base import SequenceModel
from refragkit.models.checkpoint import load_model, save_model

VOCAB = 53


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def disturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def mamba2(**changes: Any) -> transformers.PreTrainedModel:
    values = {
        "num_heads": 6,
        "head_dim": 8,
        "hidden_size": 24,
        "state_size": 10,
        "num_hidden_layers": 3,
        "n_groups": 2,
        "vocab_size": VOCAB,
        "chunk_size": 8,
    }
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**values, **changes}))


ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}


def qwen2(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**ATTENTION, **changes}))


def llama(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**ATTENTION, **changes}))


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters},
        "max_position_embeddings": 64,
    }


MODELS = {
    "mamba2": (mamba2, {}),
    "mamba2-tied": (mamba2, {"tie_word_embeddings": True, "n_groups": 1}),
    "mamba2-biases": (mamba2, {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "n_groups": 3}),
    "mamba2-dt-limit": (mamba2, {"time_step_limit": (0.3, 0.8), "expand": 4, "num_heads": 12}),
    "qwen2": (qwen2, {}),
    "qwen2-tied": (qwen2, {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-4}),
    "qwen2-yarn": (qwen2, rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama": (llama, {}),
    "llama-tied": (llama, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": (llama, {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-linear": (llama, rope("linear", factor=3.0)),
    "llama-llama3": (
        llama,
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-yarn": (
        llama,
        rope(
            "yarn",
            factor=2.5,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            mscale=0.7,
            mscale_all_dim=0.4,
        ),
    ),
    "llama-yarn-untruncated": (
        llama,
        rope("yarn", factor=2.5, original_max_position_embeddings=16, truncate=False, attention_factor=1.3),
    ),
}


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-6))


def our_gradients_under_their_names(model: SequenceModel, folder: Path) -> dict[str, torch.Tensor]:
    """Put each gradient in its weight's place and let the exporter name it."""
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(gradients[name])
    save_model(model, folder, format="hf")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same_logits_loss_and_gradients(name: str, tmp_path: Path) -> None:
    make, changes = MODELS[name]
    torch.manual_seed(0)
    theirs = make(**changes).eval()
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    batch = ids(2, 37)  # longer than a chunk and not a multiple of it
    their_output = theirs(batch, labels=batch)
    logits = ours(batch).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    assert relative(logits, their_output.logits) < 1e-4
    assert relative(loss, their_output.loss) < 1e-4
    their_output.loss.backward()
    loss.backward()

    # back into their format: the same logits there
    save_model(ours, tmp_path / "ours", format="hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert relative(again(batch).logits, their_output.logits) < 1e-5
    own = load_model(save_model(ours, tmp_path / "own"))
    assert torch.equal(own(batch).logits, ours(batch).logits)

    gradients = our_gradients_under_their_names(ours, tmp_path / "gradients")
    wanted = {key: p.grad for key, p in theirs.named_parameters()}
    assert set(gradients) == set(wanted)
    # A weight whose gradient is zero but for rounding is compared to the size of the others
    floor = 1e-3 * max(float(g.norm()) for g in wanted.values() if g is not None)
    for key, gradient in wanted.items():
        assert gradient is not None
        assert float((gradients[key] - gradient).norm()) < 1e-4 * max(float(gradient.norm()), floor), key


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (llama, rope("dynamic", factor=2.0), "rope_type 'dynamic' is not implemented"),
        (
            llama,
            rope(
                "longrope",
                factor=2.0,
                original_max_position_embeddings=16,
                short_factor=[1] * 4,
                long_factor=[2] * 4,
            ),
            "rope_type 'longrope' is not implemented",
        ),
        (llama, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            qwen2,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "use_sliding_window",
        ),
        (mamba2, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    make: Any, changes: Any, message: str, tmp_path: Path
) -> None:
    make(**changes).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_an_unknown_rope_parameter_is_refused(tmp_path: Path) -> None:
    llama(**rope("linear", factor=2.0)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["mystery"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"not understood \['mystery'\]"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("make", "left_out"),
    [
        (
            llama,
            ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings"],
        ),
        (qwen2, ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "head_dim"]),
        (
            mamba2,
            ["hidden_size", "vocab_size", "num_hidden_layers", "n_groups", "num_heads", "head_dim", "expand"],
        ),
    ],
)
def test_sizes_left_out_are_read_off_the_tensors(make: Any, left_out: list[str], tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    complete = load_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in left_out:
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).config == complete.config


def test_older_configurations_spell_rope_differently(tmp_path: Path) -> None:
    theirs = llama(**rope("linear", factor=3.0)).eval()
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config.update(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 3.0})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert relative(load_model(tmp_path)(ids(1, 20)).logits, theirs(ids(1, 20)).logits) < 1e-4


def test_sharded_folders_load(tmp_path: Path) -> None:
    theirs = llama().eval()
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.no_grad():
        assert relative(load_model(tmp_path)(ids(1, 9)).logits, theirs(ids(1, 9)).logits) < 1e-4
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        load_model(tmp_path)


def test_missing_and_unknown_keys_are_listed_under_their_names(tmp_path: Path) -> None:
    qwen2().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.scale"] = tensors.pop("model.layers.1.self_attn.q_proj.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert "Missing: model.layers.1.self_attn.q_proj.bias." in str(caught.value)
    assert "Unknown: model.layers.1.self_attn.q_proj.scale." in str(caught.value)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load_model(tmp_path)


def test_a_model_type_that_is_unknown_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="model_type 'bert' is not known; known are"):
        load_model(tmp_path)


@pytest.mark.parametrize("safetensors", [False, True])
@pytest.mark.parametrize("n_groups", [1, 2])
def test_the_state_spaces_layout(tmp_path: Path, safetensors: bool, n_groups: int) -> None:
    theirs = mamba2(tie_word_embeddings=True, n_groups=n_groups).eval()
    disturb(theirs)
    tensors = {k.replace("embeddings", "embedding"): v.contiguous() for k, v in theirs.state_dict().items()}
    if safetensors:
        tensors.pop("lm_head.weight")
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    config = {
        "d_model": 24,
        "d_intermediate": 0,
        "n_layer": 3,
        "vocab_size": VOCAB - 3,
        "ssm_cfg": {"layer": "Mamba2", "ngroups": n_groups},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load_model(tmp_path)
    with torch.no_grad():
        assert relative(ours(ids(2, 19)).logits, theirs(ids(2, 19)).logits) < 1e-4
    (tmp_path / "config.json").write_text(json.dumps({**config, "ssm_cfg": {"layer": "Mamba1"}}))
    with pytest.raises(CheckpointError, match="Mamba1"):
        load_model(tmp_path)


class Danger:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_pickled_objects_are_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"emb.weight": torch.ones(2, 2), "x": Danger()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="tensors only"):
        load_model(tmp_path / "evil.pth")
    assert "executed" not in capsys.readouterr().out
