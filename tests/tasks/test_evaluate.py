"""``task=evaluate evaluate=retrieval`` as a run: figures, files, tracking, errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import pytrec_eval

import refragkit.tasks.evaluate_retrieval
from refragkit.config import compose
from refragkit.experiment import Run, run_experiment
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.tasks.evaluate_retrieval import RetrievalEvaluation
from refragkit.types import Question
from tests.tasks.conftest import Result

Execute = Callable[..., Result]

DOCUMENTS = [
    ("film_a", "Silent Harbour", "Silent Harbour is a 1961 drama film directed by Marta Lindqvist."),
    ("film_b", "The Glass Orchard", "The Glass Orchard is a comedy film directed by Paul Oduya."),
    ("dir_a", "Marta Lindqvist", "Marta Lindqvist was a film maker born in Sweden."),
    ("dir_b", "Paul Oduya", "Paul Oduya is a stage and film director from Kenya."),
    ("sweden", "Sweden", "Sweden is a country in northern Europe."),
    ("tea_1", "Oolong", "Oolong is a tea grown on mountain slopes."),
    ("tea_2", "Oolong", "Oolong is a tea grown on mountain slopes."),
    ("moss", "Sphagnum", "Sphagnum mosses store water and build peat."),
]
QUESTIONS = [
    ("q1", "In which country was the director of Silent Harbour born?", ["film_a", "dir_a"], "films"),
    ("q2", "Which country is the director of The Glass Orchard from?", ["film_b", "dir_b"], "films"),
    ("q3", "What stores water?", ["moss"], "plants"),
    ("q4", "Is there an answer?", [], "plants"),
    ("q5", "Where is oolong grown?", ["tea_1"], "plants"),
]


def _write(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def annotated(tmp_path: Path) -> Path:
    folder = tmp_path / "annotated"
    folder.mkdir()
    _write(folder / "corpus.jsonl", [{"id": i, "title": t, "text": x} for i, t, x in DOCUMENTS])
    rows = [
        {"id": i, "question": q, "answers": ["x"], "supporting_ids": s, "hops": len(s), "dataset": d}
        for i, q, s, d in QUESTIONS
    ]
    _write(folder / "train.jsonl", rows[:3])
    _write(folder / "validation.jsonl", rows[3:])
    return folder


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    folder = tmp_path / "judged"
    folder.mkdir()
    _write(folder / "corpus.jsonl", [{"id": i, "title": t, "text": x} for i, t, x in DOCUMENTS])
    texts = ["film director country", "tea on slopes", "peat", "nothing at all", "director of a film"]
    _write(folder / "queries.jsonl", [{"id": str(n), "text": t} for n, t in enumerate(texts, 1)])
    lines = ["1\tfilm_a\t1", "1\tdir_b\t3", "1\tmoss\t0", "1\tsweden\t-1", "2\ttea_2\t2", "2\tmoss\t1"]
    lines += ["3\ttea_1\t1", "4\ttea_1\t0", "5\tdir_a\t2", "5\tdir_b\t1", "5\tfilm_a\t2", "5\tfilm_b\t1"]
    (folder / "qrels.tsv").write_text("\n".join(["query_id\tdoc_id\tscore", *lines]) + "\n")
    return folder


def _lines(result: Result) -> list[dict[str, object]]:
    text = (result.folder / "retrieval.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_figures_by_dataset_hops_and_hop(
    execute: Execute, annotated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("neither model nor tokenizer is needed")

    monkeypatch.setattr(Run, "model", property(refuse))
    monkeypatch.setattr(Run, "tokenizer", property(refuse))
    result = execute(
        "task=evaluate",
        "retriever=bm25",
        "retriever.max_hops=2",
        "retriever.top_k_per_hop=1",
        f"data.path={annotated}",
    )
    assert result.summary["status"] == "finished", result.err
    metrics = result.summary["metrics"]
    assert metrics["retrieval/questions"] == 4.0 and metrics["retrieval/left_out"] == 1.0
    assert metrics["retrieval/films/recall@2"] == metrics["retrieval/2_hops/all_support@5"] == 1.0
    assert metrics["retrieval/films/found_recall_hop_1"] == 0.5
    assert metrics["retrieval/films/found_recall_hop_2"] == 1.0
    assert metrics["retrieval/queries_per_second"] > 0
    for key in ("recall@2", "recall@5", "recall@10", "recall@20", "all_support@20", "ndcg@10", "mrr"):
        for group in ("", "films/", "plants/", "1_hops/", "2_hops/"):
            assert 0 <= metrics[f"retrieval/{group}{key}"] <= 1
    assert result.summary["artifacts"] == {
        "retrieval": "retrieval.csv",
        "rankings": "retrieval.jsonl",
        "retrieval_plot": "plots/retrieval.png",
    }
    with (result.folder / "retrieval.csv").open(encoding="utf-8") as file:
        rows = {row["group"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["all", "films", "plants", "1 hops", "2 hops"]
    assert float(rows["films"]["recall@2"]) == 1.0
    assert (result.folder / "plots" / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    first = _lines(result)[0]
    assert (first["id"], first["relevant"]) == ("q1", {"film_a": 1.0, "dir_a": 1.0})
    assert [hop["documents"][0]["doc_id"] for hop in first["hops"]] == ["film_a", "dir_a"]  # type: ignore[attr-defined]
    assert "1 of 5 questions have no relevant document: left out" in result.out
    assert "queries/s" in result.out and "films" in result.out


def test_a_dataset_may_be_called_as_another_row_is(execute: Execute, annotated: Path) -> None:
    for name in ("train.jsonl", "validation.jsonl"):
        text = (annotated / name).read_text()
        (annotated / name).write_text(text.replace('"films"', '"all"').replace('"plants"', '"2 hops"'))
    result = execute("task=evaluate", "retriever=bm25", f"data.path={annotated}")
    with (result.folder / "retrieval.csv").open(encoding="utf-8") as file:
        counts = {row["group"]: float(row["questions"]) for row in csv.DictReader(file)}
    assert counts == {"all": 4, "dataset 2 hops": 2, "dataset all": 2, "1 hops": 2, "2 hops": 2}


def test_parts_of_the_questions(execute: Execute, annotated: Path) -> None:
    common = ["task=evaluate", "retriever=bm25", f"data.path={annotated}"]
    ids = {
        split: [row["id"] for row in _lines(execute(*common, f"split={split}"))]
        for split in ("all", "train", "validation")
    }
    assert ids == {"all": ["q1", "q2", "q3", "q5"], "train": ["q1", "q2", "q3"], "validation": ["q5"]}


def test_a_single_search_is_ranked_beyond_what_the_hop_keeps(execute: Execute, annotated: Path) -> None:
    common = ["task=evaluate", "retriever=bm25", "retriever.planner=repeat", f"data.path={annotated}"]
    once = execute(*common, "retriever.max_hops=1", "retriever.top_k_per_hop=1")
    whole = execute(*common, "retriever.max_hops=8", "retriever.top_k_per_hop=1")
    for one, other in zip(_lines(once), _lines(whole), strict=True):
        assert len(one["hops"]) == 1 and len(one["ranking"]) == len(DOCUMENTS)  # type: ignore[arg-type]
        assert [d["doc_id"] for d in one["ranking"]] == [d["doc_id"] for d in other["ranking"]]  # type: ignore[attr-defined]


def test_the_gold_control_finds_everything(execute: Execute, annotated: Path, judged: Path) -> None:
    for folder in (annotated, judged):
        result = execute("task=evaluate", "retriever=gold", f"data.path={folder}")
        assert result.summary["metrics"]["retrieval/recall@5"] == 1.0, result.err
        assert result.summary["metrics"]["retrieval/ndcg@10"] == 1.0


@pytest.mark.parametrize("planner", ["repeat", "expand"])
def test_metrics_of_a_collection_are_those_of_trec_eval(execute: Execute, judged: Path, planner: str) -> None:
    result = execute(
        "task=evaluate",
        "retriever=bm25",
        f"retriever.planner={planner}",
        "retriever.max_hops=2",
        f"data.path={judged}",
    )
    assert result.summary["status"] == "finished", result.err
    lines = (judged / "qrels.tsv").read_text().splitlines()[1:]
    qrels: dict[str, dict[str, int]] = {}
    for query_id, doc_id, score in (line.split("\t") for line in lines):
        qrels.setdefault(query_id, {})[doc_id] = int(score)
    # Two documents are equal: trec_eval breaks ties in its own way, so that it is given the ranks as scores.
    ranked = {row["id"]: [d["doc_id"] for d in row["ranking"]] for row in _lines(result)}  # type: ignore[attr-defined]
    run = {i: {d: float(-rank) for rank, d in enumerate(ids)} for i, ids in ranked.items()}
    assert set(run) == {"1", "2", "3", "5"}  # 4 has nothing relevant
    measures = {"recall.2,5,10,20", "ndcg_cut.10", "recip_rank"}
    expected = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run)
    names = {f"recall@{k}": f"recall_{k}" for k in (2, 5, 10, 20)}
    names |= {"ndcg@10": "ndcg_cut_10", "mrr": "recip_rank"}
    for row in _lines(result):
        for ours, theirs in names.items():
            assert row["metrics"][ours] == pytest.approx(expected[row["id"]][theirs], abs=1e-6), (row, ours)  # type: ignore[index]
    for ours, theirs in names.items():
        mean = sum(e[theirs] for e in expected.values()) / len(expected)
        assert result.summary["metrics"][f"retrieval/{ours}"] == pytest.approx(mean, abs=1e-6)


def test_runs_of_a_sweep_can_be_told_apart(annotated: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    names = []
    for number, (retriever, hops) in enumerate([("bm25", 1), ("bm25", 2), ("random", 2)]):
        cfg = compose(
            [
                "task=evaluate",
                f"retriever={retriever}",
                f"retriever.max_hops={hops}",
                f"data.path={annotated}",
                f"paths.outputs={tmp_path / 'outputs'}",
            ]
        )
        summary = run_experiment(cfg, tmp_path / f"{number}-evaluate")
        assert summary.status == "finished", summary.error
        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}")
        run = client.get_run(str(summary.mlflow_run_id))
        names.append(run.info.run_name)
        assert run.data.params["retriever.max_hops"] == str(hops)
        # MLflow allows no @ in a name.
        assert run.data.metrics["retrieval/films/recall_at_5"] == summary.metrics["retrieval/films/recall@5"]
        files = {f.path for f in client.list_artifacts(run.info.run_id)}
        assert {"retrieval.csv", "retrieval.jsonl", "plots", "summary.json"} <= files
        contexts = {t.value for i in run.inputs.dataset_inputs for t in i.tags}
        assert contexts == {"evaluation", "knowledge base"}
    assert names == [
        "evaluate-retrieval-bm25-1-hop 0-evaluate",
        "evaluate-retrieval-bm25-2-hop 1-evaluate",
        "evaluate-retrieval-random-2-hop 2-evaluate",
    ]


def test_all_questions_go_in_one_batch(
    execute: Execute, annotated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = refragkit.tasks.evaluate_retrieval.evaluate_retrieval

    def count(
        retriever: MultiHopRetriever, questions: Sequence[Question], **options: object
    ) -> RetrievalEvaluation:
        search = retriever.retriever.search_for

        def counted(asked: Sequence[Question], *arguments: object) -> object:
            calls.append(len(asked))
            return search(asked, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(retriever.retriever, "search_for", counted)
        return real(retriever, questions, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(refragkit.tasks.evaluate_retrieval, "evaluate_retrieval", count)
    execute(
        "task=evaluate",
        "retriever=bm25",
        "retriever.planner=repeat",
        "retriever.max_hops=2",
        f"data.path={annotated}",
    )
    assert calls == [4, 4]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["retriever=none"], ["retriever=none finds nothing", "dense, bm25 or hybrid"]),
        (["dry_run=true"], ["dry_run=true is for task=train"]),
        (["data.path=/nowhere"], ["data.path=/nowhere", "does not exist"]),
        (["retriever.planner=model"], ["planner=model needs a language model", "choose planner expand"]),
        (["split=train", "JUDGED"], ["split=train: a collection with qrels.tsv has no splits"]),
        (["data.max_train_questions=3", "JUDGED"], ["data.max_train_questions=3", "evaluated whole"]),
        (["split=validation", "BARE"], ["none of 1 questions has a relevant document", "supporting_ids"]),
    ],
)
def test_errors_say_what_to_change(
    execute: Execute, annotated: Path, judged: Path, overrides: list[str], parts: list[str]
) -> None:
    if "BARE" in overrides:
        _write(annotated / "validation.jsonl", [{"id": "v", "question": "Who?", "answers": ["x"]}])
    folder = judged if "JUDGED" in overrides else annotated
    given = [o for o in overrides if "=" in o]
    result = execute("task=evaluate", "retriever=bm25", f"data.path={folder}", *given)
    assert result.summary["status"] == "failed"
    for part in parts:
        assert part in result.summary["error"]
    assert result.err.count("error:") == 1 and "Traceback" not in result.err


def test_wrong_options_are_refused_before_the_run() -> None:
    from refragkit.errors import ConfigError

    with pytest.raises(
        ConfigError, match=r"split: expected one of all, train, validation or null, got 'test'"
    ):
        compose(["task=evaluate", "split=test"])
    with pytest.raises(ConfigError, match=r"evaluate: expected one of retrieval, rag, got 'retreival'"):
        compose(["task=evaluate", "evaluate=retreival"])


def test_conversations_have_nothing_to_retrieve(execute: Execute, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": "b"}],
        }
        for i in range(9)
    ]
    _write(tmp_path / "chat.jsonl", rows)
    result = execute("task=evaluate", "retriever=bm25", "data=chat", f"data.path={tmp_path / 'chat.jsonl'}")
    assert result.summary["status"] == "failed"
    assert "choose data=multihop_qa" in result.summary["error"]
