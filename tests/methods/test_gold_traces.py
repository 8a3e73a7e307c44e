"""Gold traces on the bundled questions: what they ask for, and that a model learns to search from them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from refragkit import build_model, compose
from refragkit.config import instantiate
from refragkit.data.conversation import conversation_from_hops, render_prompt
from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.methods.base import Components
from refragkit.methods.gold_traces import GoldTraces
from refragkit.methods.refrag import RefragModule
from refragkit.methods.rollouts import roll_out
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.types import Batch, Question


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MultiHopQA:
    data = MultiHopQA(vocab_size=600)
    data.prepare(cache_dir=tmp_path_factory.mktemp("cache"), seed=0)
    return data


@pytest.fixture(scope="module")
def tokenizer(data: MultiHopQA) -> Tokenizer:
    return data.build_tokenizer()


@pytest.fixture(scope="module")
def bm25(data: MultiHopQA) -> BM25Retriever:
    retriever = BM25Retriever()
    retriever.index(data.corpus)
    return retriever


@pytest.mark.parametrize("first_query", ["question", "model"])
def test_traces_ask_for_what_is_missing_and_stop(
    data: MultiHopQA, bm25: BM25Retriever, first_query: str
) -> None:
    traces = GoldTraces(MultiHopRetriever(bm25, "model", 4, 2), first_query)
    questions = data.train[:200]
    everything = traces.hops(questions)
    searched = 0
    for question, hops in zip(questions, everything, strict=True):
        found: set[str] = set()
        titles = {d.title for d in data.corpus or () if d.doc_id in question.supporting_ids}
        for n, hop in enumerate(hops):
            if n == 0 and first_query == "question":
                assert hop.query == question.question
            else:
                assert set(question.supporting_ids) - found  # nothing is asked when nothing is missing
                if question.decomposition:
                    assert "#" not in hop.query
                else:
                    assert hop.query in titles
                searched += 1
            found |= {h.doc_id for h in hop.new_documents}
        assert len({h.query for h in hops}) == len(hops) <= 4
    assert searched > 100
    alone = MultiHopRetriever(bm25, "repeat", 1, 2).retrieve(questions)

    def recall(all_hops: Sequence[Sequence[object]]) -> float:
        hits = 0.0
        for q, hops in zip(questions, all_hops, strict=True):
            ids = {h.doc_id for hop in hops for h in hop.new_documents}  # type: ignore[attr-defined]
            hits += len(ids & set(q.supporting_ids)) / len(q.supporting_ids)
        return hits / len(questions)

    assert recall(everything) > recall(alone) + 0.15
    assert traces.hops(questions[:3]) == everything[:3]


def test_the_sub_questions_of_a_decomposition_come_in_order(data: MultiHopQA, bm25: BM25Retriever) -> None:
    question = next(q for q in data.train if q.id == "musique_2hop__105694_91469")
    (hops,) = GoldTraces(MultiHopRetriever(bm25, "model", 4, 1), "model").hops([question])
    assert [h.query for h in hops] == [
        "Which was the country for Fist Power?",
        "when was Hong Kong taken by the british",
    ]


def module_of(
    data: MultiHopQA,
    tokenizer: Tokenizer,
    bm25: BM25Retriever,
    questions: Sequence[Question],
    *overrides: str,
) -> RefragModule:
    cfg = compose(["method=refrag", "model=hybrid", "model.block_pattern=TMT", "model.d_model=64", "model.n_heads=4",
                   "model.n_kv_heads=2", "model.head_dim=16", "model.d_ff=128", "model.d_state=16",
                   "model.ssm_head_dim=16", "method.max_seq_len=1024", "method.max_new_tokens=40",
                   "method.max_document_tokens=12", f"method.global_batch_size={len(questions)}",
                   *overrides])  # fmt: skip
    module: RefragModule = instantiate(cfg, "method").module(
        Components(
            model=build_model(cfg.model, vocab_size=tokenizer.vocab_size, seed=0),
            tokenizer=tokenizer,
            retriever=MultiHopRetriever(bm25, "model", 3, 1),
            reward=instantiate(cfg, "reward"),
            hardware=instantiate(cfg, "hardware"),
            validation=list(questions),
            n_steps=1,
            seed=0,
            from_scratch=True,
            log_metrics=lambda metrics, step: None,
        )
    )
    module.manual_backward = lambda loss: loss.backward()
    return module


@pytest.mark.parametrize(
    "overrides",
    [
        ("method.objective=policy_gradient", "method.warmup=gold_traces"),
        ("method.objective=reward_weighted", "method.warmup=gold_traces"),
        ("method.objective=none",),
    ],
)
def test_traces_are_learnt_as_turns_of_the_assistant(
    data: MultiHopQA, tokenizer: Tokenizer, bm25: BM25Retriever, overrides: tuple[str, ...]
) -> None:
    questions = [q for q in data.train if q.decomposition][:2]
    module = module_of(data, tokenizer, bm25, questions, *overrides)
    prepared = module.prepare(Batch(0, questions))
    assert prepared.weights is None
    for question, example in zip(questions, prepared.examples, strict=True):
        assert module.traces is not None
        (hops,) = module.traces.hops([question])
        assert len(hops) > 1
        learnt = [t for t, m in zip(example.input_ids, example.loss_mask, strict=True) if m]
        expected: list[int] = []
        for hop in hops[1:]:
            expected += [tokenizer.special_ids["<|search|>"], *tokenizer.encode(hop.query), tokenizer.end_id]
        assert learnt == [*expected, *tokenizer.encode(question.answers[0]), tokenizer.end_id]
    learnt_batch = module.learn(Batch(0, questions))
    assert learnt_batch.kept == 2 and learnt_batch.metrics["train/loss"] > 0
    assert "reward/total" not in learnt_batch.metrics


@pytest.mark.slow
def test_a_model_learns_to_search_from_traces(
    data: MultiHopQA, tokenizer: Tokenizer, bm25: BM25Retriever
) -> None:
    questions = [q for q in data.train if q.decomposition][:3]
    module = module_of(data, tokenizer, bm25, questions, "method.warmup=gold_traces")
    optimizer = torch.optim.Adam(module.model.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        module.learn(Batch(0, questions))
        optimizer.step()
    metrics, records = module.evaluate()
    assert module.traces is not None
    for record, question, hops in zip(records, questions, module.traces.hops(questions), strict=True):
        assert [h["query"] for h in record["hops"]] == [h.query for h in hops]
        assert record["completion"] == question.answers[0]
        assert record["ended"] == "end_token" and record["searches"] == len(hops) - 1
    assert metrics["val/em"] == 1 and metrics["val/loss"] < 0.1
    assert metrics["val/searches"] == sum(r["searches"] for r in records) / 3
    # Whole conversations, rendered from their texts, are what was read and written
    for rollout in roll_out(module.model, tokenizer, module.episodes, questions).all:
        conversation = conversation_from_hops(rollout.question.question, rollout.hops, written_from_hop=2)
        prompt = render_prompt(conversation, tokenizer, 10_000, 0, max_document_tokens=12)
        assert rollout.token_ids == [*prompt, *tokenizer.encode(rollout.text), tokenizer.end_id]


def test_rewards_of_live_rollouts_weigh_given_and_sampled_answers(
    data: MultiHopQA, tokenizer: Tokenizer, bm25: BM25Retriever
) -> None:
    questions = data.train[:2]
    for target in ("given", "sampled"):
        overrides = (f"method.target={target}", "method.temperature=1.0", "method.first_query=model")
        module = module_of(data, tokenizer, bm25, questions, *overrides)
        module.reward = lambda episodes: [0.5, 0.0]  # type: ignore[assignment]
        prepared = module.prepare(Batch(0, questions))
        assert prepared.weights == pytest.approx([0.55, 0.1] if target == "given" else [0.5, 0.0])
        assert {"rollouts/searches", "rollouts/tokens_read", "reward/total"} <= set(prepared.metrics)
        for question, example in zip(questions, prepared.examples, strict=True):
            learnt = [t for t, m in zip(example.input_ids, example.loss_mask, strict=True) if m]
            gold = [*tokenizer.encode(question.answers[0]), tokenizer.end_id]
            assert (learnt[-len(gold) :] == gold) == (target == "given")
