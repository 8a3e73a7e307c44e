from __future__ import annotations

import math
from pathlib import Path

import pytest

from refragkit.errors import ConfigError
from refragkit.tracking.mlflow import MLflowTracking
from refragkit.tracking.samples import sample_rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


def _client(store: Path):  # type: ignore[no-untyped-def]
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{store / 'mlflow.db'}")


def test_a_run_holds_parameters_metrics_artifacts_and_inputs(store: Path, tmp_path: Path) -> None:
    tracking = MLflowTracking(outputs=store)
    run_id = tracking.start(
        "first", {"method.lr": 0.1, "method._target_": "x", "long": "a" * 9000}, {"command": "c"}
    )
    assert run_id
    tracking.log_metrics({"train/loss": 2.0, "val/loss": math.nan}, step=1)
    tracking.log_metrics({"train/loss": 1.0}, step=2)
    (tmp_path / "plots").mkdir()
    for name in ("config.yaml", "plots/training.png"):
        (tmp_path / name).write_text("content")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("w")
    for name in ("config.yaml", "plots/training.png", "model", "missing"):
        tracking.log_artifact(tmp_path / name)
    tracking.log_dataset("multihop_qa", "training", "d" * 64, "bundled", 300)
    tracking.end("finished")

    client = _client(store)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["method.lr"] == "0.1"
    assert "method._target_" not in run.data.params
    assert len(run.data.params["long"]) == 6000
    assert run.data.tags["command"] == "c"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "train/loss")] == [
        (1, 2.0),
        (2, 1.0),
    ]
    assert "val/loss" not in run.data.metrics
    assert {a.path for a in client.list_artifacts(run_id)} == {"config.yaml", "plots", "model"}
    assert run.inputs.dataset_inputs[0].dataset.name == "multihop_qa"
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(store)


@pytest.mark.parametrize(("status", "shown"), [("failed", "FAILED"), ("interrupted", "KILLED")])
def test_a_run_that_did_not_finish_is_closed(store: Path, status: str, shown: str) -> None:
    tracking = MLflowTracking(outputs=store)
    run_id = tracking.start("other", {}, {})
    tracking.end(status)
    assert _client(store).get_run(run_id).info.status == shown


def test_models_stay_local_unless_asked_for(store: Path, tmp_path: Path) -> None:
    tracking = MLflowTracking(outputs=store, log_model=False)
    run_id = tracking.start("small", {}, {})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_text("w")
    tracking.log_artifact(tmp_path / "adapter")
    tracking.end("finished")
    assert _client(store).list_artifacts(run_id) == []


def test_traces_have_a_span_for_each_hop(store: Path) -> None:
    tracking = MLflowTracking(outputs=store)
    run_id = tracking.start("traced", {}, {})
    document = {"doc_id": "p1", "title": "T", "text": "x", "score": 1.0, "supporting": True}
    hops = [{"hop": n, "query": f"q{n}", "latency_seconds": 0.1, "documents": [document]} for n in (1, 2)]
    tracking.log_traces(
        [{"question": "who?", "completion": "me", "rewards": {"total": 0.5}, "hops": hops}], step=3
    )
    tracking.end("finished")
    traces = _client(store).search_traces(locations=[tracking._experiment_id])
    spans = [span.name for span in traces[0].data.spans]
    assert spans == ["episode", "hop 1", "hop 2", "answer"]
    assert traces[0].info.trace_metadata["mlflow.sourceRun"] == run_id


def test_no_more_traces_than_asked_for(store: Path) -> None:
    episodes = [
        {"question": f"who{n}?", "completion": "me", "rewards": {"total": 0.5}, "hops": []} for n in range(4)
    ]
    for most in (0, 3):
        tracking = MLflowTracking(outputs=store, experiment=f"at most {most}", max_traces=most)
        tracking.start("traced", {}, {})
        tracking.log_traces(episodes, step=1)
        traces = _client(store).search_traces(locations=[tracking._experiment_id])
        assert len(traces) == most
    with pytest.raises(ConfigError, match=r"tracking\.max_traces: expected 0 or more, got -1"):
        MLflowTracking(outputs=store, max_traces=-1)


