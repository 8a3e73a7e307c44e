"""How the benchmarks measure: runs of the candidates alternate, and the median of each is compared."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def arguments(description: str | None, **defaults: int | str) -> argparse.Namespace:
    """Command line with ``--threads``, ``--repeats`` and the benchmark's own options."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, value in {"threads": 2, "repeats": 5, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    return parsed


def median_seconds(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median wall-clock seconds of each candidate.

    They take turns, so that whatever else the machine does falls on all of them; one warm-up round isn't counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """By how much a call raises the process's peak resident memory over what it holds before (Linux only)."""
    run()  # lazily loaded code isn't the call's own
    ctypes.CDLL("libc.so.6").malloc_trim(
        0
    )  # nor does freed memory that the allocator holds belong to the process
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
