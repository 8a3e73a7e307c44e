"""Four architectures and three ways to go on training, on the task of ``build.py``: runs, tables and plots.

python experiments/bridge_task/grid.py [--only TEXT ...] [--seeds 0 1] [--list]

Every job is a run of the normal command line in its own folder, and is not done again once it is finished. Each
architecture begins with one supervised run on search traces (``warm``); everything else goes on from there.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answer import MAX_HOPS, MAX_NEW_TOKENS, MAX_SEQ_LEN, TOP_K, answers_of
from omegaconf import OmegaConf

from refragkit.config import compose
from refragkit.experiment import run_experiment

OUT = Path("outputs/bridge_task")
DATA = OUT / "data"

_SHAPE = ("model.d_model=64", "model.n_heads=4", "model.n_kv_heads=4", "model.head_dim=16", "model.d_ff=128")
#: Two blocks each, and about as many parameters.
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "hybrid": ("model.block_pattern=MT", "model.d_state=16", "model.ssm_head_dim=32", *_SHAPE),
    "mamba": ("model.n_layers=2", "model.d_model=64", "model.d_state=32", "model.head_dim=32"),
    "rwkv-qwen": ("model.block_pattern=RT", "model.wkv_head_dim=16", *_SHAPE),
    "transformer": ("model.n_layers=2", *_SHAPE),
}
_ALL = (
    f"data.tokenizer={DATA / 'tokenizer'}",
    f"method.max_seq_len={MAX_SEQ_LEN}",
    "method.eval_at_start=false",
    "hardware.threads=1",
    "hardware.micro_batch_size=32",
    "tracking=none",
)
_TRACES = ("method=sft", "retriever=none", "data=chat", "method.global_batch_size=32")
#: From random weights, on traces and on passages to repeat.
WARM = (
    *_TRACES,
    f"data.path={DATA / 'warm' / 'traces.jsonl'}",
    f"data.validation_path={DATA / 'warm' / 'validation_traces.jsonl'}",
    "method.epochs=20",
    "method.max_steps=1200",
    "method.scratch_lr_frac=0.3",
    "method.warmup_steps=50",
    "method.eval_every=200",
    "method.eval_batches=13",
    "method.log_every=50",
)
_LIVE = (
    f"method.max_new_tokens={MAX_NEW_TOKENS}",
    "method=refrag",
    "data=multihop_qa",
    f"data.path={DATA / 'more'}",
    "retriever=bm25",
    "retriever.planner=model",
    f"method.max_hops={MAX_HOPS}",
    f"method.top_k_per_hop={TOP_K}",
    "method.epochs=100",
    "method.eval_every=1000",
    "reward.weights.relevance=0",
)
_EFFICIENT = ("reward.weights.answer=0.8", "reward.weights.efficiency=0.2")
_SFT = (
    *_TRACES,
    f"data.path={DATA / 'more' / 'traces.jsonl'}",
    f"data.validation_path={DATA / 'more' / 'validation_traces.jsonl'}",
    "method.epochs=100",
    "method.max_steps=88",
    "method.eval_every=1000",
)
_WEIGHTED = (
    *_LIVE,
    *_EFFICIENT,
    "method.objective=reward_weighted",
    "method.global_batch_size=32",
    "method.max_steps=95",
)
_GRADIENT = (
    *_LIVE,
    "method.objective=policy_gradient",
    "method.global_batch_size=8",
    "method.max_steps=100",
)
_GENTLE = ("method.lr=4e-4", "method.warmup_steps=10")
#: Steps are chosen so that all train on about as many tokens; the table says how many they were.
METHODS: dict[str, tuple[str, ...]] = {
    "sft": (*_SFT, *_GENTLE),
    "reward_weighted": (*_WEIGHTED, *_GENTLE),
    "policy_gradient": (*_GRADIENT, *_EFFICIENT, *_GENTLE),
    "policy_gradient, answer only": (
        *_GRADIENT,
        "reward.weights.answer=1",
        "reward.weights.efficiency=0",
        *_GENTLE,
    ),
}
#: Tried on the hybrid with seed 0, to choose the learning rate.
TRIED: dict[str, tuple[str, ...]] = {
    "sft, lr 1e-3": (*_SFT, "method.lr=1e-3"),
    "reward_weighted, lr 1e-3": (*_WEIGHTED, "method.lr=1e-3"),
    "policy_gradient, lr 1e-3": (*_GRADIENT, *_EFFICIENT, "method.lr=1e-3"),
}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        architecture: a key of `ARCHITECTURES`.
        method: a key of `METHODS` or `TRIED`, or ``warm``.
        seed: of the run.
    """

    architecture: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """For folders and messages."""
        return f"{self.architecture}/{self.method.replace(', ', '-').replace(' ', '_')}-{self.seed}"

    @property
    def folder(self) -> Path:
        """Of the run."""
        return OUT / "runs" / self.name

    @property
    def overrides(self) -> list[str]:
        """Of the run."""
        model = [f"model={self.architecture}", f"seed={self.seed}"]
        if self.method == "warm":
            return [*WARM, *model, *ARCHITECTURES[self.architecture], *_ALL]
        start = Job(self.architecture, "warm", 0).folder
        return [*(METHODS | TRIED)[self.method], *model, f"model.path={start}", *_ALL]

    @property
    def command(self) -> str:
        """What does the same by hand."""
        return " ".join(["python", "run.py", *self.overrides])

    @property
    def finished(self) -> bool:
        """Whether the folder holds a run of this configuration that came to its end; keys added since don't count."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
            config = OmegaConf.load(self.folder / "config.yaml")
        except (OSError, ValueError):
            return False
        wanted = OmegaConf.to_container(compose(self.overrides), resolve=True)
        return bool(summary["status"] == "finished" and agrees(OmegaConf.to_container(config), wanted))


def agrees(had: Any, wanted: Any) -> bool:
    """Whether all that a run's configuration says is still what is wanted."""
    if isinstance(had, dict) and isinstance(wanted, dict):
        return all(key in wanted and agrees(value, wanted[key]) for key, value in had.items())
    return bool(had == wanted)


