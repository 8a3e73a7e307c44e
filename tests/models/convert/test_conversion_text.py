"""Text for calibration: cut, shuffled and held out by names alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import DataError
from refragkit.models.convert.text import fingerprint, read_documents, split_text, windows
from refragkit.types import Document


def passages(n: int) -> list[Document]:
    return [Document(f"d{i}", f"Title {i // 2}", f"Text number {i}.") for i in range(n)]


def test_a_tenth_is_held_out_by_title_whatever_the_order() -> None:
    documents = passages(100)
    split = split_text(documents)
    assert len(split.held_out) == 10 and len(split.calibration) == 90
    assert sorted(split.calibration + split.held_out) == sorted(f"{d.title}\n{d.text}" for d in documents)
    titles = [{text.partition("\n")[0] for text in side} for side in (split.calibration, split.held_out)]
    assert not titles[0] & titles[1]
    again = split_text(documents[::-1])
    assert sorted(again.held_out) == sorted(split.held_out)
    assert [t.partition("\n")[0] for t in again.calibration] == [
        t.partition("\n")[0] for t in split.calibration
    ]
    assert split.calibration != [
        f"{d.title}\n{d.text}" for d in documents if f"{d.title}\n{d.text}" in split.calibration
    ]


def test_long_text_is_cut_at_line_ends_and_nothing_is_lost() -> None:
    lines = [f"Line {i} " + "word " * (i % 40) for i in range(900)]
    split = split_text([Document("book.txt", "book", "\n".join(lines))])
    pieces = split.calibration + split.held_out
    assert len(pieces) > 20 and len(split.held_out) == len(pieces) // 10
    assert all(3999 <= len(piece) < 4400 for piece in pieces if not piece.endswith(lines[-1]))
    assert sorted(line for piece in pieces for line in piece.split("\n")) == sorted(lines)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="1 pieces of text"):
        split_text([Document("a", "", "One line.")])
    with pytest.raises(DataError, match="0 pieces of text"):
        split_text([Document("a", "", " \n")])


def test_reads_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Alpha\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "Beta", "title": "B"}) + "\n")
    assert [d.text.strip() for d in read_documents(tmp_path)] == ["Alpha", "Beta"]
    assert [d.title for d in read_documents(tmp_path / "b.jsonl")] == ["B"]
    (tmp_path / "c.jsonl").write_text('{"content": "no text"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl:1: .*'text'"):
        list(read_documents(tmp_path))
    with pytest.raises(DataError, match="but it does not exist"):
        list(read_documents(tmp_path / "none"))
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"but it is a \.bin file"):
        list(read_documents(tmp_path / "x.bin"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"no \.txt, \.md or \.jsonl file with text"):
        list(read_documents(empty))


def test_windows_follow_one_another() -> None:
    texts = [f"number {i} is {i * i}" for i in range(200)]
    tokenizer = Tokenizer.train(texts, 300)
    rows = windows(texts, tokenizer, 100, 32, "here")
    assert rows.shape == (4, 32) and rows.dtype == torch.int64  # 100 rounded up
    joined = [i for text in texts for i in tokenizer.encode(text + "\n\n")]
    assert rows.flatten().tolist() == joined[:128]
    assert windows(texts, tokenizer, 10**9, 32, "here").shape[0] == len(joined) // 32
    with pytest.raises(DataError, match=r"here: the text has .* fewer than one window of 512"):
        windows(texts[:3], tokenizer, 512, 512, "here")
    assert fingerprint(rows) != fingerprint(rows[:3]) != fingerprint(rows[:3].flatten())
