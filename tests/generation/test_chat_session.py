"""A conversation with a kept state against reading everything again from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.chat_session import ChatSession
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.generation.text_stream import TextStream
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid, mamba, rwkv_qwen, transformer
from refragkit.seeding import derive_seed

QUESTIONS = ["Who are you?", "Why?", "And since when, my friend?", "Oh."]
TOKENIZER = Tokenizer.train([" ".join(QUESTIONS), "I am what I am, my friend. Why not?"] * 3, 300)


def _model(factory: Any, **options: Any) -> SequenceModel:
    """Logits lie well apart, and the end token is likely enough to be seen within a few tokens."""
    model: SequenceModel = factory(
        size="tiny", vocab_size=TOKENIZER.vocab_size, tie_embeddings=False, seed=3, **options
    )
    with torch.no_grad():
        head = model.get_parameter("lm_head.weight")
        head.mul_(10)
        head[TOKENIZER.end_id].mul_(1.7)
    return model


@pytest.fixture(scope="module", params=[hybrid, rwkv_qwen, mamba, transformer], ids=lambda f: f.__name__)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    return _model(request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_kept_state_equals_reading_everything_again(model: SequenceModel, temperature: float) -> None:
    config = GenerationConfig(12, temperature, stop_ids=(TOKENIZER.end_id,))
    session = ChatSession(model, TOKENIZER, config, system="Be kind.", seed=5)
    special, encode = TOKENIZER.special_ids, TOKENIZER.encode
    end = TOKENIZER.end_id
    text = [special["<|system|>"], *encode("Be kind."), end]
    ended = set()
    for turn, question in enumerate(QUESTIONS):
        # Spelled out by hand: what a model that has no state would read.
        text += [special["<|user|>"], *encode(question), end, special["<|assistant|>"]]
        before = len(session.history_ids)
        answer = session.ask(question)
        ((again,),) = generate(
            model, [text], config, pad_id=TOKENIZER.pad_id, seed=derive_seed(5, "chat", turn)
        )
        assert answer.token_ids == again.token_ids
        assert answer.text == TOKENIZER.decode(again.content_ids)
        text += again.token_ids
        assert session.history_ids == text
        # Only the new tokens were read.
        assert answer.read_tokens == len(text) - before - len(again.token_ids)
        ended.add(answer.ended_by)
        if not again.finished:
            text.append(end)
    assert session.turns == len(QUESTIONS)
    assert ended <= {"stop_token", "max_new_tokens"}


def test_both_ways_to_end_are_seen_above() -> None:
    ended = set()
    for factory in (hybrid, rwkv_qwen, mamba, transformer):
        config = GenerationConfig(12, 1.0, stop_ids=(TOKENIZER.end_id,))
        session = ChatSession(_model(factory), TOKENIZER, config, system="Be kind.", seed=5)
        ended |= {session.ask(question).ended_by for question in QUESTIONS}
    assert ended == {"stop_token", "max_new_tokens"}


def test_reset_forgets_everything_but_the_system_turn() -> None:
    model = _model(hybrid)
    session = ChatSession(
        model, TOKENIZER, GenerationConfig(8, 1.0, stop_ids=(TOKENIZER.end_id,)), system="Be kind."
    )
    first = session.ask(QUESTIONS[0])
    assert session.ask(QUESTIONS[0]).read_tokens < first.read_tokens
    session.reset()
    assert (session.history_ids, session.turns) == ([], 0)
    again = session.ask(QUESTIONS[0])
    assert (again.token_ids, again.read_tokens) == (first.token_ids, first.read_tokens)


def test_streaming_stop_strings_and_what_the_state_has_read() -> None:
    model = _model(hybrid)
    config = GenerationConfig(20, 1.0, stop_ids=(TOKENIZER.end_id,))
    whole = ChatSession(model, TOKENIZER, config, seed=1).ask(QUESTIONS[0])
    stop = whole.text[3:5]
    written: list[str] = []
    session = ChatSession(model, TOKENIZER, config, stop=[stop], seed=1)
    answer = session.ask(QUESTIONS[0], written.append)
    assert answer.ended_by == "stop_string"
    assert answer.text == "".join(written) == whole.text[: whole.text.index(stop)]
    assert len(written) > 1
    n = len(answer.token_ids)
    assert answer.token_ids == whole.token_ids[:n]
    stream = TextStream(TOKENIZER, [stop])
    assert [stream.push(token) for token in answer.token_ids] == [False] * (n - 1) + [True]
    # The next turn closes the answer that was broken off.
    session.ask(QUESTIONS[1])
    assert session.history_ids[session.history_ids.index(answer.token_ids[-1]) :].count(TOKENIZER.end_id) >= 2


def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    model = _model(hybrid)
    config = GenerationConfig(8, 0.0, stop_ids=(TOKENIZER.end_id,))
    session, other = (ChatSession(model, TOKENIZER, config) for _ in range(2))
    session.ask(QUESTIONS[0])
    other.ask(QUESTIONS[0])

    def fail(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.ask("Tell me more.", fail)
    assert session.ask(QUESTIONS[1]).token_ids == other.ask(QUESTIONS[1]).token_ids
    assert session.history_ids == other.history_ids
