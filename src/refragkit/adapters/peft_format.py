"""LoRA adapters on disk in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json``.

Keys are ``base_model.model.<module path>.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r]. For a
stack of attention blocks only, the module path is the one that Qwen2 and Llama have in transformers
(``model.layers.{i}.self_attn.q_proj``, ``model.layers.{i}.mlp.gate_proj``), so that PEFT loads our adapters
and we load PEFT's; for any other stack it is the path in our model.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from refragkit.adapters.lora import LoRALinear, block_pattern, lora_layers, projections, report, wrap
from refragkit.adapters.low_rank import AdapterWeights, LowRank
from refragkit.adapters.report import AdapterReport
from refragkit.errors import CheckpointError, ConfigError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
# Among the metadata of the file of weights, which PEFT passes over; in the configuration it would warn of it
_BASE_HASH = "refragkit_base_weights"

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
# Initialisations of PEFT that also change the base weights: their A and B mean nothing on the plain base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def portable_paths(model: nn.Module) -> dict[str, str]:
    """Maps each projection's path in our model to its path in the file."""
    pure_attention = set(block_pattern(model)) == {"T"}
    paths = {}
    for projection in projections(model):
        paths[projection.path] = projection.path
        if pure_attention and projection.name in _ATTENTION | _MLP:
            part = "self_attn" if projection.name in _ATTENTION else "mlp"
            paths[projection.path] = f"model.layers.{projection.block}.{part}.{projection.name}"
    return paths


def adapter_weights(model: nn.Module, base_hash: str | None = None) -> AdapterWeights:
    """The model's adapter as plain tensors; detached, on the CPU, not copied where they are.

    Args:
        model: an adapted model.
        base_hash: see `AdapterWeights`.

    Raises:
        ConfigError: when the model has no adapter.
    """
    paths = portable_paths(model)
    adapted = [(paths[path], layer) for path, layer in lora_layers(model)]
    if not adapted:
        raise ConfigError("save_adapter: this model has no LoRA adapter; apply one first (adapter=lora).")
    layers = {
        path: LowRank(
            layer.lora_A.detach().cpu().contiguous(),
            layer.lora_B.detach().cpu().contiguous(),
            layer.alpha,
            layer.rslora,
        )
        for path, layer in adapted
    }
    names = {path.rpartition(".")[2] for path in layers}
    everywhere = {path for path in paths.values() if path.rpartition(".")[2] in names} == set(layers)
    return AdapterWeights(
        layers=layers,
        dropout=adapted[0][1].dropout,
        # Names where they say it all; whole paths where some blocks are left out.
        target_modules=tuple(sorted(names)) if everywhere else (),
        base_hash=base_hash,
    )


def save_adapter(model: nn.Module, folder: str | Path, base_hash: str | None = None) -> Path:
    """Writes the model's adapter to ``folder``; each file appears whole or not at all.

    Args:
        model: an adapted model.
        folder: made if missing.
        base_hash: `refragkit.models.weights_hash.weights_hash` of the model that was adapted; None: not known, and
            nothing will tell that the adapter is put onto another one of the same shape.

    Returns:
        The folder.

    Raises:
        ConfigError: when the model has no adapter.
    """
    return write_adapter(adapter_weights(model, base_hash), folder)


