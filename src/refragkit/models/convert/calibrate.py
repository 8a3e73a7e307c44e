"""Closed-form fits of new mixers to the attention that they replace.

Glossary: F ``[n, C]`` what a mixer hands to its output projection, O ``[n, d_model]`` what the attention put out,
W ``[d_model, C]`` the output projection, g ``[C]`` the gain of the norm in front of it.

A norm gives every head unit variance, where attention's outputs are small and uneven: with the teacher's W alone a
converted model is useless. Two remedies need nothing but sums over tokens of F F^T and F O^T, so memory doesn't grow
with the text:

- ``lsq``: W anew, by ridge regression of O on F. The better of the two where no training follows.
- ``cal``: the teacher's W stays and g is solved, ``(W^T W * F^T F) g = diag(W^T O^T F)`` with ``*`` by element. A start
  for training: what the teacher's W knows is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from refragkit.models.base import SequenceModel
from refragkit.models.convert.activations import mixer_activations, run_mixer
from refragkit.models.convert.blocks import mixer_of
from refragkit.models.layers.mamba2 import Mamba2
from refragkit.models.layers.rwkv7 import RWKV7TimeMix

Calibration = Literal["lsq", "cal", "none"]
RIDGE = 0.2
"""Weight of the penalty, in units of the features' mean square."""


@dataclass(frozen=True)
class CalibrationReport:
    """How well one mixer fits: mean squared error over the mean square of the attention's output.

    Attributes:
        layer: the block.
        copied: with the teacher's weights and a gain of 1.
        fitted: after the fit, on the same tokens.
    """

    layer: int
    copied: float
    fitted: float


class Gram:
    """Sums over tokens that decide both fits, in float64.

    Args:
        features: C.
        outputs: d_model.
    """

    def __init__(self, features: int, outputs: int) -> None:
        self.tokens = 0
        self.features = torch.zeros(features, features, dtype=torch.float64)
        self.products = torch.zeros(features, outputs, dtype=torch.float64)
        self.squares = 0.0

    def add(self, features: Tensor, outputs: Tensor) -> None:
        """Take in F ``[..., C]`` and O ``[..., d_model]``."""
        F = features.reshape(-1, features.shape[-1]).double().cpu()
        O = outputs.reshape(-1, outputs.shape[-1]).double().cpu()  # noqa: E741
        self.tokens += len(F)
        self.features += F.T @ F
        self.products += F.T @ O
        self.squares += float(O.square().sum())

    def error(self, weight: Tensor, gain: Tensor | None = None) -> float:
        """``|O - (F * gain) W^T|^2 / |O|^2``."""
        W = weight.detach().double().cpu()
        W = W if gain is None else W * gain.detach().double().cpu()
        explained = 2 * (W.T * self.products).sum() - ((W @ self.features) * W).sum()
        return float(1 - explained / self.squares)

    def output_projection(self, ridge: float = RIDGE) -> Tensor:
        """The projection of ``lsq``."""
        penalty = ridge * float(self.features.diagonal().mean())
        system = self.features + penalty * torch.eye(len(self.features), dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(system, self.products)
        return solved.T

    def gain(self, weight: Tensor) -> Tensor:
        """The gain of ``cal`` for W ``[d_model, C]``."""
        W = weight.detach().double().cpu()
        system = (W.T @ W) * self.features
        target = (W.T * self.products).sum(1)
        # A head that puts out nothing leaves a singular system; any g does there
        return cast(Tensor, torch.linalg.lstsq(system, target[:, None], driver="gelsd").solution[:, 0])


@torch.no_grad()
def mixer_features(mixer: nn.Module, x: Tensor) -> Tensor:
    """F of inputs ``x [B, T, d_model]``: ``[B, T, C]``."""
    found: list[Tensor] = []
    handle = output_projection(mixer).register_forward_pre_hook(
        lambda module, inputs: found.append(inputs[0].detach())
    )
    try:
        run_mixer(mixer, x)
    finally:
        handle.remove()
    return found[0]


def output_projection(mixer: nn.Module) -> nn.Linear:
    """The last matrix of a recurrent mixer."""
    return cast(nn.Linear, mixer.get_submodule("out_proj" if isinstance(mixer, Mamba2) else "o_proj"))


def norm_gain(mixer: nn.Module) -> nn.Parameter:
    """The gain of the norm in front of it."""
    return mixer.get_parameter("norm.weight" if isinstance(mixer, Mamba2) else "ln_x.weight")


@torch.no_grad()
def calibrate(
    student: SequenceModel,
    teacher: SequenceModel,
    layers: Sequence[int],
    batches: Iterable[Tensor],
    kind: Calibration = "lsq",
) -> list[CalibrationReport]:
    """Fit freshly converted mixers to the teacher's, each on the teacher's own inputs.

    Args:
        student: as :func:`~refragkit.models.convert.blocks.convert_blocks` returns it; its new mixers are changed.
        teacher: what it was converted from.
        layers: the converted blocks.
        batches: token ids, int64 ``[B, T]`` each, no padding.
        kind: see the module; ``none`` only measures.

    Returns:
        A report per block.
    """
    grams: dict[int, Gram] = {}
    for input_ids in batches:
        for index, (x, y) in mixer_activations(teacher, layers, input_ids).items():
            features = mixer_features(mixer_of(student, index), x)
            gram = grams.setdefault(index, Gram(features.shape[-1], y.shape[-1]))
            gram.add(features, y)
    return [fit(mixer_of(student, index), index, grams[index], kind) for index in layers]


@torch.no_grad()
def fit(mixer: nn.Module, layer: int, gram: Gram, kind: Calibration) -> CalibrationReport:
    """Set what ``kind`` solves for in one mixer whose gain is 1."""
    assert isinstance(mixer, (Mamba2, RWKV7TimeMix))
    weight, gain = output_projection(mixer).weight, norm_gain(mixer)
    copied = fitted = gram.error(weight)
    if kind == "lsq":
        weight.copy_(gram.output_projection())
        fitted = gram.error(weight)
    elif kind == "cal":
        gain.copy_(gram.gain(weight))
        fitted = gram.error(weight, gain)
    return CalibrationReport(layer, copied, fitted)
