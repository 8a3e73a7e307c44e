"""``task=evaluate``: measure a part of the pipeline on annotated data, without training anything."""

from __future__ import annotations

import importlib
from typing import Literal

from refragkit.errors import ConfigError
from refragkit.experiment import Run

Split = Literal["all", "train", "validation"]

#: What ``evaluate`` may be -> the function that does it, called with (run, split). Add one: its name in ``evaluate``'s
#: hint below, and a line here.
EVALUATIONS: dict[str, str] = {"retrieval": "refragkit.tasks.evaluate_retrieval:run_retrieval"}


def evaluate(run: Run, evaluate: Literal["retrieval"] = "retrieval", split: Split = "all") -> None:
    """Measure what ``evaluate`` says.

    Args:
        run: the run.
        evaluate: ``retrieval``: how much of what questions need the retriever finds; no model is built.
        split: the questions to measure on.

    Raises:
        ConfigError: a dry run, or settings that don't fit the data.
        DataError: a broken data file, or nothing to measure on.
    """
    if run.cfg.dry_run:
        raise ConfigError("dry_run=true is for task=train; task=evaluate has no dry run")
    module, function = EVALUATIONS[evaluate].split(":")
    getattr(importlib.import_module(module), function)(run, split)
