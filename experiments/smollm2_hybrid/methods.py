"""Fine-tuning the SmolLM2 hybrid on multi-hop questions: no training, sft, and refrag's two objectives, in one table.

python experiments/smollm2_hybrid/methods.py --data DIR [--seeds 0 1] [--questions 120]

Each training and each evaluation is a run of the command line in its own folder (its command is printed and kept in
``summary.json``); one that is finished is not done again. The questions asked in the end, and their passages, are kept
out of training: see ``larger_set`` in ``baseline.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baseline import ASKED, DOCUMENTS, Job, answers_of, larger_set, run

from refragkit.bootstrap import bootstrap_interval

#: One passage for each hop, as in training; three for the single searches.
ASKED_WITH = {
    **DOCUMENTS,
    "hybrid, up to 3 hops": [*DOCUMENTS["hybrid, up to 3 hops"], "retriever.top_k_per_hop=1"],
}
RECIPE = [
    "experiment=smollm2_refrag",
    "retriever=hybrid",
    "method.eval_at_start=false",
    "method.eval_batches=1",
]
#: Steps of 8 questions, and those of policy gradient that take as many tokens: a question counts with its prompt, once,
#: and eight answers.
HALF, WHOLE, REST_PG, WHOLE_PG = 20, 32, 10, 27
#: A third of sft's rate: at sft's own, ten steps from the same model on the same questions earned less (README.md).
PG = ["method=refrag", "method.objective=policy_gradient", "method.init_lr_frac=0.003", "method.kl_coef=0.04"]


@dataclass(frozen=True)
class Training:
    """One training run.

    Attributes:
        overrides: beside those of `RECIPE`.
        start: the training whose model it goes on from; None for the ready-made hybrid.
        seeds: the seeds that it is run with, of those asked for.
    """

    overrides: Sequence[str]
    start: str | None = None
    seeds: Sequence[int] = (0, 1, 2)


TRAININGS: Mapping[str, Training] = {
    "half sft": Training(["method=sft", f"method.max_steps={HALF}"]),
    "sft": Training(["method=sft", f"method.max_steps={WHOLE}"]),
    "reward_weighted": Training(["method=refrag", f"method.max_steps={WHOLE}"]),
    "half sft, policy_gradient": Training([*PG, f"method.max_steps={REST_PG}"], "half sft"),
    "policy_gradient alone": Training([*PG, f"method.max_steps={WHOLE_PG}"], seeds=(0,)),
    "transformer: sft": Training(
        ["model=transformer", "method=sft", f"method.max_steps={WHOLE}"], seeds=(0,)
    ),
}
#: Models that are asked as they come.
UNTRAINED = {
    "hybrid: no training": ("model=hybrid", "model.size=smollm2"),
    "transformer: no training": ("model=transformer", "model.init=smollm2"),
}


def training_job(name: str, seed: int, data: Path, out: Path, fixed: Sequence[str]) -> Job:
    """The run that trains ``name`` with a seed."""
    training = TRAININGS[name]
    start: list[str] = []
    if training.start is not None:
        start = [f"model.path={folder_of(out, training.start, seed)}"]
    elif "model=transformer" in training.overrides:
        start = ["model.size=tiny", "model.init=smollm2"]
    # A second stage meets other questions first
    number = seed if training.start is None else seed + 100
    overrides = [*RECIPE, *training.overrides, *start, f"data.path={data}", f"seed={number}", *fixed]
    return Job(name, "training", tuple(overrides), folder_of(out, name, seed), None)


def folder_of(out: Path, name: str, seed: int) -> Path:
    """Where a training run lies."""
    return out / "training" / f"{plain(name)}-{seed}"


def plain(name: str) -> str:
    """A name for a folder."""
    return name.replace(", ", "-").replace(": ", "-").replace(" ", "_")


def evaluation_jobs(
    name: str, seed: int | None, data: Path, out: Path, fixed: Sequence[str], only: Iterable[str]
) -> list[Job]:
    """The runs that ask a model with each kind of documents."""
    if seed is None:
        model, weights, label = UNTRAINED[name], None, plain(name)
    else:
        folder = folder_of(out, name, seed)
        kind = "transformer" if name.startswith("transformer") else "hybrid"
        model, weights = (f"model={kind}", f"model.path={folder}"), folder / "model" / "model.safetensors"
        label = f"{plain(name)}-{seed}"
    return [
        Job(
            name,
            documents,
            (
                "task=evaluate",
                "evaluate=rag",
                *model,
                *ASKED_WITH[documents],
                *ASKED,
                f"data.path={data}",
                *fixed,
            ),
            out / "asked" / label / plain(documents),
            weights,
        )
        for documents in only
    ]


def table(jobs: Mapping[str, Sequence[Job]], baselines: Sequence[str]) -> str:
    """F1 of each model with each kind of documents, means over seeds [their number], and less that of others.

    Args:
        jobs: model -> its evaluations, of all seeds.
        baselines: models that are taken off, question by question, over the seeds that both have.
    """
    kinds = list(dict.fromkeys(job.documents for of in jobs.values() for job in of))
    lines = [f"| F1 | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, of in jobs.items():
        found = [by_seed(of, kind) for kind in kinds]
        cells = [f"{shown(list(mean_over_seeds(f).values()))} [{len(f)}]" if f else "-" for f in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for baseline in baselines:
        lines += ["", f"| F1 less {baseline} | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
        for name, of in jobs.items():
            if name != baseline:
                cells = [difference(by_seed(of, kind), by_seed(jobs[baseline], kind)) for kind in kinds]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_seed(jobs: Sequence[Job], documents: str) -> dict[str, dict[str, float]]:
    """F1 of each question, by seed; the seed of an untrained model is empty."""
    return {
        plain_seed(job): {identifier: record["f1"] for identifier, record in answers_of(job).items()}
        for job in jobs
        if job.documents == documents
    }


def plain_seed(job: Job) -> str:
    """The seed in the name of a job's folder; empty for an untrained model."""
    return "" if job.model in UNTRAINED else job.folder.parent.name.rpartition("-")[2]


