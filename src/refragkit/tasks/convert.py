"""``task=convert`` and ``method=distill``: attention blocks of a pretrained model become recurrent ones.

The first fits them in closed form, the second trains them as well; both measure what it cost.
"""

from __future__ import annotations

import contextlib
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

from refragkit.config import instantiate, nearest
from refragkit.console import console, progress_bar
from refragkit.errors import ConfigError
from refragkit.experiment import Run

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from refragkit.data.tokenizer import Tokenizer
    from refragkit.methods.recipes import Distill
    from refragkit.models.base import SequenceModel
    from refragkit.models.convert.blocks import RecurrentKind
    from refragkit.models.convert.calibrate import Calibration
    from refragkit.models.convert.evaluate import Row, Sample
    from refragkit.models.convert.text import TokenPiece
    from refragkit.models.hybrid import HybridLM
    from refragkit.types import Document

log = logging.getLogger("refragkit")

_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "layers": (str, list, tuple),
    "count": int,
    "to": str,
    "calibration": str,
    "calibration_tokens": int,
    "text": (str, list, tuple, type(None)),
    "evaluation_texts": (Mapping, type(None)),
    "evaluation_tokens": int,
}
_BATCH = 4  # windows at once
_HELD_OUT = "held-out text"
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
        text: files and folders, None for the data's passages and questions.
        evaluation_texts: further sets to measure on, by name.
        evaluation_tokens: to measure on, of each set, 0 for no measures.
    """

    layers: tuple[int, ...] | None
    count: int
    to: RecurrentKind
    calibration: Calibration
    calibration_tokens: int
    text: tuple[str, ...] | None
    evaluation_texts: Mapping[str, str]
    evaluation_tokens: int


def convert(run: Run, convert: Mapping[str, Any]) -> None:
    """Convert ``model.init`` or ``model.path`` and save the result under ``model/`` in the run folder.

    Args:
        run: the run.
        convert: see :class:`Settings` and ``conf/task/base/conversion.yaml``.

    Raises:
        ConfigError: a key of ``convert`` that can't be, or no model to convert.
        CheckpointError: the model can't be read.
        DataError: the text can't be read, or is too short.
    """
    from refragkit.methods.recipes import Distill

    recipe = None
    if run.cfg.choices.method == "distill":
        recipe = instantiate(run.cfg, "method")
        assert isinstance(recipe, Distill)
    convert_and_train(run, check_settings(convert, trained=recipe is not None), recipe)


def convert_and_train(run: Run, settings: Settings, recipe: Distill | None) -> None:
    """Convert, calibrate, train where there is a recipe, measure, and save; see :func:`convert`."""
    from refragkit.models.checkpoint import save_model
    from refragkit.models.convert.blocks import check_layers, convert_blocks, converted_config
    from refragkit.models.convert.calibrate import calibrate
    from refragkit.models.convert.card import Recipe, write_card
    from refragkit.models.convert.evaluate import WINDOW
    from refragkit.models.convert.text import (
        check_source,
        evaluation_windows,
        fingerprint,
        split_text,
        windows,
        with_recall,
    )
    from refragkit.tasks.trained_model import check_run, trained_model

    if recipe is None:
        if run.cfg.choices.adapter != "none":
            raise ConfigError(
                f"adapter={run.cfg.choices.adapter}: task=convert trains nothing; leave adapter=none"
            )
        check_run(run)
    elif run.cfg.choices.adapter != "none":
        raise ConfigError(
            f"adapter={run.cfg.choices.adapter}: method=distill trains new mixers; leave adapter=none"
            " (method.rest=lora trains LoRA beside them and merges it)"
        )
    elif run.model_path is None:
        log.warning(
            "model.init and model.path are null: random weights are distilled, which only shows that it runs"
        )
    if run.hardware.compile:
        raise ConfigError(
            "hardware.compile=true: converting listens in on the model's mixers, which compiled blocks don't allow;"
            " leave it false"
        )
    if recipe is not None:
        if run.hardware.precision == "bf16-true":
            raise ConfigError(
                "hardware.precision=bf16-true: method=distill trains in float32, as small updates vanish in bfloat16;"
                " choose another precision"
            )
        if run.hardware.world_size > 1:
            raise ConfigError(
                f"method=distill runs on one device, and hardware={run.cfg.choices.hardware} has"
                f" {run.hardware.world_size}; choose hardware=cpu or hardware=gpu"
            )
    _check_sizes(run)
    for given in settings.text or ():
        check_source(given, "convert.text")
    for name, given in settings.evaluation_texts.items():
        check_source(given, f"convert.evaluation_texts.{name}")
    if run.cfg.dry_run:
        assert recipe is not None
        _dry_run(run, settings, recipe)
        return
    tokenizer = run.tokenizer
    teacher = trained_model(run, tokenizer, None)
    if run.hardware.precision != "bf16-true":
        teacher.float()  # what a model is stored in is too coarse for the fits
    attention = [i for i, kind in enumerate(teacher.block_pattern) if kind == "T"]
    layers = check_layers(teacher.block_pattern, attention if settings.layers is None else settings.layers)
    # What can't be is said before any work
    planned = converted_config(teacher.config, layers, settings.to)
    if recipe is not None and settings.layers is not None:
        _check_rest(recipe, planned.block_pattern, layers)
    split = split_text(_pieces(run, settings, tokenizer))
    if split.left_out:
        log.info("%d questions show passages that are held out, and are left out", split.left_out)
    fitted = windows(split.calibration, tokenizer, settings.calibration_tokens, WINDOW, "calibration")
    trained_on = None
    if recipe is not None:
        trained_on = windows(split.calibration, tokenizer, recipe.text_tokens, WINDOW, "training")
        trained_on = with_recall(trained_on, recipe.recall_share, seed=0)  # one text for all seeds of the run
    measured = max(settings.evaluation_tokens, _SCAN_TOKENS if settings.layers is None else WINDOW)
    held_out = windows(split.held_out, tokenizer, measured, WINDOW, "held-out part")
    texts = {_HELD_OUT: held_out[: -(-settings.evaluation_tokens // WINDOW)]}
    texts |= evaluation_windows(settings.evaluation_texts, tokenizer, settings.evaluation_tokens or 1, WINDOW)
    device = teacher.head_weight.device
    batches = [batch.to(device) for batch in _batches(fitted)]

    seconds: dict[str, float] = {}
    with run.hardware.autocast():
        if settings.layers is None:
            layers = _scanned(run, settings, teacher, tokenizer, batches, held_out.to(device))
            if recipe is not None:
                planned = converted_config(teacher.config, layers, settings.to)
                _check_rest(recipe, planned.block_pattern, layers)
        with _timed(seconds, "calibration"), progress_bar("calibrating", len(batches)) as advance:
            student = convert_blocks(teacher, layers, settings.to, seed=run.seed).eval()
            reports = calibrate(student, teacher, layers, _counted(batches, advance), settings.calibration)
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
    trained, rest = "none", None
    if recipe is not None:
        if recipe.match_tokens and recipe.rest != "frozen":
            rest = f"the source's, but for what was trained beside the new mixers ({recipe.rest})"
        assert trained_on is not None
        student, trained = _distilled(run, recipe, student, teacher, layers, trained_on, seconds)

    rows: list[Row] = []
    samples: dict[str, list[Sample]] = {}
    if settings.evaluation_tokens:
        title = f"{_source(run)}: blocks {', '.join(map(str, layers))} to {settings.to}"
        with _timed(seconds, "evaluation"):
            models = {"source": teacher, "converted": student}
            rows, samples = _measured(run, models, tokenizer, texts, title, metrics)
        log.info("measured in %.0f s", seconds["evaluation"])
    metrics |= {f"convert/{name}_seconds": value for name, value in seconds.items()}
    metrics["convert/cpu_seconds"] = time.process_time()

    folder = save_model(student, run.folder / "model", tokenizer)
    source = Path(run.model_path or "")
    card = Recipe(
        source=_source(run),
        folder=source if source.exists() else None,
        layers=layers,
        to=settings.to,
        calibration=settings.calibration,
        calibration_tokens=fitted.numel(),
        text=", ".join(
            settings.text or [f"the passages and training questions of data={run.cfg.choices.data}"]
        ),
        text_sha256=fingerprint(fitted),
        seed=run.seed,
        command=run.summary.command,
        trained=trained,
        sources=settings.text or (),
        evaluation=settings.evaluation_texts if settings.evaluation_tokens else {},
        measured_in="bfloat16" if _measured_in(run) is not None else "",
        **({} if rest is None else {"rest": rest}),
    )
    write_card(folder, card, reports, rows, samples or None)
    run.artifact("model", folder)
    run.log_metrics(metrics, step=0)


def _dry_run(run: Run, settings: Settings, recipe: Distill) -> None:
    """What would be trained, on the meta device."""
    from refragkit.models.build import build_from_config, build_model
    from refragkit.models.convert.activation_cache import cache_bytes
    from refragkit.models.convert.align import training_steps
    from refragkit.models.convert.blocks import check_layers, converted_config, mixer_of
    from refragkit.models.convert.evaluate import WINDOW

    cfg: dict[str, Any] = {str(key): value for key, value in run.cfg.model.items()}
    if run.model_path is not None:
        cfg |= {"init": None, "path": run.model_path}
    vocab_size = run.data.vocab_size if run.model_path is None else None
    teacher = build_model(cfg, vocab_size=vocab_size, device="meta", cache_dir=run.cache_dir)
    attention = [i for i, kind in enumerate(teacher.block_pattern) if kind == "T"]
    if settings.layers is None and settings.count > len(attention):
        raise ConfigError(
            f"convert.count={settings.count}: this model has {len(attention)} attention blocks; choose fewer"
        )
    layers = check_layers(
        teacher.block_pattern, attention[: settings.count] if settings.layers is None else settings.layers
    )
    if settings.layers is not None:
        _check_rest(recipe, converted_config(teacher.config, layers, settings.to).block_pattern, layers)
    student = build_from_config(converted_config(teacher.config, layers, settings.to), device="meta")
    trained = sum(p.numel() for i in layers for p in mixer_of(student, i).parameters())
    steps = [training_steps(n, WINDOW)[1] if n else 0 for n in (recipe.align_tokens, recipe.match_tokens)]
    size = cache_bytes(teacher, layers, -(-recipe.text_tokens // WINDOW) * WINDOW)
    run.summary.total_parameters = sum(p.numel() for p in student.parameters())
    run.summary.trainable_parameters = trained
    too_much = size > recipe.cache_gib * 2**30
    shown = f"{len(layers)} chosen by the scan" if settings.layers is None else ", ".join(map(str, layers))
    console.print(
        f"block pattern: {teacher.block_pattern}, blocks {shown} to {settings.to}\n"
        f"parameters: {run.summary.total_parameters:,}, {trained:,} of them in new mixers\n"
        f"steps: {steps[0]:,} of alignment, {steps[1]:,} of matching\n"
        f"cache: {size / 2**30:.2f} GiB of activations on disk"
        + (f", more than method.cache_gib={recipe.cache_gib} (if there is so much text)" if too_much else ""),
        highlight=False,
    )
    run.log_metrics(
        {
            "dry_run/align_steps": steps[0],
            "dry_run/match_steps": steps[1],
            "dry_run/cache_bytes": size,
            "dry_run/new_parameters": trained,
        },
        step=0,
    )


def _check_sizes(run: Run) -> None:
    """Refuse sizes beside a trained model, which has its own."""
    model = run.cfg.model
    if run.model_path is None:
        return
    kept = ("_target_", "init", "path", "size", "gradient_checkpointing")
    sizes = [f"model.{key}" for key, value in model.items() if value is not None and str(key) not in kept]
    if sizes:
        raise ConfigError(
            f"{', '.join(sizes)}: the model that is converted, {_source(run)}, brings its own sizes; remove them"
        )


def _check_rest(recipe: Distill, block_pattern: str, layers: Sequence[int]) -> None:
    """Refuse LoRA where it would train nothing: stage 2 leaves what is below the first new mixer alone."""
    if recipe.match_tokens and recipe.rest == "lora" and "T" not in block_pattern[min(layers) :]:
        raise ConfigError(
            f"method.rest=lora trains the attention blocks above block {min(layers)}, the first that is converted, and"
            f" none is left there (block pattern {block_pattern}); choose method.rest=frozen or full, or convert fewer"
            " blocks"
        )


def check_settings(values: Mapping[str, Any], trained: bool = False) -> Settings:
    """The keys of ``convert`` with their types checked.

    Args:
        values: by key.
        trained: whether training follows, which ``calibration: auto`` depends on.

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
            expected[Mapping] = "names with a file each"
            names = " or ".join(expected[k] for k in kinds if k in expected)
            raise ConfigError(f"convert.{key}: expected {names}, got {value!r}")
    for key, least in (("count", 1), ("calibration_tokens", 1), ("evaluation_tokens", 0)):
        if values[key] < least:
            raise ConfigError(f"convert.{key}: expected at least {least}, got {values[key]}")
    for key, allowed in (("to", ("R", "M")), ("calibration", ("lsq", "cal", "none", "auto"))):
        if values[key] not in allowed:
            raise ConfigError(f"convert.{key}: expected one of {', '.join(allowed)}, got {values[key]!r}")
    layers = values["layers"]
    if isinstance(layers, str) and layers != "auto":
        raise ConfigError(f"convert.layers: expected auto or block numbers such as [3,7], got {layers!r}")
    text = values["text"]
    text = (text,) if isinstance(text, str) else text
    if text is not None and not (text and all(isinstance(source, str) for source in text)):
        raise ConfigError(
            f"convert.text: expected a file or folder, a list of these, or null, got {values['text']!r}"
        )
    for name, source in (values["evaluation_texts"] or {}).items():
        if name in (_HELD_OUT, _HELD_OUT.replace(" ", "_")):
            raise ConfigError(
                f"convert.evaluation_texts.{name}: that is what the held-out part of convert.text is called; choose"
                " another name"
            )
        if not isinstance(source, str):
            raise ConfigError(f"convert.evaluation_texts.{name}: expected a file or folder, got {source!r}")
    calibration = values["calibration"]
    if calibration == "auto":
        calibration = "cal" if trained else "lsq"
    return Settings(
        layers=None if layers == "auto" else tuple(layers),
        calibration=calibration,
        text=None if text is None else tuple(text),
        evaluation_texts=values["evaluation_texts"] or {},
        **{key: values[key] for key in ("count", "to", "calibration_tokens", "evaluation_tokens")},
    )


