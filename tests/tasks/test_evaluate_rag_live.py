"""``evaluate=rag retriever.planner=model``: the model writes the queries, and is measured like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refragkit.config import compose, instantiate
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.methods.base import Components
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.methods.rollouts import roll_out
from refragkit.models.base import SequenceModel
from refragkit.models.checkpoint import save_model
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.tasks.rag.answering import _next_batch, answer_live
from refragkit.tasks.rag.measuring import evaluate_rag
from refragkit.tasks.rag.prompts import prompt_text
from refragkit.tasks.rag.settings import Settings
from tests.tasks.conftest import Result, searching_model
from tests.tasks.test_evaluate_rag import _common, _corpus, _data, _questions

Execute = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> SequenceModel:
    return searching_model(tokenizer)


@pytest.fixture(scope="module")
def folder(model: SequenceModel, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("searching"), tokenizer)


@pytest.fixture
def retriever(tmp_path: Path) -> MultiHopRetriever:
    return bm25(planner="model", max_hops=3, top_k_per_hop=1, cache_dir=tmp_path).open_index(_corpus())


def evaluate(
    model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever, settings: Settings
) -> tuple[dict[str, object], list[dict[str, object]]]:
    reward = instantiate(compose(["reward=answer_f1"]), "reward")
    found = evaluate_rag(model, tokenizer, retriever, _questions(), reward, settings)
    return found.rows[0], found.records


@pytest.mark.parametrize("first_query", ["question", "model"])
def test_answers_are_those_of_trainings_evaluation(
    model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever, first_query: str
) -> None:
    cfg = compose(["method=refrag", "reward=answer_f1", "hardware.precision=32-true", "method.max_new_tokens=6",
                   f"method.first_query={first_query}"])  # fmt: skip
    components = Components(
        model=model,
        tokenizer=tokenizer,
        retriever=retriever,
        reward=instantiate(cfg, "reward"),
        hardware=instantiate(cfg, "hardware"),
        validation=_questions(),
        n_steps=1,
        seed=0,
        from_scratch=True,
        log_metrics=lambda metrics, step: None,
    )
    metrics, expected = instantiate(cfg, "method").module(components).evaluate()
    settings = Settings(max_new_tokens=6, first_query=first_query, bootstrap_samples=10)  # type: ignore[arg-type]
    row, records = evaluate(model, tokenizer, retriever, settings)
    for record, other in zip(records, expected, strict=True):
        for key in ("id", "completion", "em", "f1", "rewards", "searches"):
            assert record[key] == other[key], key
        assert record["ended_by"] == other["ended"]
        for mine, theirs in zip(record["hops"], other["hops"], strict=True):  # type: ignore[arg-type]
            assert mine["query"] == theirs["query"] and mine["documents"] == theirs["documents"]
    names = {"searches": "searches", "f1": "f1", "em": "em", "hops": "hops", "documents": "documents"}
    for key, theirs in names.items():
        assert row[key] == pytest.approx(metrics[f"val/{theirs}"])
    assert row["tokens_read"] == pytest.approx(metrics["val/tokens_read"] / len(records))
    # So that it means something: some search, some don't, and they come to different answers
    assert len({record["searches"] for record in records}) > 1
    assert len({record["completion"] for record in records}) > 2


def test_what_it_costs(model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever) -> None:
    settings = Settings(max_new_tokens=6, bootstrap_samples=10, timed_questions=2)
    row, records = evaluate(model, tokenizer, retriever, settings)
    episodes = EpisodeBuilder(retriever, tokenizer, 6144, 6)
    rollouts = roll_out(model, tokenizer, episodes, _questions()).all
    for record, rollout in zip(records, rollouts, strict=True):
        with torch.no_grad():
            state = model(torch.tensor([rollout.token_ids]), return_state=True).state
        assert record["state_bytes"] == state.nbytes
        turn = rollout.token_ids[len(rollout.token_ids) - rollout.written[::-1].index(False) :]
        assert record["prompt_tokens"] == len(rollout.token_ids) - len(turn)
        assert record["new_tokens"] == sum(rollout.written) >= len(turn)
        assert record["tokens_read"] in (len(rollout.token_ids), len(rollout.token_ids) - 1)
    assert row["tokens_reread"] > 1.2 * row["tokens_read"]  # type: ignore[operator]
    by_hop = [row[f"prompt_tokens_hop_{n}"] for n in (1, 2, 3)]
    assert by_hop[0] < by_hop[1] <= by_hop[2] == row["prompt_tokens"]  # type: ignore[operator]
    assert by_hop[0] == sum(r.prompt_tokens for r in rollouts) / len(rollouts)
    assert row["first_token_seconds_hop_1"] > 0 and row["first_token_seconds"] > 0  # type: ignore[operator]
    shares = [row[key] for key in ("ended", "cut", "no_answer", "too_long")]
    assert all(0 <= share <= 1 for share in shares)  # type: ignore[operator]
    assert row["no_answer"] == sum(r.ended == "no_answer" for r in rollouts) / len(rollouts)
    assert row["cut"] == sum(r.cut_turns > 0 for r in rollouts) / len(rollouts) > 0


def test_the_batches_make_no_difference(
    model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever
) -> None:
    few, many = (
        answer_live(
            model, tokenizer, retriever, retriever.planner, _questions(), Settings(6, 600, batch_tokens=n)
        )  # type: ignore[arg-type]
        for n in (50, 100_000)
    )
    assert [a.text for a in few.answered] == [a.text for a in many.answered]
    assert [a.prompt_ids for a in few.answered] == [a.prompt_ids for a in many.answered]
    for one, other in zip(few.answered, many.answered, strict=True):
        # The last token of an answer is read only where others have still to search
        assert other.total_tokens - one.tokens_read in (0, 1) and other.total_tokens == one.total_tokens
    settings = Settings(6, 600, batch_tokens=1500)
    assert [_next_batch(lengths, settings) for lengths in ([], [100, 300], [2000])] == [2, 5, 1]


def test_a_system_turn_and_examples_stand_in_front(
    model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever
) -> None:
    settings = Settings(max_new_tokens=4, system="Be brief.", examples=1)
    (answered,) = answer_live(
        model, tokenizer, retriever, retriever.planner, _questions("q3"), settings, _questions("q3", "t1")  # type: ignore[arg-type]
    ).answered  # fmt: skip
    assert prompt_text(answered.prompt_ids, tokenizer).startswith(
        "<|system|>Be brief.<|end|><|user|>Where is oolong grown?<|end|><|assistant|>slopes<|end|>"
        "<|user|>What stores water?<|end|><|retrieval|><|doc|>Sphagnum"
    )


@pytest.mark.parametrize("first_query", ["question", "model"])
def test_a_run(execute: Execute, folder: Path, tmp_path: Path, first_query: str) -> None:
    data = _data(tmp_path / "data")
    live = ["retriever.planner=model", "retriever.top_k_per_hop=1", f"rag.first_query={first_query}"]
    result = execute(*_common(folder, data, *live))
    assert result.summary["status"] == "finished", result.err
    metrics = result.summary["metrics"]
    for key in ("f1", "em", "support_recall", "support_recall_hop_1", "hops", "documents", "prompt_tokens_hop_1",
                "tokens_read", "tokens_reread", "new_tokens", "first_token_seconds", "state_bytes_hop_1", "ended",
                "cut", "no_answer", "films/f1", "2_hops/tokens_read"):  # fmt: skip
        assert f"rag/{key}" in metrics, key
    assert metrics["rag/searches"] > 0 and metrics["rag/tokens_reread"] > metrics["rag/tokens_read"]
    assert sum(s["searches"] for s in result.samples) == 4 * metrics["rag/searches"]
    asked = {s["hops"][0]["query"] == s["question"] for s in result.samples if s["hops"]}
    assert asked == {first_query == "question"}
    assert "bm25, model, 3 x 1 documents" in result.out and "queries a question" in result.out
    prompt = (result.folder / "prompt.txt").read_text(encoding="utf-8")
    assert prompt.startswith("<|user|>In which country") and prompt.endswith("<|assistant|>\n")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rag.order=sandwich"], ["rag.order=sandwich: needs all documents at once", "choose planner expand"]),
        (["rag.shuffle_documents=true", "rag.instruction=Say it."], ["rag.shuffle_documents=true and rag.instruction"]),
        (["rag.first_query=nobody"], ["rag.first_query: expected", "'nobody'"]),
    ],
)  # fmt: skip
def test_what_live_rollouts_cannot_do_is_said(
    execute: Execute, folder: Path, tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    try:
        result = execute(*_common(folder, _data(tmp_path / "data"), "retriever.planner=model", *overrides))
        message = result.summary["error"]
    except ConfigError as error:
        message = str(error)
    for part in parts:
        assert part in message
