"""What ``evaluate=rag`` shows on the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.tasks.evaluate_retrieval import Row

if TYPE_CHECKING:
    from rich.table import Table

#: What gets an interval, and its heading.
SCORES: Mapping[str, str] = {"f1": "F1", "em": "EM", "support_recall": "support recall"}
# Headings of further columns: what stands there, and how.
_COUNTS: Mapping[str, tuple[str, str]] = {
    "hops": ("hops", "{:.1f}"),
    "docs": ("documents", "{:.1f}"),
    "prompt tokens": ("prompt_tokens", "{:.0f}"),
    "new tokens": ("new_tokens", "{:.1f}"),
    "tokens read": ("tokens_read", "{:.0f}"),
}


def score(row: Mapping[str, Any], key: str) -> str:
    """A score with its interval, such as ``.437 (.352-.523)``; a dash where it was not measured."""
    if row.get(key) in (None, ""):
        return "-"
    value, low, high = (_short(row[name]) for name in (key, f"{key}_low", f"{key}_high"))
    return f"{value} ({low}-{high})"


def _short(value: Any) -> str:
    text = f"{float(value):.3f}"
    return text.removeprefix("0") if text.startswith("0.") else text


def as_table(rows: Sequence[Row], title: str = "rag") -> Table:
    """The scores by group, for the screen."""
    from rich import box
    from rich.table import Table

    hops = [key for key in rows[0] if key.startswith("support_recall_hop_")]
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group")
    headings = [f"hop {key.removeprefix('support_recall_hop_')}" for key in hops]
    for heading in ("questions", *SCORES.values(), *headings, *_COUNTS):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["group"]),
            f"{float(row['questions']):.0f}",
            *(score(row, key) for key in SCORES),
            *(_short(row[key]) if key in row else "-" for key in hops),
            *(form.format(float(row[key])) for key, form in _COUNTS.values()),
        )
    return table


def cost_table(row: Row) -> Table:
    """What the documents of each hop cost, for the screen; means over all questions."""
    from rich import box
    from rich.table import Table

    table = Table(title="one question", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("prompt with the documents of")
    for heading in ("prompt tokens", "state (MiB)", "first token (s)"):
        table.add_column(heading, justify="right")
    last = sum(key.startswith("prompt_tokens_hop_") for key in row)
    for n in range(1, last + 1):
        label = "hop 1" if n == 1 else f"hops 1 to {n}"
        table.add_row(label, *_costs(row, f"_hop_{n}"))
    if not last:
        table.add_row("no hop", *_costs(row, ""))
    return table


def _costs(row: Row, suffix: str) -> tuple[str, str, str]:
    seconds = row.get(f"first_token_seconds{suffix}")
    return (
        f"{float(row[f'prompt_tokens{suffix}']):.0f}",
        f"{float(row[f'state_bytes{suffix}']) / 2**20:.2f}",
        "-" if seconds is None else f"{float(seconds):.2f}",
    )


def samples_table(records: Sequence[Mapping[str, Any]], n: int = 4) -> Table:
    """A few questions with their answers, spread over the file, for the screen."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="samples", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("question", "expected", "answer"):
        table.add_column(heading, overflow="fold")
    table.add_column("F1", justify="right")
    for record in records[:: max(1, len(records) // n)][:n]:
        answer = " ".join(str(record["completion"]).split())
        texts = (str(record["question"]), str(record["answers"][0]), answer or "(nothing)")
        table.add_row(*map(escape, texts), _short(record["f1"]))
    return table


def retrieval_title(described: Mapping[str, Any]) -> str:
    """What the documents came from, of what ``describe`` gives."""
    if described["retriever"] == "none":
        return "no documents"
    hops, k = (int(float(described[key])) for key in ("max_hops", "top_k_per_hop"))
    title = f"{described['retriever']}, {described['planner']}, {hops} x {k} documents"
    order = described.get("order") or "question_first"
    return title if order == "question_first" else f"{title}, {order}"


def sweep_rows(folder: Path) -> list[Row]:
    """The row ``all`` of each job in a sweep's folder that has one, in the order of the jobs."""
    import csv

    rows: list[Row] = []
    number = {path: path.parent.name.split("-")[0] for path in folder.glob("*/rag.csv")}
    for path in sorted(number, key=lambda p: (int(number[p]) if number[p].isdigit() else math.inf, str(p))):
        with path.open(encoding="utf-8", newline="") as file:
            rows.append({"job": path.parent.name, **next(csv.DictReader(file))})
    return rows


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Jobs beside each other, for the screen."""
    from rich import box
    from rich.table import Table

    table = Table(title="this sweep so far", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("model", "documents"):
        table.add_column(heading, overflow="fold")
    for heading in ("questions", *SCORES.values(), "docs", "prompt tokens", "tokens read"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["model"]),
            retrieval_title(row),
            f"{float(row['questions']):.0f}",
            *(score(row, key) for key in SCORES),
            f"{float(row['documents']):.1f}",
            f"{float(row['prompt_tokens']):.0f}",
            "-" if row.get("tokens_read") in (None, "") else f"{float(row['tokens_read']):.0f}",
        )
    return table
