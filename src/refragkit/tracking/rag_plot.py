"""The plot of ``evaluate=rag``: scores with their intervals, by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refragkit.tracking.plots import save_figure

_SCORES = {"f1": "F1", "em": "EM", "support_recall": "support recall"}


def plot_rag(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path:
    """Draws F1, EM and support recall of each group with 95% intervals into one PNG, written atomically.

    Args:
        rows: with ``group``, ``questions`` and, for each score, its value and ``<score>_low``, ``<score>_high``.
        path: of the PNG; its folder is made.
        title: over the panel.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.0, 1.1 * len(rows) + 2.0), 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (key, label) in enumerate(_SCORES.items()):
        points = [(n, row) for n, row in enumerate(rows) if row.get(key) not in (None, "")]
        if not points:
            continue
        values = [float(row[key]) for _, row in points]
        axes.errorbar(
            [n + 0.2 * (index - 1) for n, _ in points],
            values,
            # An interval's end may lie a rounding error inside.
            yerr=[
                [max(0.0, v - float(row[f"{key}_low"])) for v, (_, row) in zip(values, points, strict=True)],
                [max(0.0, float(row[f"{key}_high"]) - v) for v, (_, row) in zip(values, points, strict=True)],
            ],
            fmt="o",
            markersize=5,
            capsize=3,
            color=f"C{index}",
            label=label,
        )
    labels = [f"{row['group']}\n({float(row['questions']):,.0f})" for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(-0.03, 1.03)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8)
    if title:
        axes.set_title(title, fontsize=10)
    return save_figure(figure, path)
