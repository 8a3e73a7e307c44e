"""``task=train``: check that the choices fit together, train, evaluate, export, plot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError
from refragkit.retrievers.state_cache import refuse_in_training

if TYPE_CHECKING:
    from pathlib import Path

    from refragkit.data.datamodule import DataModule
    from refragkit.experiment import Run
    from refragkit.methods.base import MethodModule
    from refragkit.methods.recipes import Recipe
    from refragkit.training.callbacks import Evaluated

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
    refuse_in_training(run.cfg.retriever.get("state_cache"), choices.method)
    if choices.method == "lora" and choices.adapter == "none":
        raise ConfigError(
            "method=lora trains an adapter, and adapter=none has none; choose method=sft instead"
        )
    if choices.data == "tokens" and choices.method not in ("sft", "lora"):
        raise ConfigError(
            f"method={choices.method} works on text, and data=tokens holds ids only; choose method=sft or lora, or the"
            " data that the ids came from"
        )


def train(run: Run, convert: Mapping[str, Any] | None = None) -> None:
    """Run the training that the configuration describes.

    Args:
        run: the run.
        convert: of ``method=distill`` only, see ``conf/task/base/conversion.yaml``.
    """
    from refragkit.config import instantiate

    if run.cfg.choices.method == "distill":
        from refragkit.tasks.convert import convert as distill

        distill(run, convert or {})
        return
    if convert is not None:
        raise ConfigError(
            f"convert belongs to method=distill and task=convert; method={run.cfg.choices.method} has no use for it"
        )
    from refragkit.models.build import build_model

    recipe: Recipe = instantiate(run.cfg, "method")
    # What doesn't fit is said before data are read or an index is built; on the meta device a model costs nothing.
    vocab_size = 512 if run.model_path is None else None  # a trained model has its own
    planned = build_model(run.cfg.model, vocab_size=vocab_size, device="meta", cache_dir=run.cache_dir)
    check_method(run, recipe, planned.block_pattern)
    run.hardware.gradient_accumulation(recipe.global_batch_size)
    _ = run.reward
    if run.cfg.dry_run:
        from refragkit.tasks.dry_run import dry_run

        dry_run(run, recipe)
        return
    _fit(run, recipe)


def _fit(run: Run, recipe: Recipe) -> None:
    import lightning.pytorch as pl

    from refragkit.console import route_library_logs
    from refragkit.methods.base import Components
    from refragkit.tracking.samples import sample_rows
    from refragkit.training.callbacks import Evaluation, StepLog
    from refragkit.training.checkpoints import Checkpoints
    from refragkit.training.progress import TrainingProgress
    from refragkit.training.stop import StopRequest

    route_library_logs()
    data = run.data
    data.check_tokenizer(run.tokenizer)
    _log_datasets(run, data)
    n_steps = recipe.n_steps(len(data.train))
    model = run.model
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
        train=data.train,
        folder=run.folder,
        model_path=run.model_path,
    )
    module = recipe.module(components)
    # A method may freeze what it doesn't train.
    run.summary.trainable_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log.info(
        "model: %s, %s parameters, %s trainable, block pattern %s",
        run.cfg.choices.model,
        f"{run.summary.total_parameters:,}",
        f"{run.summary.trainable_parameters:,}",
        model.block_pattern,
    )
    first_step = 0 if run.checkpoint is None else _go_back(run, run.checkpoint, data.fingerprint)
    # Lightning warns of a loader without a batch, even where it takes none
    loader = data.train_loader(recipe.examples_per_step, n_steps, min(first_step, n_steps - 1))
    hardware = run.hardware
    stop = StopRequest()

    def track(records: list[dict[str, Any]], step: int) -> None:
        run.tracking.log_table("samples", sample_rows(records), step)
        if step == n_steps:
            run.tracking.log_traces(records, step)

    evaluation = Evaluation(run.folder, on_records=track)
    checkpoints = Checkpoints(
        run.folder,
        evaluation,
        recipe.save_every,
        data.fingerprint,
        stop,
        on_saved=lambda: _save_progress(run, module),
    )
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
            evaluation,
            checkpoints,
        ],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        default_root_dir=run.folder,
    )
    log.info(
        "training: %s of %d examples (micro batches of %d), %d training and %d validation examples in use, %s",
        f"steps {first_step + 1} to {n_steps}" if first_step else f"{n_steps} steps",
        recipe.examples_per_step,
        module.micro_batch_size,
        len(data.train),
        min(len(data.validation), recipe.eval_batches * recipe.global_batch_size),
        hardware.resolved_precision(),
    )
    try:
        with stop.listening():
            trainer.fit(module, loader, ckpt_path=run.checkpoint, weights_only=True)
        if first_step == n_steps:  # nothing was left to train, and Lightning has called none of the hooks
            module.on_train_end()
    finally:
        _save_progress(run, module)
        for name in ("metrics.csv", "plots/training.png", "samples.jsonl"):
            run.tracking.log_artifact(run.folder / name)
    if module.truncated_documents:
        log.info("%d documents were cut to fit the context", module.truncated_documents)
    if module.dropped_examples:
        log.warning(
            "%d examples had no supervised token within the context and were skipped", module.dropped_examples
        )
    _export(run, model)
    if evaluation.first is not None and evaluation.last is not None:
        _compare(run, evaluation.first, evaluation.last)


def _go_back(run: Run, checkpoint: Path, fingerprint: str) -> int:
    """Bring the run's files to where a checkpoint was.

    Returns:
        The steps that it has taken.

    Raises:
        CheckpointError: it can't be read, or a file has lost what it held then.
        ConfigError: the data have changed since.
    """
    from refragkit.training.checkpoints import Checkpoints, callback_state, cut_back, read_header

    header = read_header(checkpoint)
    state = callback_state(header, Checkpoints)
    if state["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{checkpoint}: was trained on other data: data={run.cfg.choices.data}"
            f" ({run.cfg.data.path or 'bundled sample'}) has changed since; put the files back, or begin a new run"
        )
    cut_back(run.folder, state["sizes"])
    step = int(header["global_step"])
    log.info("going on behind step %d (%s)", step, checkpoint.name)
    return step


def _compare(run: Run, before: Evaluated, after: Evaluated) -> None:
    """Show what training changed: on the screen, in the summary, in the tracking store."""
    from refragkit.console import console
    from refragkit.training.before_after import BeforeAfter

    comparison = BeforeAfter(before, after)
    run.log_metrics(comparison.metrics, after.step)
    comparison.write(run.folder / "before_after.md")
    run.artifact("before_after", run.folder / "before_after.md")
    console.print(comparison.renderable(), highlight=False)


def _save_progress(run: Run, module: MethodModule) -> None:
    """Write what a run has so far, so that one that is killed loses no curve and no answer."""
    from refragkit.tracking.plots import plot_training
    from refragkit.training.callbacks import write_metrics_csv

    files = {
        "metrics": "metrics.csv",
        "training_plot": "plots/training.png",
        "samples": "samples.jsonl",
        "rollouts": "rollouts",
        "best_checkpoint": "checkpoints/best.ckpt",
        "last_checkpoint": "checkpoints/last.ckpt",
    }
    if module.history:
        write_metrics_csv(run.folder / files["metrics"], module.history)
        plot_training(module.history, run.folder / files["training_plot"])
    for name, file in files.items():
        if (run.folder / file).exists():
            run.keep(name, run.folder / file)
    if module.training_seconds:
        run.summary.train_tokens_per_second = module.trained_tokens / module.training_seconds
    run.write_summary()


def _export(run: Run, model: Any) -> None:
    if run.cfg.choices.adapter != "none":
        from refragkit.adapters.lora import merge_into_base
        from refragkit.adapters.peft_format import save_adapter
        from refragkit.models.weights_hash import weights_hash

        base = None if run.model_path is None else weights_hash(run.model_path)
        save_adapter(model, run.folder / "adapter", base)
        run.artifact("adapter", run.folder / "adapter")
        if run.model_path is not None:
            return
        # Its base exists nowhere else: without this the adapter could never be used.
        log.warning("the adapter's base had random weights; model/ holds both, merged")
        merge_into_base(model)
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
        source = str(run.cfg.data.get("corpus") or source)
        run.tracking.log_dataset(
            f"{name}-corpus", "knowledge base", data.fingerprint, source, len(data.corpus)
        )
