"""``task=convert``: attention blocks of a pretrained model become recurrent ones, and what it cost is measured."""

from __future__ import annotations

import csv
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from refragkit.config import nearest
from refragkit.console import console, is_terminal
from refragkit.errors import ConfigError
from refragkit.experiment import Run

if TYPE_CHECKING:
    from torch import Tensor

    from refragkit.data.tokenizer import Tokenizer
    from refragkit.models.base import SequenceModel
    from refragkit.models.convert.blocks import RecurrentKind
    from refragkit.models.convert.calibrate import Calibration
    from refragkit.models.convert.text import TextSplit
    from refragkit.types import Document

log = logging.getLogger("refragkit")

_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "layers": (str, list, tuple),
    "count": int,
    "to": str,
    "calibration": str,
    "calibration_tokens": int,
    "align_tokens": int,
    "match_tokens": int,
    "cache_gib": int,
    "text": (str, type(None)),
    "evaluation_tokens": int,
}
_BATCH = 4  # windows at once
_SCAN_TOKENS = 4096  # of text; the probe has half as many
_SCAN_PROBE_ROWS, _SCAN_PROBE_LENGTH = 8, 128


@dataclass(frozen=True)
class Settings:
    """The keys of ``convert``.

    Attributes:
        layers: block numbers, or None for ``auto``.
        count: how many blocks ``auto`` chooses.
        to: R or M.
        calibration: lsq, cal or none; ``auto`` is settled already.
        calibration_tokens: to fit on.
        align_tokens: to align the new mixers on, 0 for none.
        match_tokens: to match the source's logits on, 0 for none.
        cache_gib: the most room that the source's activations may take.
        text: a file or folder, None for the data's passages.
        evaluation_tokens: to measure on, 0 for no measures.
    """

    layers: tuple[int, ...] | None
    count: int
    to: RecurrentKind
    calibration: Calibration
    calibration_tokens: int
    align_tokens: int
    match_tokens: int
    cache_gib: int
    text: str | None
    evaluation_tokens: int


