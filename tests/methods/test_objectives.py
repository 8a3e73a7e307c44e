"""The objectives against plain sums over examples and tokens, written without micro batches or chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from refragkit import build_model, compose
from refragkit.config import instantiate
from refragkit.data.conversation import ORDERS, Rendered
from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.methods.answers import Answer, reward_parts, score_answers
from refragkit.methods.base import Components, MethodModule
from refragkit.methods.refrag import RefragModule
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.tasks.rag.prompts import build_prompt
from refragkit.tasks.rag.settings import Settings
from refragkit.types import Batch, Document, Episode, Hit, Hop, Question

MODEL = ["model=hybrid", "model.block_pattern=TM", "model.d_model=32", "model.n_heads=2", "model.n_kv_heads=1",
         "model.head_dim=16", "model.d_ff=48", "model.d_state=16", "model.ssm_head_dim=16",
         "model.wkv_head_dim=16"]  # fmt: skip
# Nothing has to be cut to fit
ROOM = ("method.max_seq_len=2048",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MultiHopQA:
    data = MultiHopQA(max_train_questions=5, max_validation_questions=5, vocab_size=400)
    data.prepare(cache_dir=tmp_path_factory.mktemp("cache"), seed=0)
    return data


@pytest.fixture(scope="module")
def tokenizer(data: MultiHopQA) -> Tokenizer:
    return data.build_tokenizer()


@pytest.fixture(scope="module")
def retriever(data: MultiHopQA, tmp_path_factory: pytest.TempPathFactory) -> MultiHopRetriever:
    retriever: MultiHopRetriever = instantiate(compose(["retriever=bm25"]), "retriever")
    retriever.max_hops, retriever.top_k_per_hop = 2, 2
    assert data.corpus is not None
    return retriever.open_index(data.corpus, tmp_path_factory.mktemp("index"))


@pytest.fixture
def make(data: MultiHopQA, tokenizer: Tokenizer, retriever: MultiHopRetriever) -> Iterator[object]:
    def make(*overrides: str, micro_batch_size: int = 4) -> MethodModule:
        cfg = compose([*MODEL, "method.max_seq_len=256", "method.max_new_tokens=6", "method.global_batch_size=5",
                       f"hardware.micro_batch_size={micro_batch_size}", *overrides])  # fmt: skip
        module = instantiate(cfg, "method").module(
            Components(
                model=build_model(cfg.model, vocab_size=tokenizer.vocab_size, seed=0),
                tokenizer=tokenizer,
                retriever=retriever,
                reward=instantiate(cfg, "reward"),
                hardware=instantiate(cfg, "hardware"),
                validation=data.validation,
                n_steps=1,
                seed=0,
                from_scratch=True,
                log_metrics=lambda metrics, step: None,
            )
        )
        # Without a Trainer, Lightning's backward is the plain one.
        module.manual_backward = lambda loss: loss.backward()
        return module

    yield make


@pytest.mark.parametrize("method", ["sft", "refrag"])
@pytest.mark.parametrize("order", ORDERS)
def test_training_takes_the_order_that_the_evaluation_does(
    make: object, data: MultiHopQA, order: str, method: str
) -> None:
    more = ["method.objective=none"] if method == "refrag" else []
    module = make(f"method={method}", f"method.order={order}", *ROOM, *more)  # type: ignore[operator]
    prepared = module.prepare(Batch(0, data.train))
    settings = Settings(max_new_tokens=6, max_seq_len=2048, order=order)
    seen = set()
    for question, example in zip(data.train, prepared.examples, strict=True):
        (hops,) = module.episodes.retrieve([question])
        prompt = build_prompt(question, hops, module.tokenizer, settings).input_ids
        assert example.input_ids[: len(prompt)] == prompt
        assert sum(example.loss_mask[: len(prompt)]) == 0 < example.supervised_tokens
        special = module.tokenizer.special_ids
        users = [i for i, t in enumerate(prompt) if t == special["<|user|>"]]
        seen.add((len(users), users[0] < prompt.index(special["<|retrieval|>"])))
    assert seen == {
        {"question_first": (1, True), "documents_first": (1, False), "sandwich": (2, True)}[order]
    }


def example_losses(module: MethodModule, examples: list[Rendered]) -> list[torch.Tensor]:
    """Cross-entropy of each supervised token of each example, read alone and unpadded, through full logits."""
    losses = []
    for example in examples:
        ids = torch.tensor(example.input_ids)
        logits = module.model(ids[None]).logits[0, :-1]
        every = functional.cross_entropy(logits, ids[1:], reduction="none")
        losses.append(every[torch.tensor(example.loss_mask[1:])])
    return losses


def gradients(module: MethodModule) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in module.model.named_parameters() if p.grad is not None}


def compare(module: MethodModule, batch: Batch, reference: object) -> None:
    prepared = module.prepare(batch)
    metrics = module._accumulate(module._keep(prepared))
    found = gradients(module)
    module.model.zero_grad()
    expected = reference(example_losses(module, prepared.examples), prepared.weights)  # type: ignore[operator]
    expected.backward()
    assert metrics["train/objective"] == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5])
def test_sft_is_the_mean_over_all_supervised_tokens(make, data: MultiHopQA, micro_batch_size: int) -> None:  # type: ignore[no-untyped-def]
    module = make("method=sft", micro_batch_size=micro_batch_size)
    compare(module, Batch(0, data.train), lambda losses, weights: torch.cat(losses).mean())


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
def test_refrag_weighs_token_means_by_rewards(make, data: MultiHopQA, micro_batch_size: int) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", "method.weight_floor=0.25", micro_batch_size=micro_batch_size)
    given = [0.0, 1.0, 0.5, 0.125, 0.75]
    module.reward = lambda episodes: given[: len(episodes)]

    def reference(losses: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
        assert weights == pytest.approx([0.25 + 0.75 * r for r in given])
        return sum(w * x.mean() for w, x in zip(weights, losses, strict=True)) / len(losses)

    compare(module, Batch(0, data.train), reference)


@pytest.mark.parametrize("pattern", ["TM", "R", "TRM"])
@pytest.mark.parametrize("micro_batch_size", [2, 5])
def test_a_prompt_read_once_gives_the_gradient_of_one_read_twice(  # type: ignore[no-untyped-def]
    make, data: MultiHopQA, pattern: str, micro_batch_size: int
) -> None:
    module = make("method=refrag", *ROOM, f"model.block_pattern={pattern}", micro_batch_size=micro_batch_size)
    batch = Batch(0, data.train)
    prepared = module.prepare(batch)
    plain = prepared.metrics | module._accumulate(module._keep(prepared))
    expected = gradients(module)
    module.model.zero_grad()
    read: list[int] = []
    starts: list[int] = []
    read_prompts = module._read
    module._read = lambda prompts: (starts.extend(map(len, prompts)), read_prompts(prompts))[1]
    hidden_states = module.model.hidden_states

    def count(input_ids, **kwargs):  # type: ignore[no-untyped-def]
        read.append(int(kwargs["attention_mask"].sum()))
        return hidden_states(input_ids, **kwargs)

    module.model.hidden_states = count
    learnt = module.learn(batch)
    assert len(starts) == 5
    # All tokens are read for learning, once: the last one of an example has nothing to predict, yet is read
    assert sum(read) == learnt.tokens == sum(map(len, prepared.examples))
    assert (learnt.examples, learnt.kept) == (5, 5)
    for name, value in plain.items():
        if not name.startswith("time/"):
            assert learnt.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert {"time/retrieve_seconds", "time/generate_seconds", "time/learn_seconds"} <= set(learnt.metrics)
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(expected[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "overrides",
    [
        ("method.target=sampled", "method.temperature=1.0"),
        ("method.temperature=0.7",),
        (
            "method.max_new_tokens=2",
            "method.max_seq_len=150",
        ),  # answers longer than the room that prompts leave
    ],
    ids=" ".join,
)
def test_where_a_prompt_must_be_read_twice_it_is(make, data: MultiHopQA, overrides: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", *overrides)
    read: list[object] = []
    module._read = lambda prompts: read.append(prompts)
    learnt = module.learn(Batch(0, data.train))
    assert not read
    assert learnt.metrics["train/objective"] >= 0
    assert learnt.tokens > 0


def test_dropout_is_for_learning_and_not_for_answering(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", *ROOM)
    hops = module.episodes.retrieve(data.train)
    prompts = [module.episodes.prompt(q, h) for q, h in zip(data.train, hops, strict=True)]
    examples = module._given(data.train, hops)
    assert module._reads_once(prompts, examples)
    instantiate(compose(["adapter=lora", "adapter.dropout=0.1"]), "adapter").apply(module.model, seed=0)
    assert not module._reads_once(prompts, examples)


def test_documents_are_cut_for_answers_learning_and_evaluation_alike(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    free, cut = make("method=refrag", *ROOM), make("method=refrag", *ROOM, "method.max_document_tokens=12")
    answered: list[list[int]] = []
    answer = cut._answer
    cut._answer = lambda prompts, *rest: (answered.extend(map(list, prompts)), answer(prompts, *rest))[1]
    learnt = cut.learn(Batch(0, data.train))
    cut.evaluate()
    marks = {
        cut.tokenizer.special_ids[name] for name in ("<|doc|>", "<|end|>", "<|search|>", "<|retrieval|>")
    }
    assert len(answered) == len(data.train) + len(data.validation)
    for ids in answered:
        doc = cut.tokenizer.special_ids["<|doc|>"]
        starts = [i for i, token in enumerate(ids) if token == doc]
        assert starts
        for start in starts:
            length = next(n for n, token in enumerate(ids[start + 1 :], 1) if token in marks)
            assert length <= 12
    hops = cut.episodes.retrieve(data.train)
    assert learnt.tokens == sum(len(e) for e in cut._given(data.train, hops))
    assert learnt.tokens < sum(len(e) for e in free._given(data.train, hops)) / 2
    assert cut.truncated_documents > 0


def test_sampled_answers_that_earn_nothing_teach_nothing(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", "method.target=sampled", "method.temperature=1.0")
    module.reward = lambda episodes: [0.0] * len(episodes)
    metrics = module._accumulate(module._keep(module.prepare(Batch(0, data.train))))
    assert metrics["train/objective"] == 0
    assert all(not g.any() for g in gradients(module).values())


def test_sampled_answers_are_trained_on_as_they_were_sampled(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", "method.target=sampled", "method.temperature=1.0")
    sampled = module.answer(data.train, module.episodes.retrieve(data.train), temperature=1.0, seed=3)
    end = module.tokenizer.end_id
    for answer in sampled:
        example = answer.as_example()
        assert example.input_ids == answer.prompt_ids + answer.token_ids
        assert example.supervised_tokens == len(answer.token_ids) <= 6
        assert end not in answer.token_ids[:-1]
    assert any(answer.token_ids[-1] != end for answer in sampled)  # cut short: must not learn to end there


def test_rewards_are_computed_on_what_the_model_answered(make, data: MultiHopQA, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag")
    answers = [q.answers[0] for q in data.train]
    said = [Answer([1], [2], text) for text in (answers[0], "", "zzz", *answers[3:])]
    monkeypatch.setattr(RefragModule, "answer", lambda self, *args, **kwargs: said)
    metrics = module.prepare(Batch(0, data.train)).metrics
    assert metrics["reward/answer"] == pytest.approx(3 / 5)
    assert metrics["reward/empty_completions"] == pytest.approx(1 / 5)
    recall_only_for_spoken = metrics["reward/relevance"]
    right = [Answer([1], [2], text) for text in answers]
    monkeypatch.setattr(RefragModule, "answer", lambda self, *args, **kwargs: right)
    assert module.prepare(Batch(0, data.train)).metrics["reward/relevance"] > recall_only_for_spoken


def test_the_answer_follows_exactly_the_prompt_that_was_answered(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", "method.max_seq_len=150")  # so short that documents are cut
    hops = module.episodes.retrieve(data.train)
    for question, found in zip(data.train, hops, strict=True):
        prompt = module.episodes.prompt(question, found)
        example = module.episodes.example(question, found, question.answers[0][:4])
        assert example.input_ids[: len(prompt)] == prompt
        assert not any(example.loss_mask[: len(prompt)])
        assert all(example.loss_mask[len(prompt) :])


def test_evaluation_counts_every_question_once(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag", micro_batch_size=2)
    metrics, records = module.evaluate()
    assert [r["id"] for r in records] == [q.id for q in data.validation]
    hops = module.episodes.retrieve(data.validation)
    rendered = [
        module.episodes.example(q, h, q.answers[0]) for q, h in zip(data.validation, hops, strict=True)
    ]
    with torch.no_grad():
        expected = torch.cat(example_losses(module, rendered)).mean().item()
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert module.evaluate()[0] == metrics


def test_a_question_is_searched_once_in_a_run(make, data: MultiHopQA, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    module = make("method=refrag")
    searched: list[str] = []
    retrieve = MultiHopRetriever.retrieve

    def count(self, questions, *args, **kwargs):  # type: ignore[no-untyped-def]
        searched.extend(q.id for q in questions)
        return retrieve(self, questions, *args, **kwargs)

    monkeypatch.setattr(MultiHopRetriever, "retrieve", count)
    first = module.episodes.retrieve([*data.train, data.train[0]])
    assert module.episodes.retrieve(data.train[:2]) == first[:2]
    assert sorted(searched) == sorted(q.id for q in data.train)


def test_dropped_examples_are_counted(make, data: MultiHopQA) -> None:  # type: ignore[no-untyped-def]
    module = make("method=sft", "method.max_seq_len=20")
    long = Question(id="long", question="why " * 400, answers=("because",))
    prepared = module.prepare(Batch(0, [long, data.train[0]]))
    assert module._keep(prepared) == []
    assert module.dropped_examples == 2
    assert module.answer([long], [()], temperature=0.0, seed=0)[0].text == ""


def test_score_answers_by_hand() -> None:
    def hop(number: int, *ids: str) -> Hop:
        hits = tuple(Hit(Document(i, i, "text"), 1.0) for i in ids)
        return Hop(number, f"q{number}", hits, hits)

    episodes = [
        Episode("q", ("Paris",), ("a", "b"), (hop(1, "a", "x"), hop(2, "b")), "the Paris", "1", 3),
        Episode("q", ("a red cat", "dog"), ("c", "d"), (hop(1, "c"),), "red bird", "2", 3),
    ]
    reward = instantiate(compose(), "reward")
    metrics, records = score_answers(episodes, reward, step=7)
    assert metrics["val/em"] == 0.5
    assert metrics["val/f1"] == pytest.approx((1 + 0.5) / 2)  # precision 1/2, recall 1/2 of "red cat"
    assert metrics["val/support_recall_hop1"] == 0.5
    assert metrics["val/support_recall"] == metrics["val/support_recall_hop2"] == 0.75
    assert (metrics["val/hops"], metrics["val/documents"]) == (1.5, 2.0)
    assert records[0]["rewards"]["total"] == pytest.approx(reward_parts(reward, episodes)["total"][0])
    assert records[0]["hops"][0]["documents"][1]["supporting"] is False
    assert records[0]["step"] == 7
