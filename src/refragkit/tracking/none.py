"""Tracking switched off: the run folder is the only record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoTracking:
    """Records nothing outside the run folder."""

    def start(
        self,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
        sweep: Path | None = None,
    ) -> str | None:
        """Return None: there is no run id."""
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Ignore the metrics."""

    def log_artifact(self, path: Path) -> None:
        """Ignore the file."""

    def log_dataset(self, name: str, context: str, digest: str, source: str, rows: int) -> None:
        """Ignore the data set."""

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Ignore the rows."""

    def log_traces(self, episodes: list[dict[str, Any]], step: int) -> None:
        """Ignore the traces."""

    def end(self, status: str) -> None:
        """Nothing is open."""
