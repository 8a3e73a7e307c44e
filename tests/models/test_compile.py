"""``hardware.compile``: the same numbers, and one clear error where there is no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from refragkit.errors import ConfigError
from refragkit.training.hardware import Hardware

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)


def run(cache: Path, *arguments: str) -> str:
    script = Path(__file__).with_name("compiled_numbers.py")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_traced_blocks_give_the_same_numbers(tmp_path: Path) -> None:
    """All of it but the code for the machine: what is traced, what is left out, and gradients through both."""
    assert len(run(tmp_path, "M", "aot_eager", "padding", "decoding").splitlines()) == 2


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("pattern", ["TT", "MM", "RR", "TMRM"])
def test_compiled_blocks_give_the_same_numbers(pattern: str, tmp_path: Path) -> None:
    assert len(run(tmp_path, pattern, "inductor").splitlines()) == 8


def test_without_a_compiler_the_setting_is_refused() -> None:
    from torch._inductor import config

    # Not monkeypatch: what it puts back leaves this module without the entry
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"hardware\.compile=true needs a C\+\+ compiler"),
    ):
        Hardware(compile=True).apply()
    Hardware().apply()