def test_answers_of_each_evaluation_are_a_table_without_a_step_twice(store: Path) -> None:
    tracking = MLflowTracking(outputs=store)
    run_id = tracking.start("tabled", {}, {})
    assert run_id is not None
    document = {"doc_id": "p1", "title": "T", "text": "x", "score": 1.0, "supporting": True}
    other = {**document, "doc_id": "p2", "title": "", "supporting": False}
    hops = [{"hop": 1, "query": "q", "latency_seconds": 0.1, "documents": [document, other]}]
    record = {"id": "a", "question": "who?", "answers": ["me", "I"], "completion": "me", "em": 1.0, "f1": 1.0,
              "rewards": {"answer": 1.0, "total": 0.5}, "hops": hops, "ended": "end_token"}  # fmt: skip
    rows = sample_rows([record, {**record, "id": "b", "hops": []}])
    tracking.log_table("samples", rows, step=0)
    tracking.log_table("samples", rows, step=5)
    tracking.log_table("samples", [], step=6)
    tracking.end("interrupted")
    resumed = MLflowTracking(outputs=store)
    assert resumed.start("tabled", {}, {}, run_id=run_id) == run_id
    resumed.log_table("samples", rows, step=5)
    resumed.log_table("samples", rows, step=10)
    resumed.end("finished")
    table = _client(store).load_table(tracking._experiment_id, "samples.json", [run_id])
    assert table["step"].tolist() == [0, 0, 5, 5, 10, 10]
    assert table["id"].tolist() == ["a", "b"] * 3
    first = table.iloc[0]
    assert (first["queries"], first["documents"], first["supporting"]) == ("q", "T\np2", "T")
    assert (first["answers"], first["reward"], first["ended_by"]) == ("me\nI", 0.5, "end_token")


def test_artifacts_of_an_explicit_database_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracking = MLflowTracking(uri=f"sqlite:///{tmp_path}/deep/runs.db", outputs=tmp_path / "unused")
    tracking.start("x", {}, {})
    (tmp_path / "a.txt").write_text("a")
    tracking.log_artifact(tmp_path / "a.txt")
    tracking.end("finished")
    assert len(list((tmp_path / "deep" / "mlartifacts").rglob("a.txt"))) == 1
    assert not (tmp_path / "mlruns").exists()


def test_an_unreachable_store_is_one_readable_error(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    tracking = MLflowTracking(uri=f"sqlite:///{tmp_path / 'folder.db'}", outputs=tmp_path)
    with pytest.raises(ConfigError, match=r"tracking\.uri"):
        tracking.start("x", {}, {})


def test_a_resumed_run_goes_on_in_the_same_one_and_repeats_no_step(store: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    first = MLflowTracking(outputs=store)
    run_id = first.start("resumed", {}, {}, sweep=sweep)
    assert run_id
    for step in (1, 2):
        first.log_metrics({"train/loss": float(step), "val/recall@5": 0.5}, step)
    first.end("interrupted")

    again = MLflowTracking(outputs=store)
    assert again.start("resumed", {}, {}, run_id=run_id, sweep=sweep) == run_id
    client = _client(store)
    assert client.get_run(run_id).info.status == "RUNNING"
    for step in (2, 3):
        again.log_metrics({"train/loss": float(step), "val/recall@5": 0.5, "new": 1.0}, step)
    again.end("finished")
    for name, steps in (("train/loss", [1, 2, 3]), ("val/recall_at_5", [1, 2, 3]), ("new", [2, 3])):
        assert [m.step for m in client.get_metric_history(run_id, name)] == steps
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"

    other = MLflowTracking(outputs=store)
    second = other.start("another job", {}, {}, sweep=sweep)
    assert second and second != run_id
    parents = [client.get_run(i).data.tags["mlflow.parentRunId"] for i in (run_id, second)]
    assert parents[0] == parents[1]  # one run above both
    assert client.get_run(parents[0]).info.run_name == "sweep sweep"


def test_a_run_that_the_store_lost_begins_anew(store: Path) -> None:
    tracking = MLflowTracking(outputs=store)
    run_id = tracking.start("lost", {}, {}, run_id="0" * 32)
    assert run_id and run_id != "0" * 32
    tracking.end("finished")
