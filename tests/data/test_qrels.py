from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from refragkit.data.qrels import has_qrels, load_collection, load_qrels
from refragkit.errors import DataError

HEADER = "query_id\tdoc_id\tscore\n"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(qrels: str, queries: int = 2, documents: int = 3) -> Path:
        corpus = [{"id": f"d{i}", "title": "", "text": f"text {i}"} for i in range(1, documents + 1)]
        asked = [{"id": f"q{i}", "text": f"query {i}"} for i in range(1, queries + 1)]
        for name, rows in (("corpus", corpus), ("queries", asked)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (tmp_path / "qrels.tsv").write_bytes(qrels.encode())
        return tmp_path

    return write


def test_a_collection_is_read(write: Write) -> None:
    folder = write(f"{HEADER}q1\td2\t1\nq1\td1\t3\nq1\td3\t0\nq2\td3\t-1\n")
    assert has_qrels(folder)
    collection = load_collection(folder)
    assert [d.doc_id for d in collection.corpus] == ["d1", "d2", "d3"]
    assert [(q.id, q.question) for q in collection.queries] == [("q1", "query 1"), ("q2", "query 2")]
    assert collection.qrels == {"q1": {"d2": 1, "d1": 3, "d3": 0}, "q2": {"d3": -1}}
    # The best first, and nothing that is not relevant.
    assert [q.supporting_ids for q in collection.queries] == [("d1", "d2"), ()]


def test_harmless_habits_are_accepted(write: Write) -> None:
    folder = write("\ufeffquery-id\tcorpus-id\tscore\r\nq1\td2\t1\r\n\r\n")
    assert load_collection(folder).qrels == {"q1": {"d2": 1}}


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("", r"qrels.tsv:1: expected the header query_id, doc_id, score, .* got ''"),
        ("q1\td1\t1\n", r"qrels.tsv:1: expected the header .* got 'q1\\td1\\t1'"),
        (f"{HEADER}q1 d1 1\n", r"qrels.tsv:2: expected query_id, .* got 1 field\(s\): 'q1 d1 1'"),
        (f"{HEADER}q1\t0\td1\t1\n", r"qrels.tsv:2: .* got 4 field"),
        (f"{HEADER}q1\td1\t1\n\nq1\td2\t1\n", r"qrels.tsv:3: .* got 1 field"),
        (f"{HEADER}q9\td1\t1\n", r"qrels.tsv:2: query_id 'q9': no query of queries.jsonl"),
        (f"{HEADER}q1\td1\t1\nq1\td9\t1\n", r"qrels.tsv:3: doc_id 'd9': no document of corpus.jsonl"),
        (f"{HEADER}q1\td1\t0.5\n", r"qrels.tsv:2: score: expected a whole number, got '0.5'"),
        (f"{HEADER}q1\td1\t1_0\n", r"qrels.tsv:2: score: expected a whole number, got '1_0'"),
        (f"{HEADER}q1\td1\t1\nq1\td1\t1\n", r"qrels.tsv:3: query 'q1' and document 'd1' were judged"),
    ],
)
def test_broken_judgements_are_refused(write: Write, qrels: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_collection(write(qrels))


def test_many_bad_lines_are_counted(write: Write) -> None:
    folder = write(HEADER + "q1\td1\tx\n" * 9)
    with pytest.raises(DataError, match=r"9 bad lines in .*qrels.tsv:\n.*:2: score[\s\S]*and 4 more$"):
        load_qrels(folder / "qrels.tsv", {"q1"}, {"d1"})


def test_a_missing_or_unclear_folder(write: Write, tmp_path: Path) -> None:
    assert not has_qrels(tmp_path) and not has_qrels(tmp_path / "nowhere")
    folder = write(f"{HEADER}q1\td1\t1\n")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DataError, match=r"queries.jsonl: expected a JSONL file of queries"):
        load_collection(folder)
    (folder / "questions.jsonl").touch()
    with pytest.raises(DataError, match=r"holds both qrels.tsv and questions.jsonl"):
        has_qrels(folder)


def test_latin_1_is_refused(write: Write) -> None:
    folder = write(HEADER)
    (folder / "qrels.tsv").write_bytes(HEADER.encode() + b"q\xe9\td1\t1\n")
    with pytest.raises(DataError, match=r"qrels.tsv: expected UTF-8, got byte 0xe9 at byte 24"):
        load_collection(folder)
