"""Layers whose frozen weights are int8: the products and the rounding are those of ``refragkit.ops.int8``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from refragkit.errors import ConfigError
from refragkit.models.layers.linear import Linear
from refragkit.ops.int8 import dequantize_rows, int8_embedding, int8_linear, quantize_rows


class Int8Rows(nn.Module):
    """``weight`` int8 [rows, width] and ``scale`` float32 [rows]; neither is trained, the one copy of the weight."""

    weight: Tensor
    scale: Tensor

    def _allocate(self, rows: int, width: int, device: torch.device) -> None:
        weight = torch.empty(rows, width, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.empty(rows, dtype=torch.float32, device=device))

    def _fill(self, weight: Tensor) -> None:
        """Take over a floating-point weight; on the meta device there is none to take."""
        if weight.device.type != "meta":
            values, self.scale = quantize_rows(weight)
            self.weight = nn.Parameter(values, requires_grad=False)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer stands for, ``[rows, width]``."""
        return dequantize_rows(self.weight, self.scale, dtype)

    @torch.no_grad()
    def resize_rows(self, count: int, rows: Mapping[int, Tensor]) -> None:
        """Make it ``count`` rows, at least as many as there are, and set some of them; new ones are 0 otherwise.

        Args:
            count: rows afterwards.
            rows: values ``[width]`` in floating point, by their number.
        """
        weight, scale = self.weight.new_zeros(count, self.weight.shape[1]), self.scale.new_zeros(count)
        weight[: len(self.weight)], scale[: len(self.scale)] = self.weight, self.scale
        for row, values in rows.items():
            rounded, scales = quantize_rows(values[None].float())
            weight[row], scale[row] = rounded[0], scales[0]
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), scale

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Moves to a device as any layer; a change of type leaves the scale precise."""
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != torch.float32:
            self.scale = scale.to(self.scale.device)
        return self


class Int8Linear(Int8Rows, Linear):
    """``x W^T + bias`` with W as int8, by integer products in both directions.

    Code that reads ``weight`` as if it were in floating point fails: its type is int8.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is one; it keeps its type.
        device: where to allocate.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self._allocate(out_features, in_features, device)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device), requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The int8 form of a layer in floating point, whose weight it doesn't keep.

        Raises:
            ValueError: values that are not finite.
        """
        layer = cls(linear.in_features, linear.out_features, False, torch.device("meta"))
        layer._fill(linear.weight)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        return layer.train(linear.training)

    def to_linear(self) -> Linear:
        """The layer in float32, frozen."""
        with torch.device("meta"):
            layer = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(self.dequantized(), requires_grad=False)
        layer.bias = self.bias
        return layer.train(self.training)

    def reset_parameters(self) -> None:
        """Refused: a rounded weight is not where training starts."""
        raise ConfigError("an int8 layer has no initial weights of its own; quantise one that has")

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return int8_linear(x, self.weight, self.scale, self.bias)


class Int8Embedding(Int8Rows, nn.Embedding):
    """Rows of an int8 matrix, in float32.

    Args:
        num_embeddings: rows.
        embedding_dim: their width.
        device: where to allocate.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self._allocate(num_embeddings, embedding_dim, device)

    @classmethod
    def of(cls, embedding: nn.Embedding) -> Int8Embedding:
        """The int8 form of an embedding in floating point.

        Raises:
            ValueError: values that are not finite.
        """
        layer = cls(embedding.num_embeddings, embedding.embedding_dim, torch.device("meta"))
        layer._fill(embedding.weight)
        return layer.train(embedding.training)

    def reset_parameters(self) -> None:
        """Refused, see :meth:`Int8Linear.reset_parameters`."""
        raise ConfigError("an int8 embedding has no initial weights of its own; quantise one that has")

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 ``[...]`` to float32 ``[..., embedding_dim]``."""
        return int8_embedding(input_ids, self.weight, self.scale)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
