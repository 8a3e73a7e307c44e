"""The encoder's transformer in ONNX Runtime and OpenVINO: the vectors of torch, or one clear error."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from refragkit.errors import ConfigError, RetrievalError
from refragkit.retrievers import encoder_backend
from refragkit.retrievers.encoder import SentenceEncoder, resolve_encoder

TEXTS = ["tea", "Who made the film Silent Harbour?", "fermented bread " * 60, "", "Ünïcode, と日本語."]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_the_vectors_are_those_of_torch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in (p for group in encoder_backend.PACKAGES[backend] for p in group):
        pytest.importorskip(package)
    before = sorted((p, p.stat().st_mtime_ns) for p in resolve_encoder(None).rglob("*"))
    expected = SentenceEncoder(dtype="float32").encode_passages(TEXTS)
    encoder = SentenceEncoder(backend=backend, cache_dir=tmp_path)
    got = encoder.encode_passages(TEXTS)
    assert (got * expected).sum(axis=1).min() >= 0.9999
    assert np.abs(got - expected).max() < 1e-4
    assert sorted((p, p.stat().st_mtime_ns) for p in resolve_encoder(None).rglob("*")) == before
    assert encoder.fingerprint != SentenceEncoder(dtype="float32").fingerprint
    # The second time it is there, whatever was needed to export it.
    assert [p.name for p in (tmp_path / "encoders").iterdir()] == [f"{backend}-{encoder.fingerprint}"]
    monkeypatch.setattr(encoder_backend, "_export", lambda *a: pytest.fail("exported again"))
    again = SentenceEncoder(backend=backend, cache_dir=tmp_path)
    assert np.abs(again.encode_passages(TEXTS[:2]) - got[:2]).max() < 1e-5


@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_a_missing_package_is_one_error_that_names_the_extra(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    needed = {p for group in encoder_backend.PACKAGES[backend] for p in group}
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in needed else found(n, *a))
    with pytest.raises(
        RetrievalError, match=rf"backend={backend} needs .*pip install 'refragkit\[{backend}\]'"
    ):
        SentenceEncoder(backend=backend).encode(["tea"])


def test_what_a_backend_can_not_do() -> None:
    with pytest.raises(ConfigError, match=r"backend=onnx computes on the CPU in float32"):
        SentenceEncoder(backend="onnx", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"backend=openvino computes on the CPU in float32"):
        SentenceEncoder(backend="openvino", device="cuda")
