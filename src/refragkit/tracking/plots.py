"""Plots of a run, drawn from plain rows such as those of ``metrics.csv``.

Figures are drawn on the Agg canvas directly: no display, no global pyplot state, safe beside other threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (title of the panel, metrics in it by label); a panel without data is left out.
_PANELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Loss (nats per token)", {"train": "train/loss", "validation": "val/loss"}),
    (
        "Reward of training answers",
        {
            "total": "reward/total",
            "answer": "reward/answer",
            "relevance": "reward/relevance",
            "efficiency": "reward/efficiency",
            "of what is kept": "reward/kept",
        },
    ),
    (
        "Samples (share)",
        {
            "accepted": "rollout/acceptance_rate",
            "distinct": "rollout/distinct_rate",
            "finished": "rollout/finished_rate",
            "prompts without any kept": "rollout/prompts_without_kept_share",
        },
    ),
    ("Completion length (tokens)", {"mean": "rollout/completion_tokens"}),
    ("Tokens/s", {"sampling": "rollout/tokens_per_second", "learning": "train/learn_tokens_per_second"}),
    (
        "Validation answers",
        {
            "F1": "val/f1",
            "exact match": "val/em",
            "support recall": "val/support_recall",
            "reward": "val/reward_total",
        },
    ),
    (
        "Validation samples",
        {"reward": "val/sampled_reward", **{f"pass@{k}": f"val/pass@{k}" for k in (1, 2, 4, 8, 16)}},
    ),
)
_MOST_COLUMNS = 4
# Above this many points a curve is noise without a running mean.
_SMOOTH_FROM_POINTS = 20


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The (steps, values) of one metric; rows where it is missing, empty or not finite are skipped.

    Values may be strings, as ``csv.DictReader`` gives them. Of two values for one step, the later row wins.
    """
    points: dict[int, float] = {}
    for row in rows:
        step, value = row.get("step"), row.get(key)
        if step in (None, "") or value in (None, ""):
            continue
        number = float(value)
        if math.isfinite(number):
            points[int(float(step))] = number
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def plot_training(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path | None:
    """Draws losses, reward parts, samples and validation scores by step into one PNG, written atomically.

    Args:
        rows: ``{"step": int, "train/loss": float, "val/loss": ..., "reward/total": ...}``; each row may
            hold any part of the metrics.
        path: of the PNG; its folder is made.

    Returns:
        The path, or None when the rows hold nothing to draw.
    """
    panels = []
    for title, metrics in _PANELS:
        curves = [(label, *series(rows, key)) for label, key in metrics.items()]
        curves = [curve for curve in curves if curve[1]]
        if curves:
            panels.append((title, curves))
    if not panels:
        return None

    # matplotlib takes most of a second to import: only when there is something to draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(_MOST_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.0 * columns, 3.6 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (title, curves) in zip(places, panels, strict=False):
        for index, (label, steps, values) in enumerate(curves):
            color = f"C{index}"
            few = len(values) < _SMOOTH_FROM_POINTS
            axes.plot(
                steps,
                values,
                color=color,
                label=label if few else None,
                marker="o" if few else None,
                markersize=3,
                linewidth=1.4 if few else 0.8,
                alpha=1.0 if few else 0.3,
            )
            if not few:
                axes.plot(steps, running_mean(values), color=color, label=label, linewidth=1.6)
        if title.startswith(("Reward", "Validation", "Samples")):
            axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)

    return save_figure(figure, path)


