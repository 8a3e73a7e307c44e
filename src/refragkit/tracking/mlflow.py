"""MLflow: parameters, metrics by step, artifacts, data sets and traces of a run, in SQLite or on a server."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError
from refragkit.summary import write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("refragkit")

MLFLOW_PARENT_RUN_ID = "mlflow.parentRunId"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MAX_PARAM_CHARACTERS = 6000  # MLflow's own limit; the whole configuration goes up as an artifact


class MLflowTracking:
    """One MLflow run.

    Args:
        uri: tracking URI; None means SQLite at ``<outputs>/mlflow.db`` with artifacts beside it.
        experiment: name of the MLflow experiment.
        log_model: whether the exported model or adapter is uploaded.
        max_traces: questions of an evaluation whose hops become traces; 0 for none.
        outputs: folder of the local store (injected).
    """

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "refragkit",
        log_model: bool = True,
        max_traces: int = 100,
        *,
        outputs: Path,
    ) -> None:
        if max_traces < 0:
            raise ConfigError(f"tracking.max_traces: expected 0 or more, got {max_traces}")
        self.uri = uri
        self.experiment = experiment
        self.log_model = log_model
        self.max_traces = max_traces
        self.outputs = outputs
        self.run_id: str | None = None
        self._experiment_id = ""
        self._logged: dict[str, int] = {}  # of a resumed run: the last step of each metric
        self._tabled: dict[str, set[int]] = {}  # of each table: the steps that it holds
        self._client: MlflowClient | None = None

    def start(
        self,
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
        sweep: Path | None = None,
    ) -> str | None:
        """Open an MLflow run.

        Args:
            run_name: shown in the UI.
            params: flat parameters.
            tags: further text.
            run_id: of a run to go on with; where the store has it no longer, a new one is opened.
            sweep: folder of the sweep that the run is a job of; its jobs have one parent run.

        Returns:
            The run id.

        Raises:
            ConfigError: the store can't be reached.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        # MLflow's defaults keep a run waiting for four minutes where no server answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        logging.getLogger("alembic").setLevel(logging.WARNING)
        try:
            self._open()
            assert self._client is not None
            parent = {} if sweep is None else {MLFLOW_PARENT_RUN_ID: self._parent(sweep)}
            if run_id is not None and self._go_on(run_id):
                for key, value in parent.items():
                    self._client.set_tag(run_id, key, value)
                return run_id
            run = self._client.create_run(
                self._experiment_id,
                run_name=run_name,
                tags={k: v for k, v in {**tags, **parent}.items() if v},
            )
        except Exception as error:
            raise ConfigError(
                f"tracking.uri: the MLflow store {self.uri or self._local_uri()} can't be opened"
                f" ({type(error).__name__}: {error}); give another tracking.uri, or tracking=none"
            ) from error
        self.run_id = run.info.run_id
        self._log_params(params)
        return self.run_id

    def _parent(self, sweep: Path) -> str:
        """The run above all jobs of a sweep, opened by the first of them; ``parent.json`` in its folder names it."""
        from filelock import FileLock

        assert self._client is not None
        file = sweep / "parent.json"
        with FileLock(sweep / ".parent.lock"):
            if file.exists():
                return str(json.loads(file.read_text(encoding="utf-8"))["run_id"])
            run = self._client.create_run(self._experiment_id, run_name=f"sweep {sweep.name}")
            write_json(file, {"uri": self.uri or self._local_uri(), "run_id": run.info.run_id})
        return str(run.info.run_id)

    def _go_on(self, run_id: str) -> bool:
        """Open an earlier run again; False where there is none.

        A store can't take back what it was told, and a resumed run repeats some steps: what is there stays as it is.
        """
        from mlflow.exceptions import MlflowException

        assert self._client is not None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            log.warning("the MLflow run %s can't be opened again (%s); a new one begins", run_id, error)
            return False
        self.run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        for name in run.data.metrics:
            history = self._client.get_metric_history(run_id, name)
            self._logged[name] = max((metric.step for metric in history), default=-1)
        return True

    def _local_uri(self) -> str:
        return f"sqlite:///{self.outputs / 'mlflow.db'}"

    def _open(self) -> None:
        from filelock import FileLock
        from mlflow import MlflowClient

        uri = self.uri or self._local_uri()
        if not uri.startswith("sqlite:///"):
            log.info("connecting to the tracking server %s", uri)
            self._client = MlflowClient(tracking_uri=uri)
            self._experiment_id = self._experiment(None)
            return
        database = Path(uri.removeprefix("sqlite:///")).absolute()
        database.parent.mkdir(parents=True, exist_ok=True)
        _check_sqlite(database)
        # SQLite has one writer at a time: ten, which is MLflow's default, wait for each other
        os.environ.setdefault("MLFLOW_ASYNC_TRACE_LOGGING_MAX_WORKERS", "1")
        # Parallel jobs race on the schema migration of a new SQLite store and on the experiment's name.
        with FileLock(database.with_name(f".{database.name}.lock")):
            self._client = MlflowClient(tracking_uri=uri)
            # Beside the database: MLflow's own default is a folder of wherever the first run was started.
            self._experiment_id = self._experiment((database.parent / "mlartifacts").as_uri())

    def _experiment(self, artifact_location: str | None) -> str:
        assert self._client is not None
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(
            self._client.create_experiment(
                self.experiment,
                artifact_location=artifact_location,
                # The UI opens on runs and curves; its default for an experiment with traces is a chat app's view.
                tags={"mlflow.experimentKind": "custom_model_development"},
            )
        )

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        assert self._client is not None and self.run_id is not None
        entries = [
            Param(k, str(v)[:_MAX_PARAM_CHARACTERS]) for k, v in params.items() if not k.endswith("_target_")
        ]
        for start in range(0, len(entries), 100):  # MLflow takes at most 100 at once
            self._client.log_batch(self.run_id, params=entries[start : start + 100])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the finite metrics at an optimiser step in one request."""
        from mlflow.entities import Metric

        if self._client is None or self.run_id is None:
            return
        now = int(time.time() * 1000)
        entries = [
            Metric(name, float(value), now, step)
            for name, value in ((_metric_name(k), v) for k, v in metrics.items())
            if math.isfinite(value) and step > self._logged.get(name, -1)
        ]
        if entries:
            self._client.log_batch(self.run_id, metrics=entries)

    def log_artifact(self, path: Path) -> None:
        """Upload a file, or a folder with its content; models only with ``log_model``."""
        if self._client is None or self.run_id is None or not path.exists():
            return
        if path.is_dir():
            if path.name not in ("model", "adapter") or self.log_model:
                self._client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
        else:
            folder = path.parent.name if path.parent.name == "plots" else None
            self._client.log_artifact(self.run_id, str(path), artifact_path=folder)

    def log_dataset(self, name: str, context: str, digest: str, source: str, rows: int) -> None:
        """Record a data set as an input of the run.

        Args:
            name: for example ``multihop_qa``.
            context: ``training``, ``validation`` or ``knowledge base``.
            digest: content hash; MLflow keeps 36 characters.
            source: where it came from.
            rows: how many examples or passages.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if self._client is None or self.run_id is None:
            return
        dataset = Dataset(
            name=name,
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"uri": source}),
            profile=json.dumps({"rows": rows}),
        )
        self._client.log_inputs(
            self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])]
        )

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Add rows to the table ``<name>.json``, which MLflow shows beside those of other runs.

        Args:
            name: of the table.
            rows: with the same keys each time; ``step`` is put in front of them.
            step: optimiser step. A step that the table holds already, in a resumed run, is left as it is.
        """
        if self._client is None or self.run_id is None or not rows:
            return
        file = f"{name}.json"
        if name not in self._tabled:
            self._tabled[name] = self._steps_of(file)
        if step in self._tabled[name]:
            return
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow asks pandas for columns in a way that pandas 3 warns of
            self._client.log_table(self.run_id, {"step": [step] * len(rows), **columns}, file)
        self._tabled[name].add(step)

    def _steps_of(self, file: str) -> set[int]:
        """The steps that a table holds; none where there is no such table yet."""
        import json
        from tempfile import TemporaryDirectory

        assert self._client is not None and self.run_id is not None
        if file not in {artifact.path for artifact in self._client.list_artifacts(self.run_id)}:
            return set()
        with TemporaryDirectory() as folder:
            table = json.loads(Path(self._client.download_artifacts(self.run_id, file, folder)).read_text())
        at = table["columns"].index("step")
        return {int(row[at]) for row in table["data"]}

    def log_traces(self, episodes: list[dict[str, Any]], step: int) -> None:
        """Record one MLflow trace for each episode, with a span for each hop and one for the answer.

        Args:
            episodes: dicts as in ``samples.jsonl``; the first ``max_traces`` are recorded.
            step: optimiser step of the evaluation.
        """
        if self._client is None or self.run_id is None or not episodes[: self.max_traces]:
            return
        import mlflow

        mlflow.set_tracking_uri(self.uri or self._local_uri())
        mlflow.set_experiment(experiment_id=self._experiment_id)
        for episode in episodes[: self.max_traces]:
            root = mlflow.start_span_no_context(
                name="episode",
                span_type="CHAIN",
                inputs={"question": episode["question"]},
                tags={"step": str(step)},
                metadata={"mlflow.sourceRun": self.run_id},
            )
            for hop in episode["hops"]:
                span = mlflow.start_span_no_context(
                    name=f"hop {hop['hop']}",
                    span_type="RETRIEVER",
                    parent_span=root,
                    inputs={"query": hop["query"]},
                    attributes={"latency_seconds": hop["latency_seconds"]},
                )
                span.end(
                    outputs=[
                        {
                            "page_content": d["text"],
                            "metadata": {"doc_id": d["doc_id"], "title": d["title"], "score": d["score"]},
                        }
                        for d in hop["documents"]
                    ]
                )
            answer = mlflow.start_span_no_context(
                name="answer",
                span_type="LLM",
                parent_span=root,
                inputs={
                    "question": episode["question"],
                    "documents": sum(len(h["documents"]) for h in episode["hops"]),
                },
            )
            answer.end(outputs=episode["completion"])
            root.end(outputs={"completion": episode["completion"], "rewards": episode["rewards"]})
        mlflow.flush_trace_async_logging()

    def end(self, status: str) -> None:
        """Close the run as FINISHED, FAILED or KILLED, so that none stays RUNNING after a crash."""
        if self._client is not None and self.run_id is not None:
            self._client.set_terminated(self.run_id, status=_STATUS.get(status, "FAILED"))


def _metric_name(name: str) -> str:
    """A name with the characters that MLflow accepts: ``recall@5`` is ``recall_at_5`` there."""
    return re.sub(r"[^\w/.\- :]", "_", name.replace("@", "_at_"))


def _check_sqlite(database: Path) -> None:
    """Fail at once on a SQLite file that can't be opened; MLflow would try again for two minutes."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(database)) as connection:
        connection.execute("pragma schema_version")
