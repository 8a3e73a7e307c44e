"""What a conversion cost: the same measures of the model before and after, side by side."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from refragkit.data.conversation import conversation_from_hops, render_prompt
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.models.base import SequenceModel
from refragkit.models.convert.probes import (
    decoding_tokens_per_second,
    induction_perplexity,
    induction_rows,
    perplexity,
    perplexity_by_position,
    recall,
)
from refragkit.models.convert.text import fingerprint, speaks_chat
from refragkit.models.weights_hash import hash_tensors

if TYPE_CHECKING:
    from rich.table import Table

    from refragkit.data.tokenizer import Tokenizer

WINDOW = 512
LENGTHS = 4
"""Length extrapolation reads windows of so many times 512."""
CONTEXTS = (1024, 4096, 16384)
INDUCTION_ROWS, INDUCTION_LENGTH = 16, 128

_FORMAT = 1

Measures = dict[str, float]
Row = dict[str, str | float]


RECALL_CONTEXTS = 50
"""Four recall prompts each."""
CHAT_PROMPTS = (
    "What is the capital of France?",
    "Name three animals that can fly.",
    "What is 7 plus 5?",
    "Write one sentence about the sea.",
    "Anna is taller than Ben. Ben is taller than Carl. Who is the tallest?",
)
PLAIN_PROMPTS = (
    "The capital of France is",
    "Three animals that can fly are",
    "Seven plus five equals",
    "The sea is",
    "Anna is taller than Ben. Ben is taller than Carl. The tallest of them is",
)
SAMPLE_TOKENS = 40


@dataclass(frozen=True)
class Sample:
    """What a model wrote.

    Attributes:
        prompt: what it was asked.
        text: its answer, or how it went on.
    """

    prompt: str
    text: str


@torch.no_grad()
def evaluate_model(
    model: SequenceModel,
    tokenizer: Tokenizer,
    texts: Mapping[str, Tensor],
    *,
    seed: int = 0,
    recall_contexts: int = RECALL_CONTEXTS,
    dtype: torch.dtype | None = None,
    contexts: Sequence[int] = CONTEXTS,
    cache_dir: Path | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Measures:
    """Measure one model.

    Args:
        model: in evaluation mode; on its own device. It stays as it is.
        tokenizer: its own.
        texts: text that nothing was fitted to by name, int64 ``[n, 512]``; rows of the first follow one another, so
            that four of them make a long window.
        seed: of the probes' random tokens.
        recall_contexts: four recall prompts each.
        dtype: what a copy of the weights is cast to and measured in; None measures the model as it is. bfloat16 takes
            about two thirds of the time on a CPU that has it, and its memory beside the model's.
        contexts: where state and speed of decoding are measured, in tokens; none for neither.
        cache_dir: where everything but state and speed is kept under a hash of all that it depends on, and read again;
            for a model that is measured often, such as the source of many conversions. None measures anew.
        advance: called :func:`evaluation_steps` times.

    Returns:
        ``perplexity/<name>``; ``induction_perplexity`` (second copy of 128 random tokens); ``recall`` (share of right
        numbers, 8 names); ``perplexity_at/<tokens>`` (of the first text read 2,048 tokens at a time, the 512 up to
        there; absent where the text is shorter); ``state_bytes/<tokens>`` and ``tokens_per_second/<tokens>`` (decoding
        one row) for each context.
    """
    model = in_type(model, dtype)
    file = None
    if cache_dir is not None:
        key = _quality_key(model, tokenizer, texts, seed, recall_contexts)
        file = cache_dir / "measures" / f"{key[:32]}.json"
    measures = None if file is None else _read_measures(file)
    if measures is None:
        measures = _quality(model, tokenizer, texts, seed, recall_contexts, advance)
        if file is not None:
            _write_measures(measures, file)
    else:
        for _ in range(evaluation_steps(texts) - 1):
            advance()
    for context in contexts:
        measures[f"state_bytes/{context}"] = float(model.state_bytes(1, context))
        measures[f"tokens_per_second/{context}"] = decoding_tokens_per_second(model, context)
    advance()
    return measures


def _quality(
    model: SequenceModel,
    tokenizer: Tokenizer,
    texts: Mapping[str, Tensor],
    seed: int,
    recall_contexts: int,
    advance: Callable[[], None],
) -> Measures:
    """What does not depend on the machine, but for rounding."""
    device = model.head_weight.device
    measures: Measures = {}
    for name, rows in texts.items():
        measures[f"perplexity/{name}"] = perplexity(model, rows.to(device))
        advance()
    probe = induction_rows(
        tokenizer.vocab_size, tokenizer.control_ids, INDUCTION_ROWS, INDUCTION_LENGTH, seed
    )
    measures["induction_perplexity"] = induction_perplexity(model, probe.to(device))
    advance()
    measures["recall"] = recall(model, tokenizer, recall_contexts, seed=seed)
    advance()
    first = next(iter(texts.values()))
    long = min(2, len(first) // LENGTHS)
    if long:
        rows = first[: long * LENGTHS].reshape(long, -1).to(device)
        for part, value in enumerate(perplexity_by_position(model, rows, LENGTHS), 1):
            measures[f"perplexity_at/{part * rows.shape[1] // LENGTHS}"] = value
    advance()
    return measures


def _quality_key(
    model: SequenceModel, tokenizer: Tokenizer, texts: Mapping[str, Tensor], seed: int, recall_contexts: int
) -> str:
    """sha256 of everything that :func:`_quality` depends on, the order and names of the texts included."""
    digest = hashlib.sha256(f"{_FORMAT} {seed} {recall_contexts} {model.head_weight.device.type}".encode())
    digest.update(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    digest.update(tokenizer.fingerprint.encode())
    for name, rows in texts.items():
        digest.update(f"{name!r} {fingerprint(rows)}".encode())
    hash_tensors(digest, model)
    return digest.hexdigest()


def _write_measures(measures: Measures, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(
        json.dumps({"format": _FORMAT, "measures": measures}, indent=1) + "\n", encoding="utf-8"
    )
    temporary.replace(file)


def _read_measures(file: Path) -> Measures | None:
    """What :func:`_write_measures` wrote; None if there is nothing or it is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            return None
        return {str(name): float(value) for name, value in values["measures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def greedy_samples(
    model: SequenceModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str] | None = None,
    *,
    max_new_tokens: int = SAMPLE_TOKENS,
    dtype: torch.dtype | None = None,
) -> list[Sample]:
    """What the model writes when it always takes the likeliest token.

    Args:
        model: on its own device. It stays as it is.
        tokenizer: its own.
        prompts: None for five short ones.
        max_new_tokens: of each answer at most.
        dtype: as in :func:`evaluate_model`.

    Returns:
        A sample per prompt: an answer in a conversation, or where the model has met none
        (:func:`~refragkit.models.convert.text.speaks_chat`) plain text that goes on.
    """
    chat = speaks_chat(tokenizer)
    if prompts is None:
        prompts = CHAT_PROMPTS if chat else PLAIN_PROMPTS
    ids = [
        render_prompt(conversation_from_hops(prompt), tokenizer, sys.maxsize, max_new_tokens)
        if chat
        else tokenizer.encode(prompt)
        for prompt in prompts
    ]
    config = GenerationConfig(max_new_tokens, stop_ids=(tokenizer.end_id,))
    completions = generate(in_type(model, dtype), ids, config, pad_id=tokenizer.pad_id)
    return [
        Sample(prompt, tokenizer.decode(completion.content_ids).strip())
        for prompt, (completion,) in zip(prompts, completions, strict=True)
    ]


