"""Our token files: ids with their loss mask, the tokenizer that wrote them, and a checksum.

Little-endian::

    0    magic          8 bytes  ff ff ff ff "RKT2": as the seed's count, it would promise 2^32 - 1 examples
    8    version        u32      2
    12   header_bytes   u32      128
    16   n_examples     u64
    24   n_tokens       u64
    32   n_supervised   u64      how many tokens are learnt
    40   vocab_size     u32      every id is below
    44   reserved       u32      0
    48   tokenizer      32 bytes sha256, `Tokenizer.fingerprint`
    80   reserved       16 bytes 0
    96   checksum       32 bytes sha256 of everything behind the header, then of the header before this field
    128  words          u32[n_tokens]: an id; its highest bit is set where the token is learnt
    ...  examples       (u64 end, u64 group)[n_examples]: the token behind the example's last one, and the hash of the
                        conversation's opening turn; examples of one group belong on one side of a split

A token's mask bit is its own, as a target: what precedes it is to predict it.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refragkit.data.token_file import (
    MAX_VOCAB_SIZE,
    Flags,
    Ids,
    TokenFile,
    TokenFileWriter,
    chunks,
    id_beyond,
    map_bytes,
    wrong,
)

MAGIC = b"\xff\xff\xff\xffRKT2"
VERSION = 2
_HEADER = struct.Struct("<8sIIQQQII32s16s32s")
_CHECKSUM_AT = 96
_COUNTS_AT = {"n_examples": 16, "n_tokens": 24, "n_supervised": 32}
_WORD_BYTES, _ENTRY_BYTES = 4, 16
_ID_BITS = np.uint32(0x7FFFFFFF)
_LEARNT = np.uint32(0x80000000)


class TokenFileV2(TokenFile):
    """See the module.

    Args:
        path: the file.

    Raises:
        DataError: it is cut short, inconsistent, or not what its checksum vouches for.
        OSError: it can't be read.
    """

    format = "v2"

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_bytes(path)
        if len(data) < _HEADER.size:
            raise wrong(path, len(data), f"the file ends within its header of {_HEADER.size} bytes")
        header = data[: _HEADER.size].tobytes()
        fields = _HEADER.unpack(header)
        _, version, header_bytes, n_examples, n_tokens, n_supervised, vocab_size = fields[:7]
        if version != VERSION or header_bytes != _HEADER.size:
            raise wrong(
                path,
                8,
                f"expected version {VERSION} with a header of {_HEADER.size} bytes, got version {version} with "
                f"{header_bytes}",
            )
        expected = _HEADER.size + _WORD_BYTES * n_tokens + _ENTRY_BYTES * n_examples
        if len(data) < expected:
            raise wrong(
                path,
                len(data),
                f"the file ends here, and its header promises {n_examples} examples of {n_tokens} tokens in {expected} "
                "bytes: it was cut short",
            )
        if len(data) > expected:
            raise wrong(
                path,
                expected,
                f"expected the end of the file behind the {n_examples} examples of {n_tokens} tokens that its header "
                f"promises, but {len(data) - expected} more bytes follow",
            )
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise wrong(path, 40, f"expected a vocabulary of 1 to {MAX_VOCAB_SIZE} ids, got {vocab_size}")
        self.n_tokens = n_tokens
        self.vocab_size = vocab_size
        self.tokenizer_hash = fields[8].hex()
        entries_at = _HEADER.size + _WORD_BYTES * n_tokens
        self._words: NDArray[np.uint32] = data[_HEADER.size : entries_at].view("<u4")
        entries = data[entries_at:].view("<u8").reshape(n_examples, 2)
        self._check_ends(entries[:, 0], entries_at)
        self._ends: NDArray[np.uint64] = entries[:, 0]
        self.lengths = np.diff(self._ends, prepend=np.uint64(0)).astype(np.int64)
        self.groups = entries[:, 1]
        self.check_ids(vocab_size)
        supervised = sum(int(np.count_nonzero(part & _LEARNT)) for _, part in chunks(self._words))
        if supervised != n_supervised:
            raise wrong(
                path,
                _COUNTS_AT["n_supervised"],
                f"expected the {supervised} learnt tokens that are there, got {n_supervised}",
            )
        checksum = hashlib.sha256(data[_HEADER.size :].data)
        checksum.update(header[:_CHECKSUM_AT])
        self.sha256 = checksum.hexdigest()
        if checksum.digest() != fields[10]:
            raise wrong(
                path,
                _CHECKSUM_AT,
                f"the contents have the checksum {self.sha256}, expected {fields[10].hex()}: they were damaged",
            )

    def _check_ends(self, ends: NDArray[np.uint64], entries_at: int) -> None:
        """Ends never fall, and the last one is the last token's."""
        before = np.concatenate([np.zeros(1, dtype=np.uint64), ends[:-1]])
        bad = (ends < before) | (ends > self.n_tokens)
        last = int(ends[-1]) if len(ends) else 0
        if bad.any() or last != self.n_tokens:
            at = int(bad.argmax()) if bad.any() else max(len(ends) - 1, 0)
            got = int(ends[at]) if len(ends) else 0
            low = int(before[at]) if len(ends) else 0
            what = f"{low} to {self.n_tokens}" if bad.any() else str(self.n_tokens)
            raise wrong(
                self.path,
                entries_at + at * _ENTRY_BYTES,
                f"expected the end of example {at + 1} of {len(ends)} at token {what}, got {got}",
            )

    def __len__(self) -> int:
        """N."""
        return len(self._ends)

    def _start(self, index: int) -> int:
        return int(self._ends[index - 1]) if index else 0

    def example(self, index: int) -> tuple[Ids, Flags]:
        """Ids [T] and flags [T], true where a token is to be learnt."""
        words = self._words[self._start(index) : int(self._ends[index])]
        return words & _ID_BITS, words > _ID_BITS

    def check_ids(self, vocab_size: int) -> None:
        """Make sure that every id is below ``vocab_size``.

        Raises:
            DataError: names the first one that isn't, and its byte.
        """
        for start, part in chunks(self._words):
            beyond = (part & _ID_BITS) >= vocab_size
            if beyond.any():
                at = start + int(beyond.argmax())
                found = int(self._words[at] & _ID_BITS)
                raise id_beyond(self.path, _HEADER.size + at * _WORD_BYTES, found, vocab_size)


