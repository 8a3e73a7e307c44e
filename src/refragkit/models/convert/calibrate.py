"""Closed-form fits of new mixers to the attention that they replace.

Glossary: F ``[n, C]`` what a mixer hands to its output projection, O ``[n, d_model]`` what the attention put out, both
without their means over tokens; W ``[d_model, C]`` the output projection, g ``[C]`` the gain of the norm before it.

A norm gives every head unit variance, where attention's outputs are small and uneven: with the teacher's W alone a
converted model is useless. Two remedies need nothing but sums over tokens of F F^T and F O^T, so memory doesn't grow
with the text:

- ``lsq``: W anew, by ridge regression of O on F. The better of the two where no training follows.
- ``cal``: the teacher's W stays and g is solved, ``(W^T W * F^T F) g = diag(W^T O^T F)`` with ``*`` by element. A start
  for training: what the teacher's W knows is kept.
"""

from __future__ import annotations

import copy
import math
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
    """How well one mixer fits: mean squared error over the variance of the attention's output.

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
        self._features = torch.zeros(features, features, dtype=torch.float64)
        self._products = torch.zeros(features, outputs, dtype=torch.float64)
        self._feature_sum = torch.zeros(features, dtype=torch.float64)
        self._output_sum = torch.zeros(outputs, dtype=torch.float64)
        self._squares = 0.0

    def add(self, features: Tensor, outputs: Tensor) -> None:
        """Take in F ``[..., C]`` and O ``[..., d_model]``, means included."""
        F = features.reshape(-1, features.shape[-1]).double().cpu()
        O = outputs.reshape(-1, outputs.shape[-1]).double().cpu()  # noqa: E741
        self.tokens += len(F)
        self._features += F.T @ F
        self._products += F.T @ O
        self._feature_sum += F.sum(0)
        self._output_sum += O.sum(0)
        self._squares += float(O.square().sum())

    @property
    def feature_mean(self) -> Tensor:
        """``[C]``."""
        return self._feature_sum / self.tokens

    @property
    def output_mean(self) -> Tensor:
        """``[d_model]``."""
        return self._output_sum / self.tokens

    @property
    def features(self) -> Tensor:
        """``F^T F`` without means, ``[C, C]``."""
        return self._features - self.tokens * torch.outer(self.feature_mean, self.feature_mean)

    @property
    def products(self) -> Tensor:
        """``F^T O`` without means, ``[C, d_model]``."""
        return self._products - self.tokens * torch.outer(self.feature_mean, self.output_mean)

    def error(self, weight: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> float:
        """Squared error of ``(F * gain) weight^T + bias``, means included, over O's variance; no bias is 0."""
        W = weight.detach().double().cpu()
        W = W if gain is None else W * gain.detach().double().cpu()
        unexplained = self._squares - self.tokens * float(self.output_mean.square().sum())
        variance = max(unexplained, 1e-12 * self._squares)  # an attention that puts out a constant has none
        unexplained -= float(2 * (W.T * self.products).sum() - ((W @ self.features) * W).sum())
        off = W @ self.feature_mean - self.output_mean
        if bias is not None:
            off += bias.detach().double().cpu()
        return (unexplained + self.tokens * float(off.square().sum())) / variance

    def output_projection(self, ridge: float = RIDGE, centred: bool = True) -> Tensor:
        """The projection of ``lsq``; not ``centred``, it has the means to carry as well."""
        features, products = (self.features, self.products) if centred else (self._features, self._products)
        penalty = ridge * float(features.diagonal().mean())
        system = features + penalty * torch.eye(len(features), dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(system, products)
        return solved.T

    def gain(self, weight: Tensor) -> Tensor:
        """The gain of ``cal`` for W ``[d_model, C]``."""
        W = weight.detach().double().cpu()
        system = (W.T @ W) * self.features
        target = (W.T * self.products).sum(1)
        # A head that puts out nothing leaves a singular system; any g does there
        return cast(Tensor, torch.linalg.lstsq(system, target[:, None], driver="gelsd").solution[:, 0])

    def bias(self, weight: Tensor, gain: Tensor) -> Tensor:
        """What takes the mean of ``(F * gain) weight^T`` to O's: ``[d_model]``."""
        return self.output_mean - weight.detach().double().cpu() @ (
            gain.detach().double().cpu() * self.feature_mean
        )


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
    copied = fitted = gram.error(weight, bias=output_projection(mixer).bias)
    if kind == "none":
        return CalibrationReport(layer, copied, fitted)
    if kind == "cal":
        gain.copy_(gram.gain(weight))
        fitted = _fit_bias(mixer, gram)
    else:
        fitted = math.inf
        # A bias in front of the projection reaches only what the projection passes on. Where that leaves out much of
        # the mean, as with attention whose values have large biases, the projection itself does better.
        for centred in (True,) if isinstance(mixer, Mamba2) else (True, False):
            before = copy.deepcopy(mixer.state_dict())
            weight.copy_(gram.output_projection(centred=centred))
            error = _fit_bias(mixer, gram)
            if error < fitted:
                fitted = error
            else:
                mixer.load_state_dict(before)
    return CalibrationReport(layer, copied, fitted)


def _fit_bias(mixer: Mamba2 | RWKV7TimeMix, gram: Gram) -> float:
    """Set the bias that gives the outputs their mean; returns the error that is left."""
    weight, gain = output_projection(mixer).weight, norm_gain(mixer)
    bias = gram.bias(weight, gain)
    if isinstance(mixer, Mamba2):
        output_projection(mixer).bias.copy_(bias)
    else:
        bias = _through(weight, bias, mixer.get_parameter("ln_x.bias"))
    return gram.error(weight, gain, bias)


def _through(weight: Tensor, wanted: Tensor, norm_bias: nn.Parameter) -> Tensor:
    """Set the bias in front of a projection so that about ``wanted`` comes out of it; returns what does.

    Least squares with a small penalty: directions that the projection hardly passes on would need huge values.
    """
    W = weight.detach().double().cpu()
    system = W @ W.T
    system += 1e-6 * float(system.diagonal().mean()) * torch.eye(len(system), dtype=torch.float64)
    before = W.T @ torch.linalg.solve(system, wanted)
    norm_bias.copy_(before)
    through: Tensor = W @ before
    return through
