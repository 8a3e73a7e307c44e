"""Documents that stay on disk: the same as in memory, whatever is asked of them."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest

from refragkit.data import corpus as corpus_module
from refragkit.data.corpus import load_corpus, open_corpus
from refragkit.data.datamodule import MultiHopQA
from refragkit.data.document_store import DocumentStore, write_documents
from refragkit.data.document_table import DocumentTable, IdTable, PassageTexts, corpus_hash, passage_text
from refragkit.data.mapped_tensors import map_tensors, write_tensors
from refragkit.errors import DataError
from refragkit.types import Document

DOCUMENTS = [
    Document("b", "Bread", "Leavened\nby yeast.", {"source": "x", "n": [1, {"deep": None}]}),
    Document("ä/2", "", "", {}),
    Document("a", "Tea", "Grown in the \u2028 mountains \U0001f375.", {"id": "not the id"}),
    Document("c", "Bread", "Leavened\nby yeast.", {}),
    Document("", "Empty id", "is an id", {}),
]


@pytest.fixture
def store(tmp_path: Path) -> DocumentStore:
    write_documents(tmp_path / "d.jsonl", tmp_path / "t.safetensors", DOCUMENTS)
    return DocumentStore(tmp_path / "d.jsonl", tmp_path / "t.safetensors")


def test_a_store_is_the_sequence_that_was_written(store: DocumentStore) -> None:
    assert list(store) == DOCUMENTS and len(store) == 5
    assert [store[i] for i in range(-5, 5)] == DOCUMENTS * 2
    assert store[1:4] == DOCUMENTS[1:4] and store[::-2] == DOCUMENTS[::-2]
    assert store[np.int64(2)] == DOCUMENTS[2] and DOCUMENTS[3] in store
    for i in (5, -6):
        with pytest.raises(IndexError):
            store[i]
    assert list(copy.copy(store)) == DOCUMENTS


def test_its_table_is_that_of_the_documents_in_memory(store: DocumentStore) -> None:
    table, expected = store.table, DocumentTable.of(DOCUMENTS)
    assert dict(table.positions) == expected.positions
    assert np.array_equal(table.id_rank, expected.id_rank)
    assert table.searchable.tolist() == expected.searchable.tolist() == [0, 2, 3, 4]
    assert (table.empty, table.duplicates) == (expected.empty, expected.duplicates) == (1, 1)
    assert table.corpus_hash == corpus_hash(DOCUMENTS)
    with pytest.raises(KeyError):
        table.positions["nobody"]
    assert table.positions.get("nobody") is None and "a" in table.positions
    texts = PassageTexts(store, table.searchable)
    assert texts[:] == [passage_text(DOCUMENTS[i]) for i in (0, 2, 3, 4)] and texts[1] == texts[:][1]


def test_ids_that_share_half_a_hash_are_told_apart() -> None:
    ids = [f"id{i}" for i in range(50)]
    high, low, order = IdTable.arrays(ids)
    documents = [Document(i, "", "x") for i in ids]
    assert [IdTable(documents, high, low, order)[i] for i in ids] == list(range(50))
    # All first halves equal: only the second tells.
    raised = IdTable(documents, np.full(50, high[order.tolist().index(7)], dtype=np.uint64), low, order)
    assert raised["id7"] == 7


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LARGE_CORPUS_BYTES", 0)


LINES = [
    {"id": f"d{i:03d}", "title": f"T{i % 7}", "text": "" if i == 5 else f"text {i % 40}", "extra": i}
    for i in range(100)
]


def _write(path: Path, rows: list[dict[str, object]], before: bytes = b"", after: bytes = b"") -> Path:
    path.write_bytes(before + "".join(json.dumps(r) + "\n" for r in rows).encode() + after)
    return path


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"\xef\xbb\xbf", b"\r\n \n\n")])
def test_a_large_corpus_is_the_small_one_on_disk(
    large: None, tmp_path: Path, before: bytes, after: bytes
) -> None:
    file = _write(tmp_path / "corpus.jsonl", LINES, before, after)
    opened = open_corpus(file, tmp_path / "cache")
    assert isinstance(opened, DocumentStore)
    expected = load_corpus(file)
    assert list(opened) == expected and [opened[i] for i in range(100)] == expected
    assert opened.table.corpus_hash == corpus_hash(expected)
    without_break = tmp_path / "no_break.jsonl"
    without_break.write_bytes(file.read_bytes().rstrip())
    assert list(open_corpus(without_break, tmp_path / "cache")) == expected


def test_a_large_corpus_is_checked_once_and_again_when_it_changed(
    large: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _write(tmp_path / "corpus.jsonl", LINES)
    open_corpus(file, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_write_table", lambda *a: pytest.fail("checked again"))
        assert len(open_corpus(file, tmp_path)) == 100
    # Same size, same time stamp, another text.
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"text 39", b"text 93"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    opened = open_corpus(file, tmp_path)
    assert isinstance(opened, DocumentStore)
    assert opened.table.corpus_hash == corpus_hash(load_corpus(file))


@pytest.mark.parametrize(
    "lines",
    [
        ['{"id": "a", "text": "x"}', '{"id": "a", "text": "y"}'],
        ['{"id": "a", "text": "x"}', "{", "", '{"id": 3, "text": "x"}', '{"id": "b"}'],
        ["[]"],
        [],
        ["", '{"id": "a", "text": "x"}'],
    ],
)
def test_bad_lines_are_reported_as_those_of_a_small_corpus(
    large: None, lines: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as expected:
        load_corpus(file)
    with pytest.raises(DataError) as error:
        open_corpus(file, tmp_path / "cache")
    assert str(error.value) == str(expected.value)
    assert not any((tmp_path / "cache").rglob("*.safetensors*"))


def test_a_file_that_changes_while_in_use_is_one_message(large: None, tmp_path: Path) -> None:
    file = _write(tmp_path / "corpus.jsonl", LINES)
    opened = open_corpus(file, tmp_path)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataError, match="was changed while in use"):
        opened[99]
    with pytest.raises(DataError, match="was changed while in use"):
        list(opened)


def test_a_data_module_over_a_large_corpus(large: None, tmp_path: Path) -> None:
    _write(tmp_path / "corpus.jsonl", LINES)
    questions = [
        {"id": f"q{i}", "question": "?", "answers": ["x"], "supporting_ids": [f"d{i:03d}"]} for i in range(10)
    ]
    _write(tmp_path / "questions.jsonl", questions)
    data = MultiHopQA(str(tmp_path), cache_dir=tmp_path)
    data.prepare()
    assert isinstance(data.corpus, DocumentStore) and data.counts["passages"] == 100
    fingerprint = data.fingerprint
    _write(tmp_path / "corpus.jsonl", [*LINES[:-1], {**LINES[-1], "text": "other"}])
    data.prepare()
    assert data.fingerprint != fingerprint
    _write(tmp_path / "questions.jsonl", [{**questions[0], "supporting_ids": ["nobody"]}, *questions[1:]])
    with pytest.raises(DataError, match="'nobody': no passage of the corpus has this id"):
        data.prepare()


def test_mapped_tensors_are_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": np.array([1.5], dtype=np.float32),
        "none": np.zeros((0, 4), dtype=np.int32),
        "c": np.array([2**63 + 1], dtype=np.uint64),
        "d": np.array([[7]], dtype=np.uint8),
        "e": np.array(0.25),
    }
    file = tmp_path / "t.safetensors"
    write_tensors(file, tensors, {"key": "value"})
    for read in (map_tensors(file)[0], load_file(file)):
        assert read.keys() == tensors.keys()
        assert all(np.array_equal(read[k], v) and read[k].dtype == v.dtype for k, v in tensors.items())
    assert map_tensors(file)[1] == {"key": "value"}
    save_file({"a": tensors["a"]}, tmp_path / "theirs.safetensors")
    assert np.array_equal(map_tensors(tmp_path / "theirs.safetensors")[0]["a"], tensors["a"])
    raw = file.read_bytes()
    for length in (0, 4, 20, len(raw) - 1):
        file.write_bytes(raw[:length])
        with pytest.raises(ValueError, match=r"t.safetensors"):
            map_tensors(file)
    file.write_bytes(raw + b"x")
    with pytest.raises(ValueError, match="truncated"):
        map_tensors(file)
