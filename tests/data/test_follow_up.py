"""What a model that keeps its state reads between two answers, against the rendering of the whole conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from refragkit.data.conversation import assistant_ids, prepare_follow_up, render_follow_up, render_prompt
from refragkit.data.tokenizer import Tokenizer
from refragkit.types import Conversation, Document, Hit, Message

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    Message("system", "Be short."),
    Message("user", "Who wrote <|end|> it?"),
    Message("assistant", "She did."),
    Message("user", "When?"),
    Message("retrieval", hop=1, query="when", documents=(Hit(Document("a", "A", "In 1900."), 1.0),)),
    Message("assistant", "In 1900, <|im_end|> she says."),
    Message("user", " And where? "),
    Message("assistant", "<|search|> where <|end|> was it"),
    Message("retrieval", hop=2, query="where was it", documents=(Hit(Document("b", "B", "In Rome."), 1.0),)),
    Message("assistant", "<|search|> Rome"),
    Message("retrieval", hop=3, query="Rome"),
    Message("assistant", "Rome."),
    Message("user", "Sure?"),
]


@pytest.fixture(params=["special", "chatml", "default system"])
def either(
    request: pytest.FixtureRequest,
    tokenizer: Tokenizer,
    chat_tokenizer: Tokenizer,
    pretrained_folder: Callable[..., Path],
) -> Tokenizer:
    if request.param == "default system":
        return Tokenizer.load(pretrained_folder(DEFAULT_SYSTEM))
    return tokenizer if request.param == "special" else chat_tokenizer


@pytest.mark.parametrize("first", [0, 1])
def test_prompt_answer_closing_and_opening_are_the_whole_conversation(either: Tokenizer, first: int) -> None:
    turns = TURNS[first:]
    answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    read = render_prompt(Conversation("c", tuple(turns[: answers[0]])), either, 10_000, 0)
    for i, at in enumerate(answers):
        end = answers[i + 1] if i + 1 < len(answers) else len(turns)
        so_far = Conversation("c", tuple(turns[:end]))
        closing, opening = render_follow_up(so_far, either)
        assert closing[-1] == either.end_id
        read += [*assistant_ids(turns[at], either), *closing, *opening]
        assert read == render_prompt(so_far, either, 10_000, 0)


def test_documents_are_cut_to_size_and_nothing_else(either: Tokenizer) -> None:
    documents = tuple(Hit(Document(i, i, "word " * 30), 1.0) for i in "ab")
    turns = (
        *TURNS[:2],
        Message("assistant", "<|search|> q"),
        Message("retrieval", query="q", documents=documents),
    )
    closing, opening = render_follow_up(Conversation("c", turns), either)
    same = prepare_follow_up(Conversation("c", turns), either, len(opening))
    assert (same[0], same[1].input_ids, same[1].truncated_documents) == (closing, opening, 0)
    # What came before makes no difference
    assert prepare_follow_up(Conversation("c", turns[1:]), either, len(opening)) == same
    less = prepare_follow_up(Conversation("c", turns), either, len(opening) - 5)[1]
    assert (len(less), less.truncated_documents, less.left_out_documents) == (len(opening) - 5, 1, 0)
    assert less.input_ids[-1] == opening[-1] and not any(less.loss_mask)
    assert prepare_follow_up(Conversation("c", turns), either, 2)[1].dropped == "too_long"
    short = prepare_follow_up(Conversation("c", turns), either, 1000, max_document_tokens=9)[1]
    assert (len(short) < len(less), short.truncated_documents) == (True, 2)


def test_there_must_be_something_to_follow(tokenizer: Tokenizer) -> None:
    for turns in (TURNS[:2], TURNS[:3]):
        with pytest.raises(ValueError, match="a follow-up needs"):
            render_follow_up(Conversation("c", tuple(turns)), tokenizer)
