"""Cross-entropy straight from hidden states: the logits of all tokens are never held at once.

Source: the idea of Wijmans et al. 2024, "Cut your losses" (arXiv 2411.09009), with plain matrix products.
Differs: rows whose target is ignored are left out before any product, and as many logits as fit a fixed budget are
kept for the backward pass instead of being computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from refragkit.ops.int8 import int8_product, precise_input_gradient

IGNORED = -100
# Float32 logits held at once, in elements: 64 MiB, small beside any vocabulary's weight yet enough rows to
# keep the product compute-bound.
_BLOCK_ELEMENTS = 16 * 2**20
# Kept for the backward pass, in elements: 128 MiB.
_KEPT_ELEMENTS = 32 * 2**20
# Logits at once where they are turned into gradients in place, in elements: 128 MiB.
_FUSED_ELEMENTS = 32 * 2**20


# Fewer with an int8 head, whose products exist both as int32 and as float32
_INT8_ELEMENTS = 5 * 2**20


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int = 1024, scale: Tensor | None = None
) -> Tensor:
    """``F.cross_entropy(hidden @ weight.T, targets, reduction="none")`` in bounded memory.

    Args:
        hidden: ``[tokens, d]``.
        weight: ``[vocab, d]``.
        targets: int64 ``[tokens]``; -100 gives a loss of exactly 0 and no gradient.
        chunk_tokens: the most tokens whose logits exist at once; fewer for large vocabularies.
        scale: ``[vocab]`` of an int8 weight, which gets no gradient; see :mod:`refragkit.ops.int8`.

    Returns:
        Losses ``[tokens]`` in float32 (float64 for float64 inputs), in nats; differentiable in hidden and weight.

    Raises:
        ValueError: shapes that don't fit, or a target outside the vocabulary.
    """
    hidden, weight, rows, kept = _checked(hidden, weight, targets, scale)
    elements = _BLOCK_ELEMENTS if scale is None else _INT8_ELEMENTS
    block = max(1, min(chunk_tokens, elements // weight.shape[0]))
    losses: Tensor = _Loss.apply(hidden[rows], weight, kept, block, scale)  # type: ignore[no-untyped-call]
    return losses.new_zeros(targets.shape).index_copy(0, rows, losses)


def weighted_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``(linear_cross_entropy(hidden, weight, targets) * token_weights).sum()``, the fast form for training.

    With the weights known beforehand, the gradients are made while the logits are there: three matrix products instead
    of four, and nothing kept for the backward pass but the gradients themselves.

    Args:
        hidden: ``[tokens, d]``.
        weight: ``[vocab, d]``.
        targets: int64 ``[tokens]``; -100 gives a loss of exactly 0 and no gradient.
        token_weights: ``[tokens]``; no gradient flows into them.
        scale: ``[vocab]`` of an int8 weight, which gets no gradient; see :mod:`refragkit.ops.int8`.

    Returns:
        The weighted sum, differentiable in hidden and weight, and the unweighted losses ``[tokens]``, which are not;
        both in float32 (float64 for float64 inputs), in nats.

    Raises:
        ValueError: shapes that don't fit, or a target outside the vocabulary.
    """
    if token_weights.shape != targets.shape:
        raise ValueError(
            f"token_weights must have shape {tuple(targets.shape)}, got {tuple(token_weights.shape)}"
        )
    hidden, weight, rows, kept = _checked(hidden, weight, targets, scale)
    block = max(1, (_FUSED_ELEMENTS if scale is None else _INT8_ELEMENTS) // weight.shape[0])
    total: Tensor
    losses: Tensor
    total, losses = _WeightedLoss.apply(hidden[rows], weight, kept, token_weights[rows], block, scale)  # type: ignore[no-untyped-call]
    return total, losses.new_zeros(targets.shape).index_copy(0, rows, losses)


def _checked(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and weight in the type they are multiplied in, the rows that count, and their targets."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy needs hidden [tokens, d] and weight [vocab, d], got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if (weight.dtype == torch.int8) != (scale is not None) or (
        scale is not None and scale.shape != weight.shape[:1]
    ):
        raise ValueError(
            f"an int8 weight [vocab, d] needs its scale [vocab] and no other weight has one, got {weight.dtype} "
            f"{tuple(weight.shape)} and {None if scale is None else tuple(scale.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must have shape {tuple(hidden.shape[:1])}, got {tuple(targets.shape)}")
    rows = (targets != IGNORED).nonzero().squeeze(1)
    kept = targets[rows]
    if kept.numel():
        low, high = (int(value) for value in kept.aminmax())
        if low < 0 or high >= weight.shape[0]:
            raise ValueError(
                f"targets must be -100 or in [0, {weight.shape[0]}), got values between {low} and {high}"
            )
    if scale is None and torch.is_autocast_enabled(hidden.device.type):
        low_precision = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(low_precision), weight.to(low_precision)
    return hidden, weight, rows, kept


def _logits(hidden: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    return hidden @ weight.T if scale is None else int8_product(hidden, weight, scale)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int, scale: Tensor | None
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        normalisers = torch.empty_like(losses)
        room = _KEPT_ELEMENTS if any(ctx.needs_input_grad) else 0
        kept: list[Tensor] = []  # logits of the first blocks
        for start in range(0, len(targets), block):
            end = start + block
            logits = _logits(hidden[start:end], weight, scale).to(dtype)
            picked = logits.gather(1, targets[start:end, None]).squeeze(1)
            highest = logits.amax(-1, keepdim=True)
            room -= logits.numel()
            if room >= 0:
                kept.append(logits)
                shifted = logits - highest
            else:
                shifted = logits.sub_(highest)
            normalisers[start:end] = shifted.exp_().sum(-1).log_() + highest.squeeze(1)
            losses[start:end] = normalisers[start:end] - picked
        ctx.block = block
        ctx.save_for_backward(hidden, weight, targets, normalisers, scale, *kept)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, normalisers, scale, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Summed over blocks in float32: a bf16 sum would lose the small blocks
        grad_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if wants_weight else None
        for number, start in enumerate(range(0, len(targets), ctx.block)):
            end = start + ctx.block
            if number < len(kept):
                shifted = kept[number] - normalisers[start:end, None]
            else:
                shifted = (
                    _logits(hidden[start:end], weight, scale)
                    .to(normalisers.dtype)
                    .sub_(normalisers[start:end, None])
                )
            probabilities = shifted.exp_()
            probabilities.scatter_add_(
                1, targets[start:end, None], probabilities.new_full((len(probabilities), 1), -1.0)
            )
            grad_logits = probabilities.mul_(grad[start:end, None])
            if scale is not None:
                if grad_hidden is not None:
                    grad_hidden[start:end] = precise_input_gradient(grad_logits, weight, scale)
                continue
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[start:end] = grad_logits @ weight
            if grad_weight is not None:
                if grad_weight.dtype == grad_logits.dtype:
                    grad_weight.addmm_(grad_logits.T, hidden[start:end])
                else:
                    grad_weight += grad_logits.T @ hidden[start:end]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor,
        block: int,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Summed over blocks in float32: a bf16 sum would lose the small blocks
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        for start in range(0, len(targets), block):
            end = start + block
            logits = _logits(hidden[start:end], weight, scale).to(dtype)
            picked = logits.gather(1, targets[start:end, None])
            highest = logits.amax(-1, keepdim=True)
            exponentials = logits.sub_(highest).exp_()
            sums = exponentials.sum(-1, keepdim=True)
            losses[start:end] = (sums.log() + highest - picked).squeeze(1)
            if not (wants_hidden or wants_weight):
                continue
            factor = token_weights[start:end, None].to(dtype)
            grad_logits = exponentials.mul_(factor / sums)
            grad_logits.scatter_add_(1, targets[start:end, None], -factor)
            if scale is not None:
                if grad_hidden is not None:
                    grad_hidden[start:end] = precise_input_gradient(grad_logits, weight, scale)
                continue
            low = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(low, weight, out=grad_hidden[start:end])
            if grad_weight is not None:
                if grad_weight.dtype == low.dtype:
                    grad_weight.addmm_(low.T, hidden[start:end])
                else:
                    grad_weight += low.T @ hidden[start:end]
        gradients = [g for g in (grad_hidden, grad_weight) if g is not None]
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return (losses * token_weights.to(dtype)).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        gradients = list(ctx.saved_tensors)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = gradients.pop(0) if wants_hidden else None
        grad_weight = gradients.pop(0) if wants_weight else None
        if grad is None:
            return None, None, None, None, None, None
        if bool(grad != 1):  # a scale on the whole loss, as a loss scaler sets it
            grad_hidden = None if grad_hidden is None else grad_hidden * grad
            grad_weight = None if grad_weight is None else grad_weight * grad
        grad_weight = None if grad_weight is None else grad_weight.to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None
