"""``task=merge``: one adapter from several, and a model with it merged into the weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from refragkit.errors import ConfigError
from refragkit.experiment import Run

log = logging.getLogger("refragkit")


def merge(
    run: Run,
    adapters: Sequence[str] = (),
    weights: Sequence[float] | None = None,
    average: Literal["exact", "svd", "factors"] = "exact",
    rank: int | None = None,
    output: str | None = None,
    merge_into: str | None = None,
) -> None:
    """Average adapters of one base model.

    Args:
        run: the run. A model is needed for ``merge_into`` only.
        adapters: folders of adapters, or of the runs that trained them, or files of weights in such folders.
        weights: one number for each, with the sum 1; None: equal ones.
        average: ``exact``, ``svd`` or ``factors``, see `refragkit.adapters.merge`.
        rank: of ``svd``; None: the highest of the adapters.
        output: a new or empty folder for the adapter; None: ``adapter/`` in the run folder.
        merge_into: a new or empty folder for the model of ``model.path`` or ``model.init`` with the average merged into
            its weights; None: none is written.

    Raises:
        ConfigError: a setting that can't be, or a folder that is not empty.
        CheckpointError: an adapter can't be read, or adapters and model don't belong together.
    """
    from refragkit.adapters.location import adapter_location
    from refragkit.adapters.merge import merge_adapters, merge_weights
    from refragkit.adapters.peft_format import check_base, read_adapter, write_adapter
    from refragkit.models.weights_hash import weights_hash
    from refragkit.tasks.export import new_folder
    from refragkit.tasks.trained_model import check_run

    merge_weights(len(adapters), weights)
    if merge_into is not None:
        if run.model_path is None:
            raise ConfigError(
                f"merge_into={merge_into} writes a model, and there is none to merge into: give the one that the"
                " adapters were trained on as model.path=DIR or model.init=NAME"
            )
        check_run(run)
    elif run.cfg.dry_run:
        raise ConfigError("dry_run=true is for task=train; task=merge has no dry run")
    folder = new_folder(output, run.folder / "adapter", "output")
    model_folder = None if merge_into is None else new_folder(merge_into, Path(), "merge_into")
    if folder == model_folder:
        raise ConfigError(f"output and merge_into are both {folder}; give the model a folder of its own")
    read = [read_adapter(adapter_location(path, f"adapters[{i}]")) for i, path in enumerate(adapters)]
    if run.model_path is not None:
        base = weights_hash(run.model_path)
        for adapter in read:
            check_base(adapter, base)
    merged = merge_adapters(read, weights, average, rank)
    write_adapter(merged.adapter, folder)
    if output is None:
        run.artifact("adapter", folder)
    else:
        run.summary.artifacts["adapter"] = os.path.relpath(folder, run.folder)
    layers = merged.adapter.layers
    ranks = sorted({update.rank for update in layers.values()})
    worst = max(merged.layer_errors, key=lambda path: merged.layer_errors[path])
    log.info(
        "merged %d adapters (%s) into one of rank %s on %d layers: %s",
        len(read),
        average,
        ranks[0] if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
        len(layers),
        folder,
    )
    log.info(
        "relative error to the weighted average of the updates: %.2g (worst layer %.2g, %s)",
        merged.relative_error,
        merged.layer_errors[worst],
        worst,
    )
    run.log_metrics(
        {
            "merge/adapters": len(read),
            "merge/layers": len(layers),
            "merge/rank": ranks[-1],
            "merge/parameters": sum(update.A.numel() + update.B.numel() for update in layers.values()),
            "merge/relative_error": merged.relative_error,
            "merge/worst_layer_error": merged.layer_errors[worst],
        },
        step=0,
    )
    if model_folder is not None:
        _merge_into(run, folder, model_folder)


def _merge_into(run: Run, adapter: Path, folder: Path) -> None:
    from refragkit.adapters.lora import merge_into_base
    from refragkit.models.checkpoint import save_model
    from refragkit.tasks.export import tokenizer_beside
    from refragkit.tasks.trained_model import trained_model

    tokenizer = tokenizer_beside(run)
    model = trained_model(run, tokenizer, str(adapter))
    n_layers = merge_into_base(model)
    save_model(model, folder, tokenizer)
    run.summary.artifacts["model"] = os.path.relpath(folder, run.folder)
    log.info("merged %d layers into the weights of %s: %s", n_layers, run.model_path, folder)
