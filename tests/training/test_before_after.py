"""The comparison that ends a training run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refragkit.training.before_after import BeforeAfter
from refragkit.training.callbacks import Evaluated
from refragkit.training.checkpoints import same_file


def record(identifier: str, f1: float, completion: str = "an answer") -> dict[str, Any]:
    documents = [
        {"doc_id": "d1", "title": "Title | one", "supporting": True},
        {"doc_id": "d2", "title": "", "supporting": False},
    ]
    hops = [
        {"hop": 1, "query": f"question {identifier}?", "documents": documents},
        {"hop": 2, "query": f"follow-up of {identifier}", "documents": [documents[1]]},
    ]
    return {"id": identifier, "question": f"question {identifier}?", "answers": ["gold", "alias"], "f1": f1,
            "completion": completion, "hops": hops}  # fmt: skip


def evaluated(step: int, metrics: dict[str, float], *scores: float, say: str = "x") -> Evaluated:
    return Evaluated(step, metrics, [record(str(n), f1, f"{say} {n}") for n, f1 in enumerate(scores)])


def test_metrics_of_the_start_and_what_changed() -> None:
    before = evaluated(0, {"val/f1": 0.25, "val/loss": 4.0, "time/evaluate_seconds": 3.0})
    after = evaluated(9, {"val/f1": 0.5, "val/loss": 3.0, "val/new": 1.0, "time/evaluate_seconds": 2.0})
    assert BeforeAfter(before, after).metrics == {
        "before/f1": 0.25, "change/f1": 0.25, "before/loss": 4.0, "change/loss": -1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "chosen"),
    [
        ((0, 0, 0, 0, 0), (0.2, 1, 0.5, 0, 0.3), ["1", "4", "3"]),
        ((1, 0, 0.5), (0, 1, 0.5), ["1", "2", "0"]),
        ((0, 0, 0, 0), (0, 0, 0, 0), ["0", "3", "1"]),  # ties: file order
        ((0, 0), (1, 0), ["0", "1"]),
        ((), (), []),
    ],
)
def test_samples_are_the_extremes_and_the_median(before: Any, after: Any, chosen: list[str]) -> None:
    comparison = BeforeAfter(evaluated(0, {}, *before), evaluated(5, {}, *after))
    assert [sample.after["id"] for sample in comparison.samples()] == chosen


def test_screen_and_page_show_scores_hops_and_both_answers(tmp_path: Path) -> None:
    before = evaluated(0, {"val/f1": 0.125, "val/loss": 4.0}, 0.0, 0.1, 0.2, say="old")
    after = evaluated(7, {"val/f1": 0.75, "val/loss": 4.5}, 1.0, 0.1, 0.1, say="new")
    comparison = BeforeAfter(before, after)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(comparison.renderable())
    screen = console.export_text()
    comparison.write(tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    for text in (screen, page):
        for expected in ("3 validation questions", "after 7 steps", "0.125", "0.750", "+0.625", "+0.500", "question 0?",
                         "old 0", "new 0", "(the question itself)", "follow-up of 0", "gold / alias",
                         "largest gain in F1", "d2"):  # fmt: skip
            assert expected.casefold() in text.casefold(), expected
    assert "Title | one *; d2" in screen and "* a supporting passage" in screen
    assert "**Title \\| one**; d2" in page
    assert not list(tmp_path.glob("*.tmp"))


def test_what_a_model_writes_cannot_break_the_page_or_the_screen() -> None:
    answer = "[bold]a | b\n\x1b[31m# c[/x] " + "long " * 100
    before, after = (
        evaluated(0, {"val/f1": 0.0}, 0.0),
        Evaluated(1, {"val/f1": 0.0}, [record("0", 0.0, answer)]),
    )
    comparison = BeforeAfter(before, after)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison.renderable())
    assert "[bold]a | b" in console.export_text()
    assert "\x1b" not in comparison.markdown()
    row = next(line for line in comparison.markdown().splitlines() if line.startswith("| after | [bold]"))
    assert "a \\| b" in row and len(row) < 200


def test_a_second_name_keeps_its_content_when_the_first_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "last", tmp_path / "best"
    first.write_text("one")
    same_file(first, second)
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").replace(first)
    assert (first.read_text(), second.read_text()) == ("two", "one")

    def refuse(source: Path, path: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    same_file(first, second)
    assert second.read_text() == "two"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last"]