class TokenWriterV2(TokenFileWriter):
    """Writes such a file.

    Args:
        path: the file.
        tokenizer_hash: `Tokenizer.fingerprint`.
        vocab_size: of the tokenizer.
    """

    def __init__(self, path: Path, tokenizer_hash: str, vocab_size: int) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size: expected 1 to {MAX_VOCAB_SIZE}, got {vocab_size}")
        super().__init__(path)
        self._tokenizer = bytes.fromhex(tokenizer_hash)
        self._vocab_size = vocab_size
        self._checksum = hashlib.sha256()
        self._file.write(bytes(_HEADER.size))
        # The table of examples comes behind the tokens: it waits in a file of its own, not in memory.
        self._entries_path = self._temporary.with_suffix(".entries")
        self._entries = self._entries_path.open("w+b")

    def append(self, ids: Ids, learnt: Flags, lengths: NDArray[np.int64], groups: NDArray[np.uint64]) -> None:
        """Add examples; see `TokenFileWriter`."""
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise ValueError(f"id {int(ids.max())} is outside the vocabulary of {self._vocab_size}")
        words = ids.astype("<u4")
        words[learnt] |= _LEARNT
        entries = np.empty((len(lengths), 2), dtype="<u8")
        entries[:, 0] = self.n_tokens + np.cumsum(lengths)
        entries[:, 1] = groups
        self._file.write(words.data)
        self._checksum.update(words.data)
        self._entries.write(entries.data)
        self.n_examples += len(lengths)
        self.n_tokens += len(ids)
        self.n_supervised += int(learnt.sum())

    def _finish(self) -> None:
        self._entries.flush()
        self._entries.seek(0)
        while block := self._entries.read(1 << 20):
            self._file.write(block)
            self._checksum.update(block)
        fields = (
            MAGIC,
            VERSION,
            _HEADER.size,
            self.n_examples,
            self.n_tokens,
            self.n_supervised,
            self._vocab_size,
            0,
            self._tokenizer,
            bytes(16),
        )
        self._checksum.update(_HEADER.pack(*fields, bytes(32))[:_CHECKSUM_AT])
        self._file.seek(0)
        self._file.write(_HEADER.pack(*fields, self._checksum.digest()))

    def __exit__(self, *error: object) -> None:
        """Leave nothing but what was committed."""
        self._entries.close()
        self._entries_path.unlink(missing_ok=True)
        super().__exit__(None, None, None)
