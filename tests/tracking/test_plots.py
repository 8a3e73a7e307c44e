"""Plots from plain rows."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from refragkit.tracking.plots import plot_distillation, plot_training, running_mean, series

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
