"""The short causal depthwise convolution in front of the Mamba-2 recurrence, channels last.

``y_t = bias + sum_d weight[K - 1 - d] * x_{t - d}`` for d = 0 .. K - 1. On a CPU this sum of K products is several
times faster, forward and backward, than transposing for ``conv1d``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def causal_conv(
    x: Tensor, history: Tensor | None, weight: Tensor, bias: Tensor | None, positions: Tensor | None = None
) -> Tensor:
    """Convolve.

    Args:
        x: ``[batch, T, channels]``; may be a slice of a wider tensor.
        history: ``[batch, K - 1, channels]``, the last inputs of earlier calls, oldest first; zeros if None.
        weight: ``[K, channels]``, the tap of the oldest input first.
        bias: ``[channels]``.
        positions: int64 ``[batch, T]``, positions within packed documents: inputs of another document are not
            seen, and there is no history. None without packing.

    Returns:
        ``[batch, T, channels]`` in x's dtype.
    """
    weight = weight.to(x.dtype)
    bias = weight.new_zeros(weight.shape[1]) if bias is None else bias.to(x.dtype)
    if positions is None:
        history = None if history is None else history.to(x.dtype)
        y: Tensor = _CausalConv.apply(x, history, weight, bias)  # type: ignore[no-untyped-call]
        return y
    y = torch.addcmul(bias, x, weight[-1])
    for distance in range(1, weight.shape[0]):
        earlier = functional.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]
        y = torch.addcmul(y, earlier * (positions >= distance)[..., None], weight[-1 - distance])
    return y


class _CausalConv(torch.autograd.Function):
    """For each distance d, the first d outputs reach back into the history, the others into x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        T, taps = x.shape[1], weight.shape[0]
        y = torch.addcmul(bias, x, weight[-1])
        for d in range(1, taps):
            y[:, d:].addcmul_(x[:, : max(0, T - d)], weight[-1 - d])
            if history is not None:
                y[:, :d].addcmul_(history[:, taps - 1 - d :][:, : min(d, T)], weight[-1 - d])
        ctx.save_for_backward(x, history, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, history, weight = ctx.saved_tensors
        wants_x, wants_history, wants_weight, wants_bias = ctx.needs_input_grad
        T, taps = x.shape[1], weight.shape[0]
        grad_x = grad * weight[-1] if wants_x else None
        grad_history = torch.zeros_like(history) if wants_history else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        if grad_weight is not None:
            grad_weight[-1] = (grad * x).sum((0, 1))
        for d in range(1, taps):
            tap, inside = weight[-1 - d], max(0, T - d)
            if grad_x is not None:
                grad_x[:, :inside].addcmul_(grad[:, d:], tap)
            if grad_history is not None:
                grad_history[:, taps - 1 - d :][:, : min(d, T)].addcmul_(grad[:, :d], tap)
            if grad_weight is not None:
                summed = (grad[:, d:] * x[:, :inside]).sum((0, 1))
                if history is not None:
                    summed += (grad[:, :d] * history[:, taps - 1 - d :][:, : min(d, T)]).sum((0, 1))
                grad_weight[-1 - d] = summed
        return grad_x, grad_history, grad_weight, grad.sum((0, 1)) if wants_bias else None
