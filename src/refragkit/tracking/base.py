"""What a run needs of a tracking store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracking(Protocol):
    """A tracking store; every method may be called on any process of a run."""

    def start(
        self,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
        sweep: Path | None = None,
    ) -> str | None:
        """Open a run with flat parameters, or go on with ``run_id``; return its id, if the store has one.

        ``sweep`` is the folder of the sweep that the run is a job of.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at an optimiser step."""

    def log_artifact(self, path: Path) -> None:
        """Upload a file, or a folder with its content."""

    def log_dataset(self, name: str, context: str, digest: str, source: str, rows: int) -> None:
        """Record a data set as an input of the run."""

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Add rows, all with the same keys, to a table of the run."""

    def log_traces(self, episodes: list[dict[str, Any]], step: int) -> None:
        """Record the hop-by-hop traces of evaluated questions."""

    def end(self, status: str) -> None:
        """Close the run as ``finished``, ``failed`` or ``interrupted``."""
