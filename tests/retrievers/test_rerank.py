"""Reranking with a cross-encoder made on the spot: tiny, random, and as real as any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from refragkit.errors import RetrievalError
from refragkit.retrievers.base import passage_text
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.controls import gold
from refragkit.retrievers.encoder import resolve_encoder
from refragkit.retrievers.rerank import RerankRetriever
from refragkit.types import Document, Question


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("cross") / "model"
    tokenizer = AutoTokenizer.from_pretrained(resolve_encoder(None))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_order_is_the_cross_encoders(corpus: list[Document], cross_encoder: Path, tmp_path: Path) -> None:
    retriever = bm25(rerank=str(cross_encoder)).open_index(corpus, tmp_path)
    base = retriever.retriever
    assert isinstance(base, RerankRetriever) and retriever.name == "bm25"
    query = "director of Silent Harbour"
    hits = retriever.search([query], 12)[0]
    logits = base._load().predict([(query, passage_text(d)) for d in corpus], show_progress_bar=False)
    expected = {d.doc_id: 1 / (1 + np.exp(-float(s))) for d, s in zip(corpus, np.ravel(logits), strict=True)}
    assert {h.doc_id: h.score for h in hits} == pytest.approx(expected, abs=2e-6)
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)
    assert retriever.search([query], 3)[0] == hits[:3]


def test_only_the_first_hits_are_read_again(corpus: list[Document], cross_encoder: Path) -> None:
    plain = bm25().open_index(corpus)
    base = RerankRetriever(plain.retriever, str(cross_encoder), depth=3)
    base.open_index(corpus)
    first = {h.doc_id for h in plain.search(["capital of a country"], 3)[0]}
    assert {h.doc_id for h in base.search(["capital of a country"], 2)[0]} < first


def test_hops_and_controls_go_through_it(
    corpus: list[Document], questions: list[Question], cross_encoder: Path
) -> None:
    hops = bm25(rerank=str(cross_encoder), max_hops=2, top_k_per_hop=2).open_index(corpus).retrieve(questions)
    assert all(1 <= len(h) <= 2 for h in hops)
    found = gold(rerank=str(cross_encoder)).open_index(corpus).retrieve(questions)
    for trail, question in zip(found, questions, strict=True):
        assert {d.doc_id for h in trail for d in h.new_documents} == set(question.supporting_ids)


def test_the_index_is_shared_with_and_without_reranking(
    corpus: list[Document], cross_encoder: Path, tmp_path: Path
) -> None:
    bm25().open_index(corpus, tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    bm25(rerank=str(cross_encoder)).open_index(corpus, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_missing_cross_encoder_is_one_message_before_indexing(
    corpus: list[Document], tmp_path: Path
) -> None:
    with pytest.raises(RetrievalError, match=r"hf download cross-encoder/ms-marco-MiniLM-L6-v2"):
        bm25(rerank="cross-encoder/ms-marco-MiniLM-L6-v2").open_index(corpus, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RetrievalError, match=r"has no config.json"):
        bm25(rerank=str(tmp_path)).open_index(corpus)


def test_another_kind_of_model_is_refused(corpus: list[Document], tmp_path: Path) -> None:
    encoder = resolve_encoder(None)
    with pytest.raises(RetrievalError, match=r"rerank=.*expected a CrossEncoder model .*got BertModel"):
        bm25(rerank=str(encoder)).open_index(corpus)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RetrievalError, match=r"config\.json can't be read"):
        bm25(rerank=str(tmp_path)).open_index(corpus)
