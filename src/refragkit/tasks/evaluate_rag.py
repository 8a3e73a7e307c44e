"""``evaluate=rag``: how well a model answers, given what the retriever finds: EM, F1, support recall, and the cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError, DataError
from refragkit.retrievers.planners.model import ModelPlanner
from refragkit.tasks.evaluate_retrieval import Row, as_metrics, write_atomically, write_csv
from refragkit.tasks.rag.answering import check_live
from refragkit.tasks.rag.measuring import evaluate_rag
from refragkit.tasks.rag.prompts import prompt_text
from refragkit.tasks.rag.settings import Settings, check_settings
from refragkit.tasks.rag.tables import (
    as_table,
    cost_table,
    retrieval_title,
    samples_table,
    sweep_rows,
    sweep_table,
)
from refragkit.tracking.samples import sample_rows
from refragkit.types import Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.experiment import Run
    from refragkit.generation.state_cache import StateCache
    from refragkit.retrievers.multi_hop import MultiHopRetriever

log = logging.getLogger("refragkit")


def run_rag(run: Run, split: str, rag: Mapping[str, Any], adapter_path: str | None) -> None:
    """Measure the run's model with the run's retriever on the run's data, and record everything.

    Raises:
        ConfigError: a key of ``rag`` that can't be, no trained model, or data without questions.
        CheckpointError: model or adapter can't be read.
        DataError: a broken data file, or no question in this part.
    """
    import json

    from refragkit.console import console
    from refragkit.tasks.trained_model import check_run, trained_model
    from refragkit.tracking.rag_plot import plot_rag

    settings = check_settings(rag)
    check_run(run)
    questions = _questions(run, split)
    reward = run.reward
    tokenizer = run.tokenizer
    retriever = run.retriever
    if retriever is not None and isinstance(retriever.planner, ModelPlanner):
        check_live(settings)
    states = _states(run, retriever, tokenizer)
    model = trained_model(run, tokenizer, adapter_path)
    described = describe(run, retriever, adapter_path) | {"order": settings.order}
    log.info(
        "%s %s questions, %s, at most %d new tokens, %s",
        f"{len(questions):,}",
        split,
        retrieval_title(described),
        settings.max_new_tokens,
        run.hardware.resolved_precision(),
    )
    started = time.perf_counter()
    evaluation = evaluate_rag(
        model,
        tokenizer,
        retriever,
        questions,
        reward,
        settings,
        seed=run.seed,
        examples=_examples(run, settings.examples),
        precision=run.hardware.autocast(),
        states=states,
    )
    rows, records = evaluation.rows, evaluation.records
    rows[0]["evaluate_seconds"] = time.perf_counter() - started
    title = f"{described['model']}: {retrieval_title(described)}, {split} questions"
    console.print(as_table(rows, title))
    console.print(cost_table(rows[0]))
    console.print(samples_table(records))
    _warn(rows[0], settings)
    if states is not None:
        log.info(states.counts.text())

    write_csv([{**described, **row} for row in rows], run.folder / "rag.csv")
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_atomically(run.folder / "samples.jsonl", "".join(lines))
    write_atomically(run.folder / "prompt.txt", prompt_text(evaluation.first_prompt, tokenizer) + "\n")
    run.log_metrics(as_metrics(rows, "rag"), step=0)
    run.artifact("rag", run.folder / "rag.csv")
    run.artifact("samples", run.folder / "samples.jsonl")
    run.artifact("prompt", run.folder / "prompt.txt")
    run.artifact("rag_plot", plot_rag(rows, run.folder / "plots" / "rag.png", title))
    run.tracking.log_table("samples", sample_rows(records), 0)
    run.tracking.log_traces(records, 0)
    _show_sweep(run.folder)


def _states(run: Run, retriever: MultiHopRetriever | None, tokenizer: Tokenizer) -> StateCache | None:
    """The cache of states that the run's retriever asks for.

    Raises:
        ConfigError: its settings can't be, or it could not serve this planner.
    """
    retriever = retriever or run.build_retriever()
    if retriever.state_cache is None:
        return None
    from refragkit.generation.state_cache import open_state_cache
    from refragkit.retrievers.planners.model import ModelPlanner

    if isinstance(retriever.planner, ModelPlanner):
        raise ConfigError(
            "retriever.state_cache serves prompts whose documents are known, and with retriever.planner=model they come"
            " hop by hop, read from the state of the hop before; leave retriever.state_cache.max_bytes=null, or choose"
            " planner expand"
        )
    return open_state_cache(retriever.state_cache, tokenizer)


def _questions(run: Run, split: str) -> list[Question]:
    data = run.data
    parts: dict[str, Sequence[Any]] = {"train": data.train, "validation": data.validation}
    questions = [q for name, part in parts.items() if split in ("all", name) for q in part]
    name, source = str(run.cfg.choices.data), str(run.cfg.data.get("path") or "bundled sample")
    if not questions:
        raise DataError(
            f"split={split}: data={name} ({source}) has no question in this part; choose another split or data.path"
        )
    if not all(isinstance(q, Question) for q in questions):
        raise ConfigError(
            f"evaluate=rag needs questions with answers, and data={name} has none; choose data=multihop_qa"
        )
    run.tracking.log_dataset(f"{name}-{split}", "evaluation", data.fingerprint, source, len(questions))
    return questions


def _examples(run: Run, n: int) -> list[Question]:
    """One more than n training questions, since a question is no example of itself; the same ones in every run."""
    from refragkit.data.split import subset_positions

    if not n:
        return []
    train = [q for q in run.data.train if isinstance(q, Question)]
    if n >= len(train):
        raise ConfigError(
            f"rag.examples={n}: expected fewer than the {len(train)} training questions of data.path"
        )
    return [train[i] for i in subset_positions([q.id for q in train], n + 1)]


def describe(run: Run, retriever: MultiHopRetriever | None, adapter_path: str | None) -> Row:
    """What a row of the table was measured with."""
    cfg = run.cfg.model
    if cfg.init is not None:
        model = str(cfg.init)
    elif cfg.path is not None:
        model = "/".join(Path(cfg.path).expanduser().absolute().parts[-2:])
    else:  # a size that stands for a pretrained model
        model = f"{run.cfg.choices.model} {cfg.size}"
    if adapter_path is not None:
        model += f" + {Path(adapter_path).name}"
    if retriever is None:
        return {"model": model, "retriever": "none", "planner": "", "max_hops": 0.0, "top_k_per_hop": 0.0}
    return {
        "model": model,
        "retriever": str(run.cfg.choices.retriever),
        "planner": retriever.planner.name,
        "max_hops": float(retriever.max_hops),
        "top_k_per_hop": float(retriever.top_k_per_hop),
    }


def _warn(row: Row, settings: Settings) -> None:
    n = float(row["questions"])
    if row["too_long"]:
        log.warning(
            "%.0f of %.0f questions don't fit into rag.max_seq_len=%d and count as wrong",
            float(row["too_long"]) * n,
            n,
            settings.max_seq_len,
        )
    if row["left_out_documents"]:
        log.warning(
            "%.1f documents a question were left out to fit into rag.max_seq_len=%d",
            float(row["left_out_documents"]),
            settings.max_seq_len,
        )
    if float(row["searches"]):
        log.info(
            "the model wrote %.1f queries a question and read %.0f tokens; reading again in each turn: %.0f",
            *(float(row[key]) for key in ("searches", "tokens_read", "tokens_reread")),
        )
    if float(row["no_answer"]) > 0.1:
        log.warning("%.0f%% of the answers were searches instead", 100 * float(row["no_answer"]))
    if float(row["ended"]) < 0.5:
        log.info(
            "%.0f%% of the answers were cut off at rag.max_new_tokens=%d",
            100 * (1 - sum(float(row[key]) for key in ("ended", "too_long", "no_answer"))),
            settings.max_new_tokens,
        )


def _show_sweep(folder: Path) -> None:
    """In a sweep: one table of the jobs that are done, this one included, on the screen and in ``rag.csv`` above."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    from refragkit.console import console

    rows = sweep_rows(folder.parent)
    if len(rows) > 1:
        console.print(sweep_table(rows))
        write_csv(rows, folder.parent / "rag.csv")
