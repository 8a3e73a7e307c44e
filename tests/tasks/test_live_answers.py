"""``task=generate`` and ``task=chat`` with a model that writes queries: against rollouts, and as runs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.answer_stream import AnswerStream
from refragkit.generation.chat_session import ChatSession
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.methods.rollouts import Rollout, roll_out
from refragkit.models.base import SequenceModel
from refragkit.models.checkpoint import save_model
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.types import Question
from tests.tasks.conftest import Result, searching_model
from tests.tasks.test_evaluate_rag import QUESTIONS, _corpus, _data

Execute = Callable[..., Result]
TEXTS = [row[1] for row in QUESTIONS]


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> SequenceModel:
    return searching_model(tokenizer)


@pytest.fixture(scope="module")
def folder(model: SequenceModel, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("searching"), tokenizer)


@pytest.fixture
def retriever(tmp_path: Path) -> MultiHopRetriever:
    return bm25(planner="model", max_hops=3, top_k_per_hop=1, cache_dir=tmp_path).open_index(_corpus())


def rolled(model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever) -> list[Rollout]:
    episodes = EpisodeBuilder(retriever, tokenizer, 100_000, 6)
    return roll_out(model, tokenizer, episodes, [Question(t, t, ()) for t in TEXTS]).all


@pytest.mark.parametrize("first_query", ["question", "model"])
def test_a_conversations_first_answer_is_that_of_a_rollout(
    model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever, first_query: str
) -> None:
    retriever.planner.first_query = first_query  # type: ignore[attr-defined]
    session = ChatSession(
        model, tokenizer, GenerationConfig(6, stop_ids=(tokenizer.end_id,)), retriever=retriever
    )
    searches = set()
    for text, rollout in zip(TEXTS, rolled(model, tokenizer, retriever), strict=True):
        session.reset()
        written, hops = [], []
        answer = session.ask(text, written.append, hops.append)
        assert session.history_ids == rollout.token_ids
        assert "".join(written).strip() == answer.text.strip() == rollout.text
        assert [(h.query, h.new_documents) for h in answer.hops] == [
            (h.query, h.new_documents) for h in rollout.hops
        ]
        assert tuple(hops) == answer.hops
        assert (answer.ended_by == "no_answer") == (rollout.ended == "no_answer")
        assert len(answer.token_ids) == sum(rollout.written)
        searches.add(rollout.searches)
    assert len(searches) > 1


def test_a_conversation_goes_on_behind_its_searches(
    model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever
) -> None:
    config = GenerationConfig(6, stop_ids=(tokenizer.end_id,))
    session = ChatSession(model, tokenizer, config, retriever=retriever)
    hops = []
    for text in TEXTS[:3]:
        answer = session.ask(text)
        hops.append(len(answer.hops))
        # What was written last is what the model writes having read all the rest from the start
        turn = list(answer.token_ids)
        while session.history_ids[-len(turn) :] != turn:
            turn.pop(0)
        ((again,),) = generate(model, [session.history_ids[: -len(turn)]], config, pad_id=tokenizer.pad_id)
        assert list(again.token_ids) == turn
    assert sum(hops) > len(hops)
    with torch.no_grad():
        state = model(torch.tensor([session.history_ids]), return_state=True).state
    assert session._state is not None
    for mine, whole in zip(session._state.tensors(), state.tensors(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-3, atol=1e-3)


def test_what_is_found_by_another_planner_stands_behind_the_question(
    model: SequenceModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    retriever = bm25(planner="repeat", max_hops=1, top_k_per_hop=2, cache_dir=tmp_path).open_index(_corpus())
    config = GenerationConfig(6, stop_ids=(tokenizer.end_id,))
    session = ChatSession(model, tokenizer, config, retriever=retriever)
    session.ask(TEXTS[0])
    answer = session.ask(TEXTS[2])
    (hop,) = answer.hops
    assert hop.query == TEXTS[2] and hop.new_documents[0].doc_id == "moss"
    roles = [m.role for m in session.messages]
    assert roles == ["user", "retrieval", "assistant"] * 2


def test_a_search_is_not_shown_and_an_answer_is(tokenizer: Tokenizer) -> None:
    written: list[str] = []
    search = AnswerStream(tokenizer, ("wrote",), written.append)
    ids = tokenizer.encode("Who wrote it?")
    assert not any(search.push(i) for i in [tokenizer.special_ids["<|search|>"], *ids])
    assert (search.finish(), written, search.searches) == ("", [], True)
    answer = AnswerStream(tokenizer, ("wrote",), written.append)
    assert any(answer.push(i) for i in ids)
    assert answer.finish() == "Who " == "".join(written) and answer.searches is False


def test_with_a_chat_template_the_first_words_tell(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "any")
    for text, expected in (
        ("Search: who?", ""),
        ("Seen it", "Seen it"),
        ("Sea", "Sea"),
        ("Search", "Search"),
    ):
        written: list[str] = []
        stream = AnswerStream(tokenizer, (), written.append)
        for token_id in tokenizer.encode(text):
            stream.push(token_id)
            assert not written or not "Search:".startswith("".join(written))
        assert stream.finish() == expected == "".join(written)
        assert stream.searches == (not expected)


@pytest.mark.parametrize("first_query", ["question", "model"])
def test_generate(
    execute: Execute, folder: Path, model: SequenceModel, tokenizer: Tokenizer, retriever: MultiHopRetriever,
    tmp_path: Path, first_query: str,
) -> None:  # fmt: skip
    retriever.planner.first_query = first_query  # type: ignore[attr-defined]
    expected = max(rolled(model, tokenizer, retriever), key=lambda r: (r.searches > 0, bool(r.text)))
    assert expected.searches
    live = ["task=generate", f"model.path={folder}", f"data.path={_data(tmp_path / 'data')}", "retriever=bm25",
            "retriever.planner=model", "retriever.max_hops=3", "retriever.top_k_per_hop=1", "use_retrieval=true",
            f"prompt={expected.question.question}", f"first_query={first_query}", "max_new_tokens=6",
            "hardware.precision=32-true"]  # fmt: skip
    result = execute(*live)
    assert result.summary["status"] == "finished", result.err
    (sample,) = result.samples
    assert sample["completion"].strip() == expected.text and expected.text in result.out
    assert sample["new_tokens"] == sum(expected.written)
    queries = [m["query"] for m in sample["messages"] if m["role"] == "retrieval"]
    assert queries == [hop.query for hop in expected.hops]
    asked = [m["content"] for m in sample["messages"] if m["role"] == "assistant"]
    assert len(asked) == expected.searches and all(text.startswith("<|search|>") for text in asked)
    assert result.summary["metrics"]["generate/prompt_tokens"] == expected.prompt_tokens
    assert all(f"hop {hop.hop}: " in result.out for hop in expected.hops)
    if first_query == "model":
        return
    several = execute(*live, "num_samples=3", "temperature=1", "system=Be brief.")
    assert several.summary["status"] == "finished", several.err
    assert len({s["completion"] for s in several.samples}) > 1
    assert several.samples[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    small = execute(*live, "max_seq_len=40")
    assert "don't fit into max_seq_len=40" in small.summary["error"]


def test_chat(execute: Execute, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in TEXTS)))
    result = execute("task=chat", f"model.path={folder}", f"data.path={_data(tmp_path / 'data')}", "retriever=bm25",
                     "retriever.planner=model", "retriever.top_k_per_hop=1", "use_retrieval=true", "temperature=0",
                     "max_new_tokens=6")  # fmt: skip
    assert result.summary["status"] == "finished", result.err
    assert [s["hops"][0]["query"] for s in result.samples] == TEXTS
    assert "hop 1: What stores water? -> Sphagnum" in result.out
    assert max(len(s["hops"]) for s in result.samples) > 1
    assert result.summary["metrics"]["chat/new_tokens"] == sum(s["new_tokens"] for s in result.samples)
    none = execute("task=chat", f"model.path={folder}", "retriever=none", "use_retrieval=true")
    assert "retriever=none has none" in json.dumps(none.summary["error"])
