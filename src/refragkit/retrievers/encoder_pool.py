"""Worker processes that encode: sentence-transformers' own pool, with threads shared out and no orphans.

Source: ``SentenceTransformer.start_multi_process_pool``.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer


class WorkerEndedError(RuntimeError):
    """A worker is gone, and what it was given with it."""


class PooledSentenceTransformer(SentenceTransformer):
    """A model whose workers share the cores, and end with the process that started them.

    Attributes:
        worker_threads: CPU threads of each worker.
    """

    worker_threads: int = 1

    @classmethod
    def _multi_process_worker(
        cls, target_device: str, model: Any, input_queue: Any, results_queue: Any
    ) -> None:
        torch.set_num_threads(model.worker_threads)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super()._multi_process_worker(target_device, model, input_queue, results_queue)

    @staticmethod
    def _get_worker_result(pool: Any, poll_interval: float = 1.0) -> Any:
        try:
            return SentenceTransformer._get_worker_result(pool, poll_interval)
        except RuntimeError as error:
            ended = [p.exitcode for p in pool["processes"] if not p.is_alive()]
            raise WorkerEndedError(
                f"{len(ended)} of {len(pool['processes'])} encoding processes ended (exit code {ended})"
            ) from error


def _end_with_parent() -> None:
    """A parent that is killed can't stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def worker_pool(model: PooledSentenceTransformer, device: str, processes: int) -> Iterator[Any]:
    """A running pool for ``model.encode(pool=...)``; the model is back on its device afterwards.

    Args:
        model: the model.
        device: where the workers compute; ``cuda`` gives each the next GPU.
        processes: how many workers.
    """
    model.worker_threads = max(1, _cores() // processes)
    pool = model.start_multi_process_pool(_devices(device, processes))
    try:
        yield pool
    finally:
        model.stop_multi_process_pool(pool)
        model.to(device)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _devices(device: str, processes: int) -> list[str]:
    if device == "cuda":
        return [f"cuda:{i % torch.cuda.device_count()}" for i in range(processes)]
    return [device] * processes
