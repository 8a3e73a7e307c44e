"""Adapters as plain tensors, off any model: the update of each layer and what has to be known to write it down.

W' = W + s B A with A [r, in], B [out, r] and s = alpha / r, or alpha / sqrt(r) with rsLoRA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one layer.

    Attributes:
        A: [r, in].
        B: [out, r].
        alpha: numerator of the scaling.
        rslora: scaled by alpha / sqrt(r) in place of alpha / r.
    """

    A: Tensor
    B: Tensor
    alpha: float
    rslora: bool = False

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.A.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.B.shape[0], self.A.shape[1]

    @property
    def scaling(self) -> float:
        """The factor s."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def delta(self) -> Tensor:
        """The update s B A [out, in], float32."""
        return (self.B.float() @ self.A.float()) * self.scaling

    def rescaled(self, alpha: float, rslora: bool) -> LowRank:
        """The same update with another alpha; both factors share the difference."""
        other = LowRank(self.A, self.B, alpha, rslora)
        factor = self.scaling / other.scaling
        if factor == 1:
            return other
        # (A negative alpha, which other programs may write, leaves its sign with B)
        root = math.sqrt(abs(factor))
        return LowRank(self.A * root, self.B * math.copysign(root, factor), alpha, rslora)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter.

    Attributes:
        layers: updates by module path, as the adapter's file names modules.
        dropout: on the input of A in training.
        target_modules: names or ends of module paths that stand for exactly these layers; empty: their paths.
        base_hash: `refragkit.models.weights_hash.weights_hash` of the model it belongs onto; None: not known.
        source: where it was read, for messages.
    """

    layers: Mapping[str, LowRank]
    dropout: float = 0.0
    target_modules: tuple[str, ...] = field(default=())
    base_hash: str | None = None
    source: str = ""