def _pieces(run: Run, settings: Settings, tokenizer: Tokenizer) -> Iterator[Document | TokenPiece]:
    """What to fit and train on: the texts, else the data's passages and training questions.

    Passages that validation questions rest on are left out.
    """
    from refragkit.models.convert.text import question_pieces, read_sources
    from refragkit.types import Question

    if settings.text is not None:
        yield from read_sources(settings.text, tokenizer)
        return
    data = run.data
    if data.corpus is None:
        raise ConfigError(
            f"convert.text is null and data={run.cfg.choices.data} has no passages; give convert.text=FILE_OR_FOLDER"
        )
    tested = {i for q in data.validation if isinstance(q, Question) for i in q.supporting_ids}
    corpus = [document for document in data.corpus if document.doc_id not in tested]
    yield from corpus
    yield from question_pieces([q for q in data.train if isinstance(q, Question)], corpus, tokenizer)


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
        with progress_bar("trying each block", scan_steps(batches, text, probe)) as advance:
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
    recipe: Distill,
    student: HybridLM,
    teacher: SequenceModel,
    layers: Sequence[int],
    text: Tensor,
    seconds: dict[str, float],
) -> tuple[HybridLM, str]:
    """Train in up to two stages; returns the trained model and what the card says of it."""
    from refragkit.methods.distill import train_stages
    from refragkit.models.convert.activation_cache import cached_activations
    from refragkit.models.convert.text import fingerprint
    from refragkit.tracking.plots import plot_distillation

    if text.numel() < recipe.text_tokens:
        log.info("there are %s tokens of text, fewer than %s", f"{text.numel():,}", f"{recipe.text_tokens:,}")
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with run.hardware.autocast(), _timed(seconds, "cache"), progress_bar("reading", len(text)) as advance:
            cache = stack.enter_context(
                cached_activations(
                    teacher,
                    layers,
                    text,
                    run.cache_dir / "activations",
                    max_bytes=recipe.cache_gib * 2**30,
                    keep=recipe.keep_cache,
                    advance=advance,
                )
            )
        log.info("the source has read %s tokens, %.0f s", f"{text.numel():,}", seconds["cache"])
        student, losses = train_stages(
            student,
            cache,
            recipe,
            run.hardware,
            seed=run.seed,
            folder=run.folder,
            log_metrics=lambda values, step: run.log_metrics(
                {f"convert/{k}": v for k, v in values.items()}, step
            ),
            progress=progress_bar,
        )
    seconds["training"] = time.perf_counter() - started - seconds["cache"]
    ends = [_mean(_tail(curve)) for name, curve in losses.items() if name.startswith("align")]
    if ends:
        log.info("mean error of the new mixers on the source's own activations: %.3f", _mean(ends))
    if "match_loss" in losses:
        curve = losses["match_loss"]
        log.info("divergence %.4f nats a token, from %.4f", _mean(_tail(curve)), _mean(_head(curve)))
    rows: list[dict[str, str | float]] = [
        {"loss": name, "step": step, "value": value}
        for name, curve in losses.items()
        for step, value in enumerate(curve)
    ]
    _write_csv(rows, run.folder / "distillation.csv")
    run.artifact("distillation", run.folder / "distillation.csv")
    run.artifact("distillation_plot", plot_distillation(losses, run.folder / "plots" / "distillation.png"))
    sentences = []
    if recipe.align_tokens:
        sentences.append(f"alignment of each new mixer on {recipe.align_tokens:,} tokens")
    if recipe.match_tokens:
        beside = {
            "frozen": "",
            "lora": f", LoRA of rank {recipe.lora_rank} beside",
            "full": ", all weights above them",
        }
        sentences.append(
            f"matching the source's logits on {recipe.match_tokens:,} tokens{beside[recipe.rest]}"
        )
    read = f"{text.numel():,} tokens of text, a share of {recipe.recall_share} for recall, ids `{fingerprint(text)}`"
    return student, f"{', then '.join(sentences)} ({read})"


