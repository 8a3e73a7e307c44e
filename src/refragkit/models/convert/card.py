"""``MODEL_CARD.md`` of a converted model: what it was made of, how, and what that cost."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refragkit.models.checksums import file_digest
from refragkit.models.config import BLOCK_KINDS
from refragkit.models.convert.calibrate import CalibrationReport
from refragkit.models.convert.evaluate import Row, Sample, shown
from refragkit.models.gguf import CONVERSION_FILE
from refragkit.models.pretrained import SMOLLM2

CARD = "MODEL_CARD.md"
_LICENCE_LINE = re.compile(r"^license(?:_name)?:\s*(\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """What decides a conversion.

    Attributes:
        source: the model as the user named it.
        folder: where it is; None if it is a single file or unknown.
        layers: the converted blocks.
        to: R or M.
        calibration: lsq, cal or none.
        calibration_tokens: how many were used.
        text: where they came from.
        text_sha256: of their ids.
        seed: of the run.
        command: that made it.
        trained: a sentence about training after the conversion.
        sources: files and folders of all text that was fitted to or trained on, as the user named them.
        evaluation: what was measured on beside the held-out text: a file or folder by name of the set.
        measured_in: the type of the weights while measuring, such as bfloat16; empty if they were as they are here.
        rest: what everything but the new mixers is.
    """

    source: str
    folder: Path | None
    layers: Sequence[int]
    to: str
    calibration: str
    calibration_tokens: int
    text: str
    text_sha256: str
    seed: int
    command: str
    trained: str = "none"
    sources: Sequence[str] = ()
    evaluation: Mapping[str, str] = field(default_factory=dict)
    measured_in: str = ""
    rest: str = "the source's, bit for bit"


def write_card(
    folder: Path,
    recipe: Recipe,
    reports: Sequence[CalibrationReport],
    rows: Sequence[Row],
    samples: Mapping[str, Sequence[Sample]] | None = None,
) -> Path:
    """Write the card beside the weights, whole or not at all.

    Args:
        folder: of the converted model.
        recipe: how it was made.
        reports: of the calibration.
        rows: of :func:`~refragkit.models.convert.evaluate.compare`; empty if nothing was measured.
        samples: of :func:`~refragkit.models.convert.evaluate.greedy_samples` by model, on the same prompts.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lines = [
        f"# {recipe.source}: {len(recipe.layers)} attention blocks as {BLOCK_KINDS[recipe.to]}",
        "",
        f"Block pattern `{config['block_pattern']}` (T attention, M Mamba-2, R RWKV-7). Load it with"
        " `refragkit.load_model`, or as `model.path` of any task.",
        "",
        "## Recipe",
        "",
        f"- source: {recipe.source}",
        f"- licence: {licence(recipe)}",
        f"- converted blocks (from 0): {', '.join(map(str, recipe.layers))}, started from q, k, v and o",
        f"- calibration: {recipe.calibration}"
        + (
            ""
            if recipe.calibration == "none"
            else f" on {recipe.calibration_tokens:,} tokens of {recipe.text}"
        ),
        f"- training after that: {recipe.trained}",
        *_sources(recipe),
        f"- seed: {recipe.seed}",
        f"- command: `{recipe.command}`",
        f"- everything else (embedding, norms, MLPs, other blocks) is {recipe.rest}",
        "",
        "## Checksums (sha256)",
        "",
    ]
    for name, digest in _checksums(folder, recipe).items():
        lines.append(f"- {name}: `{digest}`")
    lines += [
        "",
        "## Fit of the new mixers",
        "",
        "Mean squared error over the variance of the attention's output.",
        "",
    ]
    lines += ["| block | weights as copied | calibrated |", "| ---: | ---: | ---: |"]
    lines += [f"| {r.layer} | {shown(r.copied)} | {shown(r.fitted)} |" for r in reports]
    if rows:
        columns = list(rows[0])
        measured = f" Weights in {recipe.measured_in}." if recipe.measured_in else ""
        lines += ["", "## Measures", "", f"On text that nothing was fitted to.{measured}", ""]
        for name, source in recipe.evaluation.items():
            lines.append(f"- {name}: the start of {source}")
        if recipe.evaluation:
            lines.append("")
        lines += ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
        for row in rows:
            values = [shown(v, ratio=" / " in k) for k, v in row.items() if k != "measure"]
            lines.append("| " + " | ".join([str(row["measure"]), *values]) + " |")
    if samples:
        lines += ["", "## Samples", "", "Always the likeliest token.", *_sampled(samples)]
    path = folder / CARD
    temporary = folder / f".{CARD}.{os.getpid()}.tmp"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _sources(recipe: Recipe) -> list[str]:
    if not recipe.sources:
        return []
    return ["- sources of text, mixed, a tenth of them held out:", *(f"  - {s}" for s in recipe.sources)]


def _sampled(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Each prompt with what the models wrote, indented as Markdown's verbatim text."""
    lines = []
    for row in zip(*samples.values(), strict=True):
        lines += ["", f"**{' '.join(row[0].prompt.split())}**"]
        for name, sample in zip(samples, row, strict=True):
            lines += [
                "",
                f"{name}:",
                "",
                *(f"    {line}" for line in sample.text.splitlines() or ["(nothing)"]),
            ]
    return lines


def licence(recipe: Recipe) -> str:
    """What is known of the source's licence, from its folder unless it is one that everybody has the same of."""
    unknown = "that of the source, which says nothing about it here"
    folder = recipe.folder
    if recipe.source == SMOLLM2:
        return "Apache-2.0 (SmolLM2-135M-Instruct, Hugging Face)"
    if folder is None or not folder.is_dir():
        return unknown
    stated = _json(folder / "config.json").get("license")
    if isinstance(stated, str):
        return stated
    for name in (CARD, "README.md"):
        card = folder / name
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace")
            found = _LICENCE_LINE.search(text) or re.search(r"^- licence: (.+)$", text, re.MULTILINE)
            if found:
                return found.group(1).strip()
    file = next((f for f in sorted(folder.iterdir()) if f.name.upper().startswith("LICEN")), None)
    return unknown if file is None else f"see the source's {file.name}"


def _checksums(folder: Path, recipe: Recipe) -> dict[str, str]:
    digests = {}
    if recipe.folder is not None:
        files = [recipe.folder] if recipe.folder.is_file() else sorted(recipe.folder.glob("*.safetensors"))
        digests = {f"source {file.name}": file_digest(file) for file in files}
        made_of = _json(recipe.folder / CONVERSION_FILE)
        if "source_sha256" in made_of:
            digests[f"source {made_of.get('source')}"] = str(made_of["source_sha256"])
    digests["calibration token ids"] = recipe.text_sha256
    for source in (*recipe.sources, *recipe.evaluation.values()):
        file = Path(source).expanduser()
        if file.is_file():
            digests[f"text {source}"] = file_digest(file)
    for name in ("model.safetensors", "tokenizer.json"):
        if (folder / name).is_file():
            digests[name] = file_digest(folder / name)
    return digests


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
