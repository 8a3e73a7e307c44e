from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from refragkit.data.corpus_reader import CorpusReader
from refragkit.errors import ConfigError, DataError
from refragkit.types import Document

NOTHING_LEFT_OUT = {
    "corpus_bad_files": 0,
    "corpus_bad_lines": 0,
    "corpus_other_files": 0,
    "corpus_refused_links": 0,
}


def read(source: Path, *arguments: Any) -> tuple[list[Document], dict[str, int]]:
    reader = CorpusReader(source, *arguments)
    return list(reader.passages()), reader.counts


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def words(n: int) -> str:
    return " ".join(f"word {i}." for i in range(n))


def test_each_kind_of_file(tmp_path: Path) -> None:
    jsonl(
        tmp_path / "b.jsonl",
        {"text": "one", "title": "T", "year": 1843},
        {"id": 7, "text": "two", "source": "web"},
    )
    (tmp_path / "Notes.TXT").write_bytes("\ufeffnotes\r\n".encode())
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "guide.md").write_text("intro\n\n# The Guide\n\ntext\n", encoding="utf-8")
    day = datetime.date(2020, 1, 2)
    table = {
        "text": ["x", "y"],
        "id": ["p1", None],
        "title": [None, "Y"],
        "day": [day, None],
        "score": [1.5, float("nan")],
    }
    parquet.write_table(pa.table(table), tmp_path / "sub" / "t.parquet")
    passages, counts = read(tmp_path)
    assert passages == [
        Document("Notes.TXT", "Notes", "notes\r\n", {"source": "Notes.TXT"}),
        Document("b.jsonl:1", "T", "one", {"source": "b.jsonl", "year": 1843}),
        Document("7", "", "two", {"source": "web"}),
        Document("sub/guide.md", "The Guide", "intro\n\n# The Guide\n\ntext\n", {"source": "sub/guide.md"}),
        Document("p1", "", "x", {"source": "sub/t.parquet", "day": "2020-01-02", "score": 1.5}),
        Document("sub/t.parquet:2", "Y", "y", {"source": "sub/t.parquet", "score": None}),
    ]
    assert counts == {"passages": 6, "corpus_files": 4, "corpus_documents": 6, **NOTHING_LEFT_OUT}
    assert read(tmp_path) == (passages, counts)
    # A file alone has the same ids as in its folder.
    assert read(tmp_path / "Notes.TXT")[0] == passages[:1] and read(tmp_path / "b.jsonl")[0] == passages[1:3]


