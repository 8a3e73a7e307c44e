"""Shared fixtures. Everything runs offline, on the CPU, and writes to temporary folders only."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
