"""The leaderboard of a sweep as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refragkit.sweep import MEASURES
from refragkit.tracking.plots import save_figure


def plot_leaderboard(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path | None:
    """One horizontal bar for each row, the best on top, with its interval over seeds.

    Args:
        rows: of ``refragkit.sweep.leaderboard``.
        path: the PNG file.

    Returns:
        The file; None where no row has a measure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [m for m in MEASURES if m != "train/tokens" and any(m in row for row in rows)][:3]
    kept = [row for row in rows if shown and shown[0] in row]
    if not kept:
        return None
    figure = Figure(figsize=(4 + 3 * len(shown), 1.2 + 0.35 * len(kept)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    places = list(range(len(kept)))[::-1]
    for axes, measure in zip(panels, shown, strict=True):
        values = [float(row.get(measure, float("nan"))) for row in kept]
        halves = [float(row.get(f"{measure}_plus_minus", "nan")) for row in kept]
        axes.barh(places, values, 0.7, xerr=halves, color="tab:blue", ecolor="0.3", capsize=2)
        axes.set_title(
            f"{MEASURES[measure][1]}, {'more' if MEASURES[measure][0] else 'less'} is better", fontsize=10
        )
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.25)
    panels[0].set_yticks(places, [f"{row['job']} (n={row['seeds']})" for row in kept], fontsize=8)
    return save_figure(figure, path)
