"""Frozen weights in int8: products by integer arithmetic, the gradient of the input, rows of an embedding.

Glossary
    W [out, in]        the weight that is stood for
    H [in, in]         block-diagonal orthogonal rotation, a normalised Hadamard matrix in each block
    values [out, in]   int8, the only copy of W that is kept:  W H  ~  scale[:, None] * values
    scale [out]        float32, one for each row, symmetric: no zero point
    y = x W^T ~ (x H) (scale * values)^T, where each token's x H is rounded to int8 with a scale of its own

The rotation spreads what a few channels of a language model hold (they are tens of times larger than the rest) over
their block, so that one scale fits all of a token's channels. It changes nothing else, since H H^T = 1. A token's
output depends on that token only, whatever else is in the batch.

Source: weights and activations: Dettmers et al. 2022 (arXiv 2208.07339), section 2.1; rotation: Ashkboos et al. 2024
(arXiv 2404.00456), section 4.
Differs: no decomposition into outlier channels, whose choice depends on the batch; the rotation is applied to inputs
online and per block, not folded into the neighbouring layers; the gradient of the input is an integer product as well.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from refragkit.ops.graph_break import graph_break
from refragkit.ops.precision import cpu_has_bf16

_LARGEST = 127  # -128 would make the range lopsided
_ROTATED_CHANNELS = 64
# Of a weight, turned into floating point at once: 4 MiB in float32
_PIECE_ELEMENTS = 2**20
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to int8, a few rows at a time.

    Args:
        weight: ``[out, in]``, floating point.

    Returns:
        ``values`` int8 ``[out, in]``, rotated, and ``scale`` float32 ``[out]``; :func:`dequantize_rows` goes back.

    Raises:
        ValueError: not a floating-point matrix, or one with values that are not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"expected a floating-point matrix, got {weight.dtype} {tuple(weight.shape)}")
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start, end in _row_pieces(weight):
        rounded, scales = _round_rows(_rotate(weight[start:end].detach().float()))
        # Any value that isn't finite has reached its row's scale
        if not bool(scales.isfinite().all()):
            row = start + int((~scales.isfinite()[:, 0]).nonzero()[0])
            raise ValueError(f"row {row} holds values that are not finite")
        values[start:end], scale[start:end] = rounded, scales[:, 0]
    return values, scale


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that ``values`` and ``scale`` stand for, ``[rows, in]``; the whole of it, in ``dtype``."""
    precise = torch.promote_types(dtype, torch.float32)
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for start, end in _row_pieces(values):
        rows = values[start:end].to(precise) * scale[start:end, None].to(precise)
        weight[start:end] = _rotate(rows)
    return weight


