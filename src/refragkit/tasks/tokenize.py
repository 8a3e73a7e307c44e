"""``task=tokenize``: conversations as a file of token ids, in the seed's layout or in ours, whole or in parts.

Nothing appears under its name before all of it is written, read back and checked; the manifest comes last.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from refragkit.console import progress_bar
from refragkit.errors import ConfigError, DataError
from refragkit.experiment import Run

if TYPE_CHECKING:
    from refragkit.data.token_file import TokenFile

log = logging.getLogger("refragkit")

MANIFEST_VERSION = 1
_PRETRAINED = ("smollm2", "smollm2-hybrid")
_SUFFIX = ".bin"


def tokenize(
    run: Run,
    tokenizer: str | None = None,
    max_seq_len: int = 256,
    max_document_tokens: int | None = None,
    too_long: Literal["drop", "cut"] = "drop",
    format: Literal["seed", "v2"] = "seed",
    split: int | None = None,
    split_weights: Sequence[float] | None = None,
    output: str | None = None,
    workers: int | None = None,
) -> None:
    """Write the conversations of ``data.path`` as token ids.

    Args:
        run: the run. No model is built.
        tokenizer: a folder with a tokenizer, or ``smollm2``; None: ``data.tokenizer``, else that of ``model.path`` or
            ``model.init``.
        max_seq_len: tokens of an example.
        max_document_tokens: tokens of one document; None: documents are cut only where the whole does not fit.
        too_long: what becomes of a conversation that doesn't fit: ``drop`` it or ``cut`` its end off.
        format: layout of the files.
        split: so many equal parts ``<output>_0.bin``, ...
        split_weights: parts of unequal size.
        output: the file; None: ``tokens.bin`` in the run folder.
        workers: processes; None: one for each core, a single one for a small file.

    Raises:
        ConfigError: a setting that can't be, or a file that exists.
        DataError: the file or the tokenizer can't be read, a line is broken, or no conversation is left.
    """
    from refragkit.data.jsonl import existing_file
    from refragkit.data.token_file import new_token_file, open_token_file
    from refragkit.data.token_parts import part_weights, write_parts
    from refragkit.data.tokenization import Rendering, n_parts, tokenize_conversations, useful_workers
    from refragkit.data.tokenizer import Tokenizer

    weights = part_weights(split, split_weights)
    _check(run, max_seq_len, max_document_tokens, workers)
    base = _base(run, output)
    targets = [base.with_name(f"{base.name}_{i}{_SUFFIX}") for i in range(len(weights or ()))]
    targets = targets or [base.with_name(base.name + _SUFFIX)]
    manifest = base.with_name(f"{base.name}.json")
    for path in (*targets, manifest):
        if path.exists():
            raise ConfigError(f"output: {path} exists; give another name, so that nothing is overwritten")
    try:
        source = existing_file(run.cfg.data.path, "a JSONL file of conversations")
    except DataError as error:
        raise DataError(f"data.path: {error}") from error
    folder = _tokenizer_folder(run, tokenizer)
    try:
        loaded = Tokenizer.load(folder)
    except DataError as error:
        raise DataError(f"tokenizer: {error}") from error

    workers = workers or useful_workers(source)
    rendering = Rendering(str(folder), max_seq_len, max_document_tokens, too_long)
    whole = targets[0] if weights is None else base.with_name(f".{base.name}.{os.getpid()}.whole{_SUFFIX}")
    started = time.perf_counter()
    try:
        with (
            new_token_file(whole, format, loaded.fingerprint, loaded.vocab_size) as writer,
            progress_bar("tokenizing", max(n_parts(source), 1)) as advance,
        ):
            counts = tokenize_conversations(source, rendering, loaded, writer, workers, advance)
            if not writer.n_examples:
                raise DataError(_nothing_left(source, counts, max_seq_len))
            writer.commit()
            metrics: dict[str, float] = {
                **counts,
                "tokens": writer.n_tokens,
                "supervised_tokens": writer.n_supervised,
                "files": len(targets),
            }
        if weights is not None:
            write_parts(open_token_file(whole), targets, weights, loaded.fingerprint)
    finally:
        if weights is not None:
            whole.unlink(missing_ok=True)
    files = []
    for path in targets:
        file = open_token_file(path)
        file.check_ids(loaded.vocab_size)
        files.append(file)
    seconds = time.perf_counter() - started

    _write_manifest(
        manifest,
        {
            "format_version": MANIFEST_VERSION,
            "layout": format,
            "tokenizer_sha256": loaded.fingerprint,
            "vocab_size": loaded.vocab_size,
            "max_seq_len": max_seq_len,
            "max_document_tokens": max_document_tokens,
            "too_long": too_long,
            "source": {"name": source.name, "sha256": _digest(source)},
            "counts": counts,
            "files": [_entry(file) for file in files],
        },
    )
    for i, path in enumerate(targets):
        run.summary.artifacts["tokens" if weights is None else f"tokens_{i}"] = _relative(path, run)
    run.summary.artifacts["manifest"] = _relative(manifest, run)
    run.tracking.log_artifact(manifest)
    metrics |= {"seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}
    run.log_metrics({f"tokenize/{name}": value for name, value in metrics.items()}, step=0)
    _report(counts, metrics, workers, format)
    for path in targets:
        log.info("written: %s", path)


def _check(run: Run, max_seq_len: int, max_document_tokens: int | None, workers: int | None) -> None:
    if run.cfg.dry_run:
        raise ConfigError("dry_run=true is for task=train; task=tokenize has no dry run")
    if run.cfg.data.get("path") is None:
        raise ConfigError(
            "data.path: expected the JSONL file of conversations to tokenize, got null; set data.path=FILE"
        )
    if max_seq_len < 2:
        raise ConfigError(f"max_seq_len: expected at least 2 tokens, got {max_seq_len}")
    if max_document_tokens is not None and max_document_tokens < 1:
        raise ConfigError(f"max_document_tokens: expected null or at least 1, got {max_document_tokens}")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers: expected null or at least 1 process, got {workers}")


def _base(run: Run, output: str | None) -> Path:
    """The path of the file without its suffix."""
    if output is None:
        return run.folder / "tokens"
    path = Path(output).expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"output: expected a file such as {path / 'tokens.bin'}, got the folder {path}")
    return path.with_suffix("") if path.suffix == _SUFFIX else path


def _tokenizer_folder(run: Run, tokenizer: str | None) -> Path:
    from refragkit.data.tokenizer import has_tokenizer

    chosen = tokenizer or run.cfg.data.get("tokenizer")
    if chosen is None:
        if run.model_path is None:
            raise ConfigError(
                "task=tokenize needs the tokenizer of the model that will read the file: give its folder or that of the"
                " model as tokenizer=DIR, or tokenizer=smollm2"
            )
        return Path(run.model_path)
    if chosen in _PRETRAINED:
        from refragkit.models.pretrained import resolve_pretrained

        return resolve_pretrained(chosen, run.cache_dir)
    folder = Path(chosen).expanduser()
    # What a run leaves has its model, and the tokenizer beside that, one folder down.
    return folder / "model" if not has_tokenizer(folder) and has_tokenizer(folder / "model") else folder


def _nothing_left(source: Path, counts: dict[str, int], max_seq_len: int) -> str:
    if not counts["conversations"]:
        return f"{source}: expected conversations, one JSON object a line, but the file is empty"
    return (
        f"{source}: none of its {counts['conversations']} conversations is left: {counts['dropped_too_long']} don't fit"
        f" into max_seq_len={max_seq_len} and {counts['dropped_no_supervised_token']} have no assistant turn; raise"
        " max_seq_len or set too_long=cut"
    )


def _entry(file: TokenFile) -> dict[str, Any]:
    return {
        "name": file.path.name,
        "examples": len(file),
        "tokens": file.n_tokens,
        "sha256": _digest(file.path),
    }


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _write_manifest(path: Path, contents: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _relative(path: Path, run: Run) -> str:
    return os.path.relpath(path, run.folder)


def _report(counts: dict[str, int], metrics: dict[str, float], workers: int, layout: str) -> None:
    log.info(
        "%s of %s conversations, %s tokens, %s of them learnt, in %.1f s (%s tokens/s, processes: %d)",
        f"{counts['examples']:,}",
        f"{counts['conversations']:,}",
        f"{metrics['tokens']:,.0f}",
        f"{metrics['supervised_tokens']:,.0f}",
        metrics["seconds"],
        f"{metrics['tokens_per_second']:,.0f}",
        workers,
    )
    what = {
        "dropped_too_long": "too long for max_seq_len, dropped (too_long=cut keeps their beginning)",
        "dropped_no_supervised_token": "without an assistant turn, dropped",
        "cut_conversations": "conversations that lost their end",
        "truncated_documents": "documents cut to fit",
        "left_out_documents": "documents left out to fit",
    }
    for name, text in what.items():
        if counts[name]:
            log.info("%s %s", f"{counts[name]:,}", text)
    if layout == "seed":
        log.info(
            "the seed's layout has no loss mask: every token but an example's first will be learnt; format=v2 keeps it"
        )
