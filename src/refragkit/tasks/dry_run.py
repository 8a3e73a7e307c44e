"""``dry_run=true``: sizes, memory, data and steps of a run, without weights and without training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rich.table import Table

from refragkit.console import console

if TYPE_CHECKING:
    from refragkit.experiment import Run
    from refragkit.methods.recipes import Recipe
    from refragkit.models.base import SequenceModel

log = logging.getLogger("refragkit")

_FLOAT32_BYTES = 4
_ADAMW_BYTES = 8  # two float32 moments for each trainable parameter


def memory_estimate(model: SequenceModel, trainable: int, micro_batch: int, tokens: int) -> dict[str, int]:
    """Estimated peak of a training step in bytes, by what holds it.

    Args:
        model: may lie on the meta device.
        trainable: parameters with a gradient.
        micro_batch: sequences in one forward and backward pass.
        tokens: tokens of each.

    Returns:
        bytes for ``weights``, ``gradients``, ``optimizer`` and ``activations``. The last counts, per token and block,
        the inputs of each matrix product in float32: 14 d_model for the mixer and 4 d_ff for the MLP, or one d_model
        where gradient checkpointing keeps block inputs only, and one block in full.
    """
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    per_block = 14 * config.d_model + 4 * (config.d_ff or 0)
    blocks = model.n_layers
    per_token = blocks * config.d_model + per_block if model.gradient_checkpointing else blocks * per_block
    return {
        "weights": total * _FLOAT32_BYTES,
        "gradients": trainable * _FLOAT32_BYTES,
        "optimizer": trainable * _ADAMW_BYTES,
        "activations": micro_batch * tokens * per_token * _FLOAT32_BYTES,
    }


def dry_run(run: Run, recipe: Recipe) -> None:
    """Build the model on the meta device, print what a run would need, and record it in the summary."""
    from refragkit.models.build import build_model

    data = run.data
    vocab_size = data.vocab_size if run.model_path is None else None  # a trained model has its own
    model = build_model(
        run.cfg.model, vocab_size=vocab_size, seed=run.seed, device="meta", cache_dir=run.cache_dir
    )
    kinds = model.parameter_counts()
    report = run.apply_adapter(model)
    trainable = report.trainable_parameters

    table = Table(title="parameters", box=None, title_justify="left")
    table.add_column("part")
    table.add_column("count", justify="right")
    for kind, count in kinds.items():
        table.add_row(kind, f"{count:,}")
    if report.layers:
        table.add_row(f"adapter ({len(report.layers)} LoRA layers)", f"{trainable:,}")
    table.add_row("[bold]total[/bold]", f"[bold]{report.total_parameters:,}[/bold]")
    table.add_row("[bold]trainable[/bold]", f"[bold]{trainable:,}[/bold]")
    console.print(table)
    console.print(f"block pattern: {model.block_pattern}", highlight=False)
    if report.layers:
        console.print(report.table(), highlight=False)

    hardware = run.hardware
    accumulation = hardware.gradient_accumulation(recipe.global_batch_size)
    micro_batch = recipe.global_batch_size // (accumulation * hardware.world_size)
    memory = memory_estimate(model, trainable, micro_batch, recipe.max_seq_len)
    table = Table(
        title=f"memory, estimated (float32, {micro_batch} sequences of {recipe.max_seq_len} tokens at most)",
        box=None,
        title_justify="left",
    )
    table.add_column("part")
    table.add_column("MiB", justify="right")
    for part, count in (*memory.items(), ("total", sum(memory.values()))):
        table.add_row(part, f"{count / 2**20:,.0f}")
    console.print(table)

    n_steps = recipe.n_steps(len(data.train))
    corpus = len(data.corpus) if data.corpus is not None else 0
    console.print(
        f"data: {len(data.train):,} training and {len(data.validation):,} validation examples, {corpus:,} passages\n"
        f"steps: {n_steps:,} of {recipe.examples_per_step} examples"
        f" ({hardware.world_size} devices x {accumulation} micro batches of {micro_batch})",
        highlight=False,
    )
    run.log_metrics(
        {
            "dry_run/lora_layers": len(report.layers),
            "dry_run/memory_bytes": sum(memory.values()),
            "dry_run/train_examples": len(data.train),
            "dry_run/validation_examples": len(data.validation),
            "dry_run/passages": corpus,
            "dry_run/steps": n_steps,
        }
        | {f"dry_run/parameters_{kind}": count for kind, count in kinds.items()},
        step=0,
    )
