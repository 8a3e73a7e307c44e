"""The trained model that ``task=generate``, ``chat``, ``export`` and ``merge`` work with, and where it is."""

from __future__ import annotations

import logging

from refragkit.adapters.location import adapter_location
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.experiment import Run
from refragkit.models.base import SequenceModel

log = logging.getLogger("refragkit")

_TORCH_DEVICE = {"cpu": "cpu", "gpu": "cuda", "mps": "mps"}


def check_run(run: Run) -> None:
    """Refuse settings that mean nothing to a task that uses a trained model, before anything is loaded.

    Raises:
        ConfigError: a dry run, an adapter to be made, or neither ``model.path`` nor ``model.init``.
        CheckpointError: what that names is no model.
    """
    task = run.cfg.choices.task
    if run.cfg.dry_run:
        raise ConfigError(f"dry_run=true is for task=train; task={task} has no dry run")
    if run.cfg.choices.adapter != "none":
        raise ConfigError(
            f"adapter={run.cfg.choices.adapter} puts a new adapter on the model, to be trained; task={task} uses a"
            " trained one: give adapter_path=DIR and leave adapter=none"
        )
    if run.model_path is None:
        raise ConfigError(
            f"task={task} needs a trained model: give model.path=DIR, a model folder or the folder of a run that"
            " trained one, or model.init=NAME for a pretrained one"
        )


def trained_model(run: Run, tokenizer: Tokenizer | None, adapter_path: str | None) -> SequenceModel:
    """Load ``model.path`` or ``model.init``, put the adapter on it, and move it to the run's device, ready to read.

    Args:
        run: checked by `check_run`.
        tokenizer: refused if it has more entries than the model; None checks nothing.
        adapter_path: an adapter's folder or that of the run that trained it.

    Raises:
        ConfigError: the tokenizer doesn't fit.
        CheckpointError: model or adapter can't be read, or don't fit each other.
    """
    import torch

    hardware = run.hardware
    model = run.build_model(tokenizer, any_kind=True)
    if adapter_path is not None:
        from refragkit.adapters.peft_format import load_adapter
        from refragkit.models.weights_hash import weights_hash

        load_adapter(model, adapter_location(adapter_path), base_hash=weights_hash(str(run.model_path)))
    run.summary.total_parameters = sum(parameter.numel() for parameter in model.parameters())
    run.summary.trainable_parameters = 0
    if hardware.precision == "bf16-true":
        model.to(torch.bfloat16)
    model.to(_TORCH_DEVICE[hardware.accelerator]).eval()
    if hardware.compile:
        model.compile_blocks()
    log.info(
        "model: %s, %s parameters, block pattern %s",
        run.model_path,
        f"{run.summary.total_parameters:,}",
        model.block_pattern,
    )
    return model
