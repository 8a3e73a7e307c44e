"""Zero-shot answers of the pretrained SmolLM2 and of hybrids made from it, with five kinds of documents, in one table.

python experiments/smollm2_hybrid/baseline.py [--model NAME=DIR ...] [--data DIR] [OVERRIDE ...]

Every job is a run of ``task=evaluate evaluate=rag`` in its own folder; a job that is finished is not done again, unless
its command or its model's weights have changed since.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refragkit.bootstrap import bootstrap_interval
from refragkit.config import compose
from refragkit.data.datamodule import SAMPLE_DIR
from refragkit.data.split import subset_positions
from refragkit.errors import RefragError
from refragkit.experiment import run_experiment
from refragkit.models.location import model_location
from refragkit.retrievers.planners.fit_expand import in_tuning_part
from refragkit.tasks.rag.tables import score

#: Documents -> overrides, the quickest first.
DOCUMENTS: Mapping[str, Sequence[str]] = {
    "none": ["retriever=none"],
    "gold": ["retriever=gold"],
    "random": ["retriever=random", "retriever.max_hops=1"],
    "bm25, single hop": ["retriever=bm25", "retriever.planner=repeat", "retriever.max_hops=1"],
    "hybrid, up to 3 hops": ["retriever=hybrid", "retriever.planner=expand", "retriever.max_hops=3"],
}
#: As the fine-tuned models are asked; 100 tokens are about 70 words.
ASKED = ["rag.max_document_tokens=100", "rag.max_new_tokens=16", "rag.max_seq_len=2048"]


@dataclass(frozen=True)
class Job:
    """One model with one kind of documents.

    Attributes:
        model: its name in the table.
        documents: a key of `DOCUMENTS`.
        overrides: of the run.
        folder: of the run.
        weights: the model's file, None for the pretrained one.
    """

    model: str
    documents: str
    overrides: tuple[str, ...]
    folder: Path
    weights: Path | None

    @property
    def command(self) -> str:
        """What does the same by hand."""
        return " ".join(["python", "run.py", *self.overrides])

    @property
    def finished(self) -> bool:
        """Whether the folder holds this job's result."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
            started = (self.folder / "config.yaml").stat().st_mtime
        except (OSError, ValueError):
            return False
        current = self.weights is None or self.weights.stat().st_mtime < started
        return bool(summary["status"] == "finished" and summary["command"] == self.command and current)


