"""``task=export``: write a trained model in our format or in Hugging Face's, an adapter merged into it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from refragkit.errors import ConfigError
from refragkit.experiment import Run

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer

log = logging.getLogger("refragkit")


def export(
    run: Run,
    format: Literal["refragkit", "hf"] = "refragkit",
    export_dir: str | None = None,
    adapter_path: str | None = None,
) -> None:
    """Load the model and save it with its tokenizer.

    Args:
        run: the run.
        format: ``refragkit``, or ``hf`` for what the model's family is called in ``transformers`` and
            flash-linear-attention.
        export_dir: a new or empty folder; None is ``model/`` in the run folder.
        adapter_path: an adapter to merge into the weights.

    Raises:
        ConfigError: ``export_dir`` is not empty.
        CheckpointError: the model can't be read, or no Hugging Face layout holds it.
    """
    from refragkit.adapters.lora import merge_into_base
    from refragkit.models.checkpoint import save_model
    from refragkit.tasks.trained_model import check_run, trained_model

    check_run(run)
    folder = new_folder(export_dir, run.folder / "model", "export_dir")
    tokenizer = tokenizer_beside(run)
    model = trained_model(run, tokenizer, adapter_path)
    if adapter_path is not None:
        log.info("merged %d LoRA layers", merge_into_base(model))
    save_model(model, folder, tokenizer, format=format)
    log.info("exported to %s (%s)", folder, format)
    if export_dir is None:
        run.artifact("model", folder)
    else:
        run.summary.artifacts["model"] = os.path.relpath(folder, run.folder)
    run.log_metrics({"export/bytes": sum(file.stat().st_size for file in folder.iterdir())}, step=0)


def new_folder(path: str | None, default: Path, key: str) -> Path:
    """The folder that a task writes, which is not to hold anything yet.

    Args:
        path: what the configuration says.
        default: where that is None.
        key: the setting, for messages.

    Raises:
        ConfigError: there is something in it.
    """
    folder = default if path is None else Path(path).expanduser().absolute()
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise ConfigError(
            f"{key}: {folder} is not an empty folder; give a new one, so that nothing is mixed up"
        )
    return folder


def tokenizer_beside(run: Run) -> Tokenizer | None:
    """The tokenizer to save beside the weights: the configured one, or the model folder's if it has one."""
    from refragkit.data.tokenizer import has_tokenizer

    source = run.model_path or ""
    if run.cfg.data.get("tokenizer") is None and not has_tokenizer(source):
        log.warning(
            "%s has no tokenizer: only the weights are exported (data.tokenizer=DIR adds one)", source
        )
        return None
    return run.tokenizer
