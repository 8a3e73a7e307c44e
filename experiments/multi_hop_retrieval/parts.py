"""The figures of an evaluation by part: the questions that ``expand`` was fitted on, and the rest.

python experiments/multi_hop_retrieval/parts.py RUN [RUN ...]      (folders of task=evaluate evaluate=retrieval)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from refragkit.retrievers.planners.fit_expand import in_tuning_part

COLUMNS = (
    "recall@2",
    "recall@5",
    "recall@10",
    "recall@20",
    "all_support@5",
    "ndcg@10",
    "mrr",
    "found_recall",
)
PARTS = {"all": (True, False), "the rest": (False,), "tuning part": (True,)}


def main() -> None:
    """One row per run, part and data set."""
    table = Table("run", "part", "questions", *COLUMNS)
    for folder in map(Path, sys.argv[1:]):
        lines = (folder / "retrieval.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        command = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["command"]
        run = " ".join(o.removeprefix("retriever.") for o in command.split() if o.startswith("retriever"))
        groups = ["", *sorted({r["dataset"] for r in records if r.get("dataset")})]
        for part, flags in PARTS.items():
            for group in groups:
                chosen = [
                    r["metrics"]
                    for r in records
                    if in_tuning_part(r["id"]) in flags and group in ("", r.get("dataset"))
                ]
                if chosen:
                    means = (sum(m[column] for m in chosen) / len(chosen) for column in COLUMNS)
                    name = f"{part} {group}".rstrip()
                    table.add_row(run, name, str(len(chosen)), *(f"{mean:.3f}" for mean in means))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