def plot_retrieval(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path:
    """Draws what a retriever finds, a curve for each group, into one PNG, written atomically.

    Args:
        rows: with ``group``, ``questions``, ``recall@<k>`` and ``found_recall_hop_<n>``.
        path: of the PNG; its folder is made.
        title: over the panels.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("Recall of the first k documents", "recall@", "k"),
        ("Recall of what the hops handed on", "found_recall_hop_", "after hop"),
    )
    for axes, (heading, prefix, label) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        ticks = sorted(int(key.removeprefix(prefix)) for key in rows[0] if key.startswith(prefix))
        for index, row in enumerate(rows):
            axes.plot(
                range(len(ticks)),
                [float(row[f"{prefix}{n}"]) for n in ticks],
                color="black" if index == 0 else f"C{(index - 1) % 10}",
                linestyle="--" if str(row["group"]).endswith(" hops") else "-",
                linewidth=2.2 if index == 0 else 1.4,
                marker="o",
                markersize=4,
                label=f"{row['group']} ({float(row['questions']):,.0f})",
            )
        axes.set_xticks(range(len(ticks)), [str(n) for n in ticks])
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper", title="group (questions)")
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def plot_sensitivity(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path:
    """Draws what replacing each block does to text and to copying, into one PNG, written atomically.

    Args:
        rows: with ``layer``, ``perplexity_ratio``, ``probe_ratio`` and ``choice`` (``chosen`` or anything else).
        path: of the PNG; its folder is made.
        title: over the panels.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: int(row["layer"]))
    layers = [int(row["layer"]) for row in rows]
    colors = ["C0" if row["choice"] == "chosen" else "0.75" for row in rows]
    figure = Figure(figsize=(max(6.0, 0.28 * len(rows)), 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (("text", "perplexity_ratio"), ("second copy of random tokens", "probe_ratio"))
    for axes, (heading, key) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
        values = [float(row[key]) for row in rows]
        axes.bar(layers, [value - 1 for value in values], bottom=1, color=colors)
        axes.axhline(1, color="black", linewidth=0.8)
        if max(values) > 3:  # a few blocks that matter would flatten all others
            axes.set_yscale("log")
        axes.set_title(heading, fontsize=10)
        axes.set_ylabel("perplexity / source's", fontsize=9)
        axes.grid(axis="y", alpha=0.25)
    axes.set_xlabel("replaced block (blue: chosen)")
    axes.set_xticks(layers, [str(layer) for layer in layers], fontsize=7)
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def plot_conversion(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path:
    """Draws models before and after a conversion into one PNG, written atomically.

    Text, copying and recall as bars; perplexity, state and speed by length as curves. What wasn't measured is left
    out.

    Args:
        rows: of :func:`~refragkit.models.convert.evaluate.compare`: ``measure`` and a value per model, the source's
            first; columns with `` / `` are passed over.
        path: of the PNG; its folder is made.
        title: over the panels.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = [column for column in rows[0] if column != "measure" and " / " not in column]
    colors = dict(zip(models, ("0.45", *(f"C{i}" for i in range(len(models) - 1))), strict=True))
    values = {str(row["measure"]): {model: float(row[model]) for model in models} for row in rows}

    def group(prefix: str) -> dict[str, dict[str, float]]:
        return {m.removeprefix(prefix): v for m, v in values.items() if m.startswith(prefix)}

    panels: list[Callable[[Axes], None]] = []
    texts = group("perplexity/")
    if texts:
        panels.append(lambda axes: _text_bars(axes, texts, colors))
    if "recall" in values:
        recalled = {model: 100 * value for model, value in values["recall"].items()}
        panels.append(lambda axes: _bars(axes, recalled, colors, "Recall of 8 numbers (% right)", "{:.3g}"))
    if "induction_perplexity" in values:
        panels.append(
            lambda axes: _bars(
                axes,
                values["induction_perplexity"],
                colors,
                "Perplexity of repeated random tokens",
                "{:.3g}",
                log=True,
            )
        )
    for heading, prefix, label, scale, log in (
        ("Perplexity of the 512 tokens up to a position", "perplexity_at/", "tokens", 1.0, False),
        ("State (MiB)", "state_bytes/", "tokens of context", 2.0**-20, True),
        ("Decoding one row (tokens/s)", "tokens_per_second/", "tokens of context", 1.0, False),
    ):
        points = {int(position): v for position, v in group(prefix).items()}
        if points:
            panels.append(partial(_curves, points, colors, heading, label, scale, log))

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.5 * lines + 0.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(lines, columns, squeeze=False).flat
    for axes, draw in zip(places, panels, strict=False):
        draw(axes)
    for axes in list(places)[len(panels) :]:
        axes.remove()
    handles = [_patch(color) for color in colors.values()]
    figure.legend(handles, models, fontsize=9, loc="outside lower center", ncols=len(models))
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def _text_bars(axes: Axes, texts: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]) -> None:
    """Perplexity over the first model's for each text; of a single model, the perplexity itself."""
    from matplotlib.ticker import MaxNLocator

    first, *others = colors
    height = 0.8 / max(1, len(others))
    labels = [f"{name}\n({v[first]:.3g})" if others else name for name, v in texts.items()]
    for n, model in enumerate(others or [first]):
        places = [i + (n - (len(others) - 1) / 2 if others else 0) * height for i in range(len(texts))]
        widths = [v[model] / v[first] if others else v[model] for v in texts.values()]
        start = 1 if others else 0
        bars = axes.barh(places, [w - start for w in widths], height * 0.9, left=start, color=colors[model])
        axes.bar_label(bars, [f"{w:.3f}" if others else f"{w:.3g}" for w in widths], fontsize=8, padding=2)
    if others:
        axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.18)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(texts)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"Perplexity over the {first}'s (in brackets)" if others else "Perplexity", fontsize=10)
    axes.grid(axis="x", alpha=0.25)


def _bars(
    axes: Axes,
    values: Mapping[str, float],
    colors: Mapping[str, str],
    heading: str,
    form: str,
    *,
    log: bool = False,
) -> None:
    """One bar a model."""
    bars = axes.bar(range(len(values)), list(values.values()), 0.7, color=[colors[m] for m in values])
    axes.bar_label(bars, [form.format(v) for v in values.values()], fontsize=8, padding=2)
    axes.set_xticks([])
    axes.margins(x=0.3, y=0.12)
    if log:
        axes.set_ylim(1, 2 * max(*values.values(), 5))
        _log_scale(axes)
    else:
        axes.set_ylim(0, 108)
    axes.set_title(heading, fontsize=10)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.25)