def larger_set(source: Path, questions: int, folder: Path) -> Path:
    """A folder with questions that neither the planner of queries nor the bundled training questions have seen.

    Args:
        source: holds ``questions.jsonl`` and ``corpus.jsonl``.
        questions: how many to ask at most, chosen by their ids.
        folder: where the files go.
    """
    lines = (source / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    bundled = [json.loads(line) for line in (SAMPLE_DIR / "train.jsonl").read_text("utf-8").splitlines()]
    taught = {i for row in bundled for i in row["supporting_ids"]}
    seen = {row["id"] for row in bundled}
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    for row in rows:
        if in_tuning_part(row["id"]):
            parts["train"].append(row)
        elif row["id"] not in seen and not taught.intersection(row["supporting_ids"]):
            parts["validation"].append(row)
    unseen = parts["validation"]
    parts["validation"] = [unseen[i] for i in subset_positions([row["id"] for row in unseen], questions)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in parts.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
        temporary = folder / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / f"{name}.jsonl")
    if not (folder / "corpus.jsonl").exists():
        shutil.copyfile(source / "corpus.jsonl", folder / ".corpus.tmp")
        (folder / ".corpus.tmp").replace(folder / "corpus.jsonl")
    print(f"{len(parts['validation'])} of {len(unseen)} unseen questions of {source}")
    return folder


def run(job: Job) -> None:
    """Do a job that is not finished, in its own folder."""
    if job.folder.exists():
        shutil.rmtree(job.folder)
    before = time.process_time()
    summary = run_experiment(compose(job.overrides), job.folder, job.command)
    if summary.status != "finished":
        raise SystemExit(f"{job.model}, {job.documents}: {summary.error}")
    print(f"{time.process_time() - before:.0f} CPU seconds, {summary.wall_seconds:.0f} s in all", flush=True)


def row_of(job: Job) -> dict[str, str]:
    """The row of all questions."""
    with (job.folder / "rag.csv").open(encoding="utf-8", newline="") as file:
        return next(csv.DictReader(file))


def answers_of(job: Job) -> dict[str, dict[str, Any]]:
    """What was answered, by question."""
    lines = (job.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


def table(jobs: Sequence[Job]) -> str:
    """One row per job."""
    lines = [
        "| model | documents | F1 | EM | support recall | documents | prompt tokens | state (MiB) | first token (s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for job in jobs:
        row = row_of(job)
        costs = [
            f"{float(row['documents']):.1f}",
            f"{float(row['prompt_tokens']):.0f}",
            f"{float(row['state_bytes']) / 2**20:.1f}",
            f"{float(row['first_token_seconds']):.2f}" if row.get("first_token_seconds") else "-",
        ]
        scores = [score(row, key) for key in ("f1", "em", "support_recall")]
        lines.append(f"| {' | '.join([job.model, job.documents, *scores, *costs])} |")
    return "\n".join(lines) + "\n"


def differences(jobs: Sequence[Job]) -> str:
    """F1 of each model less that of the first, on the same questions and documents; empty for one model."""
    first = jobs[0].model
    base = {job.documents: answers_of(job) for job in jobs if job.model == first}
    lines = [f"| F1 less that of {first} | documents | difference |", "|---|---|---|"]
    for job in jobs:
        if job.model == first:
            continue
        answers = answers_of(job)
        values = [answers[i]["f1"] - record["f1"] for i, record in base[job.documents].items()]
        low, high = bootstrap_interval(values, 10_000, 0)
        mean = sum(values) / len(values)
        lines.append(f"| {job.model} | {job.documents} | {mean:+.3f} ({low:+.3f} to {high:+.3f}) |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="for every job, such as rag.examples=2")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--no-teacher", action="store_true", help="only the models of --model")
    parser.add_argument("--only", action="append", choices=DOCUMENTS, help="only this kind of documents")
    parser.add_argument("--data", type=Path, help="a folder with questions.jsonl and corpus.jsonl")
    parser.add_argument("--questions", type=int, default=200, help="of --data, at most (default: 200)")
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2_baseline"))
    arguments = parser.parse_args()
    models: dict[str, tuple[str, ...]] = {}
    weights: dict[str, Path | None] = {}
    if not arguments.no_teacher:
        models["SmolLM2"], weights["SmolLM2"] = ("model=transformer", "model.init=smollm2"), None
    for given in arguments.model:
        name, _, folder = given.partition("=")
        if not name or not folder or "/" in name:
            parser.error(f"--model {given}: expected NAME=DIR")
        try:
            file = model_location(folder)
        except RefragError as error:
            parser.error(str(error))
        models[name] = ("model=hybrid", f"model.path={folder}")
        weights[name] = file / "model.safetensors" if file.is_dir() else file
    if not models:
        parser.error("no model: give --model NAME=DIR or leave --no-teacher out")
    name, data = "bundled", []
    if arguments.data is not None:
        name = f"{arguments.data.name}-{arguments.questions}"
        data = [f"data.path={larger_set(arguments.data, arguments.questions, arguments.out / 'data' / name)}"]
    if arguments.overrides:
        text = " ".join(sorted(arguments.overrides)).replace("/", "_")
        name += " " + (text if len(text) < 100 else hashlib.sha256(text.encode()).hexdigest()[:12])
    jobs = []
    for model, chosen in models.items():
        for documents in arguments.only or DOCUMENTS:
            overrides = ["task=evaluate", "evaluate=rag", *chosen, *DOCUMENTS[documents], *ASKED, *data]
            folder = arguments.out / name / model / documents.replace(", ", "-").replace(" ", "_")
            jobs.append(Job(model, documents, (*overrides, *arguments.overrides), folder, weights[model]))
    started = time.perf_counter()
    missing = [job for job in jobs if not job.finished]
    for number, job in enumerate(missing, 1):
        print(f"\njob {number} of {len(missing)}: {job.model}, {job.documents}\n{job.command}", flush=True)
        run(job)
    text = "\n".join(filter(None, (table(jobs), differences(jobs))))
    seconds = {
        job: json.loads((job.folder / "summary.json").read_text("utf-8"))["wall_seconds"] for job in jobs
    }
    text += "\n" + ", ".join(f"{job.model} {job.documents} {s:.0f} s" for job, s in seconds.items()) + "\n"
    file = arguments.out / name / "baseline.md"
    file.write_text(text, encoding="utf-8")
    print(
        f"\n{text}\n{len(missing)} of {len(jobs)} jobs run now, in {time.perf_counter() - started:.0f} s; {file}"
    )


if __name__ == "__main__":
    main()