def write_adapter(adapter: AdapterWeights, folder: str | Path, weights_file: str = WEIGHTS_FILE) -> Path:
    """Writes an adapter to ``folder``; each file appears whole or not at all.

    Args:
        adapter: what to write.
        folder: made if missing.
        weights_file: name of the file of weights there; PEFT looks for the default only, ``read_adapter`` takes any.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    if adapter.base_hash is not None:
        metadata[_BASE_HASH] = adapter.base_hash
    temporary = folder / f".{weights_file}.{os.getpid()}.tmp"
    save_file(_tensors(adapter), temporary, metadata=metadata)
    _sort_metadata(temporary)
    _publish(temporary, folder / weights_file)
    temporary = folder / f".{CONFIG_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(_config(adapter), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _publish(temporary, folder / CONFIG_FILE)
    return folder


def read_adapter(location: str | Path) -> AdapterWeights:
    """Reads an adapter without a model.

    Args:
        location: a folder written by ``save_adapter`` or by PEFT, or another file of weights in such a folder.

    Raises:
        CheckpointError: for a file that is missing or unreadable, or a kind of adapter that we don't compute.
    """
    source = Path(location)
    if source.suffix != ".safetensors":
        source = source / WEIGHTS_FILE
    config = _read_config(source.parent / CONFIG_FILE)
    tensors, metadata = _read_tensors(source)
    rslora = bool(config["use_rslora"])
    layers = {}
    for path, (a, b) in _pair(tensors, source).items():
        rank = a.shape[0] if a.ndim == 2 else 0
        if rank < 1 or b.ndim != 2 or b.shape[1] != rank:
            raise CheckpointError(
                f"{source}: {path} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}; expected [rank, in] and "
                "[out, rank]."
            )
        layers[path] = LowRank(a, b, _alpha(config, path), rslora)
    # Where more than names decides which layers are meant, their paths say it best.
    narrowed = any(config.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    targets = None if narrowed else config.get("target_modules")
    return AdapterWeights(
        layers=layers,
        dropout=float(config["lora_dropout"]),
        target_modules=tuple(map(str, targets)) if isinstance(targets, list) else (),
        base_hash=metadata.get(_BASE_HASH),
        source=str(source),
    )


def load_adapter(
    model: nn.Module, folder: str | Path, *, trainable: bool = False, base_hash: str | None = None
) -> AdapterReport:
    """Puts an adapter from ``folder`` onto the model; the rest of the model is frozen.

    A model without an adapter gets one with the file's layers, ranks and alphas; a model that has one already
    must have exactly the file's layers and ranks, and takes over its values and scaling.

    Args:
        model: a stack with ``block_pattern``.
        folder: written by ``save_adapter`` or by PEFT.
        trainable: whether the adapter's weights are trained further.
        base_hash: of the model, to be compared with that of the model that the adapter was made for, where both are
            known.

    Raises:
        CheckpointError: for a file that is missing or unreadable, a kind of adapter that we don't compute, or
            one that does not fit the model. The model is unchanged then.
    """
    adapter = read_adapter(folder)
    check_base(adapter, base_hash)
    return put_adapter(model, adapter, trainable=trainable)


def check_base(adapter: AdapterWeights, base_hash: str | None) -> None:
    """Makes sure that an adapter belongs onto a model, where both are known.

    Raises:
        CheckpointError: it was made for another one.
    """
    if None not in (adapter.base_hash, base_hash) and adapter.base_hash != base_hash:
        raise CheckpointError(
            f"{adapter.source}: the adapter was trained on another base model (weights hash "
            f"{str(adapter.base_hash)[:16]}..., this model has {str(base_hash)[:16]}...); give the model that it was "
            "trained on."
        )


def put_adapter(model: nn.Module, adapter: AdapterWeights, *, trainable: bool = False) -> AdapterReport:
    """``load_adapter`` of an adapter that was read or made already.

    Raises:
        CheckpointError: it does not fit the model, which is unchanged then.
    """
    source, layers = adapter.source or "adapter", adapter.layers
    modules = {there: here for here, there in portable_paths(model).items()}
    unknown = sorted(set(layers) - set(modules))
    if unknown:
        raise CheckpointError(
            f"{source}: {len(unknown)} adapted layers do not exist in this model, the first is {unknown[0]}; "
            "the adapter belongs to another base model."
        )
    for path, update in layers.items():
        module = model.get_submodule(modules[path])
        if not isinstance(module, (nn.Linear, LoRALinear)):
            raise CheckpointError(f"{source}: {path} is not a linear layer in this model.")
        if update.shape != (module.out_features, module.in_features):
            raise CheckpointError(
                f"{source}: {path} has lora_A {tuple(update.A.shape)} and lora_B {tuple(update.B.shape)}; this model "
                f"needs [rank, {module.in_features}] and [{module.out_features}, rank]. The adapter belongs to "
                "another base model."
            )
    existing = dict(lora_layers(model))
    if existing:
        fits = {modules[path]: update.rank for path, update in layers.items()}
        has = {path: layer.rank for path, layer in existing.items()}
        if fits != has:
            raise CheckpointError(
                f"{source}: its {len(fits)} layers of rank {sorted(set(fits.values()))} are not the "
                f"{len(has)} layers of rank {sorted(set(has.values()))} that this model is adapted with."
            )

    model.requires_grad_(False)
    for path, update in layers.items():
        layer = existing.get(modules[path])
        if layer is None:
            layer = wrap(
                model,
                modules[path],
                rank=update.rank,
                alpha=update.alpha,
                dropout=adapter.dropout,
                rslora=update.rslora,
            )
        layer.alpha, layer.rslora = update.alpha, update.rslora
        with torch.no_grad():
            layer.lora_A.copy_(update.A)
            layer.lora_B.copy_(update.B)
        layer.lora_A.requires_grad_(trainable)
        layer.lora_B.requires_grad_(trainable)
    available = projections(model)
    chosen = {modules[path] for path in layers}
    return report(model, tuple(p for p in available if p.path in chosen), available)


def _tensors(adapter: AdapterWeights) -> dict[str, Tensor]:
    """An adapter's tensors by their keys in PEFT's format."""
    state = {}
    for path, update in adapter.layers.items():
        state[f"{PREFIX}{path}.lora_A.weight"] = update.A
        state[f"{PREFIX}{path}.lora_B.weight"] = update.B
    return state


def _config(adapter: AdapterWeights) -> dict[str, Any]:
    """The contents of ``adapter_config.json``."""
    layers = adapter.layers
    rank = Counter(update.rank for update in layers.values()).most_common(1)[0][0]
    alpha = Counter(update.alpha for update in layers.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": next(iter(layers.values())).rslora,
        "target_modules": list(adapter.target_modules) or sorted(layers),
        "rank_pattern": {path: update.rank for path, update in layers.items() if update.rank != rank},
        "alpha_pattern": {path: update.alpha for path, update in layers.items() if update.alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _sort_metadata(path: Path) -> None:
    """Gives equal adapters equal bytes: safetensors writes metadata in another order each time."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def _publish(temporary: Path, target: Path) -> None:
    """Makes a finished file visible under its name, after its bytes are on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(target)


def _read_config(path: Path) -> dict[str, Any]:
    """Reads ``adapter_config.json`` and refuses what ``LoRALinear`` does not compute."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; expected a folder written by save_adapter or PEFT."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}).") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(f"{path}: expected peft_type 'LORA', got {kind!r}.")
    defaults = {"lora_dropout": 0.0, "use_rslora": False, "alpha_pattern": {}, "bias": "none"}
    config = defaults | config
    config["alpha_pattern"] = config["alpha_pattern"] or {}
    _check_numbers(config, path)
    unsupported = {
        "use_dora": config.get("use_dora"),
        "bias": config["bias"] != "none",
        "lora_bias": config.get("lora_bias"),
        "modules_to_save": config.get("modules_to_save"),
        "fan_in_fan_out": config.get("fan_in_fan_out"),
        "init_lora_weights": str(config.get("init_lora_weights")).lower().startswith(_CHANGES_BASE),
    }
    for key, used in unsupported.items():
        if used:
            raise CheckpointError(f"{path}: {key}={config.get(key)!r} is not supported; expected plain LoRA.")
    return config