def _curves(
    points: Mapping[int, Mapping[str, float]],
    colors: Mapping[str, str],
    heading: str,
    label: str,
    scale: float,
    log: bool,
    axes: Axes,
) -> None:
    """One curve a model over lengths, which stand at equal distances."""
    for model, color in colors.items():
        values = [scale * at[model] for at in points.values()]
        axes.plot(range(len(points)), values, color=color, marker="o", markersize=4)
    axes.set_xticks(range(len(points)), [f"{position:,}" for position in points])
    if log:
        _log_scale(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(heading, fontsize=10)
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)


def _log_scale(axes: Axes) -> None:
    """Logarithmic upwards, with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _patch(color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color)


def plot_distillation(curves: Mapping[str, Sequence[float]], path: str | Path) -> Path:
    """Draws the losses of a distillation's stages over steps into one PNG, written atomically.

    Args:
        curves: ``align_loss/<block>`` for each aligned block, ``match_loss``, or both; a value per step.
        path: of the PNG; its folder is made.

    Returns:
        The path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        ("Alignment, block by block", "align_loss", "squared error / output's variance"),
        ("Matching the source's logits", "match_loss", "KL divergence (nats per token)"),
    )
    drawn = [panel for panel in panels if any(name.startswith(panel[1]) for name in curves)]
    figure = Figure(figsize=(5.2 * len(drawn), 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (heading, prefix, label) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True
    ):
        for name, curve in curves.items():
            if name.startswith(prefix):
                axes.plot(range(len(curve)), curve, linewidth=1, label=name.removeprefix(prefix).strip("/"))
        axes.set_yscale("log")
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel(label, fontsize=9)
        axes.grid(alpha=0.25)
        if prefix == "align_loss":
            axes.legend(title="block", fontsize=7, ncols=2)
    return save_figure(figure, path)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG under a temporary name, then rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # No software version inside: the same rows give the same bytes.
    figure.savefig(temporary, format="png", metadata={"Software": None})
    temporary.replace(path)
    return path


def running_mean(values: Sequence[float], window: int | None = None) -> list[float]:
    """Mean of each value with those up to ``window`` / 2 before and after it (default: a tenth of all)."""
    half = max(1, (len(values) // 10 if window is None else window) // 2)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        low, high = max(0, index - half), min(len(values), index + half + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means
