"""Which attention blocks a model can spare: each is replaced alone, and text and copying are measured.

Perplexity alone misleads. A block that copies from far back costs a per cent or two on text and is missed everywhere
else, so a block whose loss shows in the induction probe is never chosen, however cheap it looks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.convert.blocks import RecurrentKind, convert_blocks
from refragkit.models.convert.calibrate import RIDGE, calibrate
from refragkit.models.convert.from_attention import START
from refragkit.models.convert.probes import losses_of, second_copy
from refragkit.models.convert.text import fingerprint
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.rope import rotary_tables
from refragkit.models.layout import TokenLayout
from refragkit.models.weights_hash import hash_tensors

if TYPE_CHECKING:
    from rich.table import Table

MAX_PROBE_RATIO = 1.1
"""A block that makes the second copy of random tokens less likely than so is kept."""
_FORMAT = 1


@dataclass(frozen=True)
class Sensitivity:
    """What replacing one block, calibrated and untrained, does.

    Attributes:
        layer: the block.
        perplexity_ratio: on text, over the teacher's.
        probe_ratio: on the second copy of random tokens, over the teacher's.
        error: of the fitted mixer, see :class:`~refragkit.models.convert.calibrate.CalibrationReport`.
    """

    layer: int
    perplexity_ratio: float
    probe_ratio: float
    error: float


@dataclass(frozen=True)
class Scan:
    """All attention blocks in ascending order, and the teacher's own figures.

    Attributes:
        perplexity: the teacher's, on text.
        probe_perplexity: the teacher's, on the second copy.
        blocks: one entry per attention block.
    """

    perplexity: float
    probe_perplexity: float
    blocks: tuple[Sensitivity, ...]

    def spares_copying(self, block: Sensitivity) -> bool:
        """Whether the induction probe survives without that block."""
        return block.probe_ratio <= MAX_PROBE_RATIO

    def choose(self, count: int) -> list[int]:
        """The ``count`` blocks cheapest on text among those that the induction probe can do without.

        Raises:
            ConfigError: there are fewer.
        """
        able = sorted(filter(self.spares_copying, self.blocks), key=lambda b: (b.perplexity_ratio, b.layer))
        if len(able) < count:
            raise ConfigError(
                f"convert.count={count}: only {len(able)} of {len(self.blocks)} attention blocks can go without "
                f"raising the induction probe above {MAX_PROBE_RATIO} times the teacher's "
                f"({', '.join(str(b.layer) for b in able) or 'none'}); lower convert.count, or name convert.layers"
            )
        return sorted(block.layer for block in able[:count])


@torch.no_grad()
def scan(
    teacher: SequenceModel,
    to: RecurrentKind,
    calibration: Sequence[Tensor],
    text: Tensor,
    probe: Tensor,
    *,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Scan:
    """Replace each attention block alone and measure.

    All new mixers are fitted in one pass (each sees the teacher's inputs). Below a replaced block everything is the
    teacher's, so a row is read once, and again only from the replaced block on.

    Args:
        teacher: the model.
        to: what blocks become.
        calibration: token ids to fit on, int64 ``[B, T]`` each.
        text: windows to measure on, int64 ``[n, T]``.
        probe: of :func:`~refragkit.models.convert.probes.induction_rows`.
        seed: of the new mixers.
        advance: called :func:`scan_steps` times.
    """
    assert isinstance(teacher, HybridLM)
    layers = [i for i, kind in enumerate(teacher.block_pattern) if kind == "T"]
    student = convert_blocks(teacher, layers, to, seed=seed)

    def counted() -> Any:
        for batch in calibration:
            yield batch
            advance()

    reports = {report.layer: report for report in calibrate(student, teacher, layers, counted(), "lsq")}
    sums: dict[str, dict[int | None, float]] = {"text": {}, "probe": {}}
    tokens = {"text": 0, "probe": 0}
    for name, rows in (("text", text), ("probe", probe)):
        for part in torch.split(rows, 2):
            for index, losses in _losses_without_each(teacher, student, layers, part):
                if name == "probe":
                    losses = second_copy(losses)
                sums[name][index] = sums[name].get(index, 0.0) + float(losses.double().sum())
                tokens[name] += losses.numel() if index is None else 0
            advance()
    means = {
        name: {i: total / tokens[name] for i, total in by_layer.items()} for name, by_layer in sums.items()
    }

    def ratio(name: str, index: int) -> float:
        return math.exp(means[name][index] - means[name][None])

    return Scan(
        math.exp(means["text"][None]),
        math.exp(means["probe"][None]),
        tuple(Sensitivity(i, ratio("text", i), ratio("probe", i), reports[i].fitted) for i in layers),
    )


def scan_steps(calibration: Sequence[Tensor], text: Tensor, probe: Tensor) -> int:
    """How often :func:`scan` advances."""
    return len(calibration) + -(-len(text) // 2) + -(-len(probe) // 2)


def _losses_without_each(
    teacher: HybridLM, student: HybridLM, layers: Sequence[int], input_ids: Tensor
) -> list[tuple[int | None, Tensor]]:
    """Token losses of the teacher (None), and with each block of ``layers`` taken from the student."""
    layout = TokenLayout.of(
        (input_ids.shape[0], input_ids.shape[1]),
        input_ids.device,
        attention_mask=None,
        segment_ids=None,
        past_lengths=None,
    )
    config = teacher.config
    x = teacher.embed_tokens(input_ids)
    if teacher.embedding_norm is not None:
        x = teacher.embedding_norm(x)
    rotary = rotary_tables(layout.positions, config.head_dim, config.rope_theta, config.rope_scaling, x.dtype)
    v_first: Tensor | None = None
    inputs: list[tuple[Tensor, Tensor | None]] = []
    for block in teacher.blocks:
        inputs.append((x, v_first))
        x, v_first, _ = block(x, layout, rotary, v_first, None, False)
    found: list[tuple[int | None, Tensor]] = [(None, losses_of(teacher, teacher.norm(x), input_ids))]
    for index in layers:
        x, v_first = inputs[index]
        for block in (student.blocks[index], *teacher.blocks[index + 1 :]):
            x, v_first, _ = block(x, layout, rotary, v_first, None, False)
        found.append((index, losses_of(teacher, teacher.norm(x), input_ids)))
    return found


def scan_key(
    teacher: SequenceModel, to: str, calibration: Sequence[Tensor], text: Tensor, probe: Tensor, seed: int
) -> str:
    """sha256 of everything that a scan depends on."""
    digest = hashlib.sha256(f"{_FORMAT} {to} {seed} {START} {RIDGE}".encode())
    digest.update(json.dumps(teacher.config.to_dict(), sort_keys=True).encode())
    digest.update(fingerprint(*calibration, text, probe).encode())
    hash_tensors(digest, teacher)
    return digest.hexdigest()


def write_scan(result: Scan, path: Path) -> None:
    """Keep a scan as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": _FORMAT, **asdict(result)}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_scan(path: Path) -> Scan | None:
    """What :func:`write_scan` wrote; None if there is nothing or it is damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            return None
        blocks = tuple(Sensitivity(**block) for block in values["blocks"])
        return Scan(float(values["perplexity"]), float(values["probe_perplexity"]), blocks)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def scan_rows(result: Scan, chosen: Sequence[int]) -> list[dict[str, str | float]]:
    """One row per block, cheapest on text first, as in ``sensitivity.csv``."""
    rows: list[dict[str, str | float]] = []
    for block in sorted(result.blocks, key=lambda b: (b.perplexity_ratio, b.layer)):
        kept = "" if result.spares_copying(block) else "hurts copying"
        rows.append(
            {
                "layer": block.layer,
                "perplexity_ratio": block.perplexity_ratio,
                "probe_ratio": block.probe_ratio,
                "error": block.error,
                "choice": "chosen" if block.layer in chosen else kept,
            }
        )
    return rows


def scan_table(result: Scan, chosen: Sequence[int], to: str) -> Table:
    """The rows for the screen."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"one block to {to} at a time, perplexity / source's",
        caption=f"the source's: {result.perplexity:.2f} on text, {result.probe_perplexity:.2f} when copying",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("block", "text", "copying", "squared error"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in scan_rows(result, chosen):
        table.add_row(
            str(row["layer"]),
            f"{float(row['perplexity_ratio']):.3f}",
            f"{float(row['probe_ratio']):.3f}",
            f"{float(row['error']):.3f}",
            str(row["choice"]),
            style="bold" if row["choice"] == "chosen" else None,
        )
    return table
