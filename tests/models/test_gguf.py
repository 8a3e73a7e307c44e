from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import CheckpointError
from refragkit.models.checkpoint import load_model
from refragkit.models.gguf import convert_gguf
from refragkit.models.pretrained import resolve_pretrained

gguf = pytest.importorskip("gguf", reason="needs the extra smollm2")
pytest.importorskip("accelerate", reason="needs the extra smollm2")

TEXTS = ["In 1984 and 2024, 12.50 and 7,000,000: naïve 日本語 don't.", "cafe\u0301 or café, 42"] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """What SmolLM's own ``tokenizer.json`` says, with a small vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    # Merges of digits are in the vocabulary, so that a tokenizer that doesn't split digits shows
    learner = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer, own = learner, backend.pre_tokenizer
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    backend.pre_tokenizer = own
    return backend


def network(architecture: str, vocab_size: int, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    values = {**SIZES, "vocab_size": vocab_size, **changes}
    if architecture == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**values))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def write_gguf(
    file: Path,
    model: transformers.PreTrainedModel,
    backend: tokenizers.Tokenizer,
    architecture: str = "llama",
    split: str | None = "smollm",
    kind: str = "F32",
    extra: Callable[[Any], None] | None = None,
) -> Path:
    """The file that llama.cpp's converter writes for ``model``."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    state = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    for key, token in (("bos", "<|im_start|>"), ("eos", "<|im_end|>"), ("pad", "<|im_end|>")):
        getattr(writer, f"add_{key}_token_id")(tokens.index(token))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    if extra is not None:
        extra(writer)
    wanted = getattr(gguf.GGMLQuantizationType, kind)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if (
                architecture == "llama" and f"self_attn.{letter}_proj" in name
            ):  # rotates neighbours, not halves
                shape = values.shape
                values = values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2)
                values = np.ascontiguousarray(values.reshape(shape))
        theirs = name
        for old, new in NAMES.items():
            theirs = theirs.replace(old, new)
        used = wanted if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quants.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_the_logits_of_the_model_it_was_made_of(
    tmp_path: Path, backend: tokenizers.Tokenizer, architecture: str, tied: bool
) -> None:
    model = network(architecture, backend.get_vocab_size(), tie_word_embeddings=tied)
    split = "smollm" if architecture == "llama" else "qwen2"
    file = write_gguf(tmp_path / "m.gguf", model, backend, architecture, split)
    folder = convert_gguf(file, tmp_path / "cache", "m")
    ids = torch.randint(0, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    loaded = load_model(folder)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    assert (loaded.config.norm_eps, loaded.config.rope_theta) == (model.config.rms_norm_eps, 50_000.0)
    # transformers reads the folder like any other
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(theirs, ids), logits(model, ids), rtol=1e-4, atol=1e-4)


def test_the_tokenizer_keeps_template_control_tokens_and_the_digit_rule(
    tmp_path: Path, backend: tokenizers.Tokenizer
) -> None:
    file = write_gguf(tmp_path / "m.gguf", network("llama", backend.get_vocab_size()), backend)
    folder = convert_gguf(file, tmp_path / "cache", "m")
    tokenizer = Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, "1234567890 and  2001:db8", "\n\tx = 10**12", ""):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == theirs.encode(text) == expected
        assert tokenizer.decode(expected) == text
    assert len(tokenizer.encode("1984")) == 4
    assert (tokenizer.token(tokenizer.end_id), tokenizer.pad_id, tokenizer.bos_id) == ("<|im_end|>", 2, None)
    assert (tokenizer.chat_template, tokenizer.added_ids) == (TEMPLATE, {})
    assert tokenizer.vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_qwen_normalises_and_its_digits_stand_alone(
    tmp_path: Path, backend: tokenizers.Tokenizer, architecture: str
) -> None:
    model = network(architecture, backend.get_vocab_size())
    folder = convert_gguf(
        write_gguf(tmp_path / "m.gguf", model, backend, architecture, "qwen2"), tmp_path / "cache", "m"
    )
    # The file itself, which other programs read; transformers repairs it in part when it reads the folder
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for encode in (Tokenizer.load(folder).encode, lambda text: file.encode(text).ids):
        assert encode("cafe\u0301") == encode("café")
        assert len(encode("1984")) == 4


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")]
)
def test_weights_are_kept_exactly_in_the_narrowest_type(
    tmp_path: Path, backend: tokenizers.Tokenizer, kind: str, dtype: str
) -> None:
    model = network("llama", backend.get_vocab_size())
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    model.to(stored).float()
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, backend, kind=kind), tmp_path / "cache", "m")
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    state = load_model(folder).state_dict()
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{dtype}"}
    wanted = getattr(gguf.GGMLQuantizationType, kind)
    for ours, theirs in (("mlp.down_proj.weight", "mlp.down_proj.weight"), ("norm.weight", "norm.weight")):
        ours, theirs = (
            (f"blocks.1.{ours}", f"model.layers.1.{theirs}") if "mlp" in ours else (ours, f"model.{theirs}")
        )
        values = model.state_dict()[theirs].numpy()
        if values.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, wanted), wanted)
        assert torch.equal(state[ours].float(), torch.from_numpy(np.array(values, dtype=np.float32)))