def mean_over_seeds(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One value for each question."""
    seeds = list(found.values())
    return {identifier: sum(of[identifier] for of in seeds) / len(seeds) for identifier in seeds[0]}


def difference(mine: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]]) -> str:
    """The mean difference over questions, each over the seeds that both have; an untrained model has every seed."""
    pairs = [(of, theirs.get(seed, theirs.get(""))) for seed, of in mine.items()]
    both = [(of, other) for of, other in pairs if other is not None]
    if not both:
        return "-"
    per_question = [sum(of[i] - other[i] for of, other in both) / len(both) for i in both[0][0]]
    return f"{shown(per_question, signed=True)} [{len(both)}]"


def shown(values: Sequence[float], signed: bool = False) -> str:
    """A mean with its 95% bootstrap interval over questions."""
    low, high = bootstrap_interval(values, 10_000, 0)
    form = "{:+.3f}" if signed else "{:.3f}"
    return f"{form} ({form} to {form})".format(sum(values) / len(values), low, high)


def main() -> None:
    """Train and ask what is missing, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "fixed", nargs="*", metavar="OVERRIDE", help="of every run, such as hardware.threads=1"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with questions.jsonl and corpus.jsonl"
    )
    parser.add_argument("--questions", type=int, default=120, help="that are asked in the end (default: 120)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=[*UNTRAINED, *TRAININGS], help="only these models")
    parser.add_argument("--documents", nargs="+", choices=ASKED_WITH, default=list(ASKED_WITH))
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2_methods"))
    arguments = parser.parse_args()
    out, fixed = arguments.out, arguments.fixed
    data = larger_set(arguments.data, arguments.questions, out / "data")
    wanted = arguments.only or [*UNTRAINED, *TRAININGS]
    evaluations: dict[str, list[Job]] = {}
    for seed in arguments.seeds:
        for name in wanted:
            if name in TRAININGS and seed not in TRAININGS[name].seeds:
                continue
            of = evaluations.setdefault(name, [])
            if name in TRAININGS:
                start = TRAININGS[name].start
                for trained in [*([start] if start else []), name]:
                    do(training_job(trained, seed, data, out, fixed))
            elif of:
                continue
            mine = evaluation_jobs(
                name, seed if name in TRAININGS else None, data, out, fixed, arguments.documents
            )
            for job in mine:
                do(job)
            of += mine
    text = table(evaluations, [name for name in ("hybrid: no training", "sft") if name in evaluations])
    (out / "methods.md").write_text(text, encoding="utf-8")
    print(text)


def do(job: Job) -> None:
    """Run a job that is not finished."""
    if not job.finished:
        print(f"\n{job.model}, {job.documents}\n{job.command}", flush=True)
        run(job)


if __name__ == "__main__":
    main()