def _check_numbers(config: Mapping[str, Any], path: Path) -> None:
    """Refuses scalings that are no numbers, NaN among them, and patterns that are no regular expressions."""
    patterns = config["alpha_pattern"]
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path}: alpha_pattern: expected an object, got {patterns!r}.")
    alphas = {"lora_alpha": config.get("lora_alpha")}
    alphas |= {f"alpha_pattern[{pattern!r}]": alpha for pattern, alpha in patterns.items()}
    for key, alpha in alphas.items():
        if not _is_number(alpha):
            raise CheckpointError(f"{path}: {key}: expected a finite number, got {alpha!r}.")
    dropout = config["lora_dropout"]
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise CheckpointError(f"{path}: lora_dropout: expected a number in [0, 1), got {dropout!r}.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{path}: alpha_pattern: {pattern!r} is not a regular expression ({error})."
            ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads all tensors of a safetensors file, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, file.metadata() or {}
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; expected a folder written by save_adapter or PEFT."
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error}).") from None


def _pair(tensors: Mapping[str, Tensor], source: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Groups the tensors of a file into (A, B) by module path."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.(lora_A|lora_B)\.weight", key)
        if match is None:
            raise CheckpointError(
                f"{source}: unexpected key {key!r}; expected {PREFIX}<module path>.lora_A.weight or "
                "lora_B.weight."
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{source}: {key} holds values that are not finite.")
        halves.setdefault(match[1], {})[match[2]] = tensor
    for path, half in halves.items():
        if len(half) != 2:
            raise CheckpointError(
                f"{source}: {path} has {next(iter(half))} only; expected lora_A and lora_B."
            )
    if not halves:
        raise CheckpointError(f"{source}: holds no LoRA layer.")
    return {path: (half["lora_A"], half["lora_B"]) for path, half in halves.items()}


def _alpha(config: Mapping[str, Any], path: str) -> float:
    """A layer's alpha: PEFT's ``alpha_pattern`` entries are regular expressions for the end of a path."""
    for pattern, alpha in config["alpha_pattern"].items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return float(alpha)
    return float(config["lora_alpha"])
