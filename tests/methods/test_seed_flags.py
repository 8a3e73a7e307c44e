"""The flags of the seed trainer's command line, and the overrides that stand for them (a table in the README)."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from refragkit.config import check_overrides, compose

DEFAULTS = ["method=lora", "model=rwkv-qwen"]
# (flag, overrides, the key that they set, its value); where the flag has a default it is that of method=lora too
FLAGS: list[tuple[str, list[str], str, Any]] = [
    ("--model DIR", ["model.path=DIR"], "model.path", "DIR"),
    ("--data FILE", ["data=tokens", "data.path=train.bin"], "data.path", "train.bin"),
    ("--lora-rank 32", ["adapter.rank=32"], "adapter.rank", 32),
    ("--lora-alpha 64", ["adapter.alpha=64"], "adapter.alpha", 64),
    ("--lr 2e-5", ["method.lr=2e-5"], "method.lr", 2e-5),
    ("--epochs 3", ["method.epochs=3"], "method.epochs", 3),
    ("--max-seq-len 256", ["method.max_seq_len=256"], "method.max_seq_len", 256),
    ("--warmup 100", ["method.warmup_steps=100"], "method.warmup_steps", 100),
    ("--log-every 10", ["method.log_every=10"], "method.log_every", 10),
    ("--save-every 1000", ["method.save_every=1000"], "method.save_every", 1000),
    ("--grad-clip 1.0", ["method.grad_clip=1.0"], "method.grad_clip", 1.0),
    ("--parallel 4", ["method.workers=4"], "method.workers", 4),
    ("--quantize", ["adapter.quantize=int8"], "adapter.quantize", "int8"),
]
OF_NO_DEFAULT = ("model.path", "data.path", "method.workers", "adapter.quantize")


@pytest.mark.parametrize(("flag", "overrides", "key", "value"), FLAGS, ids=[flag for flag, *_ in FLAGS])
def test_each_flag_has_an_override(flag: str, overrides: list[str], key: str, value: Any) -> None:
    assert OmegaConf.select(compose([*DEFAULTS, *overrides]), key) == value
    if key not in OF_NO_DEFAULT:
        assert OmegaConf.select(compose(DEFAULTS), key) == value


def test_all_of_them_at_once() -> None:
    cfg = compose([*DEFAULTS, *(override for _, overrides, _, _ in FLAGS for override in overrides)])
    assert all(OmegaConf.select(cfg, key) == value for _, _, key, value in FLAGS)


def test_the_cache_of_keys_and_values_is_bounded_where_there_is_one() -> None:
    """--max-cache 2048: training reads whole sequences of max_seq_len and keeps no cache; generating does."""
    assert compose(["task=generate", "model.path=DIR", "max_seq_len=2048"]).max_seq_len == 2048


def test_the_output_folder_is_hydras() -> None:
    """--output DIR: taken by Hydra itself, and let through by the check of overrides."""
    check_overrides([*DEFAULTS, "hydra.run.dir=DIR"])
