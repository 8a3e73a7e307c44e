from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refragkit.errors import DataError
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.metrics import all_support_at, ndcg_at, recall_at, reciprocal_rank
from refragkit.tasks.evaluate_retrieval import as_metrics, as_table, evaluate_retrieval, measure, write_csv
from refragkit.types import Document, Question

QRELS = {"a": 1.0, "b": 2.0, "c": -1.0, "d": 0.0, "e": 1.0}
RANKING = ["x", "b", "c", "a", "y", "e"]


def test_values_worked_out_by_hand() -> None:
    assert recall_at(RANKING, QRELS, 2) == pytest.approx(1 / 3)
    assert recall_at(RANKING, QRELS, 6) == 1.0
    assert all_support_at(RANKING, QRELS, 5) == 0.0 and all_support_at(RANKING, QRELS, 6) == 1.0
    assert reciprocal_rank(RANKING, QRELS) == 0.5
    gained = 2 / math.log2(3) + 1 / math.log2(5) + 1 / math.log2(7)
    ideal = 2 + 1 / math.log2(3) + 1 / math.log2(4)
    assert ndcg_at(RANKING, QRELS, 10) == pytest.approx(gained / ideal)


def test_nothing_found_or_nothing_relevant() -> None:
    assert set(measure([], QRELS).values()) == {0.0}
    assert set(measure(RANKING, {}).values()) == {0.0}
    assert set(measure(RANKING, {"x": 0.0}).values()) == {0.0}


@settings(max_examples=40, deadline=None)
@given(st.permutations(["a", "b", "e", "x", "y", "z"]))
def test_agrees_with_scikit_learn(ranking: list[str]) -> None:
    from sklearn.metrics import ndcg_score

    truth = [[QRELS.get(d, 0.0) for d in ranking]]
    scores = [[float(-i) for i in range(len(ranking))]]
    for k in (2, 4, 6):
        assert ndcg_at(ranking, QRELS, k) == pytest.approx(ndcg_score(truth, scores, k=k), abs=1e-6)


def test_rows_by_dataset_and_hops(corpus: list[Document], tmp_path: Path) -> None:
    retriever = bm25(max_hops=2, top_k_per_hop=1).open_index(corpus)
    questions = [
        Question("1", "Silent Harbour", ("x",), ("film_a",), 1, metadata={"dataset": "one"}),
        Question(
            "2",
            "Which country is the director of The Glass Orchard from?",
            ("Kenya",),
            ("film_b", "dir_b"),
            2,
            metadata={"dataset": "two"},
        ),
    ]
    evaluation = evaluate_retrieval(retriever, questions)
    rows = evaluation.rows
    assert [r["group"] for r in rows] == ["all", "one", "two", "1 hops", "2 hops"]
    assert rows[0]["questions"] == 2.0 and rows[0]["recall@5"] == 1.0
    assert rows[2]["found_recall_hop_1"] == 0.5 and rows[2]["found_recall"] == 1.0
    assert float(rows[0]["queries_per_second"]) >= float(rows[0]["questions_per_second"]) > 0
    first, second = evaluation.records
    assert first["relevant"] == {"film_a": 1.0} and first["ranking"][0]["doc_id"] == "film_a"
    assert [hop["hop"] for hop in second["hops"]] == [1, 2]
    assert [d["doc_id"] for hop in second["hops"] for d in hop["documents"]] == ["film_b", "dir_b"]
    assert second["metrics"]["found_recall_hop_1"] == 0.5
    metrics = as_metrics(rows)
    assert metrics["retrieval/recall@5"] == metrics["retrieval/2_hops/recall@5"] == 1.0
    write_csv(rows, tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(encoding="utf-8") as f:
        assert [line["group"] for line in csv.DictReader(f)] == [r["group"] for r in rows]
    assert as_table(rows).row_count == 5


def test_qrels_replace_supporting_passages(corpus: list[Document]) -> None:
    retriever = bm25(max_hops=1, top_k_per_hop=2).open_index(corpus)
    question = Question("1", "tea grown on slopes", ("x",))
    assert (
        evaluate_retrieval(retriever, [question], qrels={"1": {"tea": 2.0, "chess": 0.0}}).rows[0]["ndcg@10"]
        == 1.0
    )
    with pytest.raises(DataError, match=r"'1' has no relevant document \(none in the qrels\)"):
        evaluate_retrieval(retriever, [question], qrels={"1": {"tea": 0.0}})
    with pytest.raises(DataError, match=r"supporting_ids is empty"):
        evaluate_retrieval(retriever, [question])
    with pytest.raises(DataError, match=r"no questions"):
        evaluate_retrieval(retriever, [])
