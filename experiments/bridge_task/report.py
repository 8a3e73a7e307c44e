"""Tables and plots of the finished runs of ``grid.py``.

python experiments/bridge_task/report.py [--seeds 0 1]
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answer import answers_of
from grid import ARCHITECTURES, DATA, METHODS, TRIED, Job
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from refragkit.bootstrap import bootstrap_interval

HERE = Path(__file__).parent
RESAMPLES = 10_000
#: Steps that a plotted line is the mean of.
SMOOTH_STEPS = 10

Records = dict[str, dict[str, Any]]


def read(jobs: Sequence[Job], key: str, hops: int | None = None) -> list[float]:
    """One value for each validation question, the mean over the jobs."""
    found: list[Records] = [{r["id"]: r for r in answers_of(j.folder, DATA / "more")} for j in jobs]
    ids = [i for i, r in found[0].items() if hops in (None, r["hops_needed"])]
    return [sum(float(records[i][key]) for records in found) / len(found) for i in ids]


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def with_interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and 95% interval over questions."""
    low, high = bootstrap_interval(values, RESAMPLES, 0)
    return f"{mean(values):{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def metrics(job: Job) -> list[dict[str, str]]:
    """The run's metrics, step by step."""
    with (job.folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def curve(job: Job, key: str) -> list[float]:
    """One metric over the steps that have it."""
    return [float(row[key]) for row in metrics(job) if row.get(key)]


def finished(architecture: str, method: str, seeds: Sequence[int]) -> list[Job]:
    """The finished jobs of a row; those of a warm start have seed 0 only."""
    jobs = [Job(architecture, method, seed) for seed in ([0] if method == "warm" else seeds)]
    return [job for job in jobs if job.finished]


def results(seeds: Sequence[int]) -> str:
    """A row for each architecture and method."""
    lines = [
        "| model | trained with | EM, one hop | EM, two hops | hops, one-hop questions | hops, two-hop questions |"
        " evidence found, two hops | seeds | trained tokens | read and written in rollouts | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for architecture in ARCHITECTURES:
        for method in ("warm", *METHODS, *TRIED):
            jobs = finished(architecture, method, seeds)
            if not jobs:
                continue
            tokens = mean([curve(j, "train/tokens")[-1] for j in jobs])
            rolled = mean([sum(curve(j, "rollouts/tokens_read")) for j in jobs])
            seconds = mean([sum(curve(j, "time/step_seconds")) for j in jobs])
            cells = [
                architecture,
                method,
                *(with_interval(read(jobs, "em", hops)) for hops in (1, 2)),
                *(f"{mean(read(jobs, 'hops', hops)):.2f}" for hops in (1, 2)),
                f"{mean(read(jobs, 'support', 2)):.3f}",
                ", ".join(str(j.seed) for j in jobs),
                f"{tokens:,.0f}",
                f"{rolled:,.0f}" if rolled else "-",
                f"{seconds:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def differences(seeds: Sequence[int]) -> str:
    """Pairs of methods and of architectures, on the same questions and seeds."""
    pairs = [
        (("hybrid", one), ("hybrid", other))
        for one, other in (
            ("policy_gradient", "reward_weighted"),
            ("reward_weighted", "sft"),
            ("policy_gradient", "sft"),
            ("policy_gradient", "policy_gradient, answer only"),
            ("policy_gradient", "warm"),
        )
    ]
    pairs += [(("hybrid", "sft"), (a, "sft")) for a in ARCHITECTURES if a != "hybrid"]
    pairs += [(("hybrid", "policy_gradient"), (a, "policy_gradient")) for a in ("mamba", "rwkv-qwen")]
    lines = [
        "| first | second | EM, one hop | EM, two hops | EM, all | each seed, all | hops, one-hop questions |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, other in pairs:
        first, second = finished(*one, seeds), finished(*other, seeds)
        if "warm" not in (one[1], other[1]):
            both = {j.seed for j in first} & {j.seed for j in second}
            first, second = ([j for j in jobs if j.seed in both] for jobs in (first, second))
        if not first or not second:
            continue

        def less(
            key: str, hops: int | None, first: Sequence[Job] = first, second: Sequence[Job] = second
        ) -> list[float]:
            return [a - b for a, b in zip(read(first, key, hops), read(second, key, hops), strict=True)]

        each = []
        for n, job in enumerate(first):
            against = second[0] if len(second) == 1 else second[n]
            each.append(f"{mean(less('em', None, [job], [against])):+.3f}")
        cells = [
            " ".join(one),
            " ".join(other),
            *(with_interval(less("em", hops), "+") for hops in (1, 2, None)),
            ", ".join(each),
            with_interval(less("hops", 1), "+"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def controls() -> str:
    """What can be had without reading the second passage."""
    train = [json.loads(line) for line in (DATA / "warm" / "train.jsonl").read_text("utf-8").splitlines()]
    asked = [
        json.loads(line) for line in (DATA / "more" / "validation.jsonl").read_text("utf-8").splitlines()
    ]

    def kind(row: dict[str, Any]) -> str:
        return str(row["question"]).split(" of ")[0]

    answers: dict[str, Counter[str]] = {}
    for row in train:
        answers.setdefault(kind(row), Counter())[row["answers"][0]] += 1
    lines = ["| control | EM, one hop | EM, two hops |", "|---|---|---|"]
    guessed = {
        hops: [
            float(answers[kind(r)].most_common(1)[0][0] == r["answers"][0])
            for r in asked
            if r["hops"] == hops
        ]
        for hops in (1, 2)
    }
    lines.append(
        "| the most frequent answer | " + " | ".join(with_interval(v) for v in guessed.values()) + " |"
    )
    start = Job("hybrid", "warm", 0)
    if start.finished:
        records = answers_of(start.folder, DATA / "more", max_hops=1)
        found = [[r["em"] for r in records if r["hops_needed"] == hops] for hops in (1, 2)]
        lines.append(
            "| hybrid after the warm start, no search of its own | "
            + " | ".join(map(with_interval, found))
            + " |"
        )
    return "\n".join(lines) + "\n"


def learning() -> str:
    """Validation loss on traces (queries and answers) in the course of each architecture's warm start."""
    losses = {}
    for architecture in ARCHITECTURES:
        job = Job(architecture, "warm", 0)
        if (job.folder / "metrics.csv").exists():
            rows = metrics(job)
            losses[architecture] = {
                int(row["step"]): float(row["val/loss"]) for row in rows if row["val/loss"]
            }
    steps = sorted({step for of in losses.values() for step in of})
    lines = [f"| model | {' | '.join(f'step {step}' for step in steps)} |", "|---" * (1 + len(steps)) + "|"]
    for architecture, of in losses.items():
        cells = [f"{of[step]:.2f}" if step in of else "-" for step in steps]
        lines.append(f"| {architecture} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def smooth(values: Sequence[float]) -> list[float]:
    """Means of the last steps."""
    return [mean(values[max(0, n + 1 - SMOOTH_STEPS) : n + 1]) for n in range(len(values))]


def plot_training(seeds: Sequence[int], file: Path) -> None:
    """Reward, divergence from the start model, and searches over the steps of policy gradient."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("reward/answer", "F1 of sampled answers"),
        ("train/kl", "KL to the start model (nats per token)"),
        ("rollouts/hops", "hops of a rollout (of training questions)"),
    )
    colours = {"policy_gradient": "C0", "policy_gradient, answer only": "C1"}
    names = {
        "policy_gradient": "0.8 answer + 0.2 efficiency",
        "policy_gradient, answer only": "answer only",
    }
    for axes, (key, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for method, colour in colours.items():
            for n, job in enumerate(finished("hybrid", method, seeds)):
                values = smooth(curve(job, key))
                axes.plot(
                    range(1, len(values) + 1), values, colour, lw=1.2, label=None if n else names[method]
                )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=110)


def plot_hops(seeds: Sequence[int], file: Path) -> None:
    """Hops and right answers by what a question needs, of the hybrid."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    rows = [(m, jobs) for m in ("warm", *METHODS) if (jobs := finished("hybrid", m, seeds))]
    for axes, (key, title) in zip(
        figure.subplots(1, 2), (("hops", "hops used"), ("em", "exact match")), strict=True
    ):
        for n, hops in enumerate((1, 2)):
            values = [read(jobs, key, hops) for _, jobs in rows]
            means = [mean(v) for v in values]
            ends = [bootstrap_interval(v, RESAMPLES, 0) for v in values]
            errors = [[m - e[0] for m, e in zip(means, ends, strict=True)]]
            errors.append([e[1] - m for m, e in zip(means, ends, strict=True)])
            places = [i + 0.38 * n - 0.19 for i in range(len(rows))]
            label = f"{hops}-hop questions"
            axes.barh(
                places, means, height=0.36, xerr=errors, label=label, color=f"C{n}", error_kw={"lw": 0.8}
            )
        axes.set_yticks(
            range(len(rows)), [m for m, _ in rows] if key == "hops" else [""] * len(rows), fontsize=8
        )
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Print the tables and draw the plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    print(controls())
    print(learning())
    print(results(arguments.seeds))
    print(differences(arguments.seeds))
    plot_training(arguments.seeds, HERE / "training.png")
    plot_hops(arguments.seeds, HERE / "hops.png")


if __name__ == "__main__":
    main()
