"""The settings of ``method=lora``: supervised fine-tuning of an adapter, by one process or by several workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from refragkit.errors import ConfigError, DataError
from refragkit.methods.recipes import Recipe

if TYPE_CHECKING:
    from refragkit.methods.base import Components
    from refragkit.methods.lora_module import LoraModule


@dataclass(frozen=True, kw_only=True)
class Lora(Recipe):
    """Settings of lora; see ``Recipe`` for the shared ones.

    Attributes:
        save_every: with each checkpoint goes a file ``adapter/checkpoint_<step>.safetensors``; null: none.
        workers: processes that train an adapter each on a share of every batch, beside one read-only base.
        worker_weights: the share of each; null: equal ones.
        average: how their adapters become one, see ``refragkit.adapters.merge``.
        sync_every: steps after which the average replaces the adapter of every worker; 1: gradients are averaged
            instead, in each step; null: once, at the end.
    """

    workers: int
    worker_weights: Sequence[float] | None
    average: Literal["exact", "svd", "factors"]
    sync_every: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers < 1:
            raise ConfigError(f"method.workers: expected at least 1, got {self.workers}")
        if self.sync_every is not None and self.sync_every < 1:
            raise ConfigError(f"method.sync_every: expected null or at least 1, got {self.sync_every}")
        if self.workers == 1:
            alone = [name for name in ("worker_weights", "sync_every") if getattr(self, name) is not None]
            if alone:
                raise ConfigError(
                    f"method.{alone[0]}={getattr(self, alone[0])} is about several workers, and method.workers is 1;"
                    f" set method.workers=N or leave method.{alone[0]} null"
                )
            return
        self._check_weights()
        try:
            self.cuts(self.weights)
        except DataError as error:
            raise ConfigError(
                f"method.global_batch_size={self.global_batch_size} has not an example for each of"
                f" method.workers={self.workers} with method.worker_weights={self.worker_weights}: raise it, or use"
                " fewer workers"
            ) from error
        if self.sync_every is not None and self.sync_every > 1 and self.average == "exact":
            raise ConfigError(
                f"method.sync_every={self.sync_every} goes on from averages, and method.average=exact multiplies the"
                " rank by the number of workers each time; choose method.average=svd or factors, or"
                " method.sync_every=1 to average gradients"
            )

    def _check_weights(self) -> None:
        weights = self.worker_weights
        if weights is None:
            return
        if len(weights) != self.workers or not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(
                f"method.worker_weights: expected a positive number for each of method.workers={self.workers}, such as"
                f" [{','.join(['2', *['1'] * (self.workers - 1)])}], got {list(weights)}"
            )

    @property
    def weights(self) -> list[float]:
        """What each worker takes of a batch, in proportion."""
        return [1.0] * self.workers if self.worker_weights is None else list(self.worker_weights)

    def cuts(self, weights: Sequence[float]) -> list[int]:
        """Where shares of a batch begin and end: share i is its examples ``cuts[i]`` to ``cuts[i + 1]`` - 1.

        Raises:
            DataError: one would be empty.
        """
        from refragkit.data.token_parts import boundaries

        return boundaries(self.global_batch_size, weights)

    def module(self, components: Components) -> LoraModule:
        """The Lightning module."""
        from refragkit.methods.lora_module import LoraModule

        if self.workers == 1:
            return LoraModule(self, components)
        from refragkit.methods.lora_workers import LoraWorkersModule

        return LoraWorkersModule(self, components)