def convert(run: Run, convert: Mapping[str, Any]) -> None:
    """Convert ``model.init`` or ``model.path`` and save the result under ``model/`` in the run folder.

    Args:
        run: the run.
        convert: see :class:`Settings` and ``conf/task/convert.yaml``.

    Raises:
        ConfigError: a key of ``convert`` that can't be, or no model to convert.
        CheckpointError: the model can't be read.
        DataError: the text can't be read, or is too short.
    """
    from refragkit.models.checkpoint import save_model
    from refragkit.models.convert.blocks import check_layers, convert_blocks, converted_config
    from refragkit.models.convert.calibrate import calibrate
    from refragkit.models.convert.card import Recipe, write_card
    from refragkit.models.convert.evaluate import WINDOW, as_table, compare
    from refragkit.models.convert.text import fingerprint, windows
    from refragkit.tasks.trained_model import check_run, trained_model
    from refragkit.tracking.plots import plot_conversion

    settings = check_settings(convert)
    check_run(run)
    if run.hardware.compile:
        raise ConfigError(
            "hardware.compile=true: task=convert listens in on the model's mixers, which compiled blocks don't allow;"
            " leave it false"
        )
    if settings.align_tokens + settings.match_tokens and run.hardware.precision == "bf16-true":
        raise ConfigError(
            "hardware.precision=bf16-true: convert.align_tokens and convert.match_tokens train in float32, as small "
            "updates vanish in bfloat16; choose another precision"
        )
    tokenizer = run.tokenizer
    teacher = trained_model(run, tokenizer, None)
    if run.hardware.precision != "bf16-true":
        teacher.float()  # what a model is stored in is too coarse for the fits
    attention = [i for i, kind in enumerate(teacher.block_pattern) if kind == "T"]
    layers = check_layers(teacher.block_pattern, attention if settings.layers is None else settings.layers)
    converted_config(teacher.config, layers, settings.to)  # what can't be is said before any work
    split = _text(run, settings)
    fitted = windows(split.calibration, tokenizer, settings.calibration_tokens, WINDOW, "calibration")
    trained_on = None
    if settings.align_tokens + settings.match_tokens:
        wanted = -(-settings.align_tokens // WINDOW) * WINDOW + settings.match_tokens
        trained_on = windows(split.calibration, tokenizer, wanted, WINDOW, "training")
    measured = max(settings.evaluation_tokens, _SCAN_TOKENS if settings.layers is None else WINDOW)
    held_out = windows(split.held_out, tokenizer, measured, WINDOW, "held-out part")
    device = teacher.head_weight.device
    batches = [batch.to(device) for batch in _batches(fitted)]

    if settings.layers is None:
        layers = _scanned(run, settings, teacher, tokenizer, batches, held_out.to(device))
    started = time.perf_counter()
    student = convert_blocks(teacher, layers, settings.to, seed=run.seed).eval()
    with _progress("calibrating", len(batches)) as advance:
        reports = calibrate(student, teacher, layers, _counted(batches, advance), settings.calibration)
    seconds = {"calibration": time.perf_counter() - started}
    log.info(
        "blocks %s to %s, calibration %s on %s tokens: mean error %.3f (copied %.3f), %.0f s",
        ", ".join(map(str, layers)),
        settings.to,
        settings.calibration,
        f"{fitted.numel():,}",
        sum(r.fitted for r in reports) / len(reports),
        sum(r.copied for r in reports) / len(reports),
        seconds["calibration"],
    )
    run.summary.total_parameters = sum(parameter.numel() for parameter in student.parameters())
    metrics = {f"convert/error/{r.layer}": r.fitted for r in reports}
    trained = "none"
    if trained_on is not None:
        trained = _distilled(run, settings, student, teacher, layers, trained_on, seconds)

    rows = []
    if settings.evaluation_tokens:
        started = time.perf_counter()
        texts = {"held-out text": held_out[: -(-settings.evaluation_tokens // WINDOW)]}
        measures = _evaluated({"source": teacher, "converted": student}, tokenizer, texts, run.seed)
        seconds["evaluation"] = time.perf_counter() - started
        rows = compare(measures)
        console.print(
            as_table(rows, f"{_source(run)}: blocks {', '.join(map(str, layers))} to {settings.to}")
        )
        log.info("measured in %.0f s", seconds["evaluation"])
        metrics |= {
            f"convert/{model}/{name.replace(' ', '_')}": value
            for model, found in measures.items()
            for name, value in found.items()
        }
        _write_csv(rows, run.folder / "conversion.csv")
        run.artifact("measures", run.folder / "conversion.csv")
        run.artifact("conversion_plot", plot_conversion(rows, run.folder / "plots" / "conversion.png"))
    metrics |= {f"convert/{name}_seconds": value for name, value in seconds.items()}

    folder = save_model(student, run.folder / "model", tokenizer)
    source = Path(run.model_path or "")
    recipe = Recipe(
        source=_source(run),
        folder=source if source.exists() else None,
        layers=layers,
        to=settings.to,
        calibration=settings.calibration,
        calibration_tokens=fitted.numel(),
        text=settings.text or f"the passages of data={run.cfg.choices.data}",
        text_sha256=fingerprint(fitted),
        seed=run.seed,
        command=run.summary.command,
        trained=trained,
    )
    write_card(folder, recipe, reports, rows)
    run.artifact("model", folder)
    run.log_metrics(metrics, step=0)


def check_settings(values: Mapping[str, Any]) -> Settings:
    """The keys of ``convert`` with their types checked.

    Raises:
        ConfigError: an unknown or missing key, or a value that can't be.
    """
    for key in values:
        if key not in _KEYS:
            near = nearest(str(key), _KEYS)
            raise ConfigError(
                f"unknown key 'convert.{key}'" + (f"; did you mean 'convert.{near}'?" if near else "")
            )
    for key, kind in _KEYS.items():
        if key not in values:
            raise ConfigError(f"convert.{key}: missing key")
        value = values[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = {str: "a string", int: "a whole number", list: "a list", type(None): "null"}
            names = " or ".join(expected[k] for k in kinds if k in expected)
            raise ConfigError(f"convert.{key}: expected {names}, got {value!r}")
    least_values = {"count": 1, "calibration_tokens": 1, "cache_gib": 1}
    least_values |= {"align_tokens": 0, "match_tokens": 0, "evaluation_tokens": 0}
    for key, least in least_values.items():
        if values[key] < least:
            raise ConfigError(f"convert.{key}: expected at least {least}, got {values[key]}")
    for key, allowed in (("to", ("R", "M")), ("calibration", ("lsq", "cal", "none", "auto"))):
        if values[key] not in allowed:
            raise ConfigError(f"convert.{key}: expected one of {', '.join(allowed)}, got {values[key]!r}")
    layers = values["layers"]
    if isinstance(layers, str) and layers != "auto":
        raise ConfigError(f"convert.layers: expected auto or block numbers such as [3,7], got {layers!r}")
    calibration = values["calibration"]
    if calibration == "auto":
        calibration = "cal" if values["align_tokens"] + values["match_tokens"] else "lsq"
    return Settings(
        layers=None if layers == "auto" else tuple(layers),
        calibration=calibration,
        **{key: values[key] for key in _KEYS if key not in ("layers", "calibration")},
    )


def _text(run: Run, settings: Settings) -> TextSplit:
    from refragkit.models.convert.text import read_documents, split_text

    if settings.text is not None:
        return split_text(read_documents(settings.text))
    return split_text(_passages(run))


def _passages(run: Run) -> Iterator[Document]:
    """The data's passages but for those that validation questions rest on."""
    from refragkit.types import Question

    data = run.data
    if data.corpus is None:
        raise ConfigError(
            f"convert.text is null and data={run.cfg.choices.data} has no passages; give convert.text=FILE_OR_FOLDER"
        )
    tested = {i for q in data.validation if isinstance(q, Question) for i in q.supporting_ids}
    return (document for document in data.corpus if document.doc_id not in tested)


def _scanned(
    run: Run,
    settings: Settings,
    teacher: SequenceModel,
    tokenizer: Tokenizer,
    batches: Sequence[Tensor],
    held_out: Tensor,
) -> list[int]:
    """The blocks that ``auto`` means; the scan is kept in the cache."""
    from refragkit.models.convert.evaluate import WINDOW
    from refragkit.models.convert.probes import induction_rows
    from refragkit.models.convert.sensitivity import (
        read_scan,
        scan,
        scan_key,
        scan_rows,
        scan_steps,
        scan_table,
        write_scan,
    )
    from refragkit.tracking.plots import plot_sensitivity

    text = held_out[: _SCAN_TOKENS // WINDOW]
    probe = induction_rows(
        tokenizer.vocab_size, tokenizer.control_ids, _SCAN_PROBE_ROWS, _SCAN_PROBE_LENGTH, run.seed
    ).to(text.device)
    key = scan_key(teacher, settings.to, batches, text, probe, run.seed)
    file = run.cache_dir / "sensitivity" / f"{key[:32]}.json"
    result = read_scan(file)
    if result is None:
        started = time.perf_counter()
        log.info("trying each attention block alone ...")
        with _progress("trying each block", scan_steps(batches, text, probe)) as advance:
            result = scan(teacher, settings.to, batches, text, probe, seed=run.seed, advance=advance)
        write_scan(result, file)
        log.info("done in %.0f s, kept in the cache", time.perf_counter() - started)
    else:
        log.info("sensitivity of each block: from the cache")
    try:
        layers = result.choose(settings.count)
    except ConfigError:
        console.print(scan_table(result, [], settings.to))
        raise
    console.print(scan_table(result, layers, settings.to))
    rows = scan_rows(result, layers)
    _write_csv(rows, run.folder / "sensitivity.csv")
    run.artifact("sensitivity", run.folder / "sensitivity.csv")
    plot = plot_sensitivity(
        rows, run.folder / "plots" / "sensitivity.png", f"one block to {settings.to} at a time"
    )
    run.artifact("sensitivity_plot", plot)
    return layers


def _distilled(
    run: Run,
    settings: Settings,
    student: SequenceModel,
    teacher: SequenceModel,
    layers: Sequence[int],
    text: Tensor,
    seconds: dict[str, float],
) -> str:
    """Train the new mixers in up to two stages, each on its part of the text; returns what the card says of it."""
    from refragkit.models.convert.activation_cache import cached_activations
    from refragkit.models.convert.align import align, training_steps
    from refragkit.models.convert.match import match
    from refragkit.models.convert.text import fingerprint
    from refragkit.tracking.plots import plot_distillation

    window = text.shape[1]
    first = -(-settings.align_tokens // window)
    wanted = first * window + settings.match_tokens
    aligned, matched = text[:first], text[first:]
    if text.numel() < wanted:
        log.info("training text: %s tokens, fewer than %s: read again", f"{text.numel():,}", f"{wanted:,}")
        matched = text
    sentences = []
    losses: dict[str, list[float]] = {}

    if settings.align_tokens:
        started = time.perf_counter()
        log.info("aligning %d mixers on %s tokens ...", len(layers), f"{settings.align_tokens:,}")
        steps = training_steps(settings.align_tokens, window)[1]
        with (
            _progress("aligning", len(aligned) + steps) as advance,
            cached_activations(
                teacher,
                layers,
                aligned,
                run.cache_dir / "activations",
                max_bytes=settings.cache_gib * 2**30,
                advance=advance,
            ) as cache,
        ):
            curves = align(student, cache, tokens=settings.align_tokens, seed=run.seed, advance=advance)
        seconds["align"] = time.perf_counter() - started
        losses |= {f"align_loss/{layer}": curve for layer, curve in curves.items()}
        start, end = ([_mean(part(c)) for c in curves.values()] for part in (_head, _tail))
        log.info("mean error %.3f, from %.3f, %.0f s", _mean(end), _mean(start), seconds["align"])
        sentences.append(f"alignment of each new mixer on {settings.align_tokens:,} tokens")
    if settings.match_tokens:
        started = time.perf_counter()
        log.info("matching the source's logits on %s tokens ...", f"{settings.match_tokens:,}")
        with _progress("matching", training_steps(settings.match_tokens, window)[1]) as advance:
            curve = match(
                student,
                teacher,
                layers,
                matched,
                tokens=settings.match_tokens,
                seed=run.seed,
                advance=advance,
            )
        seconds["match"] = time.perf_counter() - started
        losses["match_loss"] = curve
        log.info(
            "divergence %.4f nats a token, from %.4f, %.0f s",
            _mean(_tail(curve)),
            _mean(_head(curve)),
            seconds["match"],
        )
        sentences.append(f"matching the source's logits on {settings.match_tokens:,} tokens")

    for step in range(max(map(len, losses.values()))):
        values = {f"convert/{name}": curve[step] for name, curve in losses.items() if step < len(curve)}
        run.log_metrics(values, step=step)
    rows: list[dict[str, str | float]] = [
        {"loss": name, "step": step, "value": value}
        for name, curve in losses.items()
        for step, value in enumerate(curve)
    ]
    _write_csv(rows, run.folder / "distillation.csv")
    run.artifact("distillation", run.folder / "distillation.csv")
    plot = plot_distillation(losses, run.folder / "plots" / "distillation.png")
    run.artifact("distillation_plot", plot)
    return f"{', then '.join(sentences)}, of the new mixers alone (token ids `{fingerprint(text)}`)"


def _head(curve: Sequence[float]) -> Sequence[float]:
    """A curve's first tenth."""
    return curve[: max(1, len(curve) // 10)]


def _tail(curve: Sequence[float]) -> Sequence[float]:
    """Its last tenth."""
    return curve[-max(1, len(curve) // 10) :]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _evaluated(
    models: Mapping[str, SequenceModel], tokenizer: Tokenizer, texts: Mapping[str, Tensor], seed: int
) -> dict[str, dict[str, float]]:
    from refragkit.models.convert.evaluate import evaluate_model, evaluation_steps

    with _progress("measuring", len(models) * evaluation_steps(texts)) as advance:
        return {
            name: evaluate_model(model, tokenizer, texts, seed=seed, advance=advance)
            for name, model in models.items()
        }


def _source(run: Run) -> str:
    """The model as the user named it."""
    return str(run.cfg.model.get("init") or run.cfg.model.get("path"))


def _batches(rows: Tensor) -> Iterator[Tensor]:
    return (rows[i : i + _BATCH] for i in range(0, len(rows), _BATCH))


def _counted(batches: Sequence[Tensor], advance: Callable[[], None]) -> Iterator[Tensor]:
    for batch in batches:
        yield batch
        advance()


@contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar where a person watches; yields what moves it on."""
    from rich.progress import Progress

    if not is_terminal():
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda: progress.advance(task)


def _write_csv(rows: Sequence[Mapping[str, str | float]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cast(Any, rows))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)
