"""Plots from plain rows."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from refragkit.tracking.plots import plot_conversion, plot_distillation, plot_training, running_mean, series

ROWS = [
    {
        "step": step,
        "train/loss": 5.0 / (step + 1),
        "reward/total": 0.1 * step / 30,
        "reward/answer": 0.0,
        **({"val/loss": 4.0, "val/f1": 0.2} if step % 10 == 0 else {}),
    }
    for step in range(30)
]


def test_plot_is_a_png_with_one_panel_per_kind_of_metric(tmp_path: Path) -> None:
    path = tmp_path / "plots" / "training.png"
    assert plot_training(ROWS, path) == path
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    three_panels = int.from_bytes(data[16:20], "big")
    only_loss = plot_training([{"step": 1, "train/loss": 2.0}], tmp_path / "one.png")
    assert only_loss is not None
    assert three_panels == 3 * int.from_bytes(only_loss.read_bytes()[16:20], "big")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "plots"]


def test_more_than_four_panels_take_a_second_line(tmp_path: Path) -> None:
    sizes = []
    rows = [{"step": 1, "train/loss": 2.0, "reward/total": 0.5}]
    for more in ({"rollout/acceptance_rate": 0.5}, {"rollout/completion_tokens": 9.0}, {"val/pass@4": 0.1}):
        rows.append({"step": 2, **more})
        path = plot_training(rows, tmp_path / "a.png")
        assert path is not None
        sizes.append(struct.unpack(">II", path.read_bytes()[16:24]))
    (three, high), (four, same), (five, higher) = sizes
    assert (4 * three, high) == (3 * four, same) and (five, higher) == (four, 2 * high)


def test_same_rows_same_bytes(tmp_path: Path) -> None:
    first, second = plot_training(ROWS, tmp_path / "a.png"), plot_training(ROWS, tmp_path / "b.png")
    assert first is not None
    assert second is not None
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "rows", [[], [{"step": 1}], [{"step": 1, "train/loss": math.nan}], [{"train/loss": 1}]]
)
def test_nothing_to_draw_writes_nothing(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    assert plot_training(rows, tmp_path / "a.png") is None
    assert list(tmp_path.iterdir()) == []


def test_series_reads_csv_strings_and_skips_gaps() -> None:
    rows = [
        {"step": "2", "x": "1.5"},
        {"step": "1", "x": ""},
        {"step": "0", "x": "3"},
        {"step": 3, "x": None},
        {"step": 4, "x": math.inf},
        {"step": 2, "x": 7.0},
    ]
    assert series(rows, "x") == ([0, 2], [3.0, 7.0])


def test_running_mean_keeps_constants_and_length() -> None:
    assert running_mean([2.0] * 25) == pytest.approx([2.0] * 25)
    assert running_mean([0.0, 3.0, 6.0], window=2) == [1.5, 3.0, 4.5]


def test_plot_distillation_draws_the_stages_that_ran(tmp_path: Path) -> None:
    curves = {"align_loss/12": [0.9, 0.5], "align_loss/3": [0.8, 0.4], "match_loss": [0.3, 0.2, 0.1]}
    both = plot_distillation(curves, tmp_path / "plots" / "both.png")
    one = plot_distillation({"match_loss": [0.3]}, tmp_path / "one.png")
    sizes = [struct.unpack(">II", path.read_bytes()[16:24]) for path in (both, one)]
    assert sizes[0][0] == 2 * sizes[1][0] and sizes[0][1] == sizes[1][1]


def measures(factor: float) -> dict[str, float]:
    values = {
        "perplexity/wikitext2": 30.0,
        "perplexity/chat": 6.5,
        "recall": 0.86,
        "induction_perplexity": 15.0,
    }
    values |= {f"perplexity_at/{n}": 20.0 for n in (512, 1024)}
    values |= {f"state_bytes/{n}": 1e4 * n for n in (1024, 4096)}
    values |= {f"tokens_per_second/{n}": 5.0 for n in (1024, 4096)}
    return {name: value * factor for name, value in values.items()}


def conversion_rows(models: dict[str, dict[str, float]]) -> list[dict[str, str | float]]:
    from refragkit.models.convert.evaluate import compare

    return compare(models)


def test_plot_conversion_draws_what_was_measured(tmp_path: Path) -> None:
    models = {"source": measures(1), "converted": measures(1.1)}
    six = plot_conversion(conversion_rows(models), tmp_path / "plots" / "six.png", "Title")
    few = {name: {k: v for k, v in found.items() if "/" not in k} for name, found in models.items()}
    two = plot_conversion(conversion_rows(few), tmp_path / "two.png")
    sizes = [struct.unpack(">II", path.read_bytes()[16:24]) for path in (six, two)]
    assert 2 * sizes[0][0] == 3 * sizes[1][0] and sizes[0][1] > 1.7 * sizes[1][1]
    same = plot_conversion(conversion_rows(models), tmp_path / "same.png", "Title")
    assert same.read_bytes() == six.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plots", "same.png", "two.png"]


def test_plot_conversion_shows_ratios_states_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the figure, not how it looks."""
    from matplotlib.figure import Figure

    from refragkit.tracking import plots

    drawn: list[Figure] = []
    save = plots.save_figure
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: drawn.append(figure) or save(figure, path))
    models = {"source": measures(1), "calibrated": measures(1.3), "trained": measures(0.9)}
    plot_conversion(conversion_rows(models), tmp_path / "a.png")
    text, recalled, copied, position, state, speed = drawn[0].axes
    assert [t.get_text() for t in text.get_yticklabels()] == ["wikitext2\n(30)", "chat\n(6.5)"]
    widths = sorted(round(bar.get_x() + bar.get_width(), 6) for bar in text.patches)
    assert widths == [0.9, 0.9, 1.3, 1.3]
    assert [round(bar.get_height()) for bar in recalled.patches] == [86, 112, 77]
    assert copied.get_yscale() == state.get_yscale() == "log" != position.get_yscale()
    assert [line.get_ydata()[1] for line in state.lines] == pytest.approx([39.0625, 50.78125, 35.15625])
    assert all(len(axes.lines) == 3 for axes in (position, state, speed))
    assert [t.get_text() for t in drawn[0].legends[0].get_texts()] == list(models)
    plot_conversion(conversion_rows({"source": measures(1)}), tmp_path / "b.png")
    assert [bar.get_width() for bar in drawn[1].axes[0].patches] == [30, 6.5]
