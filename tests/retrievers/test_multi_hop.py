from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from refragkit.errors import ConfigError, DataError, RetrievalError
from refragkit.retrievers.bm25 import BM25Retriever, bm25
from refragkit.retrievers.controls import GoldRetriever, gold
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.base import PLANNERS, QueryPlanner, Trail
from refragkit.retrievers.planners.expand import ExpandPlanner
from refragkit.retrievers.planners.fit_expand import fit_expand
from refragkit.retrievers.planners.model import ModelPlanner
from refragkit.types import Document, Hit, Question


class CountingBM25(BM25Retriever):
    """BM25 that remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        return super().search(queries, k)


def test_hop_2_asks_something_new_built_from_what_hop_1_found(
    corpus: list[Document], questions: list[Question]
) -> None:
    hops = bm25(max_hops=3, top_k_per_hop=1).open_index(corpus).retrieve(questions[:1])[0]
    assert hops[0].query == questions[0].question
    assert [h.doc_id for h in hops[0].new_documents] == ["film_a"]
    # The director's name is in the film's passage only, not in the question.
    assert "Marta Lindqvist" in hops[1].query and "Lindqvist" not in questions[0].question
    assert [h.doc_id for h in hops[1].new_documents] == ["dir_a"]
    assert len({h.query for h in hops}) == len(hops)


def test_expand_reaches_what_single_hop_misses(corpus: list[Document], questions: list[Question]) -> None:
    retriever = bm25(max_hops=2, top_k_per_hop=1).open_index(corpus)
    for hops, question in zip(retriever.retrieve(questions[:2]), questions[:2], strict=True):
        assert {d.doc_id for h in hops for d in h.new_documents} == set(question.supporting_ids)


def test_all_questions_go_hop_by_hop_in_one_batch(corpus: list[Document], questions: list[Question]) -> None:
    base = CountingBM25()
    MultiHopRetriever(base, "repeat", max_hops=3, top_k_per_hop=2).open_index(corpus).retrieve(questions)
    assert [len(b) for b in base.batches] == [3, 3, 3]


def test_the_result_of_a_question_does_not_depend_on_its_batch(
    corpus: list[Document], questions: list[Question]
) -> None:
    retriever = bm25(max_hops=3, top_k_per_hop=2).open_index(corpus)

    def ids(batch: Sequence[Question]) -> list[list[tuple[str, list[str]]]]:
        return [[(h.query, [d.doc_id for d in h.hits]) for h in hops] for hops in retriever.retrieve(batch)]

    together = ids(questions)
    assert together == [ids([q])[0] for q in questions]
    assert together == ids(questions)
    assert together[::-1] == ids(questions[::-1])


def test_it_stops_when_nothing_new_is_left(corpus: list[Document], questions: list[Question]) -> None:
    hops = bm25(planner="repeat", max_hops=50, top_k_per_hop=5).open_index(corpus).retrieve(questions)
    assert all(len(h) == 3 for h in hops)  # 12 documents: 5, 5, 2


def test_gold_planner_asks_the_decomposition_with_answers_filled_in(corpus: list[Document]) -> None:
    question = Question(
        "m",
        "What is the capital of the country where the maker of Silent Harbour was born?",
        ("Stockholm",),
        ("film_a", "sweden"),
        decomposition=(
            {"question": "Silent Harbour >> director", "answer": "Marta Lindqvist"},
            {"question": "where was #1 born", "answer": "Sweden"},
        ),
    )
    hops = bm25(planner="gold", max_hops=4, top_k_per_hop=1).open_index(corpus).retrieve([question])[0]
    assert [h.query for h in hops] == ["Silent Harbour director", "where was Marta Lindqvist born"]


def test_gold_planner_without_decomposition_asks_once(
    corpus: list[Document], questions: list[Question]
) -> None:
    hops = bm25(planner="gold").open_index(corpus).retrieve(questions)
    assert [[h.query for h in hop] for hop in hops] == [[q.question] for q in questions]


def test_gold_control_returns_exactly_the_supporting_passages(
    corpus: list[Document], questions: list[Question]
) -> None:
    many = Question("q4", "All of them?", ("yes",), ("chess", "tea", "bread", "moss"), 4)
    found = gold(top_k_per_hop=3).open_index(corpus).retrieve([*questions, many])
    got = [tuple(d.doc_id for h in hops for d in h.new_documents) for hops in found]
    assert got == [q.supporting_ids for q in questions] + [many.supporting_ids]
    assert [len(hops) for hops in found] == [1, 1, 1, 2]
    with pytest.raises(RetrievalError, match="'nowhere' is not in the indexed corpus of 12"):
        gold().open_index(corpus).retrieve([Question("x", "?", ("a",), ("nowhere",))])


def test_none_records_one_empty_hop(corpus: list[Document], questions: list[Question]) -> None:
    from refragkit.retrievers.controls import none

    found = none().open_index(corpus).retrieve(questions)
    assert all(len(hops) == 1 and hops[0].new_documents == () for hops in found)


def test_a_planner_of_ones_own(corpus: list[Document], questions: list[Question]) -> None:
    class Reversing(QueryPlanner):
        def plan(self, trails: Sequence[Trail]) -> list[str | None]:
            return [None if t.hops else " ".join(reversed(t.question.question.split())) for t in trails]

    hops = MultiHopRetriever(BM25Retriever(), Reversing()).open_index(corpus).retrieve(questions)
    assert [h[0].query for h in hops][2] == "sourdough? leavens What"


def test_a_model_writes_the_follow_up_queries(corpus: list[Document], questions: list[Question]) -> None:
    batches: list[int] = []

    def write(trails: Sequence[Trail]) -> list[str | None]:
        batches.append(len(trails))
        names = {"q1": "Marta Lindqvist", "q2": None, "q3": trails[-1].question.question}
        return [names[t.question.id] for t in trails]

    retriever = MultiHopRetriever(BM25Retriever(), ModelPlanner(write), 3, 1).open_index(corpus)
    hops = retriever.retrieve(questions)
    assert [[h.query for h in trail] for trail in hops] == [
        [questions[0].question, "Marta Lindqvist"],
        [questions[1].question],
        [questions[2].question],
    ]
    assert batches == [3, 1]
    with pytest.raises(ConfigError, match=r"planner=model needs a language model"):
        bm25(planner="model").open_index(corpus).retrieve(questions)


def test_a_model_may_write_the_first_query_too(corpus: list[Document], questions: list[Question]) -> None:
    def write(trails: Sequence[Trail]) -> list[str | None]:
        first = {"q1": "Marta Lindqvist", "q2": None, "q3": "sourdough"}
        return [None if t.hops else first[t.question.id] for t in trails]

    planner = ModelPlanner(first_query="model")
    retriever = MultiHopRetriever(BM25Retriever(), planner, 3, 1).open_index(corpus)
    with pytest.raises(ConfigError, match=r"planner=model needs a language model"):
        retriever.retrieve(questions)
    with planner.written_by(write):
        hops = retriever.retrieve(questions)
    assert [[h.query for h in trail] for trail in hops] == [["Marta Lindqvist"], [], ["sourdough"]]
    assert planner.writer is None


def test_weights_can_be_fitted_on_ones_own_questions(
    corpus: list[Document], questions: list[Question]
) -> None:
    retriever = bm25(max_hops=2, top_k_per_hop=1).open_index(corpus)
    model = fit_expand(retriever, questions[:2], hidden=4, steps=100)
    again = fit_expand(
        MultiHopRetriever(retriever.retriever, ExpandPlanner(model)).open_index(corpus), questions[:2]
    )
    assert again.weights["w1"].shape == (15, 16)
    fitted = MultiHopRetriever(retriever.retriever, ExpandPlanner(model), 2, 1).open_index(corpus)
    for hops, question in zip(fitted.retrieve(questions[:2]), questions[:2], strict=True):
        assert {d.doc_id for h in hops for d in h.new_documents} == set(question.supporting_ids)
    with pytest.raises(DataError, match=r"planner expand, got repeat"):
        fit_expand(bm25(planner="repeat").open_index(corpus), questions)
    with pytest.raises(DataError, match=r"none of 1 questions"):
        fit_expand(retriever, [Question("x", "Silent Harbour director?", ("a",), ("nowhere",))])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": "expnd"}, f"'expnd' is unknown: expected one of {', '.join(sorted(PLANNERS))}"),
        ({"max_hops": 0}, "max_hops must be at least 1, got 0"),
        ({"top_k_per_hop": -1}, "top_k_per_hop must be at least 1, got -1"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiHopRetriever(GoldRetriever(), **arguments)  # type: ignore[arg-type]


def test_documents_without_titles_do_no_harm(questions: list[Question], tmp_path: Path) -> None:
    plain = [
        Document(f"d{i}", "", t) for i, t in enumerate(["wild yeast leavens bread", "tea", "a boat", "chess"])
    ]
    single = bm25(planner="repeat", max_hops=1, top_k_per_hop=2).open_index(plain, tmp_path)
    multi = bm25(planner="expand", max_hops=3, top_k_per_hop=2).open_index(plain, tmp_path)
    first = [hops[0].new_documents for hops in single.retrieve(questions)]
    assert [hops[0].new_documents for hops in multi.retrieve(questions)] == first
