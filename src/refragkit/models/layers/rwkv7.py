"""The RWKV-7 time mix.

Glossary, with d = shift(x) - x: ``x_n`` the token-shift weights mu_n; ``r_proj`` W_r (receptance), ``k_proj``,
``v_proj``, ``o_proj``; ``decay`` the map w0 + tanh(x w1) w2; ``iclr`` (in-context learning rate) a0 + x a1 a2;
``value_residual`` v0 + x v1 v2; ``gate`` sigmoid(x g1) g2; ``k_k`` and ``k_a`` the removal and replacement key
weights; ``r_k`` the bonus for the current token; ``ln_x`` the per-head norm.

Source: Peng et al. 2025 (arXiv 2503.14456), section 4; the official ``RWKV_Tmix_x070``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from refragkit.models.config import ModelConfig
from refragkit.models.layers.init import small_init, uniform_
from refragkit.models.layers.linear import Linear
from refragkit.models.layout import TokenLayout
from refragkit.models.state import RWKV7State
from refragkit.ops.wkv7 import wkv7

_MAX_DECAY_RATE = math.exp(-0.5)  # log-decays lie in (-0.6065, 0)


class LowRank(nn.Module):
    """``up(activation(down(x))) + bias`` through a narrow middle.

    The bias (where there is one) is added in float32: it can be many times larger than what bfloat16 would round
    off, and for decays that matters.
    """

    def __init__(
        self, width: int, rank: int, activation: Literal["tanh", "sigmoid", "none"], bias: bool
    ) -> None:
        super().__init__()
        self.activation = activation
        self.down = Linear(width, rank, bias=False)
        self.up = Linear(rank, width, bias=False)
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Official: the way in at zero, the way out orthogonal with gain 0.1; the bias belongs to the mixer."""
        nn.init.zeros_(self.down.weight)
        width, rank = self.up.weight.shape
        gain = 0.1 * math.sqrt(max(1.0, rank / width))
        nn.init.orthogonal_(self.up.weight, gain=gain, generator=generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same shape; float32 (or float64) where there is a bias."""
        inner = self.down(x)
        if self.activation == "tanh":
            inner = inner.tanh()
        elif self.activation == "sigmoid":
            inner = inner.sigmoid()
        out: Tensor = self.up(inner)
        if self.bias is None:
            return out
        precise = torch.promote_types(out.dtype, torch.float32)
        return out.to(precise) + self.bias.to(precise)


class RWKV7TimeMix(nn.Module):
    """An R block's mixer.

    Args:
        config: the model's.
        index: the block's place in the stack; initial decays and mixes depend on it.
        first: whether this is the first R block, which provides the values that later ones mix in.
    """

    def __init__(self, config: ModelConfig, index: int, first: bool) -> None:
        super().__init__()
        width = config.d_model
        self.n_heads = config.wkv_heads
        self.head_dim = config.wkv_head_dim
        self.gate_kind = config.wkv_gate
        self.residual_branches = config.n_layers * (1 if config.mlp == "none" else 2)
        self.depth = index / max(1, config.n_layers - 1)
        self.depth_left = 1 - index / config.n_layers
        self.layer_scale = (1 + index) / config.n_layers
        self.x_r = nn.Parameter(torch.empty(width))
        self.x_w = nn.Parameter(torch.empty(width))
        self.x_k = nn.Parameter(torch.empty(width))
        self.x_v = nn.Parameter(torch.empty(width))
        self.x_a = nn.Parameter(torch.empty(width))
        self.k_k = nn.Parameter(torch.empty(width))
        self.k_a = nn.Parameter(torch.empty(width))
        self.r_k = nn.Parameter(torch.empty(self.n_heads, self.head_dim))
        self.r_proj = Linear(width, width, bias=config.wkv_bias)
        self.k_proj = Linear(width, width, bias=config.wkv_bias)
        self.v_proj = Linear(width, width, bias=config.wkv_bias)
        self.o_proj = Linear(width, width, bias=False)
        self.decay = LowRank(width, config.decay_rank, "tanh", bias=True)
        self.iclr = LowRank(width, config.iclr_rank, "none", bias=True)
        self.value_residual = None
        if config.wkv_value_residual and not first:
            self.value_residual = LowRank(width, config.value_rank, "none", bias=True)
        self.gate = None
        if config.wkv_gate != "none":
            self.x_g = nn.Parameter(torch.empty(width))
            self.gate = LowRank(width, config.gate_rank, "sigmoid", bias=False)
        self.ln_x = None
        if config.wkv_group_norm:
            self.ln_x = nn.GroupNorm(self.n_heads, width, eps=config.wkv_norm_eps)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """The official recipe of RWKV-LM's x070.

        Differs: ``o_proj`` starts small instead of at zero, so that a fresh model's outputs depend on its state.
        """
        width, N = self.k_k.shape[0], self.head_dim
        channel = torch.arange(width, dtype=torch.float64)
        ramp = channel / width
        for name, power in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            if hasattr(self, f"x_{name}"):
                getattr(self, f"x_{name}").copy_(1 - ramp ** (power * self.depth_left))
        linear = channel / (width - 1) - 0.5
        zigzag = (channel % N - (N - 1) / 2) / ((N - 1) / 2)
        zigzag = zigzag * zigzag.abs()
        self.decay.init_weights(generator)
        rates = -6 + 6 * (channel / (width - 1)) ** (1 + self.depth**0.3)
        self.decay.get_parameter("bias").copy_(rates + 0.5 + zigzag * 2.5)
        self.iclr.init_weights(generator)
        if self.gate is not None:
            self.gate.init_weights(generator)
        self.iclr.get_parameter("bias").copy_(-0.19 + zigzag * 0.3 + linear * 0.4)
        if self.value_residual is not None:
            self.value_residual.init_weights(generator)
            self.value_residual.get_parameter("bias").copy_(0.73 - linear * 0.4)
        self.k_k.copy_(0.71 - linear * 0.1)
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        for projection, bound in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            uniform_(projection.weight, -bound / width**0.5, bound / width**0.5, generator)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        small_init(self.o_proj, generator, self.residual_branches)
        if self.ln_x is not None:
            nn.init.constant_(self.ln_x.weight, self.layer_scale**0.7)
            nn.init.zeros_(self.ln_x.bias)

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout,
        v_first: Tensor | None,
        state: RWKV7State | None,
        return_state: bool,
    ) -> tuple[Tensor, Tensor, RWKV7State | None]:
        """Mix ``x [B, T, d_model]`` (real tokens first) along the sequence.

        Args:
            x: the normalised input.
            layout: where the real tokens are.
            v_first: values of the first R block, ``[B, T, d_model]``; None in that block.
            state: of earlier calls.
            return_state: whether to build the new state.

        Returns:
            The output, ``v_first`` for the blocks above, and the new state (without the channel mix's part).
        """
        batch, T, width = x.shape
        shape = (batch, T, self.n_heads, self.head_dim)
        extended = layout.with_history(x, None if state is None else state.shift_state[:, None], 1)
        previous = extended[:, :-1]
        same = layout.same_document(1)
        if same is not None:
            previous = previous * same
        delta = previous - x

        r = self.r_proj(torch.addcmul(x, delta, self.x_r))
        k = self.k_proj(torch.addcmul(x, delta, self.x_k))
        x_v = torch.addcmul(x, delta, self.x_v)
        v = self.v_proj(x_v)
        w = self.decay(torch.addcmul(x, delta, self.x_w))
        iclr = torch.sigmoid(self.iclr(torch.addcmul(x, delta, self.x_a))).to(k.dtype)
        log_decay = -_MAX_DECAY_RATE * torch.sigmoid(w)
        if self.value_residual is None or v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.value_residual(x_v)).to(v.dtype)
        kk = functional.normalize((k * self.k_k).view(shape).to(log_decay.dtype), dim=-1)
        k = k * (1 + (iclr - 1) * self.k_a)
        removal, replacement = -kk, kk * iclr.view(shape)
        k_heads, v_heads, r_heads, log_decay = (
            k.view(shape),
            v.view(shape),
            r.view(shape),
            log_decay.view(shape),
        )
        k_written = k_heads
        if layout.valid is not None:  # padding neither decays the state nor writes to it
            real = layout.valid[..., None, None]
            log_decay, removal, k_written = log_decay * real, removal * real, k_heads * real
        y, wkv_state = wkv7(
            r_heads,
            log_decay,
            k_written,
            v_heads,
            removal,
            replacement,
            None if state is None else state.wkv_state,
            segment_ids=layout.document_ids,
            least_log_decay=-_MAX_DECAY_RATE,
        )
        if self.ln_x is not None:
            y = self.ln_x(y.reshape(batch * T, width)).view(shape)
        y = y + (r_heads * k_heads * self.r_k).sum(-1, keepdim=True) * v_heads
        y = y.reshape(batch, T, width)
        if self.gate is not None:
            gate = self.gate(torch.addcmul(x, delta, self.x_g))
            y = y * (gate if self.gate_kind == "sigmoid" else 1 + gate)
        out: Tensor = self.o_proj(y)
        if not return_state:
            return out, v_first, None
        return out, v_first, RWKV7State(layout.history(extended, 1)[:, 0], wkv_state)
