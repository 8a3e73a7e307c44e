"""Memory of LoRA workers on one int8 base of the 1.5b hybrid: what one and what six of them take together.

    python experiments/benchmarks/int8_workers.py --workers 1,6 --gradient-checkpointing

Random weights, rank 32, one sequence of 256 tokens for each worker in a step, every token supervised. What counts is
the proportional share (PSS, Linux only) of all processes together: workers, their leader, and the server that they are
forked from; of the base, which they share, each counts its part. The largest sum that is seen while steps are taken is
printed, and what one worker took of it. Each row is a process of its own. Needs as much memory as it prints: look
whether it is free first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import torch


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="1,6", help="numbers of them, a row each")
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--sequence-tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)  # measure so many in this process
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.row:
        print(json.dumps(measure(args)))
        return
    print(f"torch {torch.__version__}, {args.size}, {args.sequence_tokens} tokens, {args.steps} steps each")
    print(f"{'workers':>7} {'base GiB':>9} {'together GiB':>12} {'a worker':>9} {'leader':>7} {'server':>7}")
    for count in map(int, args.workers.split(",")):
        command = [sys.executable, __file__, *sys.argv[1:], "--row", str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{count:>7} {row['base']:>9.2f} {row['together']:>12.2f} {row['worker']:>9.2f} {row['leader']:>7.2f}"
            f" {row['server']:>7.2f}",
            flush=True,
        )


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Start the workers and watch them take their steps."""
    from refragkit.adapters.lora import LoRA
    from refragkit.data.conversation import Rendered
    from refragkit.models.build import build_model
    from refragkit.training.optim import LearningRates
    from refragkit.training.workers import Workers
    from refragkit.training.workers_process import Job

    node = {
        "_target_": "refragkit.models.build.rwkv_qwen",
        "size": args.size,
        "gradient_checkpointing": args.gradient_checkpointing,
    }
    model = build_model(node, quantize="int8").train()
    LoRA(args.rank, 2 * args.rank).apply(model)
    job = Job(
        learning_rates=LearningRates.uniform(2e-5),
        weight_decay=0.0,
        grad_clip=1.0,
        micro_batch_size=1,
        pad_id=0,
        bfloat16=True,
        threads=1,
        seed=0,
        shared_gradients=False,
    )
    workers = Workers(model, args.row, job)
    watch = Watch(workers.process_ids)
    watch.start()
    generator = torch.Generator().manual_seed(0)
    count = args.sequence_tokens + 1
    for step in range(args.steps):
        ids = torch.randint(0, model.vocab_size, (args.row, count), generator=generator).tolist()
        mask = [False, *[True] * (count - 1)]
        workers.order(step, 1.0, {i: [Rendered(row, mask)] for i, row in enumerate(ids)})
        workers.wait(step)
    watch.stop()
    workers.close()
    return watch.largest | {"base": workers.base.size / 2**30}


class Watch(threading.Thread):
    """Adds up the proportional shares of the processes of a measurement, again and again."""

    def __init__(self, workers: list[int]) -> None:
        super().__init__(daemon=True)
        self.workers = workers
        self.server = cast(int, multiprocessing.forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
        self.largest: dict[str, float] = {"together": 0.0}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            each = [share_gib(pid) for pid in self.workers]
            leader, server = share_gib(os.getpid()), share_gib(self.server)
            together = sum(each) + leader + server
            if together > self.largest["together"]:
                self.largest = {
                    "together": together,
                    "worker": max(each),
                    "leader": leader,
                    "server": server,
                }
            time.sleep(0.1)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def share_gib(pid: int) -> float:
    """A process's proportional share of memory, in GiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) / 2**20


if __name__ == "__main__":
    main()
