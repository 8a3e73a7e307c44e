"""First weights of recurrent mixers that take the place of attention.

Attention without its softmax and its positions is ``o_t = sum_s (q_t . k_s) v_s``: a recurrence whose state adds up
``v_s k_s^T``. Both mixers can compute just that, with r = q in RWKV-7, and C = q, B = k, x = v in Mamba-2; what they
have on top starts out doing (next to) nothing. Key and value heads that several query heads share are repeated.

Glossary: ``rate`` the decay per token, -log w.

Source: Wang et al. 2024 (arXiv 2408.15237), section 3, for Mamba; Goldstein et al. 2025 (arXiv 2505.03005) for RWKV.
Differs: no rotary positions on r and k; slow, uniform decays; heads keep their number and width, one group each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from refragkit.models.layers.attention import Attention
from refragkit.models.layers.mamba2 import Mamba2
from refragkit.models.layers.rwkv7 import _MAX_DECAY_RATE, RWKV7TimeMix

DECAY_RATE = 0.005
"""Per token: half of a value is left after 139 tokens."""
_ICLR = 0.02  # how much of what a key held is removed when it is written again
_DT = 0.05
START = (DECAY_RATE, _ICLR, _DT)
"""Everything here that is not the teacher's."""
_OPEN_GATE = 1.2784645427610738  # SiLU of it is 1


@torch.no_grad()
def rwkv7_from_attention(mixer: RWKV7TimeMix, attention: Attention) -> None:
    """Let an initialised R mixer compute attention without softmax, positions and bonus.

    A key's bias is left out: attention without positions doesn't see it, but every removal key would point its way.
    """
    for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"):
        nn.init.zeros_(getattr(mixer, name))  # each token sees itself, not the one before
    q, k, v = _projections(attention)
    for projection, (weight, bias) in ((mixer.r_proj, q), (mixer.k_proj, k), (mixer.v_proj, v)):
        projection.weight.copy_(weight)
        if projection.bias is not None and bias is not None:
            projection.bias.copy_(bias)
    mixer.o_proj.weight.copy_(attention.o_proj.weight)
    if mixer.k_proj.bias is not None:
        nn.init.zeros_(mixer.k_proj.bias)
    nn.init.constant_(mixer.decay.get_parameter("bias"), _logit(DECAY_RATE / _MAX_DECAY_RATE))
    nn.init.constant_(mixer.iclr.get_parameter("bias"), _logit(_ICLR))
    nn.init.ones_(mixer.k_k)
    nn.init.zeros_(mixer.k_a)  # keys are written as they are
    nn.init.zeros_(mixer.r_k)
    if mixer.gate is not None:
        # 1 + 0 at first. One of the two matrices must not be 0, or neither would learn
        mixer.gate.down.weight.copy_(mixer.gate.up.weight.T)
        nn.init.zeros_(mixer.gate.up.weight)
    if mixer.ln_x is not None:
        nn.init.ones_(mixer.ln_x.weight)
        nn.init.zeros_(mixer.ln_x.bias)


@torch.no_grad()
def mamba2_from_attention(mixer: Mamba2, attention: Attention) -> None:
    """Let an initialised M mixer compute attention without softmax and positions: identity convolution, open gate."""
    q, k, v = _projections(attention)
    width = mixer.d_inner
    nn.init.zeros_(mixer.in_proj.weight)
    nn.init.zeros_(mixer.in_proj.bias)
    parts = zip((v, k, q), range(width, 4 * width, width), strict=True)  # z | x | B | C | dt
    for (weight, bias), start in parts:
        mixer.in_proj.weight[start : start + width].copy_(weight)
        if bias is not None:
            mixer.in_proj.bias[start : start + width].copy_(bias)
    nn.init.constant_(mixer.in_proj.bias[:width], _OPEN_GATE)
    nn.init.zeros_(mixer.conv1d.weight)
    nn.init.ones_(mixer.conv1d.weight[:, :, -1])
    if mixer.conv1d.bias is not None:
        nn.init.zeros_(mixer.conv1d.bias)
    nn.init.constant_(mixer.dt_bias, math.log(math.expm1(_DT)))
    nn.init.constant_(mixer.A_log, math.log(DECAY_RATE / _DT))
    nn.init.zeros_(mixer.D)
    nn.init.ones_(mixer.norm.weight)
    mixer.out_proj.weight.copy_(attention.o_proj.weight)
    nn.init.zeros_(mixer.out_proj.bias)
    o_bias: Tensor | None = attention.o_proj.bias
    if o_bias is not None:
        mixer.out_proj.bias.copy_(o_bias)


def _projections(attention: Attention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of q, k and v, one head of each per query head."""
    groups = attention.n_heads // attention.n_kv_heads
    result: list[tuple[Tensor, Tensor | None]] = []
    for projection, repeats in (
        (attention.q_proj, 1),
        (attention.k_proj, groups),
        (attention.v_proj, groups),
    ):
        heads = projection.weight.view(-1, attention.head_dim, projection.in_features)
        bias: Tensor | None = projection.bias
        if bias is not None:
            bias = bias.view(-1, attention.head_dim).repeat_interleave(repeats, dim=0).flatten()
        result.append((heads.repeat_interleave(repeats, dim=0).flatten(0, 1), bias))
    return result


def _logit(p: float) -> float:
    return math.log(p / (1 - p))