def all_jobs(seeds: Sequence[int]) -> list[Job]:
    """In the order of doing: what the most depends on first."""
    jobs = [Job("hybrid", "warm", 0)]
    jobs += [Job("hybrid", method, seed) for seed in seeds for method in METHODS]
    others = ("transformer", "rwkv-qwen", "mamba")
    jobs += [Job(architecture, "warm", 0) for architecture in others]
    for architecture in others:
        # refrag refuses a model without a recurrent block
        methods = ["sft"] if architecture == "transformer" else ["sft", "policy_gradient"]
        jobs += [Job(architecture, method, seed) for seed in seeds for method in methods]
    return [*jobs, *(Job("hybrid", method, 0) for method in TRIED)]


def run(job: Job) -> None:
    """Do a job that is not finished, and answer the validation questions."""
    if not job.finished:
        print(f"\n{job.name}\n{job.command}", flush=True)
        if job.folder.exists():
            shutil.rmtree(job.folder)
        summary = run_experiment(compose(job.overrides), job.folder, job.command)
        if summary.status != "finished":
            raise SystemExit(f"{job.name}: {summary.error}")
    records = answers_of(job.folder, DATA / "more")
    parts = []
    for hops in (1, 2):
        chosen = [r for r in records if r["hops_needed"] == hops]
        em, used = (sum(r[key] for r in chosen) / len(chosen) for key in ("em", "hops"))
        parts.append(f"{hops}-hop questions: EM {em:.3f}, hops {used:.2f}")
    print(f"{job.name}: {'; '.join(parts)}", flush=True)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="jobs whose name has it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--list", action="store_true", help="show the jobs and whether they are finished")
    arguments = parser.parse_args()
    for job in all_jobs(arguments.seeds):
        if arguments.only and not any(text in job.name for text in arguments.only):
            continue
        if arguments.list:
            print("finished" if job.finished else "missing ", job.name)
        else:
            run(job)


if __name__ == "__main__":
    main()
