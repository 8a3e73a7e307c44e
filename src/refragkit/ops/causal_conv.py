"""The short causal depthwise convolution in front of the Mamba-2 recurrence, channels last.

``y_t = bias + sum_d weight[K - 1 - d] * x_{t - d}`` for d = 0 .. K - 1. On a CPU this sum of K products is several
times faster, forward and backward, than transposing for ``conv1d``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_conv(
    extended: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None = None
) -> Tensor:
    """Convolve.

    Args:
        extended: ``[batch, K - 1 + T, channels]``, the inputs with those of earlier calls (or zeros) in front.
        weight: ``[K, channels]``, the tap of the oldest input first.
        bias: ``[channels]``.
        positions: int64 ``[batch, T]``, positions within packed documents: inputs of another document are not
            seen. None without packing.

    Returns:
        ``[batch, T, channels]`` in extended's dtype.
    """
    weight = weight.to(extended.dtype)
    bias = weight.new_zeros(weight.shape[1]) if bias is None else bias.to(extended.dtype)
    if positions is None:
        y: Tensor = _CausalConv.apply(extended, weight, bias)  # type: ignore[no-untyped-call]
        return y
    taps, T = weight.shape[0], positions.shape[1]
    y = torch.addcmul(bias, extended[:, taps - 1 :], weight[-1])
    for distance in range(1, taps):
        earlier = extended[:, taps - 1 - distance :][:, :T]
        y = torch.addcmul(y, earlier * (positions >= distance)[..., None], weight[-1 - distance])
    return y


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, extended: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        taps = weight.shape[0]
        T = extended.shape[1] - taps + 1
        y = torch.addcmul(bias, extended[:, taps - 1 :], weight[-1])
        for tap in range(taps - 1):
            y.addcmul_(extended[:, tap : tap + T], weight[tap])
        ctx.save_for_backward(extended, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        extended, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        T = grad.shape[1]
        grad_input = grad_weight = None
        if wants_input:
            grad_input = torch.zeros_like(extended)
            for tap, tap_weight in enumerate(weight):
                grad_input[:, tap : tap + T].addcmul_(grad, tap_weight)
        if wants_weight:
            grad_weight = torch.stack(
                [(grad * extended[:, tap : tap + T]).sum((0, 1)) for tap in range(weight.shape[0])]
            )
        return grad_input, grad_weight, grad.sum((0, 1)) if wants_bias else None
