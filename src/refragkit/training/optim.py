"""AdamW over four kinds of parameters with learning rates of their own, schedules, and gradient clipping.

Kinds
    embedding    the token embedding (tied to the head or not)
    unembedding  the output head, where it is a weight of its own
    matrix       every other two-dimensional weight that mixes features: projections and adapter factors
    other        the rest: norms, biases, decays, convolutions, token-shift mixes, per-head vectors

Schedules are pure functions of the step, so that a resumed run needs the step number only.

Source: AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101); cosine: 2017 (arXiv 1608.03983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refragkit.errors import ConfigError, RefragError

KINDS = ("embedding", "unembedding", "matrix", "other")

# Two-dimensional, yet one value per channel: RWKV-7 stores its bonus as [head, channel of the head].
_VECTORS = ("r_k",)


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Peak learning rate per kind of parameter, each >= 0."""

    embedding: float
    unembedding: float
    matrix: float
    other: float

    def __post_init__(self) -> None:
        for kind in KINDS:
            value = getattr(self, kind)
            if not 0 <= value < math.inf:
                raise ConfigError(f"learning rate of {kind}: expected a finite number >= 0, got {value!r}.")

    @classmethod
    def uniform(cls, learning_rate: float) -> LearningRates:
        """The same rate for everything."""
        return cls(learning_rate, learning_rate, learning_rate, learning_rate)

    def scaled(self, factor: float) -> LearningRates:
        """All rates times ``factor``."""
        return LearningRates(*(getattr(self, kind) * factor for kind in KINDS))


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """The kind of each trainable parameter by its name; a tied weight appears once, as ``embedding``."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "head_weight", None)
    kinds = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            kinds[name] = "embedding"
        elif head is parameter:
            kinds[name] = "unembedding"
        elif parameter.ndim == 2 and min(parameter.shape) > 1 and name.rpartition(".")[2] not in _VECTORS:
            kinds[name] = "matrix"
        else:
            kinds[name] = "other"
    return kinds


def parameter_groups(
    model: nn.Module, learning_rates: LearningRates, *, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups the trainable parameters by kind, for a torch optimiser; empty kinds are left out.

    Each group has ``name``, ``params`` (in the model's order), ``lr``, ``initial_lr`` and ``weight_decay``,
    which is 0 for the kind ``other``: zero is no neutral value for a norm's gain or a state's decay rate.

    Raises:
        ConfigError: when nothing is trainable.
    """
    if not 0 <= weight_decay < math.inf:
        raise ConfigError(f"weight_decay: expected a finite number >= 0, got {weight_decay!r}.")
    kinds = parameter_kinds(model)
    if not kinds:
        raise ConfigError("The optimiser got no trainable parameter: every weight of the model is frozen.")
    parameters = dict(model.named_parameters())
    groups = []
    for kind in KINDS:
        members = [parameters[name] for name, its_kind in kinds.items() if its_kind == kind]
        if members:
            rate = getattr(learning_rates, kind)
            groups.append(
                {
                    "name": kind,
                    "params": members,
                    "lr": rate,
                    "initial_lr": rate,
                    "weight_decay": 0.0 if kind == "other" else weight_decay,
                }
            )
    return groups


def build_adamw(
    model: nn.Module,
    learning_rates: LearningRates,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW over ``parameter_groups``; the one-pass fused kernel where the device has it."""
    groups = parameter_groups(model, learning_rates, weight_decay=weight_decay)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=devices <= {"cpu", "cuda"})


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Sets each group's rate to its peak times ``factor``; returns the rates by group name."""
    rates = {}
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
        rates[str(group["name"])] = float(group["lr"])
    return rates


def constant(step: int, n_steps: int, warmup_steps: int = 0, final_fraction: float = 1.0) -> float:
    """1 after the warmup; ``final_fraction`` has no effect. See ``learning_rate_factor``."""
    return _warmup(step, n_steps, warmup_steps) or 1.0


def linear(step: int, n_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0) -> float:
    """Falls in a straight line from 1 towards ``final_fraction``. See ``learning_rate_factor``."""
    if (rising := _warmup(step, n_steps, warmup_steps)) is not None:
        return rising
    progress = (step - warmup_steps) / (n_steps - warmup_steps)
    return 1.0 - (1.0 - final_fraction) * progress


def cosine(step: int, n_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0) -> float:
    """Falls along half a cosine from 1 towards ``final_fraction``. See ``learning_rate_factor``."""
    if (rising := _warmup(step, n_steps, warmup_steps)) is not None:
        return rising
    progress = (step - warmup_steps) / (n_steps - warmup_steps)
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[int, int, int, float], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
}


def learning_rate_factor(
    schedule: str, step: int, n_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> float:
    """The factor on the peak learning rate for update number ``step``.

    The warmup rises by equal steps from 1 / warmup_steps at step 0 to 1 at its last step; then the schedule
    falls from 1 so that it would reach ``final_fraction`` at step ``n_steps``, one after the last: no update
    of a run has rate 0, the first and the last included. A run shorter than its warmup never leaves it.

    Args:
        schedule: ``constant``, ``linear`` or ``cosine``.
        step: the update about to be made, from 0.
        n_steps: updates in the whole run.
        warmup_steps: how many of them warm up.
        final_fraction: where the schedule heads, as a fraction of the peak.

    Raises:
        ConfigError: for an unknown schedule or a step outside the run.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: expected one of {sorted(SCHEDULES)}, got {schedule!r}.")
    return SCHEDULES[schedule](step, n_steps, warmup_steps, final_fraction)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales all gradients down together so that their norm is at most ``max_norm``; 0 clips nothing.

    Returns:
        The norm before clipping.

    Raises:
        RefragError: when the norm is not finite; an update with it would destroy the weights.
    """
    gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    value = float(norm)
    if not math.isfinite(value):
        raise RefragError(
            f"The norm of the gradient is {value}: training has diverged. Lower the learning rate "
            "or train in full precision."
        )
    if max_norm > 0 and value > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (value + 1e-6))
    return value


def _warmup(step: int, n_steps: int, warmup_steps: int) -> float | None:
    """The factor while warming up, else None."""
    if not 0 <= step < n_steps:
        raise ConfigError(f"schedule: expected a step in [0, {n_steps}), got {step}.")
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps: expected a number >= 0, got {warmup_steps}.")
    return (step + 1) / warmup_steps if step < warmup_steps else None
