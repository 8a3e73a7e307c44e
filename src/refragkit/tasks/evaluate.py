"""``task=evaluate``: measure a part of the pipeline on annotated data, without training anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from refragkit.errors import ConfigError
from refragkit.experiment import Run

Split = Literal["all", "train", "validation"]


def evaluate(
    run: Run,
    rag: Mapping[str, Any],
    evaluate: Literal["retrieval", "rag"] = "retrieval",
    split: Split | None = None,
    adapter_path: str | None = None,
) -> None:
    """Measure what ``evaluate`` says.

    Args:
        run: the run.
        rag: of ``evaluate=rag``; see `refragkit.tasks.rag.settings.Settings` and ``conf/task/evaluate.yaml``.
        evaluate: ``retrieval``: how much of what questions need the retriever finds; no model is built. ``rag``: how
            well a trained model answers, given what the retriever finds.
        split: the questions to measure on; None is all of them for ``retrieval``, the validation part for ``rag``.
        adapter_path: an adapter to put on the model.

    Raises:
        ConfigError: a dry run, or settings that don't fit the data, the model or each other.
        DataError: a broken data file, or nothing to measure on.
        CheckpointError: the model or the adapter can't be read.
    """
    if run.cfg.dry_run:
        raise ConfigError("dry_run=true is for task=train; task=evaluate has no dry run")
    if evaluate == "rag":
        from refragkit.tasks.evaluate_rag import run_rag

        run_rag(run, split or "validation", rag, adapter_path)
        return
    from refragkit.tasks.evaluate_retrieval import run_retrieval

    if adapter_path is not None:
        raise ConfigError(
            f"adapter_path={adapter_path}: evaluate=retrieval uses no model; leave it out, or choose evaluate=rag"
        )
    run_retrieval(run, split or "all")
