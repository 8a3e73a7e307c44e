"""The Mamba-2 mixer.

Glossary: ``d_inner`` = expand * d_model, ``H`` heads of width ``P`` (``ssm_head_dim``), ``N`` = ``d_state``,
``G`` = ``n_groups``, ``z`` the gate, ``x`` the input, ``B`` and ``C`` the input and output maps, ``dt`` the step
size, ``A`` = -exp(A_log) the decay rate, ``D`` the skip.

Source: Dao and Gu 2024 (arXiv 2405.21060), section 7; parameter names follow the released code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from refragkit.models.config import ModelConfig
from refragkit.models.layers.init import small_init, uniform_
from refragkit.models.layers.linear import Linear
from refragkit.models.layers.norm import GatedRMSNorm
from refragkit.models.layout import TokenLayout
from refragkit.models.state import Mamba2State
from refragkit.ops.causal_conv import causal_conv
from refragkit.ops.ssd import ssd

_DT_MIN, _DT_MAX, _DT_FLOOR = 1e-3, 1e-1, 1e-4
_A_MIN, _A_MAX = 1.0, 16.0


class Mamba2(nn.Module):
    """An M block's mixer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.d_inner = config.d_inner
        self.n_heads = config.ssm_heads
        self.head_dim = config.ssm_head_dim
        self.d_state = config.d_state
        self.n_groups = config.n_groups
        self.d_conv = config.d_conv
        self.dt_limit = config.dt_limit
        self.conv_silu = config.conv_silu
        self.residual_branches = config.n_layers * (1 if config.mlp == "none" else 2)
        self.conv_channels = self.d_inner + 2 * self.n_groups * self.d_state
        self.in_proj = Linear(
            config.d_model, self.d_inner + self.conv_channels + self.n_heads, bias=config.ssm_bias
        )
        self.conv1d = nn.Conv1d(
            self.conv_channels,
            self.conv_channels,
            self.d_conv,
            groups=self.conv_channels,
            bias=config.conv_bias,
        )
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.D = nn.Parameter(torch.empty(self.n_heads))
        self.norm = GatedRMSNorm(self.d_inner, config.norm_eps, config.ssm_norm_groups)
        self.out_proj = Linear(self.d_inner, config.d_model, bias=config.ssm_bias)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """The paper's recipe: A uniform in [1, 16], dt log-uniform in [1e-3, 1e-1], D = 1.

        Differs: projections start from the small init that all blocks share; the released code's uniform
        ``1 / sqrt(fan_in)`` has nearly the same variance.
        """
        small_init(self.in_proj, generator)
        small_init(self.out_proj, generator, self.residual_branches)
        bound = 1 / math.sqrt(self.d_conv)
        uniform_(self.conv1d.weight, -bound, bound, generator)
        if self.conv1d.bias is not None:
            uniform_(self.conv1d.bias, -bound, bound, generator)
        uniform_(self.A_log, _A_MIN, _A_MAX, generator).log_()
        dt = uniform_(self.dt_bias, math.log(_DT_MIN), math.log(_DT_MAX), generator).exp_()
        dt.clamp_(min=_DT_FLOOR)
        dt.add_(torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        nn.init.ones_(self.D)
        self.norm.init_weights(generator)

    def forward(
        self, x: Tensor, layout: TokenLayout, state: Mamba2State | None, return_state: bool
    ) -> tuple[Tensor, Mamba2State | None]:
        """Mix ``x [B, T, d_model]`` (real tokens first) along the sequence.

        Returns:
            ``[B, T, d_model]``, and the new state if asked for.
        """
        batch, T, _ = x.shape
        z, xbc, dt = torch.split(self.in_proj(x), [self.d_inner, self.conv_channels, self.n_heads], dim=-1)
        history = None if state is None else state.conv_state
        conv_inputs = xbc
        packed = None if layout.document_ids is None else layout.positions
        xbc = causal_conv(
            xbc, history, self.conv1d.weight[:, 0].T, self.conv1d.bias, packed, silu=self.conv_silu
        )
        maps = self.n_groups * self.d_state
        inputs, B, C = torch.split(xbc, [self.d_inner, maps, maps], dim=-1)
        precise = torch.promote_types(dt.dtype, torch.float32)
        dt = functional.softplus(dt.to(precise) + self.dt_bias.to(precise))
        if self.dt_limit is not None:
            dt = dt.clamp(*self.dt_limit)
        if layout.valid is not None:
            dt = dt * layout.valid[..., None]  # with dt = 0 padding neither decays the state nor writes to it
        inputs = inputs.reshape(batch, T, self.n_heads, self.head_dim)
        y, ssm_state = ssd(
            inputs,
            dt,
            -self.A_log.to(precise).exp(),
            B.reshape(batch, T, self.n_groups, self.d_state),
            C.reshape(batch, T, self.n_groups, self.d_state),
            None if state is None else state.ssm_state,
            D=self.D,
            segment_ids=layout.document_ids,
            overwrite_state=state is not None and state.overwritable,
        )
        out: Tensor = self.out_proj(self.norm(y.reshape(batch, T, self.d_inner), z))
        if not return_state:
            return out, None
        width = self.d_conv - 1
        return out, Mamba2State(
            layout.history(layout.with_history(conv_inputs, history, width), width), ssm_state
        )