def _head(curve: Sequence[float]) -> Sequence[float]:
    """A curve's first tenth."""
    return curve[: max(1, len(curve) // 10)]


def _tail(curve: Sequence[float]) -> Sequence[float]:
    """Its last tenth."""
    return curve[-max(1, len(curve) // 10) :]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _measured(
    run: Run,
    models: Mapping[str, SequenceModel],
    tokenizer: Tokenizer,
    texts: Mapping[str, Tensor],
    title: str,
    metrics: dict[str, float],
) -> tuple[list[Row], dict[str, list[Sample]]]:
    """The same measures of all models, side by side on screen, in files and in ``metrics``; and what they write."""
    from refragkit.models.convert.evaluate import (
        as_table,
        compare,
        evaluate_model,
        evaluation_steps,
        greedy_samples,
        in_type,
        samples_table,
    )
    from refragkit.tracking.plots import plot_conversion

    measures, samples = {}, {}
    with progress_bar("measuring", len(models) * (evaluation_steps(texts) + 1)) as advance:
        for name, stored in models.items():
            model = in_type(stored, _measured_in(run))
            measures[name] = evaluate_model(
                model,
                tokenizer,
                texts,
                seed=run.seed,
                cache_dir=run.cache_dir if name == "source" else None,
                advance=advance,
            )
            samples[name] = greedy_samples(model, tokenizer)
            advance()
    rows = compare(measures)
    console.print(as_table(rows, title))
    console.print(samples_table(samples, "greedy samples"))
    for name, found in measures.items():
        metrics |= {f"convert/{name}/{key.replace(' ', '_')}": value for key, value in found.items()}
    _write_csv(rows, run.folder / "conversion.csv")
    run.artifact("measures", run.folder / "conversion.csv")
    plot = plot_conversion(rows, run.folder / "plots" / "conversion.png", title)
    run.artifact("conversion_plot", plot)
    return rows, samples


def _measured_in(run: Run) -> torch.dtype | None:
    """The type that a copy of the weights is measured in, None for the weights as they are."""
    import torch

    return torch.bfloat16 if run.hardware.resolved_precision() == "bf16-mixed" else None


def _source(run: Run) -> str:
    """The model as the user named it."""
    from refragkit.models.build import start_of

    return str(
        start_of(run.cfg.model) or run.cfg.model.get("path") or f"random model={run.cfg.choices.model}"
    )


def _batches(rows: Tensor) -> Iterator[Tensor]:
    return (rows[i : i + _BATCH] for i in range(0, len(rows), _BATCH))


def _counted(batches: Sequence[Tensor], advance: Callable[[], None]) -> Iterator[Tensor]:
    for batch in batches:
        yield batch
        advance()


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add how long the block takes."""
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _write_csv(rows: Sequence[Mapping[str, str | float]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cast(Any, rows))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)
