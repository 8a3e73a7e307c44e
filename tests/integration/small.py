"""Overrides that make a real run take seconds: same code, fewer and shorter examples."""

from __future__ import annotations

from pathlib import Path

SMALL = [
    "retriever=bm25",
    "data.max_train_questions=12",
    "data.max_validation_questions=4",
    "data.vocab_size=512",
    "method.max_steps=2",
    "method.global_batch_size=4",
    "method.max_seq_len=384",
    "method.max_new_tokens=4",
]


def small(outputs: Path, *overrides: str) -> list[str]:
    """The small run's overrides with its outputs in a folder of its own."""
    changed = {o.split("=")[0] for o in overrides}
    return [o for o in SMALL if o.split("=")[0] not in changed] + [f"paths.outputs={outputs}", *overrides]
