"""The projections of all blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FEWEST_ROWS, _MOST_ROWS = 2, 16
_SMALLEST_WEIGHT = 1 << 18


class Linear(nn.Linear):
    """``x W^T + bias``; while decoding a few rows on a CPU in float32, computed as ``(W x^T)^T``.

    MKL takes 1.2 to 8 times as long for the first form where 2 to 16 rows meet a large weight: what a batch of
    samples spends most of its time on. Sums are taken in another order, so the last bits differ.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        if self._may_transpose(x):
            rows = x.numel() // self.in_features
            if _FEWEST_ROWS <= rows <= _MOST_ROWS:
                y = (self.weight @ x.reshape(rows, -1).T).T.contiguous()
                y = y if self.bias is None else y.add_(self.bias)
                return y.view(*x.shape[:-1], self.out_features)
        return super().forward(x)

    def _may_transpose(self, x: Tensor) -> bool:
        """Whatever the number of rows: compiled code checks that at each call once it has been asked for."""
        return (
            self.weight.numel() >= _SMALLEST_WEIGHT
            and x.dtype == self.weight.dtype == torch.float32
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )
