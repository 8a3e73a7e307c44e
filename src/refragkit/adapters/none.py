"""No adapter: every weight of the model is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refragkit.adapters.report import AdapterReport

if TYPE_CHECKING:
    from torch import nn


class NoAdapter:
    """Leaves the model as it is; has the interface of ``LoRA``."""

    def apply(self, model: nn.Module, *, seed: int = 0, base: str | None = None) -> AdapterReport:
        """Counts the parameters and changes nothing; the rest is accepted for the interface's sake."""
        parameters = list(model.parameters())
        return AdapterReport(
            layers=(),
            available=(),
            trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            total_parameters=sum(p.numel() for p in parameters),
        )
