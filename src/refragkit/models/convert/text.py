"""Text for calibration and scan, and a fixed part of it that is only measured on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from refragkit.data.document_files import Problem, corpus_files, read_file
from refragkit.data.split import id_rank, subset_positions
from refragkit.errors import DataError

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.types import Document

_HELD_OUT_SHARE = 10
_PIECE_CHARACTERS = 4000
_SUFFIXES = (".txt", ".md", ".jsonl")
_PARAGRAPH_END = re.compile(r"\n+")


@dataclass(frozen=True)
class TextSplit:
    """Pieces of text in a fixed shuffled order.

    A tenth is held out. Which, depends on the pieces' names alone: no seed, no order of files.

    Attributes:
        calibration: to fit on.
        held_out: to measure on.
    """

    calibration: list[str]
    held_out: list[str]


def split_text(documents: Iterable[Document]) -> TextSplit:
    """Cut long documents into pieces and hold out a tenth; short documents of one title stay on one side.

    Raises:
        DataError: too little to hold anything out.
    """
    pieces: dict[str, list[str]] = {}
    for document in documents:
        parts = list(_pieces(document.text))
        for number, part in enumerate(parts):
            whole = len(parts) == 1
            name = (document.title or document.doc_id) if whole else f"{document.doc_id}#{number:06d}"
            pieces.setdefault(name, []).append(
                f"{document.title}\n{part}" if document.title and whole else part
            )
    names = sorted(pieces, key=id_rank)
    if len(names) < 2:
        raise DataError(
            f"convert.text: {len(names)} pieces of text (of up to {_PIECE_CHARACTERS} characters), too few to hold any "
            "out for measuring; give more text"
        )
    held = set(subset_positions(names, max(1, len(names) // _HELD_OUT_SHARE)))
    sides: tuple[list[str], list[str]] = ([], [])
    for position, name in enumerate(names):
        sides[position in held].extend(pieces[name])
    return TextSplit(*sides)


def _pieces(text: str) -> Iterator[str]:
    """Runs of paragraphs of about 4,000 characters, nothing lost; a longer paragraph is a piece of its own."""
    start = 0
    for end in _PARAGRAPH_END.finditer(text):
        if end.end() - start >= _PIECE_CHARACTERS:
            if text[start : end.end()].strip():
                yield text[start : end.end()].strip("\n")
            start = end.end()
    if text[start:].strip():
        yield text[start:].strip("\n")


def read_documents(source: str | Path) -> Iterator[Document]:
    """The documents of a .txt, .md or .jsonl (``text`` and, if any, ``id`` and ``title``) or of a folder of them.

    Raises:
        DataError: nothing there, or a file or line that can't be read.
    """
    path = Path(source).expanduser()
    if not path.exists() or (path.is_file() and path.suffix.lower() not in _SUFFIXES):
        problem = f"is a {path.suffix or 'nameless'} file" if path.exists() else "does not exist"
        raise DataError(
            f"convert.text={source}: expected a .txt, .md or .jsonl file or a folder of them, but it {problem}"
        )
    found = False
    for file in corpus_files(path):
        if isinstance(file, Problem):
            if file.kind == "file":
                raise DataError(f"convert.text: {file.message}")
            continue
        for item in read_file(file):
            if isinstance(item, Problem):
                raise DataError(f"convert.text: {item.message}")
            found = True
            yield item.document
    if not found:
        raise DataError(f"convert.text={source}: no .txt, .md or .jsonl file with text in this folder")


def windows(texts: Sequence[str], tokenizer: Tokenizer, tokens: int, window: int, what: str) -> Tensor:
    """The first ``tokens`` tokens of texts that follow one another, int64 ``[tokens // window, window]``.

    Args:
        texts: joined by blank lines.
        tokenizer: of the model.
        tokens: how many, rounded up to whole windows.
        window: tokens per row.
        what: named in the error.

    Raises:
        DataError: there are fewer tokens than one window.
    """
    wanted = -(-tokens // window) * window
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text + "\n\n")
        if len(ids) >= wanted:
            break
    rows = min(len(ids), wanted) // window
    if not rows:
        raise DataError(
            f"{what}: the text has {len(ids)} tokens there, fewer than one window of {window}; give more text"
        )
    return torch.tensor(ids[: rows * window], dtype=torch.int64).view(rows, window)


def fingerprint(*tensors: Tensor) -> str:
    """sha256 of token ids."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
