"""What training changed: the same validation questions answered by the model before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from refragkit.training.callbacks import Evaluated

# (label, metric, whether more is better)
_ROWS = (
    ("F1", "val/f1", True),
    ("exact match", "val/em", True),
    ("support recall", "val/support_recall", True),
    ("loss (nats per token)", "val/loss", False),
)
# Longer answers and queries are cut on the screen and in the report; samples.jsonl has them whole.
_MOST_CHARACTERS = 160
# Style of a document that is found, by whether it supports the answer.
_FOUND = {True: "green", False: ""}


@dataclass(frozen=True)
class Sample:
    """A question with both answers.

    Attributes:
        why: what it stands for.
        before: its record in ``samples.jsonl`` before training.
        after: the same after it.
    """

    why: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]


class BeforeAfter:
    """Both evaluations side by side.

    Args:
        before: of the model that training started from.
        after: of the trained one, on the same questions.
    """

    def __init__(self, before: Evaluated, after: Evaluated) -> None:
        self.before = before
        self.after = after

    @property
    def metrics(self) -> dict[str, float]:
        """Every ``val/`` metric of the start under ``before/``, and its change under ``change/``."""
        found = {}
        for name, value in self.before.metrics.items():
            if name.startswith("val/"):
                short = name.removeprefix("val/")
                found[f"before/{short}"] = value
                if name in self.after.metrics:
                    found[f"change/{short}"] = self.after.metrics[name] - value
        return found

    def samples(self) -> list[Sample]:
        """Three questions: the one whose F1 rose most, the median one, and the one whose F1 fell most or rose least.

        Ties go to the question that comes first in the file; fewer than three questions are shown all.
        """
        answered = {record["id"]: record for record in self.after.records}
        pairs = [(r, answered[r["id"]]) for r in self.before.records if r["id"] in answered]
        if len(pairs) < 3:
            return [Sample("", before, after) for before, after in pairs]

        def gain(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> float:
            return float(pair[1]["f1"] - pair[0]["f1"])

        most = max(pairs, key=gain)
        least = min((p for p in pairs if p is not most), key=gain)
        rest = sorted((p for p in pairs if p is not most and p is not least), key=gain)
        chosen = (
            ("largest gain in F1", most),
            ("median", rest[len(rest) // 2]),
            ("smallest gain in F1", least),
        )
        return [Sample(why, before, after) for why, (before, after) in chosen]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(measure, before, after, change), for what was measured both times."""
        found = []
        for label, name, _ in _ROWS:
            if name in self.before.metrics and name in self.after.metrics:
                before, after = self.before.metrics[name], self.after.metrics[name]
                found.append((label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"))
        return found

    @property
    def title(self) -> str:
        """What is compared."""
        count = len(self.after.records)
        what = f"{count} validation questions" if count else "validation examples"
        return f"{what}, before and after {self.after.step} steps"

    def renderable(self) -> Group:
        """The table and the samples for a terminal."""
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for column in ("before", "after", "change"):
            table.add_column(column, justify="right")
        for (label, before, after, change), (_, _, up) in zip(self.rows(), self._shown(), strict=True):
            better = change.startswith("+") == up and float(change) != 0
            style = "green" if better else "red" if float(change) else "dim"
            table.add_row(label, before, f"[bold]{after}[/bold]", f"[{style}]{change}[/{style}]")
        samples = self.samples()
        note = [Text("* a supporting passage", style="dim")] if any(s.after["hops"] for s in samples) else []
        return Group(Text(self.title, style="bold"), table, *map(self._panel, samples), *note)

    def _shown(self) -> list[tuple[str, str, bool]]:
        return [r for r in _ROWS if r[1] in self.before.metrics and r[1] in self.after.metrics]

    def _panel(self, sample: Sample) -> Panel:
        lines = [Text(_cut(sample.after["question"]), style="bold")]
        for hop in sample.after["hops"]:
            lines.append(Text(f"hop {hop['hop']}: {_query(hop, sample.after)}", style="cyan"))
            found = Text("  found: ")
            for number, document in enumerate(hop["documents"]):
                found.append("; " if number else "")
                name = _cut(document["title"] or document["doc_id"])
                found.append(f"{name} *" if document["supporting"] else name, _FOUND[document["supporting"]])
            lines.append(found)
        lines.append(Text(f"gold:   {_cut(' / '.join(sample.after['answers']))}"))
        for label, record in (("before", sample.before), ("after", sample.after)):
            lines.append(
                Text(f"{label + ':':<7} {_cut(record['completion']) or '(nothing)'}  (F1 {record['f1']:.2f})")
            )
        return Panel(Group(*lines), title=escape(sample.why) or None, title_align="left")

    def markdown(self) -> str:
        """The same as a Markdown page."""
        lines = [f"# {self.title[0].upper()}{self.title[1:]}", ""]
        lines += _markdown_table(("", "before", "after", "change"), self.rows())
        for sample in self.samples():
            lines += ["", f"## {_cell(_cut(sample.after['question']))}", ""]
            if sample.why:
                lines += [f"({sample.why})", ""]
            for hop in sample.after["hops"]:
                titles = "; ".join(
                    f"**{_cell(d['title'] or d['doc_id'])}**"
                    if d["supporting"]
                    else _cell(d["title"] or d["doc_id"])
                    for d in hop["documents"]
                )
                lines.append(f"{hop['hop']}. {_cell(_query(hop, sample.after))} -> {titles}")
            lines += [""] if sample.after["hops"] else []
            answers = [
                ("gold", " / ".join(sample.after["answers"]), ""),
                *(
                    (label, record["completion"] or "(nothing)", f"{record['f1']:.2f}")
                    for label, record in (("before", sample.before), ("after", sample.after))
                ),
            ]
            lines += _markdown_table(
                ("", "answer", "F1"), [(label, _cell(_cut(text)), f1) for label, text, f1 in answers]
            )
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write `markdown` to ``path`` under a temporary name, then rename."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(self.markdown(), encoding="utf-8")
        temporary.replace(path)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _query(hop: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return "(the question itself)" if hop["query"] == record["question"] else _cut(hop["query"])


def _cut(text: str) -> str:
    """One line of bounded length, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "\u2026"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