def test_long_documents_become_passages(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(words(200), encoding="utf-8")
    rows = (
        {"id": "a", "text": words(200), "title": "A", "chunk": "mine"},
        {"id": "b", "text": "short", "title": "B"},
    )
    jsonl(tmp_path / "p.jsonl", *rows)
    passages, counts = read(tmp_path)
    # Passages that come as such stay as they are, unless a size is asked for.
    assert [p.doc_id for p in passages] == ["long.txt#0", "long.txt#1", "long.txt#2", "long.txt#3", "a", "b"]
    assert counts["corpus_documents"] == 3 and counts["passages"] == 6
    assert dict(passages[1].metadata) == {"source": "long.txt", "chunk": 1} and passages[1].title == "long"
    assert all(p.text == p.text.strip() and p.text in words(200) for p in passages[:4])
    passages, _ = read(tmp_path, 100, 0)
    assert [p.doc_id for p in passages if p.title == "A"] == [f"a#{n}" for n in range(7)]
    assert " ".join(p.text for p in passages if p.title == "A") == words(200)
    assert {p.metadata["chunk"] for p in passages if p.title == "A"} == {"mine"}
    assert passages[-1] == Document("b", "B", "short", {"source": "p.jsonl"})


def test_markdown_is_cut_at_its_sections(tmp_path: Path) -> None:
    file = tmp_path / "guide.md"
    file.write_text(f"# Guide\n\n## Install\n\n{words(10)}\n\n## Use\n\n{words(120)}\n", encoding="utf-8")
    passages, _ = read(file)
    assert [(p.doc_id, p.title) for p in passages] == [
        ("guide.md#0", "Guide > Install"),
        ("guide.md#1", "Guide > Use"),
        ("guide.md#2", "Guide > Use"),
    ]
    assert passages[0].text == f"# Guide\n\n## Install\n\n{words(10)}" and passages[1].text.startswith(
        "## Use"
    )
    file.write_text(f"# Guide\n\n## Install\n\n{words(10)}\n\n## Use\n\n{words(12)}\n", encoding="utf-8")
    assert [(p.doc_id, p.title) for p in read(file)[0]] == [("guide.md", "Guide")]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder with a good file and one of everything that can be wrong."""
    folder = tmp_path / "docs"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden" / "x.txt").write_text("hidden")
    (folder / ".x.txt").write_text("hidden")
    (folder / "a-latin.txt").write_bytes(b"caf\xe9")
    (folder / "b-broken.jsonl").write_text(
        '{"text": "good"}\n{"text": \n\n{"txt": "x"}\n{"id": true, "text": "x"}\n'
    )
    (folder / "c-empty.md").write_text("")
    parquet.write_table(pa.table({"body": ["x"]}), folder / "d-column.parquet")
    parquet.write_table(
        pa.table({"text": ["x", None, "y"], "id": ["1", "2", "3"]}), folder / "e-null.parquet"
    )
    parquet.write_table(pa.table({"text": ["z" * 1000] * 100}), folder / "f-cut.parquet")
    os.truncate(folder / "f-cut.parquet", 300)
    (folder / "g.pdf").write_text("x")
    (folder / "h.PDF").write_text("x")
    (folder / "Makefile").write_text("x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    (folder / "i-link.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (folder / "j-link").symlink_to(tmp_path / "outside")
    (folder / "k-loop").symlink_to(folder)
    (folder / "l-inside.jsonl").symlink_to("b-broken.jsonl")
    (folder / "l-itself.txt").symlink_to("l-itself.txt")
    os.mkfifo(folder / "m-pipe.txt")
    return folder


def test_a_bad_file_is_reported_and_the_rest_is_read(bad: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        passages, counts = read(bad)
    assert [(p.doc_id, p.text) for p in passages] == [("b-broken.jsonl:1", "good"), ("1", "x"), ("3", "y")]
    assert counts == {
        "passages": 3,
        "corpus_files": 2,
        "corpus_documents": 3,
        "corpus_bad_files": 5,
        "corpus_bad_lines": 5,
        "corpus_other_files": 3,
        "corpus_refused_links": 2,
    }
    warnings = [r.getMessage().replace(f"{bad}/", "") for r in caplog.records if r.levelname == "WARNING"]
    assert [w.split(":")[1].strip() for w in warnings] == [
        *[
            "left out a-latin.txt",
            "left out b-broken.jsonl",
            "left out c-empty.md",
            "left out d-column.parquet",
        ],
        *["left out e-null.parquet", "problems in 4 more files, not shown"],
    ]
    assert warnings[0].endswith("expected UTF-8, got byte 0xe9 at byte 4 (save the file as UTF-8)")
    assert "b-broken.jsonl:2: expected one JSON object, got broken JSON" in warnings[1]
    assert warnings[1].endswith("(and 3 more bad lines in this file)")
    (summary,) = (r.getMessage() for r in caplog.records if r.levelname == "INFO")
    assert summary == (
        f"data.corpus={bad}: 3 passages of 3 documents in 2 files; left out: 5 bad files, 5 bad lines, "
        "2 refused links, 3 files of other types (.pdf 2, no suffix 1)"
    )
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a-latin.txt", r"^data.corpus: .*a-latin.txt: expected UTF-8, got byte 0xe9 at byte 4"),
        (
            "b-broken.jsonl",
            r"^data.corpus: 4 bad lines in .*\n  .*:2: .*\n  .*:3: .*empty line\n  .*:4: ",
        ),
        ("c-empty.md", r"c-empty.md: the file is empty"),
        ("d-column.parquet", r"d-column.parquet: expected a column 'text', got the columns body"),
        ("e-null.parquet", r"e-null.parquet: row 2: key 'text': expected a string, got null"),
        ("f-cut.parquet", r"f-cut.parquet: can't be read as Parquet"),
        ("g.pdf", r"data.corpus=.*expected a .jsonl, .md, .parquet or .txt file or a folder.*type .pdf"),
        ("nowhere", r"data.corpus=.*nowhere: expected .*it does not exist"),
        ("m-pipe.txt", r"m-pipe.txt: expected .*it is neither"),
    ],
)
def test_a_single_file_that_is_bad_is_an_error(bad: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(bad / name)


def test_nothing_that_can_be_read(bad: Path, tmp_path: Path) -> None:
    for name in ("b-broken.jsonl", "e-null.parquet"):
        (bad / name).unlink()
    with pytest.raises(DataError) as error:
        read(bad)
    lines = str(error.value).replace(f"{bad}/", "").splitlines()
    assert lines[0] == f"data.corpus={bad}: no document could be read:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        *[
            "a-latin.txt",
            "c-empty.md",
            "d-column.parquet",
            "f-cut.parquet",
            "i-link.txt",
            "... and problems in 2 more files",
        ]
    ]
    (tmp_path / "other").mkdir()
    with pytest.raises(
        DataError, match=r"expected .jsonl, .md, .parquet or .txt files in this folder, found nothing"
    ):
        read(tmp_path / "other")
    (tmp_path / "other" / "a.pdf").write_text("x")
    with pytest.raises(DataError, match=r"found only files of other types \(.pdf 1\)"):
        read(tmp_path / "other")


def test_ids_are_unique_in_the_whole_corpus(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"id": "x", "text": "1"}, {"id": "y", "text": "2"})
    jsonl(tmp_path / "b.jsonl", {"id": "z", "text": "3"}, {"id": "y", "text": "4"})
    with pytest.raises(DataError, match=r"the id 'y' is used in a.jsonl and in b.jsonl; ids must be unique"):
        read(tmp_path)
    jsonl(tmp_path / "b.jsonl", {"id": "z", "text": "3"}, {"id": "z", "text": "4"})
    with pytest.raises(DataError, match=r"the id 'z' is used twice in b.jsonl"):
        read(tmp_path)


def test_a_damaged_row_group_keeps_what_comes_before(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    texts = [f"{i:05d} " * 20 for i in range(4000)]
    parquet.write_table(pa.table({"text": texts}), file, row_group_size=2000, compression="snappy")
    content = bytearray(file.read_bytes())
    second = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    start = second.dictionary_page_offset or second.data_page_offset
    content[start : start + 400] = bytes(400)
    file.write_bytes(content)
    jsonl(tmp_path / "a.jsonl", {"text": "x"})
    passages, counts = read(tmp_path)
    assert counts["corpus_bad_files"] == 1
    assert [p.text for p in passages] == ["x", *texts[: len(passages) - 1]] and len(passages) in (1025, 2001)


def test_half_a_surrogate_pair_is_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line in ('{"text": "\\ud83d"}', '{"text": "x", "by": ["\\ud83d"]}', '{"text": "x", "\\ud83d": 1}'):
        file.write_text(line)
        with pytest.raises(DataError, match=r"a.jsonl:1: .*lone surrogate"):
            read(file)


def test_nothing_is_held_but_ids(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", *({"text": str(n)} for n in range(10)))
    (tmp_path / "b.jsonl").write_text("{")
    stream = CorpusReader(tmp_path / "a.jsonl").passages()
    assert next(stream).text == "0"


def test_sizes_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match=r"data.chunk_overlap"):
        CorpusReader("/nowhere", None, 200)
    with pytest.raises(ConfigError, match=r"data.chunk_tokens"):
        CorpusReader("/nowhere", 3)
    CorpusReader("/nowhere", 300, 200)


@pytest.mark.parametrize(("source", "size", "key"), [("", None, "corpus"), ("docs", 0, "chunk_tokens")])
def test_a_setting_that_is_not_the_default_is_not_taken_for_it(
    source: str, size: int | None, key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}: expected"):
        CorpusReader(source, size)
