"""Kullback-Leibler divergence from a teacher's next-token distribution, straight from hidden states.

Glossary, for one token: ``p`` the teacher's distribution, ``q`` the student's, both after a temperature tau.

``KL(p || q) = sum_v p_v (log p_v - log q_v)``, and its gradient in the student's logits is ``(q - p) / tau``.

Source: Hinton et al. 2015, "Distilling the knowledge in a neural network" (arXiv 1503.02531); the loss of the last
stage of MOHAWK (arXiv 2408.10189) and RADLADS (arXiv 2505.03005). Logits in blocks of tokens as in ``cross_entropy``.
Differs: not multiplied by tau squared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one model held at once, in elements: 64 MiB in float32; three such blocks exist.
_BLOCK_ELEMENTS = 16 * 2**20


def linear_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """KL(teacher || student) of each token; logits exist for a block of tokens at a time only.

    The gradient in the hidden states is made while the logits are there. That in the student's weight needs the
    gradient of every token's loss first, so where it is wanted, the backward pass makes the logits again.

    Args:
        student_hidden: ``[tokens, d]``, after the final norm.
        student_weight: the student's output head, ``[vocab, d]``.
        teacher_hidden: ``[tokens, d_teacher]``; no gradient flows into it.
        teacher_weight: ``[vocab, d_teacher]``; no gradient flows into it.
        temperature: both models' logits are divided by it.

    Returns:
        Divergences ``[tokens]`` in float32 (float64 for float64 inputs), in nats; differentiable in student_hidden and
        student_weight.

    Raises:
        ValueError: shapes that don't fit, or a temperature that is not above 0.
    """
    for name, hidden, weight in (
        ("student", student_hidden, student_weight),
        ("teacher", teacher_hidden, teacher_weight),
    ):
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            raise ValueError(
                f"linear_kl needs {name}_hidden [tokens, d] and {name}_weight [vocab, d], got "
                f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
            )
    if len(student_hidden) != len(teacher_hidden):
        raise ValueError(
            f"student and teacher must have as many tokens, got {len(student_hidden)} and {len(teacher_hidden)}"
        )
    if len(student_weight) != len(teacher_weight):
        raise ValueError(
            "student and teacher must have one vocabulary, got heads of "
            f"{len(student_weight)} and {len(teacher_weight)} tokens"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a finite number > 0, got {temperature}")
    device = student_hidden.device.type
    inputs = (student_hidden, student_weight, teacher_hidden.detach(), teacher_weight.detach())
    if torch.is_autocast_enabled(device):
        low_precision = torch.get_autocast_dtype(device)
        inputs = (
            inputs[0].to(low_precision),
            inputs[1].to(low_precision),
            inputs[2].to(low_precision),
            inputs[3].to(low_precision),
        )
    block = max(1, _BLOCK_ELEMENTS // len(student_weight))
    divergences: Tensor = _LinearKL.apply(*inputs, temperature, block)  # type: ignore[no-untyped-call]
    return divergences


def _log_probabilities(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = (hidden @ weight.T).to(dtype)
    if temperature != 1:
        logits.div_(temperature)
    logits.sub_(logits.amax(-1, keepdim=True))
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: Tensor,
        student_weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        temperature: float,
        block: int,
    ) -> Tensor:
        dtype = torch.promote_types(student_hidden.dtype, torch.float32)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        divergences = torch.empty(len(student_hidden), dtype=dtype, device=student_hidden.device)
        grad_hidden = torch.empty_like(student_hidden) if wants_hidden else None
        for start in range(0, len(student_hidden), block):
            rows = slice(start, start + block)
            log_q = _log_probabilities(student_hidden[rows], student_weight, temperature, dtype)
            log_p = _log_probabilities(teacher_hidden[rows], teacher_weight, temperature, dtype)
            p = log_p.exp()
            divergences[rows] = log_p.sub_(log_q).mul_(p).sum(-1)
            if grad_hidden is not None:
                grad_logits = log_q.exp_().sub_(p).div_(temperature)
                torch.mm(grad_logits.to(student_hidden.dtype), student_weight, out=grad_hidden[rows])
        ctx.temperature, ctx.block = temperature, block
        inputs = (student_hidden, student_weight, teacher_hidden, teacher_weight) if wants_weight else ()
        ctx.save_for_backward(*(() if grad_hidden is None else (grad_hidden,)), *inputs)
        return divergences

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        saved = list(ctx.saved_tensors)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = grad_weight = None
        if wants_hidden:
            unit = saved.pop(0)
            grad_hidden = (unit * grad[:, None]).to(unit.dtype)
        if wants_weight:
            student_hidden, student_weight, teacher_hidden, teacher_weight = saved
            # Summed over blocks in float32: a bf16 sum would lose the small blocks
            total = torch.zeros_like(student_weight, dtype=grad.dtype)
            for start in range(0, len(student_hidden), ctx.block):
                rows = slice(start, start + ctx.block)
                q = _log_probabilities(
                    student_hidden[rows], student_weight, ctx.temperature, grad.dtype
                ).exp_()
                p = _log_probabilities(
                    teacher_hidden[rows], teacher_weight, ctx.temperature, grad.dtype
                ).exp_()
                scaled = q.sub_(p).mul_(grad[rows, None] / ctx.temperature)
                total += scaled.to(student_hidden.dtype).T @ student_hidden[rows]
            grad_weight = total.to(student_weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
