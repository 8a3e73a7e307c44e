"""What holds for every option in conf/retriever; a new file there is tested by being there."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra.utils import get_object

from refragkit.errors import RetrievalError
from refragkit.types import Document, Question

from .conftest import CONF, OPTIONS, build, retriever_node

QUERIES = ["director of Silent Harbour", "capital city", "tea"]


@pytest.mark.parametrize("option", OPTIONS)
def test_the_file_opens_with_its_description_and_its_command(option: str) -> None:
    first, second = (CONF / "retriever" / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("# ") and len(first) > 10
    assert second.startswith("# python run.py ") and f"retriever={option}" in second


@pytest.mark.parametrize("option", OPTIONS)
def test_keys_are_the_signature(option: str) -> None:
    node = retriever_node(option)
    parameters = set(inspect.signature(get_object(node._target_)).parameters) - {"cache_dir"}
    assert set(node) - {"_target_"} == parameters


@pytest.mark.parametrize("option", OPTIONS)
def test_hits_are_ordered_distinct_and_at_most_k(option: str, corpus: list[Document], cache: Path) -> None:
    retriever = build(option, cache).open_index(corpus)
    for k in (1, 3, len(corpus) + 5):
        found = retriever.search(QUERIES, k)
        assert len(found) == len(QUERIES)
        for hits in found:
            assert len(hits) in ({0} if option in ("none", "gold") else {min(k, len(corpus))})
            keys = [(-h.score, h.doc_id) for h in hits]
            assert keys == sorted(keys)
            assert len({h.doc_id for h in hits}) == len(hits)
            assert all(h.document is next(d for d in corpus if d.doc_id == h.doc_id) for h in hits)
    assert retriever.search([], 3) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_a_batch_is_its_queries_one_by_one(option: str, corpus: list[Document], cache: Path) -> None:
    retriever = build(option, cache).open_index(corpus)
    assert retriever.search(QUERIES, 4) == [retriever.search([q], 4)[0] for q in QUERIES]


@pytest.mark.parametrize("option", [o for o in OPTIONS if o not in ("none", "gold", "random")])
def test_equal_documents_tie_by_id(option: str, cache: Path) -> None:
    texts = ["a green apple on a table"] * 9 + ["a boat on the sea"]
    documents = [Document(f"d{i}", "", t) for i, t in zip((7, 3, 9, 1, 5, 0, 2, 8, 6, 4), texts, strict=True)]
    hits = build(option, cache).open_index(documents).search(["apple"], 3)[0]
    assert [h.doc_id for h in hits] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("option", [o for o in OPTIONS if o not in ("none", "gold", "random")])
def test_empty_documents_are_never_found(option: str, corpus: list[Document], cache: Path) -> None:
    documents = [*corpus, Document("blank", "", " \n"), Document("void", "", "")]
    hits = build(option, cache).open_index(documents).search(["anything at all"], 50)[0]
    assert {h.doc_id for h in hits} == {d.doc_id for d in corpus}


@pytest.mark.parametrize("option", OPTIONS)
def test_save_and_load_give_the_same_hits(
    option: str, corpus: list[Document], cache: Path, tmp_path: Path
) -> None:
    first = build(option, cache).retriever
    first.index(corpus)
    first.save(tmp_path / "index")
    second = build(option, cache).retriever
    second.load(tmp_path / "index")
    assert second.search(QUERIES, 4) == first.search(QUERIES, 4)
    assert [dict(d.metadata) for d in second.documents] == [dict(d.metadata) for d in corpus]


@pytest.mark.parametrize("option", [o for o in OPTIONS if o not in ("none", "gold", "random")])
def test_score_is_what_search_says(option: str, corpus: list[Document], cache: Path) -> None:
    retriever = build(option, cache).open_index(corpus).retriever
    found = retriever.search(QUERIES, 5)
    scores = retriever.score(QUERIES, [[h.doc_id for h in hits] for hits in found])
    for hits, values in zip(found, scores, strict=True):
        assert values == pytest.approx([h.score for h in hits], abs=2e-6)
    assert retriever.score(["tea"], [[]]) == [[]]


@pytest.mark.parametrize("option", OPTIONS)
def test_wrong_use_is_one_clear_message(option: str, corpus: list[Document], cache: Path) -> None:
    retriever = build(option, cache)
    with pytest.raises(RetrievalError, match="corpus is empty"):
        retriever.open_index([])
    with pytest.raises(RetrievalError, match="'tea' is used by documents number 8 and 12"):
        retriever.open_index([*corpus, corpus[8]])


@pytest.mark.parametrize("option", OPTIONS)
def test_multi_hop_respects_its_limits(
    option: str, corpus: list[Document], questions: list[Question], cache: Path
) -> None:
    retriever = build(option, cache).open_index(corpus)
    for hops in retriever.retrieve(questions, max_hops=2, top_k_per_hop=2):
        assert 1 <= len(hops) <= 2
        assert [h.hop for h in hops] == list(range(1, len(hops) + 1))
        ids = [d.doc_id for h in hops for d in h.new_documents]
        assert len(set(ids)) == len(ids) and all(len(h.hits) <= 2 for h in hops)
        assert all(h.latency_seconds >= 0 for h in hops)
