"""Position-wise networks: SwiGLU, and RWKV's channel mix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from refragkit.models.config import ModelConfig
from refragkit.models.layers.init import small_init, uniform_
from refragkit.models.layers.int8 import Int8Linear
from refragkit.models.layers.linear import Linear
from refragkit.models.layout import TokenLayout
from refragkit.ops.int8 import int8_swiglu


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.residual_branches = 2 * config.n_layers
        self.gate_proj = Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.up_proj = Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.down_proj = Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def init_weights(self, generator: torch.Generator) -> None:
        """Small init, the output scaled down with depth."""
        small_init(self.gate_proj, generator)
        small_init(self.up_proj, generator)
        small_init(self.down_proj, generator, self.residual_branches)

    @property
    def is_frozen_int8(self) -> bool:
        """Whether all three layers are int8 and nothing else, which one operation computes."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        return all(isinstance(layer, Int8Linear) and layer.bias is None for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d_model]`` to the same shape."""
        if self.is_frozen_int8:
            gate, up, down = (
                (layer.weight, layer.scale)
                for layer in (self.gate_proj, self.up_proj, self.down_proj)
                if isinstance(layer, Int8Linear)
            )
            return int8_swiglu(x, gate, up, down)
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ChannelMix(nn.Module):
    """RWKV's feed-forward: ``value(relu(key(x + (shift(x) - x) * x_k))^2)``.

    Source: Peng et al. 2025 (arXiv 2503.14456), section 4; the official ``RWKV_CMix_x070``.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.residual_branches = 2 * config.n_layers
        self.depth_left = 1 - index / config.n_layers
        self.x_k = nn.Parameter(torch.empty(config.d_model))
        self.key = Linear(config.d_model, config.d_ff, bias=False)
        self.value = Linear(config.d_ff, config.d_model, bias=False)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """The official recipe. Differs: ``value`` starts small instead of at zero, so that it is never inert."""
        width = self.x_k.shape[0]
        ramp = torch.arange(width, dtype=torch.float64) / width
        self.x_k.copy_(1 - ramp ** (self.depth_left**4))
        uniform_(self.key.weight, -0.5 / width**0.5, 0.5 / width**0.5, generator)
        small_init(self.value, generator, self.residual_branches)

    def forward(
        self, x: Tensor, layout: TokenLayout, shift_state: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Mix ``x [B, T, d_model]``.

        Returns:
            The output, and the last real input ``[B, d_model]`` if asked for.
        """
        extended = layout.with_history(x, None if shift_state is None else shift_state[:, None], 1)
        previous = extended[:, :-1]
        same = layout.same_document(1)
        if same is not None:
            previous = previous * same
        mixed = torch.addcmul(x, previous - x, self.x_k)
        out = self.value(functional.relu(self.key(mixed)).square())
        return out, layout.history(extended, 1)[:, 0] if return_state else None
