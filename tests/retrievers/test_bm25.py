from __future__ import annotations

from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st

from refragkit.errors import RetrievalError
from refragkit.retrievers.base import best_first, passage_text
from refragkit.retrievers.bm25 import BM25Retriever, words
from refragkit.types import Document


def test_scores_are_those_of_bm25s(corpus: list[Document]) -> None:
    stemmer = Stemmer.Stemmer("english")
    tokens = [stemmer.stemWords(words(passage_text(d))) for d in corpus]
    reference = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    reference.index(tokens, show_progress=False)
    query = "directors of silent films in countries"
    expected = reference.get_scores(stemmer.stemWords(words(query)))
    retriever = BM25Retriever()
    retriever.index(corpus)
    hits = retriever.search([query], len(corpus))[0]
    assert {h.doc_id: h.score for h in hits} == pytest.approx(
        {d.doc_id: float(s) for d, s in zip(corpus, expected, strict=True)}
    )


def test_stemming_matches_other_forms(corpus: list[Document]) -> None:
    retriever = BM25Retriever()
    retriever.index(corpus)
    assert retriever.search(["growing teas"], 1)[0][0].doc_id == "tea"


def test_a_query_without_known_words_scores_zero(corpus: list[Document]) -> None:
    retriever = BM25Retriever()
    retriever.index(corpus)
    for hits in retriever.search(["", "zzz qqq", "the of and", "!?"], 2):
        assert [h.score for h in hits] == [0.0, 0.0]


def test_a_corpus_of_stop_words(tmp_path: Path) -> None:
    retriever = BM25Retriever()
    retriever.index([Document("a", "", "the of"), Document("b", "", "and")])
    retriever.save(tmp_path / "i")
    retriever.load(tmp_path / "i")
    assert [h.doc_id for h in retriever.search(["the"], 5)[0]] == ["a", "b"]


def test_bad_settings_are_refused(corpus: list[Document]) -> None:
    with pytest.raises(RetrievalError, match=r"0 <= retriever.b <= 1, got k1=1.5, b=2"):
        BM25Retriever(b=2)
    with pytest.raises(RetrievalError, match=r"a finite retriever.k1 >= 0.*got k1=inf"):
        BM25Retriever(k1=float("inf"))
    with pytest.raises(RetrievalError, match=r"stemmer='klingon' is unknown.*english"):
        BM25Retriever(stemmer="klingon").index(corpus)
    with pytest.raises(RetrievalError, match=r"no index yet"):
        BM25Retriever().search(["a"], 1)
    retriever = BM25Retriever()
    retriever.index(corpus)
    with pytest.raises(RetrievalError, match=r"k must be at least 1, got 0"):
        retriever.search(["a"], 0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 0.0, -1.0, 0.5, 1.0, 2.5]), max_size=60),
    st.integers(1, 12),
    st.data(),
)
def test_the_best_of_many_equal_scores(values: list[float], k: int, data: st.DataObject) -> None:
    scores, n = np.array(values), len(values)
    id_rank = np.array(data.draw(st.permutations(range(n + 3))), dtype=np.int64)
    positions = np.array(data.draw(st.permutations(range(n + 3)))[:n], dtype=np.int64)
    expected = sorted(range(n), key=lambda i: (-values[i], id_rank[positions[i]]))[:k]
    assert best_first(scores, positions, id_rank, k).tolist() == expected
