from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from refragkit.errors import RetrievalError
from refragkit.retrievers.passage_graph import PassageGraph
from refragkit.retrievers.planners.evidence import (
    FEATURES,
    WEIGHTS_FILE,
    EvidenceFeatures,
    EvidenceModel,
    QuestionTerms,
    fit_evidence,
)
from refragkit.types import Document

QUESTION = "country director Silent Harbour born"


def features(corpus: list[Document], seeds: dict[str, float]) -> dict[str, dict[str, float]]:
    """Feature values by document and name, for the whole corpus as the pool."""
    graph = PassageGraph.build(corpus)
    position = {d.doc_id: i for i, d in enumerate(corpus)}
    ids = np.array(graph.term_ids(QUESTION)[0])
    terms = QuestionTerms(ids, float(graph.idf[ids].sum()), {position["film_a"]: None})
    pool = np.arange(len(corpus))
    compute = EvidenceFeatures(graph)
    arguments = (
        terms,
        {position[s]: v for s, v in seeds.items()},
        pool,
        np.zeros(len(pool)),
        np.ones(len(pool)),
    )
    x = compute(*arguments)
    assert np.array_equal(x, compute(*arguments))  # the scratch memory is clean
    return {d.doc_id: dict(zip(FEATURES, x[i].tolist(), strict=True)) for i, d in enumerate(corpus)}


def test_features_say_how_the_seed_leads_to_a_passage(corpus: list[Document]) -> None:
    x = features(corpus, {"film_a": 0.9})
    assert x["film_a"]["named"] == 1.0 and x["film_b"]["named"] == 0.0
    assert x["dir_a"]["linked"] == 0.9 and x["dir_a"]["link_count"] == 1.0
    assert x["dir_b"]["linked"] == x["bread"]["linked"] == 0.0
    # "born" stands in the director's passage and not in the film's.
    assert x["dir_a"]["link_missing"] > 0 and x["dir_a"]["link_context"] > 0
    assert x["dir_a"]["shared_names"] > 0 == x["bread"]["shared_names"]
    assert 0 < x["dir_a"]["link_early"] < 1
    assert x["film_a"]["shared_names"] == 0.0  # not with itself
    assert x["film_a"]["covered"] > x["dir_a"]["covered"] > x["tea"]["covered"] == 0.0


def test_backlinks_count_too(corpus: list[Document]) -> None:
    x = features(corpus, {"dir_a": 0.8})
    assert x["film_a"]["links_back"] == 0.8 and x["film_a"]["back_missing"] > 0
    assert x["sweden"]["linked"] == 0.8 and x["sweden"]["links_back"] == 0.0
    assert x["sweden"]["popularity"] > 0 == x["bread"]["popularity"]


def test_the_strongest_seed_counts(corpus: list[Document]) -> None:
    x = features(corpus, {"film_a": 0.9, "film_b": 0.4})
    assert x["dir_a"]["linked"] == 0.9 and x["dir_b"]["linked"] == 0.4


def test_the_shipped_weights_fit_the_features() -> None:
    content = json.loads(WEIGHTS_FILE.read_text(encoding="utf-8"))
    assert content["features"] == list(FEATURES)
    assert "885 of the 1,399" in content["note"]
    probabilities = EvidenceModel.load()(np.zeros((3, len(FEATURES))))
    assert ((probabilities > 0) & (probabilities < 1)).all()


def test_fit_learns_is_deterministic_and_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = [rng.random((20, len(FEATURES))) for _ in range(20)]
    y = [rows[:, 0] * rows[:, 4] > 0.3 for rows in x]
    first, second = (fit_evidence(x, y, hidden=8, steps=200) for _ in range(2))
    assert all(np.array_equal(first.weights[k], second.weights[k]) for k in first.weights)
    right = [((first(rows) > 0.5) == labels).mean() for rows, labels in zip(x, y, strict=True)]
    assert np.mean(right) > 0.95
    first.save(tmp_path / "w.json", "a note")
    assert EvidenceModel.load(tmp_path / "w.json")(x[0]) == pytest.approx(first(x[0]), abs=1e-3)


def test_weights_of_another_shape_are_refused() -> None:
    weights = dict(EvidenceModel.load().weights)
    with pytest.raises(RetrievalError, match=r"expected w2 of shape \(16,\), got \(4,\)"):
        EvidenceModel({**weights, "w2": np.zeros(4)})
