"""The scan's shortcut equals converting each block alone; what hurts copying is never chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.build import hybrid, transformer
from refragkit.models.convert import calibrate, convert_blocks
from refragkit.models.convert.probes import induction_perplexity, induction_rows, perplexity
from refragkit.models.convert.sensitivity import (
    Scan,
    Sensitivity,
    read_scan,
    scan,
    scan_key,
    scan_rows,
    scan_steps,
    scan_table,
    write_scan,
)
from refragkit.tracking.plots import plot_sensitivity

VOCAB = 61


def rows(n: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (n, 32), generator=torch.Generator().manual_seed(seed))


CALIBRATION = [rows(4, 0), rows(4, 1)]
TEXT, PROBE = rows(5, 2), induction_rows(VOCAB, [], 3, 12, 0)


@pytest.mark.parametrize(("teacher_kind", "to"), [("T", "R"), ("T", "M"), ("TMTT", "R")])
def test_each_block_is_measured_as_if_converted_alone(teacher_kind: str, to: Any) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "seed": 1}
    teacher = (
        transformer(n_layers=3, **sizes)
        if teacher_kind == "T"
        else hybrid(block_pattern=teacher_kind, **sizes)
    )
    teacher.eval()
    steps: list[None] = []
    result = scan(teacher, to, CALIBRATION, TEXT, PROBE, advance=lambda: steps.append(None))
    assert len(steps) == scan_steps(CALIBRATION, TEXT, PROBE) == 2 + 3 + 2
    assert result.perplexity == pytest.approx(perplexity(teacher, TEXT), rel=1e-5)
    layers = [i for i, kind in enumerate(teacher.block_pattern) if kind == "T"]
    assert [block.layer for block in result.blocks] == layers
    for block in result.blocks:
        alone = convert_blocks(teacher, layers, to)  # the same new weights as in the scan
        calibrate(alone, teacher, layers, CALIBRATION, "lsq")
        one = convert_blocks(teacher, [block.layer], to)
        one.load_state_dict(
            {k: v for k, v in alone.state_dict().items() if k.startswith(f"blocks.{block.layer}.mixer.")},
            strict=False,
        )
        ratio = perplexity(one, TEXT) / result.perplexity
        assert block.perplexity_ratio == pytest.approx(ratio, rel=1e-4) and ratio != 1
        probe = induction_perplexity(one, PROBE) / result.probe_perplexity
        assert block.probe_ratio == pytest.approx(probe, rel=1e-4)


RESULT = Scan(
    10.0,
    1.5,
    (
        Sensitivity(0, 1.5, 1.0, 0.3),
        Sensitivity(1, 1.001, 70.0, 0.1),  # harmless on text, and it is what copies
        Sensitivity(2, 1.03, 0.99, 0.2),
        Sensitivity(3, 1.02, 1.05, 0.2),
    ),
)


def test_blocks_that_hurt_copying_are_never_chosen() -> None:
    assert RESULT.choose(1) == [3]
    assert RESULT.choose(2) == [2, 3]
    assert RESULT.choose(3) == [0, 2, 3]
    with pytest.raises(ConfigError, match=r"only 3 of 4 attention blocks .* \(3, 2, 0\)"):
        RESULT.choose(4)


def test_table_and_plot(tmp_path: Path) -> None:
    table = scan_rows(RESULT, [2, 3])
    assert [(row["layer"], row["choice"]) for row in table] == [
        (1, "hurts copying"),
        (3, "chosen"),
        (2, "chosen"),
        (0, ""),
    ]
    assert scan_table(RESULT, [2, 3], "R").row_count == 4
    file = plot_sensitivity(table, tmp_path / "plots" / "s.png", "title")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_scan_is_kept_under_all_that_it_depends_on(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "scan.json"
    write_scan(RESULT, file)
    assert read_scan(file) == RESULT
    file.write_text(file.read_text()[:-20])
    assert read_scan(file) is None and read_scan(tmp_path / "none.json") is None
    teacher = transformer(n_layers=2, vocab_size=VOCAB, seed=1)
    arguments: dict[str, Any] = {"calibration": CALIBRATION, "text": TEXT, "probe": PROBE, "seed": 0}
    key = scan_key(teacher, "R", **arguments)
    assert key == scan_key(transformer(n_layers=2, vocab_size=VOCAB, seed=1), "R", **arguments)
    others = [
        scan_key(teacher, "M", **arguments),
        scan_key(teacher, "R", **{**arguments, "seed": 1}),
        scan_key(teacher, "R", **{**arguments, "text": TEXT[:4]}),
        scan_key(teacher, "R", **{**arguments, "calibration": CALIBRATION[:1]}),
    ]
    with torch.no_grad():
        teacher.get_parameter("blocks.1.mlp.up_proj.weight")[0, 0] += 1
    others.append(scan_key(teacher, "R", **arguments))
    assert len({key, *others}) == 6
