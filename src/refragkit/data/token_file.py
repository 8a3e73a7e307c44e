"""Files of token ids, memory-mapped: examples of any length, one behind the other.

Two layouts, told apart by their first bytes and read alike: the seed's (`refragkit.data.token_file_seed`), which
holds ids only, and ours (`refragkit.data.token_file_v2`), which also knows the tokenizer and the loss mask. A file is
checked in full before it is used; what is wrong with it is said with the byte where it is wrong.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

from refragkit.data.jsonl import existing_file
from refragkit.errors import DataError

Format = Literal["seed", "v2"]
Ids = NDArray[np.uint32]
Flags = NDArray[np.bool_]

MAX_VOCAB_SIZE = 2**31
"""Ids are below: our layout keeps the loss mask in the highest bit of a word."""

REWRITE = "write the file again with task=tokenize"
_CHUNK_WORDS = 1 << 22  # of a file that is looked through: 16 MiB


class TokenFile(ABC):
    """An open file of N examples.

    Attributes:
        path: the file.
        n_tokens: of all examples together.
        vocab_size: ids are below it; None where the file doesn't say.
        tokenizer_hash: `Tokenizer.fingerprint` of the tokenizer that wrote it; None where the file doesn't say.
        sha256: of its contents.
        lengths: [N] tokens of each example.
        groups: [N] uint64; examples of one group belong on one side of a split.
    """

    format: Format
    path: Path
    n_tokens: int
    vocab_size: int | None = None
    tokenizer_hash: str | None = None
    sha256: str
    lengths: NDArray[np.int64]
    groups: NDArray[np.uint64]

    @abstractmethod
    def __len__(self) -> int:
        """N."""

    @abstractmethod
    def example(self, index: int) -> tuple[Ids, Flags]:
        """Token ids of example ``index`` [T], and which of them are to be learnt [T]."""

    @abstractmethod
    def check_ids(self, vocab_size: int) -> None:
        """Make sure that every id is below ``vocab_size``.

        Raises:
            DataError: names the first one that isn't, and its byte.
        """


class TokenFileWriter(ABC):
    """Writes a file under a temporary name; `commit` makes it appear under its own.

    Use it as a context manager: without `commit`, nothing is left.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_examples = 0
        self.n_tokens = 0
        self.n_supervised = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: BinaryIO = self._temporary.open("w+b")

    @abstractmethod
    def append(self, ids: Ids, learnt: Flags, lengths: NDArray[np.int64], groups: NDArray[np.uint64]) -> None:
        """Add n examples.

        Args:
            ids: of all of them, one behind the other.
            learnt: which ids are to be learnt; same shape.
            lengths: [n] ids of each.
            groups: [n]; see `TokenFile`.

        Raises:
            DataError: the layout can't hold them.
            OSError: the disk is full.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Write what is known at the end only."""

    def commit(self) -> None:
        """Make the finished file visible, after its bytes are on the disk."""
        self._finish()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def open_token_file(path: str | Path) -> TokenFile:
    """Open a file of either layout and check all of it.

    Raises:
        DataError: it is missing, cut short, has a wrong count, ids outside its vocabulary, or bytes that its
            checksum doesn't vouch for; names the byte.
    """
    from refragkit.data.token_file_seed import SeedTokenFile
    from refragkit.data.token_file_v2 import MAGIC, TokenFileV2

    file = existing_file(path, "a token file")
    try:
        with file.open("rb") as f:
            start = f.read(len(MAGIC))
        return TokenFileV2(file) if start == MAGIC else SeedTokenFile(file)
    except OSError as error:
        raise DataError(f"{file}: can't be read ({error.strerror or error})") from error


def new_token_file(path: Path, layout: Format, tokenizer_hash: str, vocab_size: int) -> TokenFileWriter:
    """A writer of either layout.

    Args:
        path: the file.
        layout: ``seed`` or ``v2``.
        tokenizer_hash: `Tokenizer.fingerprint`, which only ``v2`` keeps.
        vocab_size: of the tokenizer.
    """
    from refragkit.data.token_file_seed import SeedTokenWriter
    from refragkit.data.token_file_v2 import TokenWriterV2

    if layout == "seed":
        return SeedTokenWriter(path)
    return TokenWriterV2(path, tokenizer_hash, vocab_size)


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """A file's bytes, read-only and memory-mapped; a plain array over the mapping, which is faster to index."""
    size = path.stat().st_size
    if not size:
        return np.zeros(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def chunks(words: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Parts of an array that fit into memory, each with its position."""
    for start in range(0, len(words), _CHUNK_WORDS):
        yield start, words[start : start + _CHUNK_WORDS]


def wrong(path: Path, offset: int, problem: str, remedy: str = REWRITE) -> DataError:
    """The error for something wrong at a byte of a file."""
    return DataError(f"{path}: byte {offset}: {problem}; {remedy}")


def id_beyond(path: Path, offset: int, token_id: int, vocab_size: int) -> DataError:
    """The error for an id outside the vocabulary."""
    return wrong(
        path,
        offset,
        f"expected a token id below the vocabulary's size {vocab_size}, got {token_id}",
        "was it written with another tokenizer? Choose the model or data.tokenizer that it belongs to, or "
        + REWRITE,
    )
