"""LoRA adapters on disk in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json``.

Keys are ``base_model.model.<module path>.lora_A.weight`` [r, in] and ``...lora_B.weight`` [out, r]. For a
stack of attention blocks only, the module path is the one that Qwen2 and Llama have in transformers
(``model.layers.{i}.self_attn.q_proj``, ``model.layers.{i}.mlp.gate_proj``), so that PEFT loads our adapters
and we load PEFT's; for any other stack it is the path in our model.
"""

from __future__ import annotations

import json
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
from refragkit.adapters.report import AdapterReport
from refragkit.errors import CheckpointError, ConfigError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."

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


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by their keys in PEFT's format; detached, on the CPU, not copied where they are.

    Raises:
        ConfigError: when the model has no adapter.
    """
    paths = portable_paths(model)
    state = {}
    for path, layer in lora_layers(model):
        state[f"{PREFIX}{paths[path]}.lora_A.weight"] = layer.lora_A.detach().cpu().contiguous()
        state[f"{PREFIX}{paths[path]}.lora_B.weight"] = layer.lora_B.detach().cpu().contiguous()
    if not state:
        raise ConfigError("save_adapter: this model has no LoRA adapter; apply one first (adapter=lora).")
    return state


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """The adapter's ``adapter_config.json``, read off the adapted layers."""
    paths = portable_paths(model)
    layers = [(paths[path], layer) for path, layer in lora_layers(model)]
    if not layers:
        raise ConfigError("save_adapter: this model has no LoRA adapter; apply one first (adapter=lora).")
    rank = Counter(layer.rank for _, layer in layers).most_common(1)[0][0]
    alpha = Counter(layer.alpha for _, layer in layers).most_common(1)[0][0]
    adapted = {path for path, _ in layers}
    names = {path.rpartition(".")[2] for path in adapted}
    everywhere = {path for path in paths.values() if path.rpartition(".")[2] in names} == adapted
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": layers[0][1].dropout,
        "use_rslora": layers[0][1].rslora,
        # Names where they say it all; whole paths where some blocks are left out.
        "target_modules": sorted(names if everywhere else adapted),
        "rank_pattern": {path: layer.rank for path, layer in layers if layer.rank != rank},
        "alpha_pattern": {path: layer.alpha for path, layer in layers if layer.alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def save_adapter(model: nn.Module, folder: str | Path) -> Path:
    """Writes the model's adapter to ``folder``; each file appears whole or not at all.

    Returns:
        The folder.

    Raises:
        ConfigError: when the model has no adapter.
    """
    folder = Path(folder)
    state, config = adapter_state(model), adapter_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS_FILE}.{os.getpid()}.tmp"
    save_file(state, temporary, metadata={"format": "pt"})
    _publish(temporary, folder / WEIGHTS_FILE)
    temporary = folder / f".{CONFIG_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _publish(temporary, folder / CONFIG_FILE)
    return folder


def load_adapter(model: nn.Module, folder: str | Path, *, trainable: bool = False) -> AdapterReport:
    """Puts an adapter from ``folder`` onto the model; the rest of the model is frozen.

    A model without an adapter gets one with the file's layers, ranks and alphas; a model that has one already
    must have exactly the file's layers and ranks, and takes over its values and scaling.

    Args:
        model: a stack with ``block_pattern``.
        folder: written by ``save_adapter`` or by PEFT.
        trainable: whether the adapter's weights are trained further.

    Raises:
        CheckpointError: for a file that is missing or unreadable, a kind of adapter that we don't compute, or
            one that does not fit the model. The model is unchanged then.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG_FILE)
    source = folder / WEIGHTS_FILE
    tensors = _read_tensors(source)
    layers = _pair(tensors, source)

    modules = {there: here for here, there in portable_paths(model).items()}
    unknown = sorted(set(layers) - set(modules))
    if unknown:
        raise CheckpointError(
            f"{source}: {len(unknown)} adapted layers do not exist in this model, the first is {unknown[0]}; "
            "the adapter belongs to another base model."
        )
    for path, (a, b) in layers.items():
        module = model.get_submodule(modules[path])
        if not isinstance(module, (nn.Linear, LoRALinear)):
            raise CheckpointError(f"{source}: {path} is not a linear layer in this model.")
        rank = a.shape[0] if a.ndim == 2 else 0
        want_a, want_b = (rank, module.in_features), (module.out_features, rank)
        if rank < 1 or tuple(a.shape) != want_a or tuple(b.shape) != want_b:
            raise CheckpointError(
                f"{source}: {path} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}; this model needs "
                f"[rank, {module.in_features}] and [{module.out_features}, rank]. The adapter belongs to "
                "another base model."
            )
    existing = dict(lora_layers(model))
    if existing:
        fits = {modules[path]: a.shape[0] for path, (a, _) in layers.items()}
        has = {path: layer.rank for path, layer in existing.items()}
        if fits != has:
            raise CheckpointError(
                f"{source}: its {len(fits)} layers of rank {sorted(set(fits.values()))} are not the "
                f"{len(has)} layers of rank {sorted(set(has.values()))} that this model is adapted with."
            )

    model.requires_grad_(False)
    for path, (a, b) in layers.items():
        layer = existing.get(modules[path])
        alpha, dropout, rslora = (
            _alpha(config, path),
            float(config["lora_dropout"]),
            bool(config["use_rslora"]),
        )
        if layer is None:
            layer = wrap(model, modules[path], rank=a.shape[0], alpha=alpha, dropout=dropout, rslora=rslora)
        layer.alpha, layer.rslora = alpha, rslora
        with torch.no_grad():
            layer.lora_A.copy_(a)
            layer.lora_B.copy_(b)
        layer.lora_A.requires_grad_(trainable)
        layer.lora_B.requires_grad_(trainable)
    available = projections(model)
    chosen = {modules[path] for path in layers}
    return report(model, tuple(p for p in available if p.path in chosen), available)


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
    if not isinstance(config.get("lora_alpha"), (int, float)):
        raise CheckpointError(f"{path}: lora_alpha: expected a number, got {config.get('lora_alpha')!r}.")
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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
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
