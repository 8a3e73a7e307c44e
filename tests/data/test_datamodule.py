from __future__ import annotations

import hashlib
import inspect
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from refragkit.data.datamodule import SAMPLE_DIR, Conversations, MultiHopQA
from refragkit.errors import ConfigError, DataError

CONF = Path(__file__).parents[2] / "conf" / "data"
INJECTED = {"cache_dir", "seed"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def question(n: int, *gold: int) -> dict[str, Any]:
    return {
        "id": f"q{n}",
        "question": f"Who is {n}?",
        "answers": [str(n)],
        "supporting_ids": [f"p{g}" for g in gold],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A full layout of 40 questions; every fourth shares a gold passage with the next."""
    write(
        tmp_path / "corpus.jsonl",
        [{"id": f"p{n}", "title": f"T{n}", "text": f"Text {n}."} for n in range(100)],
    )
    rows = [question(n, n, n + 50, *([n + 51] if n % 4 == 0 else [])) for n in range(40)]
    write(tmp_path / "questions.jsonl", rows)
    return tmp_path


def test_the_bundled_sample_is_what_its_readme_says(sample: MultiHopQA) -> None:
    assert sample.counts == {
        "train_questions": 300,
        "validation_questions": 60,
        "questions_in_files": 360,
        "passages": 1800,
        "shared_gold_passages": 0,
    }
    assert sum(f.stat().st_size for f in SAMPLE_DIR.iterdir()) < 1_500_000
    train = Counter(q.metadata["dataset"] for q in sample.train)
    assert train == {"hotpotqa": 75, "musique": 70, "2wikimultihopqa": 155}
    assert set(Counter(q.metadata["dataset"] for q in sample.validation).values()) == {20}
    assert Counter(q.hops for q in sample.train) == {2: 232, 3: 15, 4: 53}
    assert Counter(q.hops for q in sample.validation) == {2: 39, 3: 8, 4: 13}
    for q in [*sample.train, *sample.validation]:
        assert set(q.supporting_ids) <= set(q.candidate_ids)
        assert bool(q.decomposition) == (q.metadata["dataset"] == "musique")
    assert not {q.question for q in sample.train} & {q.question for q in sample.validation}
    readme = (SAMPLE_DIR / "README.md").read_text(encoding="utf-8")
    for file in SAMPLE_DIR.glob("*.jsonl"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in readme


def test_constructors_read_nothing() -> None:
    MultiHopQA("/nowhere", tokenizer="/nowhere")
    Conversations("/nowhere")


def test_a_split_shares_no_gold_passage_and_is_the_same_for_every_seed(folder: Path) -> None:
    one, other = MultiHopQA(str(folder), 8, seed=1), MultiHopQA(str(folder), 8)
    one.prepare()
    other.prepare(seed=2, cache_dir=folder / "cache")
    assert one.validation == other.validation and one.train == other.train
    assert one.fingerprint == other.fingerprint
    assert other.seed == 2 and other.cache_dir == folder / "cache"
    assert 7 <= len(one.validation) <= 8 and len(one.train) + len(one.validation) == 40
    assert one.counts["shared_gold_passages"] == 0
    assert [q.id for q in one.train] == sorted((q.id for q in one.train), key=lambda i: int(i[1:]))


def test_the_fingerprint_follows_the_content(folder: Path) -> None:
    def fingerprint() -> str:
        data = MultiHopQA(str(folder), 8)
        data.prepare()
        return data.fingerprint

    before = fingerprint()
    assert fingerprint() == before
    with (folder / "corpus.jsonl").open("a") as f:
        f.write('{"id": "new", "title": "", "text": "one more"}\n')
    assert fingerprint() != before


def test_small_data_keep_four_fifths_for_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = MultiHopQA(str(folder))
    with caplog.at_level(logging.WARNING):
        data.prepare()
    assert 7 <= len(data.validation) <= 8
    assert "data.validation_questions=200 is more than a fifth of the 40 examples" in caplog.text


def test_split_files_are_used_as_they_are(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder / "train.jsonl", [question(1, 1, 2), question(2, 3)])
    write(folder / "validation.jsonl", [question(3, 2)])
    data = MultiHopQA(str(folder))
    with caplog.at_level(logging.WARNING):
        data.prepare()
    assert [q.id for q in data.train] == ["q1", "q2"] and [q.id for q in data.validation] == ["q3"]
    assert data.counts["shared_gold_passages"] == 1
    assert "1 passages are gold in train.jsonl and in validation.jsonl" in caplog.text
    write(folder / "validation.jsonl", [question(2, 9)])
    with pytest.raises(
        DataError, match=r"1 question ids are in train.jsonl and in validation.jsonl, such as 'q2'"
    ):
        data.prepare()


def test_fewer_questions(folder: Path) -> None:
    data = MultiHopQA(str(folder), 8, max_train_questions=5, max_validation_questions=2)
    data.prepare()
    assert (len(data.train), len(data.validation)) == (5, 2)


def test_a_path_that_is_no_folder_of_data(folder: Path, tmp_path: Path) -> None:
    for path, message in {
        "/nowhere": "data.path=/nowhere: expected a folder .* but it does not exist",
        str(folder / "corpus.jsonl"): "it is a file",
        str(write(tmp_path / "x" / "other.jsonl", [{}]).parent): "found JSONL files: other.jsonl",
    }.items():
        with pytest.raises(DataError, match=message) as error:
            MultiHopQA(path).prepare()
        assert "\n" not in str(error.value)


def test_broken_content_is_named_by_file_and_line(folder: Path) -> None:
    with (folder / "questions.jsonl").open("a") as f:
        f.write('{"id": "q99", "question"')
    with pytest.raises(DataError, match=r"questions\.jsonl:41: expected one JSON object, got broken JSON"):
        MultiHopQA(str(folder)).prepare()
    (folder / "corpus.jsonl").write_text("")
    with pytest.raises(DataError, match=r"corpus\.jsonl: expected passages.*the file is empty"):
        MultiHopQA(str(folder)).prepare()


def test_what_can_not_be_split(folder: Path) -> None:
    write(folder / "questions.jsonl", [question(n, 1) for n in range(10)])
    with pytest.raises(DataError, match="can't hold out 2 questions without sharing a gold passage"):
        MultiHopQA(str(folder), 2).prepare()
    write(folder / "questions.jsonl", [question(1, 1)])
    with pytest.raises(DataError, match=r"expected at least 2 examples.*got 1"):
        MultiHopQA(str(folder)).prepare()


def test_impossible_settings_are_all_reported(folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        MultiHopQA(str(folder), 0, max_train_questions=-1).prepare()
    assert str(error.value).splitlines() == [
        "data.validation_questions: expected an integer of at least 1, got 0",
        "data.max_train_questions: expected an integer of at least 1, got -1",
    ]


def test_the_tokenizer_never_sees_a_validation_question(folder: Path) -> None:
    data = MultiHopQA(str(folder), 8, vocab_size=300, cache_dir=folder / "cache")
    with pytest.raises(RuntimeError, match="prepare"):
        data.build_tokenizer()
    data.prepare()
    texts = data.tokenizer_texts()
    assert "T1\nText 1." in texts and data.train[0].question in texts
    assert not {q.question for q in data.validation} & set(texts)
    tokenizer = data.build_tokenizer()
    assert tokenizer.vocab_size <= 300 and list((folder / "cache" / "tokenizers").iterdir())
    assert data.build_tokenizer(folder / "other").fingerprint == tokenizer.fingerprint
    assert list((folder / "other" / "tokenizers").iterdir())


def test_a_tokenizer_folder_is_used(folder: Path, pretrained_folder: Callable[..., Path]) -> None:
    data = MultiHopQA(str(folder), tokenizer=str(pretrained_folder(None)))
    assert data.build_tokenizer().vocab_size > 264
    with pytest.raises(DataError, match=r"data.tokenizer: /nowhere: expected a tokenizer folder"):
        MultiHopQA(str(folder), tokenizer="/nowhere").build_tokenizer()


def test_loaders_yield_global_batches(sample: MultiHopQA) -> None:
    batches = list(sample.train_loader(global_batch_size=16, n_steps=3))
    assert [b.index for b in batches] == [0, 1, 2] and {len(b.examples) for b in batches} == {16}
    assert next(iter(sample.train_loader(16, 3, first_step=2))) == batches[2]
    assert [q for b in sample.validation_loader(16) for q in b.examples] == sample.validation
    assert len(sample.validation_loader(16, max_examples=20)) == 2


def conversation(n: int, opening: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": opening}, {"role": "assistant", "content": f"reply {n}"}]
    return {"id": f"c{n}", "messages": turns}


def test_conversations_that_open_alike_stay_on_one_side(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [conversation(n, f"Opening {n // 2}") for n in range(40)])
    data = Conversations(str(path), validation_conversations=6, vocab_size=300, cache_dir=tmp_path)
    data.prepare()
    assert data.corpus is None
    assert data.counts == {
        "train_conversations": 34,
        "validation_conversations": 6,
        "conversations_in_files": 40,
    }
    openings = [{c.messages[0].content for c in part} for part in (data.train, data.validation)]
    assert not openings[0] & openings[1]
    assert "reply 1" in data.tokenizer_texts() or "reply 0" in data.tokenizer_texts()
    assert data.build_tokenizer().vocab_size > 264
    assert len(next(iter(data.train_loader(4, 1))).examples) == 4


def test_conversations_with_a_validation_file(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [conversation(1, "a")])
    other = write(tmp_path / "other.jsonl", [conversation(2, "b")])
    data = Conversations(str(path), validation_path=str(other))
    data.prepare()
    assert [c.id for c in data.train] == ["c1"] and [c.id for c in data.validation] == ["c2"]
    with pytest.raises(DataError, match=r"data.validation_path: /nowhere: expected a JSONL file"):
        Conversations(str(path), validation_path="/nowhere").prepare()


def test_conversations_need_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path: expected a JSONL file of conversations.*got null"):
        Conversations().prepare()
    with pytest.raises(DataError, match=r"data.path: /nowhere: expected a JSONL file of conversations"):
        Conversations("/nowhere").prepare()
    path = write(tmp_path / "chat.jsonl", [conversation(n, "the same") for n in range(10)])
    with pytest.raises(DataError, match="can't hold out 2 conversations"):
        Conversations(str(path), validation_conversations=2).prepare()


def test_documents_of_ones_own_replace_the_corpus(folder: Path, tmp_path: Path) -> None:
    (folder / "corpus.jsonl").rename(tmp_path / "mine.jsonl")
    with pytest.raises(
        DataError,
        match=r"expected corpus.jsonl and questions.jsonl .*found JSONL files: mine.jsonl, questions.jsonl",
    ):
        MultiHopQA(str(folder)).prepare()
    data = MultiHopQA(str(folder), 8, corpus=str(tmp_path / "mine.jsonl"))
    data.prepare()
    assert data.corpus is not None and data.corpus[1].doc_id == "p1"
    assert data.counts["passages"] == 100 and data.counts["corpus_files"] == 1
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Some text.")
    with pytest.raises(
        DataError, match=r"questions.jsonl:1: key 'supporting_ids': 'p0', .*no passage of the corpus"
    ):
        MultiHopQA(str(folder), corpus=str(tmp_path / "docs")).prepare()
    with pytest.raises(
        ConfigError, match=r"data.chunk_tokens=100 is about data.corpus, and data.corpus is null"
    ):
        MultiHopQA(str(folder), chunk_tokens=100).prepare()


def test_the_corpus_can_be_read_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "questions.jsonl").unlink()
    assert [d.doc_id for d in MultiHopQA(str(folder)).read_corpus() or []][:2] == ["p0", "p1"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("One two three four. " * 60)
    for data in (MultiHopQA(corpus=str(tmp_path / "docs")), Conversations(corpus=str(tmp_path / "docs"))):
        assert [d.doc_id for d in data.read_corpus() or []] == ["a.txt#0", "a.txt#1"]
        assert data.counts["passages"] == 2 and not data.train
    assert Conversations().read_corpus() is None


def test_conversations_with_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [conversation(n, f"Opening {n}") for n in range(10)])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# Title\n\nOne two three four.\n")
    data = Conversations(str(path), corpus=str(tmp_path / "docs"))
    data.prepare()
    assert [d.title for d in data.corpus or []] == ["Title"]
    assert data.counts["passages"] == 1 and data.counts["train_conversations"] == 8
    assert data.tokenizer_texts()[0] == "Title\n# Title\n\nOne two three four.\n"
    before = data.fingerprint
    (tmp_path / "docs" / "a.md").write_text("# Title\n\nOne two three five.\n")
    data.prepare()
    assert data.fingerprint != before


@pytest.mark.parametrize(("option", "target"), [("multihop_qa", MultiHopQA), ("chat", Conversations)])
def test_the_yaml_lists_every_parameter_with_its_default(option: str, target: Callable[..., Any]) -> None:
    text = (CONF / f"{option}.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[0].startswith("# ") and text.splitlines()[1].startswith("# python run.py ")
    config = yaml.safe_load(text)
    assert config.pop("_target_") == f"{target.__module__}.{target.__name__}"
    parameters = inspect.signature(target).parameters
    assert config == {k: p.default for k, p in parameters.items() if k not in INJECTED}


def test_importing_the_module_is_light() -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import refragkit.data.datamodule;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