def int8_embedding(input_ids: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Rows of the weight, float32 ``[..., in]`` for int64 ``[...]``."""
    ids = input_ids.flatten()
    rows = _rotate(values[ids].float() * scale[ids, None])
    return rows.view(*input_ids.shape, values.shape[1])


def int8_linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias`` with W as int8; differentiable in x (and the bias), not in W.

    Nothing of the input is kept for the backward pass. NaN and infinity make the whole output row of their token NaN.

    Args:
        x: ``[..., in]``.
        values: int8 ``[out, in]``.
        scale: float32 ``[out]``.
        bias: ``[out]``.

    Returns:
        ``[..., out]`` in x's type, or in that of autocast where it is on.

    Raises:
        ValueError: shapes or types that don't fit.
    """
    if values.dtype != torch.int8 or scale.shape != values.shape[:1] or x.shape[-1] != values.shape[1]:
        raise ValueError(
            "int8_linear needs x [..., in], int8 values [out, in] and scale [out], got "
            f"{tuple(x.shape)}, {values.dtype} {tuple(values.shape)} and {tuple(scale.shape)}"
        )
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    y = _linear(x, values, scale, dtype)
    return y if bias is None else y + bias.to(dtype)


def int8_linear_reference(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with the weight in floating point and x as it is: what :func:`int8_linear` approximates."""
    weight = dequantize_rows(values, scale, x.dtype)
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def int8_swiglu(
    x: Tensor, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> Tensor:
    """``W_down (silu(W_gate x) * W_up x)`` with int8 weights; differentiable in x.

    For the backward pass the outputs of gate and up are kept as int8, with a scale for every 64 channels of a token,
    and nothing else.

    Args:
        x: ``[..., d_model]``.
        gate: values and scale, ``[d_ff, d_model]`` and ``[d_ff]``.
        up: the same.
        down: ``[d_model, d_ff]`` and ``[d_model]``.

    Returns:
        ``[..., d_model]`` in x's type, or in that of autocast where it is on.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _swiglu(x, *gate, *up, *down, dtype)


def int8_product(x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """``x W^T`` in float32 for ``[tokens, in]``, without autograd."""
    return _product(*_round_rows(_rotate_fast(x)), values, scale)


def int8_input_gradient(grad: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """``grad W`` in float32 for ``[tokens, out]``, each token's gradient rounded to int8."""
    return _rotate_fast(_rotated_gradient(grad, values, scale)).float()


def _product(rounded: Tensor, token_scale: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    return _integer_product(rounded, values.T).float().mul_(token_scale).mul_(scale)


def _rotated_gradient(grad: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """``grad W H``."""
    rounded, token_scale = _round_rows(grad.float() * scale)
    return _integer_product(rounded, values).float().mul_(token_scale)


def precise_input_gradient(grad: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """``grad W`` in float32 for ``[tokens, out]``, in bfloat16 where the hardware has it, else float32.

    For the output head: a token's gradient is its probabilities, most of which int8 would round to nothing.
    """
    dtype = _fast_dtype(values)
    total = torch.zeros(grad.shape[0], values.shape[1], dtype=torch.float32, device=grad.device)
    for start, end in _row_pieces(values):
        piece = (grad[:, start:end] * scale[start:end]).to(dtype)
        total += piece @ values[start:end].to(dtype)
    return _rotate(total)


@graph_break
def _linear(x: Tensor, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y: Tensor = _Linear.apply(x, values, scale, dtype)  # type: ignore[no-untyped-call]
    return y


@graph_break
def _swiglu(
    x: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    y: Tensor = _SwiGLU.apply(x, gate, gate_scale, up, up_scale, down, down_scale, dtype)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(values, scale)
        ctx.dtype = x.dtype
        y = int8_product(x.reshape(-1, x.shape[-1]), values, scale)
        return y.to(dtype).view(*x.shape[:-1], values.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        values, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        grad_x = int8_input_gradient(grad.reshape(-1, grad.shape[-1]), values, scale)
        return grad_x.to(ctx.dtype).view(*grad.shape[:-1], values.shape[1]), None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        gate_scale: Tensor,
        up: Tensor,
        up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        rounded = _round_rows(_rotate_fast(x.reshape(-1, x.shape[-1])))
        opened = _product(*rounded, gate, gate_scale)
        inner = _product(*rounded, up, up_scale)
        if ctx.needs_input_grad[0]:
            kept = *_packed(opened), *_packed(inner)
            ctx.save_for_backward(gate, gate_scale, up, up_scale, down, down_scale, *kept)
        ctx.dtype = x.dtype
        y = int8_product(functional.silu(opened, inplace=True).mul_(inner), down, down_scale)
        return y.to(dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, gate_scale, up, up_scale, down, down_scale, *kept = ctx.saved_tensors
        opened, inner = _unpacked(kept[0], kept[1], len(gate)), _unpacked(kept[2], kept[3], len(up))
        middle = int8_input_gradient(grad.reshape(-1, grad.shape[-1]), down, down_scale)
        grad_x = _rotated_gradient(functional.silu(opened) * middle, up, up_scale)
        grad_opened = torch.ops.aten.silu_backward(middle.mul_(inner), opened)
        grad_x += _rotated_gradient(grad_opened, gate, gate_scale)
        return _rotate_fast(grad_x).to(ctx.dtype).view(grad.shape), *[None] * 7


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values and scales ``[rows, 1]``, float32; a row of zeros stays one, one with NaN gets a scale of NaN."""
    x = x.float()
    # (torch's vector_norm of infinite order takes 20 times as long)
    scale = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    # The conversion of NaN is undefined but harmless: the scale makes NaN of it again
    return (x / scale).round_().to(torch.int8), scale


def _packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[tokens, channels]`` as int8 and scales, one for each group of channels."""
    return _round_rows(x.reshape(-1, _group_width(x.shape[1])))


def _unpacked(rounded: Tensor, scale: Tensor, channels: int) -> Tensor:
    return rounded.float().mul_(scale).view(-1, channels)


def _group_width(channels: int) -> int:
    """64 where that divides the width, else all of it: groups of a few channels would save nothing."""
    return _ROTATED_CHANNELS if channels % _ROTATED_CHANNELS == 0 else channels


def _rotation_width(channels: int) -> int:
    """Channels in a block: as many as divide the width, 1 (no rotation) where it is odd."""
    return math.gcd(channels, _ROTATED_CHANNELS)


@cache
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix ``[width, width]`` of 1 and -1, symmetric; width is a power of 2."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _rotate(x: Tensor) -> Tensor:
    """``x H`` for ``[rows, channels]`` in x's precision; the inverse is the same."""
    width = _rotation_width(x.shape[1])
    if width == 1:
        return x
    blocks = x.reshape(-1, width) @ _signs(width, x.dtype, x.device)
    return blocks.mul_(1 / math.sqrt(width)).view(x.shape)


def _rotate_fast(x: Tensor) -> Tensor:
    """The same in bfloat16 where the hardware has it: its rounding is far below that to int8."""
    return _rotate(x.to(_fast_dtype(x)))


def _fast_dtype(x: Tensor) -> torch.dtype:
    fast = cpu_has_bf16() if x.device.type == "cpu" else x.device.type == "cuda"
    return torch.bfloat16 if fast else torch.float32


@cache
def _integer_units() -> bool:
    """Whether this CPU sums products of int8 in hardware; without, torch's integer product may take a plain loop."""
    check = getattr(
        torch.cpu, "_is_vnni_supported", lambda: False
    )  # private, and not in every build of torch
    return bool(torch.backends.mkldnn.is_available()) and bool(check())  # type: ignore[no-untyped-call]


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` of int8 ``[m, k]`` and ``[k, n]``: int32, or float32 where the device has no such product."""
    (m, k), n = a.shape, b.shape[1]
    if not m * k * n:
        return torch.zeros(m, n, dtype=torch.int32, device=a.device)
    if a.device.type == "cpu":
        native = _integer_units()
    else:  # what cuBLASLt asks for
        native = a.device.type == "cuda" and m > 16 and k % 8 == 0 and n % 8 == 0
    if native:
        return torch._int_mm(a, b)
    product = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    for start, end in _row_pieces(b):
        product += a[:, start:end].float() @ b[start:end].float()
    return product


def _row_pieces(matrix: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows that are small enough to be held in floating point."""
    rows = max(1, _PIECE_ELEMENTS // max(1, matrix.shape[1]))
    return [(start, min(start + rows, len(matrix))) for start in range(0, len(matrix), rows)]
