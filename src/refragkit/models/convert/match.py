"""Stage 2 of distillation: the whole student learns to predict what the teacher predicts, by its new mixers.

Aligned mixers read the teacher's inputs; in the student each reads what those below it made of them. Training end to
end mends what adds up from block to block.

Source: the last stage of MOHAWK (Bick et al. 2024, arXiv 2408.10189, section 3.3), step 2 of RADLADS (Goldstein et al.
2025, arXiv 2505.03005), stage 2 of ARWKV (Yueyu et al. 2025, arXiv 2501.15570) and Mamba in the Llama (Wang et al.
2024, arXiv 2408.15237).
Differs: the new mixers are trained, and what else is asked for, where the originals train everything; the embedding,
the output head and the blocks below the first new mixer stay the teacher's, so that the student starts from the cached
residual stream there, and the teacher is not run again; the loss is KL(teacher || student) alone, without Mamba in the
Llama's cross-entropy, over whole vocabularies without holding the logits of all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from refragkit.models.convert.activation_cache import ActivationCache
from refragkit.models.convert.align import training_steps, window_rows
from refragkit.models.hybrid import HybridLM
from refragkit.ops.distillation import linear_kl
from refragkit.training.optim import (
    LearningRates,
    build_adamw,
    clip_gradients,
    learning_rate_factor,
    set_learning_rates,
)

_MAX_NORM = 1.0


class Matching:
    """Stage 2, step by step.

    Args:
        student: converted from the cache's teacher; what of it is trainable is trained, in float32.
        mixers: the new ones (:func:`~refragkit.models.convert.align.trained_mixers`).
        cache: the teacher's activations.
        tokens: to train on, in steps of 1,024 (or one window); windows come again where there are fewer.
        matrix_lr: peak learning rate of the mixers' matrices.
        other_lr: of the mixers' other parameters.
        rest_lr: of everything else that is trainable.
        seed: of the windows' order.

    Attributes:
        name: matching.
        steps: how many there are.
        step_tokens: tokens of each.
        optimizer: AdamW over all that is trainable.
    """

    name = "matching"

    def __init__(
        self,
        student: HybridLM,
        mixers: nn.ModuleList,
        cache: ActivationCache,
        *,
        tokens: int,
        matrix_lr: float = 2e-4,
        other_lr: float = 4e-4,
        rest_lr: float = 5e-5,
        seed: int = 0,
    ) -> None:
        self._student, self._cache, self._seed = student, cache, seed
        self._windows, self.steps = training_steps(tokens, cache.window_tokens)
        self.step_tokens = self._windows * cache.window_tokens
        self.optimizer: Any = build_adamw(mixers, LearningRates(matrix_lr, matrix_lr, matrix_lr, other_lr))
        new = {id(p) for p in mixers.parameters()}
        rest = [p for p in student.parameters() if p.requires_grad and id(p) not in new]
        if rest:
            group = {
                "name": "rest",
                "params": rest,
                "lr": rest_lr,
                "initial_lr": rest_lr,
                "weight_decay": 0.0,
            }
            self.optimizer.add_param_group(group)
        self._trained = [*mixers.parameters(), *rest]

    def step(self, step: int) -> dict[str, float]:
        """Update number ``step``; returns KL(teacher || student) before it, in nats per token.

        Raises:
            RefragError: training diverged.
        """
        set_learning_rates(self.optimizer, learning_rate_factor("cosine", step, self.steps))
        device = self._student.head_weight.device
        total = 0.0
        for row in window_rows(self._cache.windows, self._windows, step, self._seed):
            start, final = (part.to(device).float() for part in self._cache.read_ends([row]))
            loss = divergence(self._student, start, self._cache.first, final).mean() / self._windows
            torch.autograd.backward(loss)
            total += float(loss.detach())
        clip_gradients(self._trained, _MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"match_loss": total}


def divergence(student: HybridLM, start: Tensor, first: int, final: Tensor) -> Tensor:
    """KL(teacher || student) of the token after each, in nats: ``[B * T]``.

    Args:
        student: with the teacher's output head.
        start: the residual stream that enters block ``first``, ``[B, T, d_model]``.
        first: the block.
        final: the teacher's hidden states after the last norm, ``[B, T, d_model]``.
    """
    hidden = student.hidden_states_from(start, first).flatten(0, 1)
    return linear_kl(hidden, student.head_weight, final.flatten(0, 1), student.head_weight)