def test_a_conversion_is_made_once_and_again_for_another_content(
    tmp_path: Path, backend: tokenizers.Tokenizer
) -> None:
    file = write_gguf(tmp_path / "m.gguf", network("llama", backend.get_vocab_size()), backend)
    cache = tmp_path / "cache"
    folder = resolve_pretrained(file, cache)
    (folder.parent / f".{folder.name}-killed.tmp").mkdir()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_pretrained(file, cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert json.loads((folder / "conversion.json").read_text())["source"] == "m.gguf"
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8] + bytes(7) + b"1")  # damaged, and still readable
    assert resolve_pretrained(file, cache) == folder and weights.read_bytes() == content
    write_gguf(file, network("llama", backend.get_vocab_size(), num_hidden_layers=1), backend)
    other = resolve_pretrained(file, cache)
    assert other != folder and load_model(other).n_layers == 1
    # What a killed process left is taken away by the next that makes the same
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()
    write_gguf(file, network("llama", backend.get_vocab_size()), backend)
    assert resolve_pretrained(file, cache) == folder
    assert {entry.name for entry in folder.parent.iterdir() if not entry.name.endswith(".lock")} == {
        folder.name,
        other.name,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architecture": "gemma"},
            "architecture 'gemma' is not implemented; implemented are llama and qwen2",
        ),
        ({"split": "chameleon"}, "splits text by the rule 'chameleon', which is not known"),
        ({"split": None}, "splits text by the rule 'default', which is not known"),
        (
            {"extra": lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))},
            r"scales its rotary frequencies \(rope_freqs.weight\)",
        ),
        (
            {"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            r"scales its rotary frequencies \(yarn\)",
        ),
        ({"extra": lambda w: w.add_expert_count(4)}, "mixture of experts"),
        (
            {"extra": lambda w: (w.add_key_length(16), w.add_rope_dimension_count(8))},
            "rotates 8 of 16 channels",
        ),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    tmp_path: Path, backend: tokenizers.Tokenizer, change: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", network("llama", backend.get_vocab_size()), backend, **change)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(file, tmp_path / "cache", "m")
    assert not [entry for entry in (tmp_path / "cache" / "pretrained").iterdir() if entry.is_dir()]


def test_broken_files_and_missing_packages_are_named(
    tmp_path: Path, backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF, or not")
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a GGUF file that can be read"):
        convert_gguf(file, tmp_path / "cache", "m")
    write_gguf(file, network("llama", backend.get_vocab_size()), backend)
    with pytest.raises(CheckpointError, match=r"its sha256 is [0-9a-f]{64}, expected 00"):
        convert_gguf(file, tmp_path / "cache", "m", digest="00")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        convert_gguf(file, tmp_path / "cache", "m")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        CheckpointError, match=r"needs gguf and accelerate: pip install 'refragkit\[smollm2\]'"
    ):
        convert_gguf(file, tmp_path / "cache", "m")
