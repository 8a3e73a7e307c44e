"""Question, corpus and conversation files: what is accepted, and one clear message for what isn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refragkit.data.conversation_file import load_conversations
from refragkit.data.corpus import load_corpus
from refragkit.data.questions import load_questions
from refragkit.errors import DataError
from refragkit.types import Conversation, Document, Hit, Message, Question

GOOD: dict[str, Any] = {"id": "q1", "question": "Who?", "answers": ["Ada"]}
PASSAGE: dict[str, Any] = {"id": "p1", "title": "Ada", "text": "Ada wrote."}
CHAT: dict[str, Any] = {"id": "c1", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def _write(*lines: dict[str, Any] | str | bytes, end: bytes = b"\n") -> Path:
        data = [json.dumps(x, ensure_ascii=False) if isinstance(x, dict) else x for x in lines]
        raw = [x.encode() if isinstance(x, str) else x for x in data]
        path = tmp_path / "file.jsonl"
        path.write_bytes(end.join(raw) + end)
        return path

    return _write


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != key}


def test_a_full_question_keeps_everything(write: Callable[..., Path]) -> None:
    steps = [{"question": "Who?", "answer": "Ada", "supporting_id": "p1"}]
    row = GOOD | {
        "supporting_ids": ["p1", "p2"],
        "hops": 3,
        "candidate_ids": ["p2", "p1"],
        "decomposition": steps,
        "dataset": "d",
        "type": None,
    }
    minimal = GOOD | {"id": "q2"}
    full, short = load_questions(write(row, minimal), {"p1", "p2"})
    assert full == Question(
        "q1", "Who?", ("Ada",), ("p1", "p2"), 3, ("p2", "p1"), tuple(steps), {"dataset": "d", "type": None}
    )
    assert short == Question("q2", "Who?", ("Ada",))
    (defaulted,) = load_questions(write(GOOD | {"supporting_ids": ["p1", "p2"]}))
    assert defaulted.hops == 2


def test_a_passage_keeps_its_other_keys(write: Callable[..., Path]) -> None:
    titled, bare = load_corpus(write(PASSAGE | {"year": 1843}, {"id": "p2", "text": ""}))
    assert titled == Document("p1", "Ada", "Ada wrote.", {"year": 1843})
    assert bare == Document("p2", "", "")


def test_a_conversation_survives_a_round_trip(write: Callable[..., Path]) -> None:
    conversation = Conversation(
        "c1",
        (
            Message("system", "Be short."),
            Message("user", "Who?"),
            Message("retrieval", hop=2, query="Ada", documents=(Hit(Document("p1", "Ada", "x"), 0.5),)),
            Message("assistant", "Ada"),
        ),
    )
    assert load_conversations(write(conversation.to_dict())) == [conversation]


def test_habits_of_editors_are_accepted(tmp_path: Path, write: Callable[..., Path]) -> None:
    rows = [
        json.dumps(GOOD | {"id": str(n), "question": "Où \u2028 ça ?"}, ensure_ascii=False) for n in range(3)
    ]
    expected = load_questions(write(*rows))
    assert [q.id for q in expected] == ["0", "1", "2"]
    for name, text in {
        "byte order mark": "\ufeff" + "\n".join(rows),
        "CRLF": "\r\n".join(rows) + "\r\n",
        "blank lines at the end": "\n".join(rows) + "\n\n  \n\r\n",
        "no line end": "\n".join(rows),
    }.items():
        path = tmp_path / name
        path.write_bytes(text.encode())
        assert load_questions(path) == expected, name


QUESTION_PROBLEMS: list[tuple[str, dict[str, Any] | str | bytes, str]] = [
    ("broken", '{"id": "q2", "question": ', r"broken JSON \(Expecting value, column \d+\): \{\"id\""),
    ("two objects", json.dumps(GOOD) * 2, "broken JSON"),
    ("not JSON", "q2,Who?,Ada", "broken JSON"),
    ("a list", '["q2"]', r"expected a JSON object, got a list: \[\"q2\"\]"),
    ("a number", "7", "expected a JSON object, got an integer: 7"),
    ("nothing", "", "got an empty line"),
    ("not UTF-8", b'{"id": "q\xe9"}', "expected UTF-8, got byte 0xe9 at byte 10"),
    ("NaN", '{"id": "q2", "x": NaN}', "the constant NaN"),
    ("half a pair", '{"id": "q2", "question": "\\ud83d", "answers": ["a"]}', "'question'.*lone surrogate"),
    ("too deep", "[" * 100_000, "JSON that can't be read|broken JSON"),
    ("huge number", '{"id": ' + "9" * 5000 + "}", "JSON that can't be read"),
    ("no id", without(GOOD, "id"), r"missing key 'id' \(keys found: answers, question\)"),
    ("no question", without(GOOD, "question") | {"id": "q2"}, "missing key 'question'"),
    ("no answers", without(GOOD, "answers") | {"id": "q2"}, "missing key 'answers'"),
    ("id is a number", GOOD | {"id": 7}, "key 'id': expected a string, got an integer: 7"),
    (
        "blank question",
        GOOD | {"id": "q2", "question": "  "},
        "'question': expected a string that is not empty",
    ),
    (
        "answers is a string",
        GOOD | {"id": "q2", "answers": "Ada"},
        "'answers': expected a list of strings, got a st",
    ),
    ("no answer in it", GOOD | {"id": "q2", "answers": []}, "'answers': expected a list with at least one"),
    ("null answer", GOOD | {"id": "q2", "answers": [None]}, "'answers': expected strings.*got null"),
    (
        "hops is true",
        GOOD | {"id": "q2", "hops": True},
        "'hops': expected an integer of at least 0, got a boolean",
    ),
    ("hops below zero", GOOD | {"id": "q2", "hops": -1}, "'hops'.*got an integer: -1"),
    ("same id", GOOD, "key 'id': 'q1' is already used on line 1"),
    ("same gold twice", GOOD | {"id": "q2", "supporting_ids": ["p1", "p1"]}, "'p1' is there more than once"),
    (
        "unknown gold",
        GOOD | {"id": "q2", "supporting_ids": ["p1", "p9"]},
        "'supporting_ids': 'p9': no passage",
    ),
    ("unknown candidate", GOOD | {"id": "q2", "candidate_ids": ["p9"]}, "'candidate_ids': 'p9': no passage"),
    (
        "decomposition of strings",
        GOOD | {"id": "q2", "decomposition": ["a"]},
        "'decomposition': expected objects",
    ),
    (
        "unknown gold in a step",
        GOOD | {"id": "q2", "decomposition": [{"question": "x", "supporting_id": "p9"}]},
        r"'decomposition\[0\]\.supporting_id': 'p9'",
    ),
]


@pytest.mark.parametrize(
    ("line", "message"), [p[1:] for p in QUESTION_PROBLEMS], ids=[p[0] for p in QUESTION_PROBLEMS]
)
def test_a_bad_line_is_named(line: Any, message: str, write: Callable[..., Path]) -> None:
    path = write(GOOD, line, GOOD | {"id": "last"})
    with pytest.raises(DataError, match=message) as error:
        load_questions(path, {"p1"})
    assert str(error.value).startswith(f"{path}:2: ")
    assert "\n" not in str(error.value)


def test_several_bad_lines_are_shown_at_once_and_counted(write: Callable[..., Path]) -> None:
    path = write(*["broken"] * 8, GOOD)
    with pytest.raises(DataError) as error:
        load_questions(path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"8 bad lines in {path}:"
    assert [line.split(": ")[0].strip() for line in lines[1:6]] == [f"{path}:{n}" for n in range(1, 6)]
    assert lines[6:] == ["  ... and 3 more"]


def test_a_long_line_is_not_shown_whole(write: Callable[..., Path]) -> None:
    with pytest.raises(DataError) as error:
        load_questions(write('{"id": "' + "x" * 10_000))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"corpus\.jsonl: expected passages, .* the file is empty"):
        load_corpus(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_corpus(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="got a folder"):
        load_corpus(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (PASSAGE, "'p1' is already used on line 1"),
        ({"id": "p2", "title": "t"}, "missing key 'text'"),
        ({"id": "p2", "text": ["a"]}, "'text': expected a string, got a list"),
        ({"id": "", "text": "a"}, "'id': expected a string that is not empty"),
    ],
)
def test_a_bad_passage_is_named(line: Any, message: str, write: Callable[..., Path]) -> None:
    path = write(PASSAGE, line)
    with pytest.raises(DataError, match=message) as error:
        load_corpus(path)
    assert str(error.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "'messages': expected a list of objects, got a string"),
        (
            [{"role": "bot", "content": "x"}],
            r"'messages\[0\]\.role': expected one of system, user.*got 'bot'",
        ),
        ([{"role": "user", "content": None}], r"'messages\[0\]\.content': expected a string, got null"),
        (
            [{"role": "user", "content": " "}],
            r"'messages\[0\]\.content': expected a string that is not empty",
        ),
        ([{"role": "user", "value": "x"}], r"missing key 'messages\[0\]\.content'"),
        ([{"role": "retrieval", "query": "x"}], r"missing key 'messages\[0\]\.documents'"),
        (
            [{"role": "retrieval", "documents": [{"doc_id": "a", "text": "x", "score": "high"}]}],
            r"'messages\[0\]\.documents\[0\]\.score': expected a finite number, got a string",
        ),
    ],
)
def test_a_bad_conversation_is_named(messages: Any, message: str, write: Callable[..., Path]) -> None:
    path = write(CHAT, {"id": "c2", "messages": messages})
    with pytest.raises(DataError, match=message) as error:
        load_conversations(path)
    assert str(error.value).startswith(f"{path}:2: ")
