"""``retriever.state_cache``: what it may say, in every retriever, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refragkit.config import compose, group_options, instantiate
from refragkit.errors import ConfigError
from refragkit.experiment import run_experiment
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.state_cache import StateCacheSettings, refuse_in_training, state_cache_settings

RETRIEVERS = sorted(set(group_options("retriever")) - {"milvus"})  # an extra


@pytest.mark.parametrize("name", RETRIEVERS)
def test_every_retriever_takes_it(name: str, tmp_path: Path) -> None:
    overrides = [f"retriever={name}", "retriever.state_cache.max_bytes=1_000_000"]
    built = instantiate(compose(overrides), "retriever", cache_dir=tmp_path)
    assert built.state_cache == StateCacheSettings(1_000_000)
    assert instantiate(compose([f"retriever={name}"]), "retriever", cache_dir=tmp_path).state_cache is None
    cfg = compose([f"retriever={name}", "retriever.state_cache=null"])
    assert instantiate(cfg, "retriever", cache_dir=tmp_path).state_cache is None


def test_all_keys() -> None:
    values = {"max_bytes": 10, "path": "states", "path_max_bytes": 20}
    assert state_cache_settings(values) == StateCacheSettings(10, "states", 20)
    assert state_cache_settings({"max_bytes": 10}) == StateCacheSettings(10, None, None)
    assert state_cache_settings({}) is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_byte": 1}, r"max_byte: unknown key; did you mean 'retriever\.state_cache\.max_bytes'"),
        ({"max_bytes": "1GiB"}, r"max_bytes: expected a whole number or null, got '1GiB'"),
        ({"max_bytes": True}, "max_bytes: expected a whole number or null, got True"),
        ({"max_bytes": 0}, "max_bytes: expected at least 1 byte or null, got 0"),
        ({"max_bytes": 1, "path": 3}, "path: expected a string or null, got 3"),
        ({"max_bytes": 1, "path": ""}, "path: expected a folder or null, got ''"),
        (
            {"max_bytes": 1, "path": "a", "path_max_bytes": -1},
            "path_max_bytes: expected at least 1 byte or null",
        ),
        (
            {"path": "states"},
            r"path=states is set, and without retriever\.state_cache\.max_bytes there is no",
        ),
        ({"max_bytes": 1, "path_max_bytes": 5}, r"path_max_bytes is set, and there is no .*\.path"),
    ],
)
def test_mistakes(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=r"retriever\.state_cache\." + problem):
        bm25(state_cache=values)


def test_a_node_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"retriever\.state_cache: expected a mapping or null, got 5"):
        compose(["retriever.state_cache=5"])


def test_training_refuses_it(tmp_path: Path) -> None:
    cfg = compose(
        [
            "method=refrag",
            "model.size=tiny",
            "retriever=bm25",
            "retriever.state_cache.max_bytes=1",
            "tracking=none",
            f"paths.outputs={tmp_path / 'outputs'}",
        ]
    )
    summary = run_experiment(cfg, tmp_path / "run")
    assert summary.status == "failed" and summary.error is not None
    assert "retriever.state_cache keeps states of a model whose weights don't change" in summary.error
    assert (
        "method=refrag changes them at every step; leave retriever.state_cache.max_bytes=null"
        in summary.error
    )
    refuse_in_training({"max_bytes": None, "path": None, "path_max_bytes": None}, "refrag")
    refuse_in_training(None, "refrag")
