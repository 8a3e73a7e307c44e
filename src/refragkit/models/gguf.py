"""GGUF files into Hugging Face folders, once: quantised weights back to floats, with the file's own tokenizer.

The arithmetic and the names are those of ``transformers`` and ``gguf``. What they leave wrong or unsaid is repaired or
refused here, since each of it gives a model that runs and is subtly worse: the digit rule of SmolLM's tokenizer, the
normalisation of Qwen's, scaled rotary frequencies, vocabularies split in an unknown way.

Source: the format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the rules for splitting text,
``llm_tokenizer_bpe`` of llama.cpp and each model's ``tokenizer.json``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from refragkit.errors import CheckpointError
from refragkit.models.checksums import CHECKSUMS, file_digest, is_whole, write_checksums

log = logging.getLogger("refragkit")

ARCHITECTURES = ("llama", "qwen2")
"""What of GGUF's ``general.architecture`` can be read."""

EXTRA_COMMAND = "pip install 'refragkit[smollm2]'"
"""Installs what reading GGUF files takes."""

CONVERSION_FILE = "conversion.json"
"""Says in a converted folder what it was made of."""

# Changes when a conversion gives another result than before: folders of earlier ones are not used any more
_CONVERSION = 2
_SMOLLM, _QWEN2 = ("smollm",), ("qwen2", "deepseek-r1-qwen")
# Rules for splitting text (tokenizer.ggml.pre) of which transformers has the regular expression, or that are set below
_KNOWN_SPLITS = ("gpt-2", "llama3", "llama-v3", "llama-bpe", *_QWEN2, *_SMOLLM)


def convert_gguf(file: Path, cache_dir: Path, name: str, digest: str | None = None) -> Path:
    """A Hugging Face folder (safetensors, ``config.json``, tokenizer) with what a GGUF file holds.

    Weights are kept in the narrowest of bfloat16, float16 and float32 that holds every dequantised value exactly:
    float32 for quantised files, whose values are products of a scale and an integer.

    Args:
        file: the file.
        cache_dir: the folder is made under ``<cache_dir>/pretrained/``, named by the file's content, and found there
            the next time; whole or not at all, also when two processes want it at once.
        name: opens the folder's name.
        digest: the sha256 that the file must have; None for any.

    Raises:
        CheckpointError: a package is missing, the file is broken or another than expected, or it holds something that
            can't be read correctly; the message says which.
    """
    if digest is None:
        digest = file_digest(file)
    target = converted_folder(cache_dir, name, digest)
    if is_whole(target):
        return target
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise CheckpointError(f"reading {file} needs {' and '.join(missing)}: {EXTRA_COMMAND}")
    found = file_digest(file)
    if found != digest:
        raise CheckpointError(f"{file} is not the expected file: its sha256 is {found}, expected {digest}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        if is_whole(target):  # another process made it meanwhile
            return target
        if target.exists():
            log.warning("%s does not match its %s and is made again", target, CHECKSUMS)
            shutil.rmtree(target)
        for left in target.parent.glob(f".{target.name}-*.tmp"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent))
        try:
            log.info("converting %s, once; it takes about a minute for each 100 MB ...", file.name)
            _convert(file, work, digest)
            write_checksums(work)
            work.chmod(0o755)
            work.replace(target)
        except CheckpointError:
            raise
        except Exception as error:  # transformers, gguf and the disk raise many types
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise CheckpointError(
                f"{file} can't be converted into {target}: {type(error).__name__}: {first_line}"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    log.info("kept in %s", target)
    return target


def converted_folder(cache_dir: Path, name: str, digest: str) -> Path:
    """Where the conversion of a file with this sha256 is, or will be."""
    key = hashlib.sha256(f"{_CONVERSION} {digest}".encode()).hexdigest()[:12]
    return cache_dir / "pretrained" / f"{name}-{key}"


def _convert(file: Path, folder: Path, digest: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    split = _check_header(file)
    with tempfile.TemporaryDirectory() as alone:  # where no file beside it can get between
        (Path(alone) / file.name).symlink_to(file.absolute())
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(alone, gguf_file=file.name, dtype=torch.float32)
    config: dict[str, Any] = model.config.to_dict()
    if config.get("model_type") not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: transformers reads it as model_type {config.get('model_type')!r}; "
            f"implemented are {' and '.join(ARCHITECTURES)}"
        )
    tensors = dict(model.state_dict())
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    dtype = _exact_dtype(tensors)
    save_file(
        {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    # Stored as a float32, read as a double: 9.999999747e-06 is the same number in the arithmetic as 1e-05
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    _write_json(folder / "config.json", config)
    model.generation_config.save_pretrained(folder)

    _repair(tokenizer, split)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    _write_json(
        folder / CONVERSION_FILE,
        {
            "source": file.name,
            "source_bytes": file.stat().st_size,
            "source_sha256": digest,
            "conversion": _CONVERSION,
            "weights_sha256": file_digest(folder / "model.safetensors"),
            "packages": {package: version(package) for package in ("gguf", "tokenizers", "transformers")},
        },
    )


def _check_header(file: Path) -> str:
    """The name of the rule for splitting text, of a file that can be read correctly."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        values = {
            key: reader.fields[key].contents()
            for key in reader.fields
            if key.startswith(("general.", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
            or ".rope." in key
            or ".expert" in key
            or key.endswith(".attention.key_length")
        }
    except Exception as error:  # whatever a broken file makes of the reader
        raise CheckpointError(f"{file} is not a GGUF file that can be read: {error}") from error
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: GGUF architecture {architecture!r} is not implemented; implemented are "
            f"{' and '.join(ARCHITECTURES)}. Use the model's safetensors folder if its family is one of those that "
            "load_model reads."
        )
    scaling = values.get(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in {tensor.name for tensor in reader.tensors} or scaling != "none":
        raise CheckpointError(
            f"{file}: it scales its rotary frequencies ({scaling if scaling != 'none' else 'rope_freqs.weight'}), "
            "which is lost on the way through transformers; use the model's safetensors folder"
        )
    width = values.get(f"{architecture}.attention.key_length")
    rotary = values.get(f"{architecture}.rope.dimension_count")
    if width is not None and rotary is not None and width != rotary:
        raise CheckpointError(
            f"{file}: rotates {rotary} of {width} channels of each head, which is not implemented"
        )
    if values.get(f"{architecture}.expert_count"):
        raise CheckpointError(f"{file}: it is a mixture of experts, which is not implemented")
    split = str(values.get("tokenizer.ggml.pre", ""))
    if values.get("tokenizer.ggml.model") == "gpt2" and split not in _KNOWN_SPLITS:
        raise CheckpointError(
            f"{file}: its tokenizer splits text by the rule {split or 'default'!r}, which is not known here (known are "
            f"{', '.join(_KNOWN_SPLITS)}): texts would get wrong tokens. Use the model's safetensors folder."
        )
    return split


def _repair(tokenizer: Any, split: str) -> None:
    """Give a tokenizer what its file names and transformers leaves out."""
    from tokenizers import normalizers, pre_tokenizers

    if split in _SMOLLM:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if split in _QWEN2:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def _exact_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in tensors.values()):
            return dtype
    return torch.float32


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