def in_type(model: SequenceModel, dtype: torch.dtype | None) -> SequenceModel:
    """A copy of the model with its floating-point weights in ``dtype``, or the model itself if they are already."""
    weights = list(itertools.chain(model.parameters(), model.buffers()))
    if dtype is None or all(w.dtype == dtype for w in weights if w.is_floating_point()):
        return model
    # Cast on the way, so that the copy is never held in the wider type; one that is shared stays shared
    cast = {
        id(w): nn.Parameter(w.detach().to(dtype), requires_grad=False)
        if isinstance(w, nn.Parameter)
        else w.to(dtype)
        for w in weights
        if w.is_floating_point()
    }
    return copy.deepcopy(model, cast)


def evaluation_steps(texts: Mapping[str, Tensor]) -> int:
    """How often :func:`evaluate_model` advances."""
    return len(texts) + 4


def compare(models: Mapping[str, Measures]) -> list[Row]:
    """One row per measure with the value of every model, and each over the first's (``<name> / <first>``)."""
    names = list(models)
    first = names[0]
    rows: list[Row] = []
    for measure, base in models[first].items():
        row: Row = {"measure": measure}
        row |= {name: models[name][measure] for name in names}
        row |= {f"{name} / {first}": models[name][measure] / base if base else math.nan for name in names[1:]}
        rows.append(row)
    return rows


def as_table(rows: Sequence[Row], title: str) -> Table:
    """Rows of :func:`compare` for the screen."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("measure")
    for column in list(rows[0])[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["measure"]),
            *(shown(value, ratio=" / " in name) for name, value in row.items() if name != "measure"),
        )
    return table


def shown(value: str | float, ratio: bool = False) -> str:
    """A number in as many digits as mean something."""
    number = float(value)
    if math.isnan(number):  # over a source's 0
        return "-"
    if ratio or abs(number) < 10:
        return f"{number:.3f}"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.1f}"


def samples_table(samples: Mapping[str, Sequence[Sample]], title: str) -> Table:
    """What each model wrote on the same prompts, for the screen."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=True)
    table.add_column("prompt", ratio=1)
    for name in samples:
        table.add_column(name, ratio=2)
    for row in zip(*samples.values(), strict=True):
        table.add_row(Text(row[0].prompt), *(Text(sample.text) for sample in row))
    return table
