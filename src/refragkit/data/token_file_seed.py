"""The seed's token files: ids only, without version, tokenizer, loss mask or checksum.

Little-endian ``n_examples: u32``, then for each example ``seq_len: u32, tokens: u32[seq_len]``. Every token of an
example but the first is learnt.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refragkit.data.token_file import (
    REWRITE,
    Flags,
    Ids,
    TokenFile,
    TokenFileWriter,
    chunks,
    id_beyond,
    map_bytes,
    wrong,
)
from refragkit.errors import DataError

_WORD_BYTES = 4
_MAX_COUNT = 2**32 - 1
_LIKELY = "is it a token file at all, and was it copied whole? If it was cut, " + REWRITE


class SeedTokenFile(TokenFile):
    """See the module. Groups are examples with the same ids: nothing else is known of where they came from.

    Args:
        path: the file.

    Raises:
        DataError: it is cut short, or holds more or fewer examples than its count says.
        OSError: it can't be read.
    """

    format = "seed"

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_bytes(path)
        if len(data) % _WORD_BYTES or not len(data):
            raise wrong(
                path,
                len(data),
                "the file ends within a number of 4 bytes" if len(data) else "it is empty",
                _LIKELY,
            )
        self._words: NDArray[np.uint32] = data.view("<u4")
        self._starts = self._find_examples()
        self.lengths = self._words[self._starts - 1].astype(np.int64)
        self.n_tokens = len(self._words) - 1 - len(self._starts)
        self.sha256 = hashlib.sha256(data.data).hexdigest()
        self.groups = np.fromiter(
            (
                int.from_bytes(hashlib.blake2b(self._ids(i).data, digest_size=8).digest(), "little")
                for i in range(len(self))
            ),
            dtype=np.uint64,
            count=len(self),
        )

    def _find_examples(self) -> NDArray[np.int64]:
        """[N] positions in words of each example's first token."""
        words, n_words = self._words, len(self._words)
        count = int(words[0])
        # Each example takes a word at least: what the count says is not believed before anything is set aside for it.
        starts = np.zeros(min(count, n_words - 1), dtype=np.int64)
        position = 1
        for i in range(count):
            if position == n_words:
                raise wrong(
                    self.path,
                    n_words * _WORD_BYTES,
                    f"the file ends behind example {i}, and its first four bytes promise {count}",
                    _LIKELY,
                )
            length = int(words[position])
            if position + 1 + length > n_words:
                raise wrong(
                    self.path,
                    n_words * _WORD_BYTES,
                    f"the file ends within example {i + 1} of {count}: it starts at byte {position * _WORD_BYTES} and "
                    f"should have {length} tokens, but {n_words - position - 1} are there",
                    _LIKELY,
                )
            starts[i] = position + 1
            position += 1 + length
        if position != n_words:
            raise wrong(
                self.path,
                position * _WORD_BYTES,
                f"expected the end of the file behind {count} examples, as its first four bytes promise, but "
                f"{(n_words - position) * _WORD_BYTES} more bytes follow",
                _LIKELY,
            )
        return starts

    def __len__(self) -> int:
        """N."""
        return len(self._starts)

    def _ids(self, index: int) -> Ids:
        start = int(self._starts[index])
        return self._words[start : start + int(self.lengths[index])]

    def example(self, index: int) -> tuple[Ids, Flags]:
        """Ids [T] and flags [T], true but for the first."""
        ids = self._ids(index)
        learnt = np.ones(len(ids), dtype=np.bool_)
        learnt[:1] = False
        return ids, learnt

    def check_ids(self, vocab_size: int) -> None:
        """Make sure that every id is below ``vocab_size``.

        Raises:
            DataError: names the first one that isn't, and its byte.
        """
        counts = self._starts - 1
        for start, part in chunks(self._words):
            beyond = part >= vocab_size
            if not start:
                beyond[0] = False  # n_examples
            first, last = np.searchsorted(counts, (start, start + len(part)))
            beyond[counts[first:last] - start] = False  # seq_len
            if beyond.any():
                at = start + int(beyond.argmax())
                raise id_beyond(self.path, at * _WORD_BYTES, int(self._words[at]), vocab_size)


class SeedTokenWriter(TokenFileWriter):
    """Writes such a file; ``learnt`` and ``groups`` have no place in it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file.write(bytes(_WORD_BYTES))

    def append(self, ids: Ids, learnt: Flags, lengths: NDArray[np.int64], groups: NDArray[np.uint64]) -> None:
        """Add examples; see `TokenFileWriter`."""
        self.n_examples += len(lengths)
        self.n_tokens += len(ids)
        self.n_supervised += len(ids) - int((lengths > 0).sum())
        if self.n_examples > _MAX_COUNT:
            raise DataError(
                f"{self.path}: the seed's layout counts at most {_MAX_COUNT} examples; use format=v2 or split=N"
            )
        words = np.empty(len(ids) + len(lengths), dtype="<u4")
        ends = np.cumsum(lengths)
        counts = ends - lengths + np.arange(len(lengths))
        is_count = np.zeros(len(words), dtype=np.bool_)
        is_count[counts] = True
        words[is_count] = lengths
        words[~is_count] = ids
        self._file.write(words.data)

    def _finish(self) -> None:
        self._file.seek(0)
        self._file.write(self.n_examples.to_bytes(_WORD_BYTES, "little"))
