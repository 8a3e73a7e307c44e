"""``task=train``: check that the choices fit together, train, evaluate, export, plot."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError

if TYPE_CHECKING:
    from refragkit.data.datamodule import DataModule
    from refragkit.experiment import Run
    from refragkit.methods.recipes import Recipe

log = logging.getLogger("refragkit")


def check_method(run: Run, recipe: Recipe, block_pattern: str) -> None:
    """Refuse a combination of method, model and retriever that can't do what the method means.

    Args:
        run: the run.
        recipe: the method's settings.
        block_pattern: one letter for each block of the model.

    Raises:
        ConfigError: the reason and what to choose instead.
    """
    choices = run.cfg.choices
    if recipe.needs_recurrence and not set(block_pattern) & set("MR"):
        raise ConfigError(
            f"method={choices.method} needs a recurrent block: it carries what each hop read in a recurrent state, and"
            f" model={choices.model} has attention blocks only (block pattern {block_pattern});"
            " choose model=mamba, model=hybrid or model=rwkv-qwen"
        )
    if recipe.needs_retriever and choices.retriever == "none":
        raise ConfigError(
            f"method={choices.method} needs a knowledge base to retrieve from, and retriever=none has none;"
            " choose retriever=dense, bm25 or hybrid, or method=sft to train without documents"
        )


def train(run: Run) -> None:
    """Run the training that the configuration describes."""
    from refragkit.config import instantiate
    from refragkit.models.build import build_model

    recipe: Recipe = instantiate(run.cfg, "method")
    if run.cfg.dry_run:
        from refragkit.tasks.dry_run import dry_run

        dry_run(run, recipe)
        return
    # On the meta device this costs nothing, and says what doesn't fit before data are read or an index is built.
    vocab_size = 512 if run.model_path is None else None  # a trained model has its own
    check_method(run, recipe, build_model(run.cfg.model, vocab_size=vocab_size, device="meta").block_pattern)
    run.hardware.gradient_accumulation(recipe.global_batch_size)
    _fit(run, recipe)


def _fit(run: Run, recipe: Recipe) -> None:
    import lightning.pytorch as pl

    from refragkit.console import route_library_logs
    from refragkit.methods.base import Components
    from refragkit.tracking.plots import plot_training
    from refragkit.training.callbacks import Evaluation, StepLog, write_metrics_csv
    from refragkit.training.progress import TrainingProgress

    route_library_logs()
    data = run.data
    _log_datasets(run, data)
    n_steps = recipe.n_steps(len(data.train))
    model = run.model
    log.info(
        "model: %s, %s parameters, %s trainable, block pattern %s",
        run.cfg.choices.model,
        f"{run.summary.total_parameters:,}",
        f"{run.summary.trainable_parameters:,}",
        model.block_pattern,
    )
    components = Components(
        model=model,
        tokenizer=run.tokenizer,
        retriever=run.retriever,
        reward=run.reward,
        hardware=run.hardware,
        validation=data.validation,
        n_steps=n_steps,
        seed=run.seed,
        from_scratch=run.model_path is None,
        log_metrics=run.log_metrics,
    )
    module = recipe.module(components)
    loader = data.train_loader(recipe.global_batch_size, n_steps)
    hardware = run.hardware
    trainer = pl.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.num_nodes,
        strategy=hardware.strategy,
        precision=hardware.resolved_precision(),
        max_steps=n_steps,
        callbacks=[
            TrainingProgress(),
            StepLog(),
            Evaluation(
                run.folder, on_records=lambda records, step: run.tracking.log_traces(records[:16], step)
            ),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        default_root_dir=run.folder,
    )
    log.info(
        "training: %d steps of %d examples (%d micro batches each), %d training and %d validation examples, %s",
        n_steps,
        recipe.global_batch_size,
        hardware.gradient_accumulation(recipe.global_batch_size),
        len(data.train),
        len(data.validation),
        hardware.resolved_precision(),
    )
    try:
        trainer.fit(module, loader)
    finally:
        if module.history:
            write_metrics_csv(run.folder / "metrics.csv", module.history)
            run.artifact("metrics", run.folder / "metrics.csv")
            (run.folder / "plots").mkdir(exist_ok=True)
            plot_training(module.history, run.folder / "plots" / "training.png")
            run.artifact("training_plot", run.folder / "plots" / "training.png")
        if (run.folder / "samples.jsonl").exists():
            run.artifact("samples", run.folder / "samples.jsonl")
        if module.training_seconds:
            run.summary.train_tokens_per_second = module.trained_tokens / module.training_seconds
    for name in ("best", "last"):
        path = run.folder / "checkpoints" / f"{name}.ckpt"
        if path.exists():
            run.summary.artifacts[f"{name}_checkpoint"] = str(path.relative_to(run.folder))
    if module.truncated_documents:
        log.info("%d documents were cut to fit method.max_seq_len", module.truncated_documents)
    if module.dropped_examples:
        log.warning(
            "%d examples had no supervised token within the context and were skipped", module.dropped_examples
        )
    _export(run, model)


def _export(run: Run, model: Any) -> None:
    if run.cfg.choices.adapter != "none":
        from refragkit.adapters.peft_format import save_adapter

        save_adapter(model, run.folder / "adapter")
        run.artifact("adapter", run.folder / "adapter")
        return
    from refragkit.models.checkpoint import save_model

    save_model(model, run.folder / "model", tokenizer=run.tokenizer)
    run.artifact("model", run.folder / "model")


def _log_datasets(run: Run, data: DataModule) -> None:
    name, source = str(run.cfg.choices.data), str(run.cfg.data.path or "bundled sample")
    run.tracking.log_dataset(f"{name}-train", "training", data.fingerprint, source, len(data.train))
    run.tracking.log_dataset(
        f"{name}-validation", "validation", data.fingerprint, source, len(data.validation)
    )
    if data.corpus is not None:
        run.tracking.log_dataset(
            f"{name}-corpus", "knowledge base", data.fingerprint, source, len(data.corpus)
        )
