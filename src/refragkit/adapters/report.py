"""What an adapter changed: the layers it wrapped, the parameters it trains, and a coverage table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer inside a block of the stack.

    Attributes:
        path: module path in our model, e.g. ``blocks.3.mixer.q_proj``.
        name: its path within the mixer or MLP, e.g. ``q_proj`` or ``decay.up``.
        block: index of the block in the stack, from 0.
        kind: block type, ``T``, ``M`` or ``R``.
    """

    path: str
    name: str
    block: int
    kind: str


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The outcome of ``adapter.apply(model)``.

    Attributes:
        layers: the wrapped projections, in the order of the stack; empty without an adapter.
        available: every projection of every block, wrapped or not.
        trainable_parameters: elements that training will change.
        total_parameters: elements of the model, adapter included, tied weights once.
    """

    layers: tuple[Projection, ...]
    available: tuple[Projection, ...]
    trainable_parameters: int
    total_parameters: int

    def table(self) -> str:
        """The coverage table: wrapped / available layers by projection (rows) and block type (columns)."""
        return coverage_table(self.layers, self.available)


def coverage_table(layers: Sequence[Projection], available: Sequence[Projection]) -> str:
    """Lays out wrapped / available counts by projection name and block type; ``-`` where there is none."""
    kinds = sorted({projection.kind for projection in available})
    names = list(dict.fromkeys(projection.name for projection in available))
    have = Counter((projection.name, projection.kind) for projection in available)
    wrapped = Counter((projection.name, projection.kind) for projection in layers)
    rows = [["projection", *(f"{kind} blocks" for kind in kinds)]]
    for name in names:
        cells = [f"{wrapped[name, k]}/{have[name, k]}" if have[name, k] else "-" for k in kinds]
        rows.append([name, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
