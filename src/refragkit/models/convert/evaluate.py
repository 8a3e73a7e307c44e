"""What a conversion cost: the same measures of the model before and after, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from refragkit.models.base import SequenceModel
from refragkit.models.convert.probes import (
    decoding_tokens_per_second,
    induction_perplexity,
    induction_rows,
    perplexity,
    perplexity_by_position,
    recall,
)

if TYPE_CHECKING:
    from rich.table import Table

    from refragkit.data.tokenizer import Tokenizer

WINDOW = 512
LENGTHS = 4
"""Length extrapolation reads windows of so many times 512."""
CONTEXTS = (1024, 4096, 16384)
INDUCTION_ROWS, INDUCTION_LENGTH = 16, 128

Measures = dict[str, float]
Row = dict[str, str | float]


@torch.no_grad()
def evaluate_model(
    model: SequenceModel,
    tokenizer: Tokenizer,
    texts: Mapping[str, Tensor],
    *,
    seed: int = 0,
    recall_contexts: int = 50,
    advance: Callable[[], None] = lambda: None,
) -> Measures:
    """Measure one model.

    Args:
        model: in evaluation mode; on its own device.
        tokenizer: its own.
        texts: held-out text by name, int64 ``[n, 512]``; rows follow one another, so that four of the first make a
            long window.
        seed: of the probes' random tokens.
        recall_contexts: four recall prompts each.
        advance: called :func:`evaluation_steps` times.

    Returns:
        ``perplexity/<name>``; ``induction_perplexity`` (second copy of 128 random tokens); ``recall`` (share of right
        numbers, 8 names); ``perplexity_at/<tokens>`` (of the first text read 2,048 tokens at a time, the 512 up to
        there; absent where the text is shorter); ``state_bytes/<tokens>`` and ``tokens_per_second/<tokens>`` (decoding
        one row) at 1k, 4k and 16k.
    """
    device = model.head_weight.device
    measures: Measures = {}
    for name, rows in texts.items():
        measures[f"perplexity/{name}"] = perplexity(model, rows.to(device))
        advance()
    probe = induction_rows(
        tokenizer.vocab_size, tokenizer.control_ids, INDUCTION_ROWS, INDUCTION_LENGTH, seed
    )
    measures["induction_perplexity"] = induction_perplexity(model, probe.to(device))
    advance()
    measures["recall"] = recall(model, tokenizer, recall_contexts, seed=seed)
    advance()
    first = next(iter(texts.values()))
    long = min(2, len(first) // LENGTHS)
    if long:
        rows = first[: long * LENGTHS].reshape(long, -1).to(device)
        for part, value in enumerate(perplexity_by_position(model, rows, LENGTHS), 1):
            measures[f"perplexity_at/{part * rows.shape[1] // LENGTHS}"] = value
    advance()
    for context in CONTEXTS:
        measures[f"state_bytes/{context}"] = float(model.state_bytes(1, context))
        measures[f"tokens_per_second/{context}"] = decoding_tokens_per_second(model, context)
    advance()
    return measures


def evaluation_steps(texts: Mapping[str, Tensor]) -> int:
    """How often :func:`evaluate_model` advances."""
    return len(texts) + 4


def compare(models: Mapping[str, Measures]) -> list[Row]:
    """One row per measure with the value of every model, and each over the first's (``<name> / <first>``)."""
    names = list(models)
    first = names[0]
    rows: list[Row] = []
    for measure, base in models[first].items():
        row: Row = {"measure": measure}
        row |= {name: models[name][measure] for name in names}
        row |= {f"{name} / {first}": models[name][measure] / base if base else 0.0 for name in names[1:]}
        rows.append(row)
    return rows


def as_table(rows: Sequence[Row], title: str) -> Table:
    """Rows of :func:`compare` for the screen."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("measure")
    for column in list(rows[0])[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["measure"]),
            *(shown(value, ratio=" / " in name) for name, value in row.items() if name != "measure"),
        )
    return table


def shown(value: str | float, ratio: bool = False) -> str:
    """A number in as many digits as mean something."""
    number = float(value)
    if ratio or abs(number) < 10:
        return f"{number:.3f}"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.1f}"
