"""Worked answers: the bundled sample, GSM8K's own files, a user's files, and what is refused."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from refragkit import compose
from refragkit.config import instantiate
from refragkit.data.gsm8k import GSM8K, SAMPLE_DIR, load_worked_answers
from refragkit.data.split import id_rank
from refragkit.errors import ConfigError, DataError
from refragkit.rewards.numeric import NumericReward
from refragkit.types import Episode

SHARED = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
CONF = Path(__file__).parents[2] / "conf" / "data"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def row(n: int, **more: Any) -> dict[str, Any]:
    return {
        "question": f"What is {n} + 1?",
        "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}",
        **more,
    }


def prepared(**arguments: Any) -> GSM8K:
    data = GSM8K(**arguments)
    data.prepare()
    return data


def test_the_bundled_sample_is_what_its_readme_says() -> None:
    data = prepared()
    assert data.counts == {"train_questions": 400, "validation_questions": 100, "questions_in_files": 500}
    assert data.corpus is None
    assert max(id_rank(q.id) for q in data.validation) < min(id_rank(q.id) for q in data.train)
    assert not {q.question for q in data.train} & {q.question for q in data.validation}
    readme = (SAMPLE_DIR / "README.md").read_text(encoding="utf-8")
    files = list(SAMPLE_DIR.glob("*.jsonl"))
    assert len(files) == 2
    for file in files:
        assert hashlib.sha256(file.read_bytes()).hexdigest() in readme
        assert f"{file.stat().st_size:,}" in readme


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_the_sample_is_a_part_of_the_original() -> None:
    original = {q.id: q.answers for q in load_worked_answers(SHARED / "train.jsonl")}
    data = prepared()
    for question in [*data.train, *data.validation]:
        assert original[question.id] == question.answers


def test_gold_answers_earn_the_reward_and_those_of_others_do_not() -> None:
    questions = prepared().train[:50]
    other = questions[1:] + questions[:1]
    episodes = [Episode(q.question, q.answers, completion=q.answers[0]) for q in questions]
    wrong = [
        Episode(q.question, q.answers, completion=o.answers[0])
        for q, o in zip(questions, other, strict=True)
        if q.answers[1] != o.answers[1]
    ]
    assert NumericReward()(episodes) == [1.0] * 50
    assert NumericReward()(wrong) == [0.0] * len(wrong)


def test_rows_without_ids_and_with_more_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "sums.jsonl", [row(1), row(2, id=7, level="easy"), row(3, final_answer=4)])
    first, second, third = load_worked_answers(file)
    assert (first.id, second.id, third.id) == ("sums_00000", "7", "sums_00002")
    assert first.answers == ("1 + 1 = <<1+1=2>>2\n#### 2", "2")
    assert second.metadata == {"level": "easy"} and third.metadata == {}
    assert load_worked_answers(file, annotations=False)[0].answers[0] == "1 + 1 = 2\n#### 2"


def test_a_file_is_split_and_questions_that_read_the_same_stay_together(tmp_path: Path) -> None:
    rows = [row(n // 2) for n in range(40)]
    one = prepared(path=str(write(tmp_path / "a.jsonl", rows)), validation_questions=6)
    assert len(one.validation) == 6 and len(one.train) == 34
    assert not {q.question for q in one.train} & {q.question for q in one.validation}
    again = prepared(path=str(tmp_path / "a.jsonl"), validation_questions=6, seed=3)
    assert again.validation == one.validation and again.fingerprint == one.fingerprint


def test_a_test_file_is_used_only_where_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(n) for n in range(20)])
    write(tmp_path / "test.jsonl", [row(n) for n in range(100, 103)])
    assert len(prepared(path=str(tmp_path), validation_questions=4).validation) == 4
    named = prepared(path=str(tmp_path), validation_path=str(tmp_path / "test.jsonl"), max_train_questions=5)
    assert [q.id for q in named.validation] == ["test_00000", "test_00001", "test_00002"]
    assert len(named.train) == 5 and named.counts["questions_in_files"] == 23
    write(tmp_path / "validation.jsonl", [row(50)])
    assert [q.id for q in prepared(path=str(tmp_path)).validation] == ["validation_00000"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "a?", "answer": "I don't know"}],
            r"train\.jsonl:1: key 'answer': expected a last line with a",
        ),
        (
            [row(1), row(2, final_answer="9")],
            r"train\.jsonl:2: key 'final_answer': '9' is not what the answer",
        ),
        ([{"question": "a?"}], r"train\.jsonl:1: missing key 'answer'"),
        ([row(1, id="a"), row(2, id="a")], r"'a' is already used on line 1"),
        ([row(1)], "expected at least 2 examples"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    write(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError, match=message):
        prepared(path=str(tmp_path))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.path=.*nowhere: expected a JSONL file.* but it does not exist"
    ):
        prepared(path=str(tmp_path / "nowhere"))
    write(tmp_path / "test.jsonl", [row(1)])
    with pytest.raises(DataError, match=r"found JSONL files: test\.jsonl"):
        prepared(path=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.validation_path: .*nowhere"):
        prepared(validation_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"data\.validation_questions"):
        prepared(validation_questions=0)
    same = write(tmp_path / "train.jsonl", [row(n) for n in range(9)])
    with pytest.raises(DataError, match="9 question ids are in"):
        prepared(path=str(tmp_path), validation_path=str(same))


def test_the_yaml_lists_every_parameter_with_its_default() -> None:
    config = yaml.safe_load((CONF / "gsm8k.yaml").read_text(encoding="utf-8"))
    assert config.pop("_target_") == f"{GSM8K.__module__}.{GSM8K.__name__}"
    parameters = inspect.signature(GSM8K).parameters
    assert config == {k: p.default for k, p in parameters.items() if k not in {"cache_dir", "seed"}}


def test_a_corpus_may_be_searched(tmp_path: Path) -> None:
    (tmp_path / "formulas.md").write_text("# Circles\n\nThe area is pi r squared.\n")
    data = instantiate(compose(["data=gsm8k", f"data.corpus={tmp_path / 'formulas.md'}"]), "data")
    data.prepare()
    assert [d.title for d in data.corpus] == ["Circles"]
    assert "The area is pi" in data.tokenizer_texts()[0]
