"""Stage 2 of distillation: the whole student learns to predict what the teacher predicts, by its new mixers.

Aligned mixers read the teacher's inputs; in the student each reads what those below it made of them. Training end to
end mends what adds up from block to block.

Source: the last stage of MOHAWK (Bick et al. 2024, arXiv 2408.10189, section 3.3), step 2 of RADLADS (Goldstein et al.
2025, arXiv 2505.03005), stage 2 of ARWKV (Yueyu et al. 2025, arXiv 2501.15570) and Mamba in the Llama (Wang et al.
2024, arXiv 2408.15237).
Differs: only the new mixers are trained, the originals train everything; the loss is KL(teacher || student) alone,
without Mamba in the Llama's cross-entropy, over whole vocabularies without holding the logits of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from refragkit.models.base import SequenceModel
from refragkit.models.convert.align import trained_mixers, training_steps, window_rows
from refragkit.ops.distillation import linear_kl
from refragkit.training.optim import (
    LearningRates,
    build_adamw,
    clip_gradients,
    learning_rate_factor,
    set_learning_rates,
)

_MAX_NORM = 1.0


def match(
    student: SequenceModel,
    teacher: SequenceModel,
    layers: Sequence[int],
    windows: Tensor,
    *,
    tokens: int,
    matrix_lr: float = 2e-4,
    other_lr: float = 4e-4,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train the mixers of some blocks on the teacher's next-token distribution; nothing else changes.

    Args:
        student: whose mixers have been aligned, in float32.
        teacher: what it was converted from; read without gradients.
        layers: the converted blocks.
        windows: token ids, int64 ``[n, T]``, no padding.
        tokens: to train on, in steps of 1,024 (or one window); windows come again where there are fewer.
        matrix_lr: peak learning rate of matrices.
        other_lr: of the mixers' other parameters.
        seed: of the windows' order.
        advance: called once per step.

    Returns:
        KL(teacher || student) at each step, before the update, in nats per token.

    Raises:
        ConfigError: weights in less than float32.
        RefragError: training diverged.
    """
    per_step, steps = training_steps(tokens, windows.shape[1])
    device = student.head_weight.device
    was_training = teacher.training
    teacher.eval()
    curve: list[float] = []
    try:
        with trained_mixers(student, layers) as mixers:
            optimizer = build_adamw(mixers, LearningRates(matrix_lr, matrix_lr, matrix_lr, other_lr))
            for step in range(steps):
                set_learning_rates(optimizer, learning_rate_factor("cosine", step, steps))
                total = 0.0
                for row in window_rows(len(windows), per_step, step, seed):
                    loss = divergence(student, teacher, windows[row : row + 1].to(device)).mean() / per_step
                    torch.autograd.backward(loss)
                    total += float(loss.detach())
                clip_gradients(mixers.parameters(), _MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                curve.append(total)
                advance()
    finally:
        teacher.train(was_training)
    return curve


def divergence(student: SequenceModel, teacher: SequenceModel, input_ids: Tensor) -> Tensor:
    """KL(teacher || student) of the token after each of ``input_ids [B, T]``: ``[B * T]``, in nats."""
    with torch.no_grad():
        wanted, _ = teacher.hidden_states(input_ids)
    hidden, _ = student.hidden_states(input_ids)
    return linear_kl(hidden.flatten(0, 1), student.head_weight, wanted.flatten(0, 1), teacher.head_weight)
