"""The card says what a conversion was made of, how, and what it cost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from refragkit.models.convert.calibrate import CalibrationReport
from refragkit.models.convert.card import CARD, Recipe, write_card
from refragkit.models.convert.evaluate import Sample, compare

ROWS = compare(
    {
        "source": {"perplexity/held-out text": 20.0, "perplexity/chat": 6.0, "recall": 0.8},
        "converted": {"perplexity/held-out text": 21.0, "perplexity/chat": 6.3, "recall": 0.6},
    }
)


def recipe(folder: Path, **more: object) -> Recipe:
    values: dict[str, object] = {
        "source": "a/model",
        "folder": folder,
        "layers": [1, 3],
        "to": "R",
        "calibration": "cal",
        "calibration_tokens": 8192,
        "text": "the sources below",
        "text_sha256": "ab" * 32,
        "seed": 7,
        "command": "python run.py task=convert",
    }
    return Recipe(**(values | more))  # type: ignore[arg-type]


def card_of(folder: Path, *arguments: object, **more: object) -> str:
    (folder / "config.json").write_text(json.dumps({"block_pattern": "TRTR"}))
    reports = [CalibrationReport(1, 1.9, 0.4), CalibrationReport(3, 1.8, 0.3)]
    path = write_card(folder, recipe(folder, **more), reports, *arguments)  # type: ignore[arg-type]
    assert path == folder / CARD and not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))
    return path.read_text()


def test_a_card_without_measures_has_the_recipe_only(tmp_path: Path) -> None:
    card = card_of(tmp_path, [])
    assert "cal on 8,192 tokens of the sources below" in card and "| 3 | 1.800 | 0.300 |" in card
    assert "other blocks) is the source's, bit for bit" in card
    for absent in ("## Measures", "## Samples", "sources of text", "Weights in"):
        assert absent not in card


def test_sources_and_evaluation_sets_are_listed_with_checksums(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text("{}\n")
    (tmp_path / "texts").mkdir()
    card = card_of(
        tmp_path,
        ROWS,
        sources=[str(chat), str(tmp_path / "texts")],
        evaluation={"chat": str(chat)},
        measured_in="bfloat16",
        rest="trained along",
    )
    recipe_part, _, rest = card.partition("## Checksums")
    assert recipe_part.count("\n  - ") == 2 and f"\n  - {chat}\n" in recipe_part
    assert "other blocks) is trained along" in recipe_part
    checksums, _, measures = rest.partition("## Measures")
    digest = hashlib.sha256(chat.read_bytes()).hexdigest()
    assert checksums.count(f"text {chat}: `{digest}`") == 1 and f"text {tmp_path / 'texts'}:" not in checksums
    assert "Weights in bfloat16." in measures and f"- chat: the start of {chat}" in measures
    assert "| perplexity/chat | 6.000 | 6.300 | 1.050 |" in measures
    assert "| recall | 0.800 | 0.600 | 0.750 |" in measures


def test_samples_are_verbatim_and_side_by_side(tmp_path: Path) -> None:
    samples = {
        "source": [Sample("Who?", "Ada *and* | Grace\n# both"), Sample("Why?", "")],
        "converted": [Sample("Who?", "Ada"), Sample("Why?", "Because.")],
    }
    card = card_of(tmp_path, ROWS, samples)
    part = card.partition("## Samples")[2]
    assert "**Who?**\n\nsource:\n\n    Ada *and* | Grace\n    # both\n\nconverted:\n\n    Ada\n" in part
    assert "**Why?**\n\nsource:\n\n    (nothing)\n\nconverted:\n\n    Because.\n" in part
