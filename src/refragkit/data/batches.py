"""Global batches by number, as map-style data sets for a loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from refragkit.data.order import batch_indices
from refragkit.types import Batch, Conversation, Question

Examples = Sequence[Question] | Sequence[Conversation] | Sequence[Question | Conversation]


class BatchDataset(Dataset[Batch]):
    """Item i is the whole global batch of step ``first_step + i``, drawn by `batch_indices`.

    Attributes:
        examples: what batches are made of.
        seed: of the run.
        global_batch_size: examples per batch.
        n_steps: steps of the whole run.
        first_step: where a resumed run goes on; 0 from the start.
    """

    def __init__(
        self, examples: Examples, seed: int, global_batch_size: int, n_steps: int, first_step: int = 0
    ) -> None:
        if not examples or global_batch_size < 1 or not 0 <= first_step <= n_steps:
            raise ValueError(
                "BatchDataset: expected at least one example, global_batch_size >= 1 and 0 <= first_step <= n_steps, "
                f"got {len(examples)} examples, global_batch_size={global_batch_size}, first_step={first_step}, "
                f"n_steps={n_steps}"
            )
        self.examples = examples
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.n_steps = n_steps
        self.first_step = first_step

    def __len__(self) -> int:
        """Steps that are left."""
        return self.n_steps - self.first_step

    def __getitem__(self, index: int) -> Batch:
        """The batch of step ``first_step + index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        step = self.first_step + index
        chosen = batch_indices(self.seed, step, len(self.examples), self.global_batch_size)
        return Batch(index=step, examples=[self.examples[i] for i in chosen])


class SequentialBatches(Dataset[Batch]):
    """Every example once, in order, the last batch possibly shorter: for validation.

    ``max_examples`` takes the first ones only (None: all).
    """

    def __init__(self, examples: Examples, batch_size: int, max_examples: int | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"SequentialBatches: expected batch_size >= 1, got {batch_size}")
        self.examples = examples if max_examples is None else examples[:max_examples]
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.examples) // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        """Batch ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index * self.batch_size
        return Batch(index=index, examples=list(self.examples[start : start + self.batch_size]))


class StepLoader(DataLoader[Any]):
    """A loader without a state: where it begins is in its data set, as ``first_step``.

    Lightning asks for one before it goes on in the middle of an epoch.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to restore."""


def batch_loader(batches: BatchDataset | SequentialBatches) -> DataLoader[Any]:
    """A loader that yields the batches in order, one `Batch` at a time.

    In this process: a batch holds questions, not tensors, so workers would only cost their start.
    """
    return StepLoader(batches, batch_size=None, shuffle=False, num_workers=0)
