"""The rule that picks the next token from logits, and the random numbers that it uses.

Each row has a generator of its own, seeded by (seed, row, sample), and spends exactly one uniform number a
token: what a row draws depends neither on its neighbours in the batch nor on when they leave it, and torch's
global generator is never touched.

Source: top-k: Fan et al. 2018 (arXiv 1805.04833); nucleus (top-p): Holtzman et al. 2020 (arXiv 1904.09751).
Differs: tokens come from the inverse of the cumulative distribution, not from ``torch.multinomial``, which
draws from one generator for the whole batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class RowGenerator:
    """The uniform numbers of one generated row: number n is a pure function of (seed, row, sample, n)."""

    def __init__(self, seed: int, row: int, sample: int) -> None:
        # SeedSequence hashes its words, so that neighbouring rows and seeds are not correlated.
        self._generator = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([seed % 2**64, row, sample]))
        )

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        return float(self._generator.random())


def choose_tokens(
    logits: Tensor, uniforms: Tensor | None, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Picks one token a row: the likeliest, or a draw from the tempered and truncated distribution.

    The order is temperature, then top-k, then top-p. Top-p keeps the fewest likeliest tokens whose
    probabilities sum to at least ``top_p``; the likeliest is always kept.

    Args:
        logits: [B, V].
        uniforms: [B] float64 in [0, 1), one number a row; unused (None allowed) where ``temperature`` is 0.
        temperature: 0 picks the likeliest token, the first of equals.
        top_p: in (0, 1]; 1 keeps everything.
        top_k: keep this many of the likeliest tokens; 0 keeps everything.

    Returns:
        [B] int64.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    if uniforms is None:
        raise ValueError("sampling with a temperature needs one uniform number a row")
    scores = logits.float() / temperature
    order: Tensor | None = None
    if 0 < top_k < scores.shape[-1]:
        scores, order = scores.topk(top_k, dim=-1, sorted=True)
    elif top_p < 1:
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
    # float64: over 150,000 tokens a float32 running sum is off by more than a rare token's probability.
    probabilities = torch.softmax(scores.double(), dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    if top_p < 1:
        # A token stays if what precedes it doesn't reach top_p yet.
        keep = cumulative - probabilities < top_p
        keep[:, 0] = True
        cumulative = (probabilities * keep).cumsum(dim=-1)
    target = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    # Rounding may put the target on the total itself: the last token that has any probability, then.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    index = torch.minimum(index, last)
    return (index if order is None else order.gather(-1, index)).squeeze(-1)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of ``tokens`` [B] under the model itself, softmax(logits [B, V]); float32 [B].

    Temperature and truncation play no part: this is what a training forward pass gives for the same tokens.
    """
    scores = logits.float()
    return scores.gather(-1, tokens[:, None]).squeeze(-1) - scores.logsumexp(dim=-1)
