"""Token files of both layouts, against readings of the bytes with ``struct`` that know nothing of the code."""

from __future__ import annotations

import hashlib
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refragkit.data.token_file import Format, TokenFile, TokenFileWriter, new_token_file, open_token_file
from refragkit.data.token_parts import boundaries, part_weights, write_parts
from refragkit.errors import ConfigError, DataError

HASH = hashlib.sha256(b"a tokenizer").hexdigest()
VOCAB = 1000
EXAMPLES: list[tuple[list[int], list[bool]]] = [
    ([5, 999, 0, 17], [False, False, True, True]),
    ([7], [False]),
    ([], []),
    ([1, 2, 3, 4, 5, 6, 7], [False, True, True, False, False, True, True]),
    ([5, 999, 0, 17], [False, True, True, True]),
]
FORMATS: list[Format] = ["seed", "v2"]


def add(writer: TokenFileWriter, examples: list[tuple[list[int], list[bool]]], first_group: int = 0) -> None:
    writer.append(
        np.array([i for ids, _ in examples for i in ids], dtype=np.uint32),
        np.array([m for _, mask in examples for m in mask], dtype=np.bool_),
        np.array([len(ids) for ids, _ in examples], dtype=np.int64),
        np.arange(first_group, first_group + len(examples), dtype=np.uint64),
    )


def written(path: Path, layout: Format, examples: list[tuple[list[int], list[bool]]] = EXAMPLES) -> Path:
    with new_token_file(path, layout, HASH, VOCAB) as writer:
        add(writer, examples[:2])
        add(writer, examples[2:], 2)
        writer.commit()
    return path


def contents(file: TokenFile) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(file.example, range(len(file)))]


def seed_bytes(examples: list[list[int]]) -> bytes:
    """The seed's layout, packed here."""
    out = struct.pack("<I", len(examples))
    for ids in examples:
        out += struct.pack(f"<I{len(ids)}I", len(ids), *ids)
    return out


def seed_examples(data: bytes) -> list[list[int]]:
    """The seed's layout, unpacked here."""
    (count,), at, examples = struct.unpack_from("<I", data), 4, []
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        examples.append(list(struct.unpack_from(f"<{length}I", data, at + 4)))
        at += 4 + 4 * length
    assert at == len(data)
    return examples


def test_the_seeds_layout_is_written_byte_for_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "a.bin", "seed")
    assert path.read_bytes() == seed_bytes([ids for ids, _ in EXAMPLES])
    assert seed_examples(path.read_bytes()) == [ids for ids, _ in EXAMPLES]
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_the_seeds_layout_is_read_and_every_token_but_the_first_is_learnt(tmp_path: Path) -> None:
    path = tmp_path / "theirs.bin"
    path.write_bytes(seed_bytes([ids for ids, _ in EXAMPLES]))
    file = open_token_file(path)
    assert file.format == "seed" and file.vocab_size is None and file.tokenizer_hash is None
    assert [ids for ids, _ in contents(file)] == [ids for ids, _ in EXAMPLES]
    for ids, mask in contents(file):
        assert mask == [n > 0 for n in range(len(ids))]
    assert file.lengths.tolist() == [4, 1, 0, 7, 4]
    assert file.n_tokens == 16
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.groups[0] == file.groups[4] and len(set(file.groups.tolist())) == 4


def test_our_layout_keeps_everything(tmp_path: Path) -> None:
    path = written(tmp_path / "a.bin", "v2")
    file = open_token_file(path)
    assert contents(file) == EXAMPLES
    assert (file.format, file.vocab_size, file.tokenizer_hash) == ("v2", VOCAB, HASH)
    assert file.groups.tolist() == [0, 1, 2, 3, 4] and file.n_tokens == 16
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    # As the module's docstring has it, read here.
    data = path.read_bytes()
    head = struct.unpack("<8sIIQQQII32s16s32s", data[:128])
    assert head[:8] == (b"\xff\xff\xff\xffRKT2", 2, 128, 5, 16, 9, VOCAB, 0)
    assert head[8].hex() == HASH and head[10] == hashlib.sha256(data[128:] + data[:96]).digest()
    words = struct.unpack("<16I", data[128:192])
    assert [w & (2**31 - 1) for w in words] == [i for ids, _ in EXAMPLES for i in ids]
    assert [bool(w >> 31) for w in words] == [m for _, mask in EXAMPLES for m in mask]
    assert struct.unpack("<10Q", data[192:]) == (4, 0, 5, 1, 5, 2, 12, 3, 16, 4)


@pytest.mark.parametrize("layout", FORMATS)
def test_nothing_is_left_without_a_commit(layout: Format, tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_token_file(tmp_path / "a.bin", layout, HASH, VOCAB) as writer:
        add(writer, EXAMPLES)
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_ids_outside_the_vocabulary_are_named_with_their_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    # 4 (count), 4 + 4 * 4, 4 + 4, 4: the second example's length, 1000000, is no id
    path.write_bytes(seed_bytes([[1, 2, 3, 4], [5], [6, 1000, 7]]))
    open_token_file(path).check_ids(1001)
    with pytest.raises(DataError, match=r"a\.bin: byte 40: expected a token id below .* 1000, got 1000;"):
        open_token_file(path).check_ids(1000)
    file = open_token_file(written(tmp_path / "b.bin", "v2"))
    with pytest.raises(DataError, match=r"b\.bin: byte 132: expected a token id below .* size 999, got 999;"):
        file.check_ids(999)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        written(tmp_path / "c.bin", "v2", [([VOCAB], [True])] * 3)
    assert not (tmp_path / "c.bin").exists()


def test_lengths_are_not_taken_for_ids_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refragkit.data.token_file._CHUNK_WORDS", 3)
    path = tmp_path / "a.bin"
    path.write_bytes(seed_bytes([[1] * 9, [2], [0] * 8, [3, 2]]))
    file = open_token_file(path)
    file.check_ids(4)
    with pytest.raises(DataError, match=r"byte 92: .* got 3;"):
        file.check_ids(3)


def _resealed(data: bytes) -> bytes:
    """Our layout with a checksum that fits."""
    return data[:96] + hashlib.sha256(data[128:] + data[:96]).digest() + data[128:]


def _with(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: d[:-1],
            r"byte 271: the file ends here, and its header promises .* in 272 bytes: it was cut",
        ),
        (lambda d: d[:50], r"byte 50: the file ends within its header of 128 bytes"),
        (lambda d: d + b"x", r"byte 272: expected the end of the file .* 1 more bytes follow"),
        (lambda d: _with(d, 8, b"\x03"), r"byte 8: expected version 2 .* got version 3"),
        (
            lambda d: _with(d, 16, _u64(6)),
            r"byte 272: the file ends here, and its header promises 6 examples",
        ),
        (lambda d: _with(d, 16, _u64(2**63)), r"byte 272: the file ends here"),
        (lambda d: _with(d, 24, _u64(2**64 - 1)), r"byte 272: the file ends here"),
        (lambda d: _with(d, 24, _u64(15)), r"byte 268: expected the end of the file"),
        (lambda d: _with(d, 32, _u64(8)), r"byte 32: expected the 9 learnt tokens that are there, got 8"),
        (lambda d: _with(d, 40, bytes(4)), r"byte 40: expected a vocabulary of 1 to"),
        (
            lambda d: _with(d, 40, struct.pack("<I", 999)),
            r"byte 132: expected a token id below .* 999, got 999",
        ),
        (lambda d: _with(d, 130, b"\x01"), r"byte 128: expected a token id below .* 1000, got 65541"),
        (lambda d: _with(d, 192, _u64(6)), r"byte 208: expected the end of example 2 of 5 at token 6 to 16"),
        (lambda d: _with(d, 208, _u64(2**64 - 1)), r"byte 208: expected the end of example 2"),
        (
            lambda d: _with(d, 256, _u64(15)),
            r"byte 256: expected the end of example 5 of 5 at token 16, got 15",
        ),
        (lambda d: _with(d, 128, b"\x06"), r"byte 96: the contents have the checksum .*: they were damaged"),
        (lambda d: _with(d, 48, b"\x00"), r"byte 96: the contents have the checksum"),
        (lambda d: _with(d, 85, b"\x01"), r"byte 96: the contents have the checksum"),
        (lambda d: _with(d, 200, b"\x09"), r"byte 96: the contents have the checksum"),
    ],
)
def test_our_layout_damaged(spoil: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.bin", "v2")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=rf"^{path}: {message}") as error:
        open_token_file(path)
    assert "task=tokenize" in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte 0: it is empty"),
        (b"\x01\x00", "byte 2: the file ends within a number of 4 bytes"),
        (
            seed_bytes([[1, 2], [3]])[:-4],
            r"byte 20: the file ends within example 2 of 2: it starts at byte 16 and ",
        ),
        (seed_bytes([[1, 2], [3]])[:-3], r"byte 21: the file ends within a number"),
        (seed_bytes([[1, 2], [3]])[:-8], r"byte 16: the file ends behind example 1, .* promise 2"),
        (
            seed_bytes([[1, 2], [3]]) + bytes(8),
            r"byte 24: expected the end of the file .* 8 more bytes follow",
        ),
        (
            _with(seed_bytes([[1, 2], [3]]), 0, b"\x01"),
            r"byte 16: expected the end of the file behind 1 examples",
        ),
        (
            _with(seed_bytes([[1, 2], [3]]), 0, b"\xff\xff\xff\x7f"),
            r"byte 24: the file ends behind example 2",
        ),
        (
            _with(seed_bytes([[1, 2], [3]]), 4, b"\xff\xff\xff\xff"),
            r"byte 24: .* should have 4294967295 tokens",
        ),
        (b'{"id": "1", "messages": []}\n', r"byte 28: the file ends within example 1 of "),
    ],
)
def test_the_seeds_layout_damaged(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"^{path}: {message}"):
        open_token_file(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a token file, but there is no such file"):
        open_token_file(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"expected a token file \(a file\), got a folder"):
        open_token_file(tmp_path)


def test_a_lying_header_sets_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for data in (
        struct.pack("<II", 2**32 - 1, 0),
        struct.pack("<8sIIQQQII80x", b"\xff\xff\xff\xffRKT2", 2, 128, 2**60, 2**61, 0, 5, 0),
    ):
        path.write_bytes(data)
        tracemalloc.start()
        try:
            with pytest.raises(DataError):
                open_token_file(path)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


_EXAMPLE = st.integers(0, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)
_in_one_folder = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(examples=st.lists(_EXAMPLE, max_size=8), layout=st.sampled_from(FORMATS))
@_in_one_folder
def test_round_trip(examples: list[tuple[list[int], list[bool]]], layout: Format, tmp_path: Path) -> None:
    file = open_token_file(written(tmp_path / "a.bin", layout, examples))
    assert [ids for ids, _ in contents(file)] == [ids for ids, _ in examples]
    if layout == "v2":
        assert contents(file) == examples
    else:
        assert seed_examples(file.path.read_bytes()) == [ids for ids, _ in examples]


def _reads_or_refuses(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        file = open_token_file(path)
        file.check_ids(VOCAB)
    except DataError as error:
        assert str(error).startswith(f"{path}: byte ")
        return
    examples = contents(file)
    assert sum(len(ids) for ids, _ in examples) == file.n_tokens
    assert all(i < VOCAB for ids, _ in examples for i in ids)
    if file.format == "seed":  # what is accepted is what the bytes say
        assert seed_bytes([ids for ids, _ in examples]) == data


@given(data=st.binary(max_size=300))
@_in_one_folder
def test_any_bytes_are_read_or_refused(data: bytes, tmp_path: Path) -> None:
    _reads_or_refuses(tmp_path / "a.bin", data)


@given(
    words=st.lists(st.integers(0, 4) | st.sampled_from([0, 1, 2**31, 2**32 - 1]), max_size=40),
    tail=st.binary(max_size=3),
)
@_in_one_folder
def test_words_like_those_of_a_token_file(words: list[int], tail: bytes, tmp_path: Path) -> None:
    _reads_or_refuses(tmp_path / "a.bin", struct.pack(f"<{len(words)}I", *words) + tail)


@given(
    layout=st.sampled_from(FORMATS),
    edits=st.lists(st.tuples(st.integers(0, 271), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.integers(0, 272) | st.none(),
    tail=st.binary(max_size=9),
    reseal=st.booleans(),
)
@_in_one_folder
def test_real_files_mutated(
    layout: Format,
    edits: list[tuple[int, bytes]],
    cut: int | None,
    tail: bytes,
    reseal: bool,
    tmp_path: Path,
) -> None:
    data = original = written(tmp_path / "a.bin", layout).read_bytes()
    for offset, value in edits:
        data = _with(data, min(offset, len(data)), value)
    data = data[:cut] + tail
    if layout == "v2" and reseal and len(data) >= 128:
        data = _resealed(data)
    _reads_or_refuses(tmp_path / "a.bin", data)
    if layout == "v2" and not reseal and data[:8] == original[:8] and data != original:
        with pytest.raises(DataError):
            open_token_file(tmp_path / "a.bin")


@pytest.mark.parametrize("layout", FORMATS)
def test_parts_hold_all_examples_in_order(layout: Format, tmp_path: Path) -> None:
    examples = [([n, n + 1], [False, True]) for n in range(11)]
    whole = open_token_file(written(tmp_path / "whole.bin", layout, examples))
    for weights, sizes in (([1.0] * 3, [4, 3, 4]), ([6.0, 2.0], [8, 3]), ([1.0], [11])):
        paths = [tmp_path / f"part_{i}.bin" for i in range(len(weights))]
        write_parts(whole, paths, weights, HASH)
        parts = [open_token_file(path) for path in paths]
        assert [len(part) for part in parts] == sizes
        assert [e for part in parts for e in contents(part)] == contents(whole)
        assert [g for part in parts for g in part.groups.tolist()] == whole.groups.tolist()
        assert {part.tokenizer_hash for part in parts} == {whole.tokenizer_hash}
    with pytest.raises(DataError, match=r"11 examples can't be cut into parts .* they would hold"):
        write_parts(whole, [tmp_path / f"more_{i}.bin" for i in range(12)], [1.0] * 12, HASH)
    assert not list(tmp_path.glob("*more*"))


@given(n=st.integers(1, 10_000), parts=st.integers(1, 40))
def test_equal_parts_differ_by_one_at_most(n: int, parts: int) -> None:
    if parts > n:
        return
    cuts = boundaries(n, [1.0] * parts)
    sizes = np.diff(cuts)
    assert cuts[0] == 0 and cuts[-1] == n and sizes.max() - sizes.min() <= 1


def test_weights_that_cannot_be() -> None:
    assert part_weights(None, None) is None
    assert part_weights(3, None) == [1.0] * 3
    assert part_weights(None, [6, 2]) == [6, 2]
    for split, weights in ((0, None), (-1, None), (2, [1, 1]), (None, []), (None, [1, 0]), (None, [1, -2])):
        with pytest.raises(ConfigError):
            part_weights(split, weights)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"split_weights: expected a positive number"):
            part_weights(None, [1, bad])


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "a.bin", "v2")
    assert not list(tmp_path.iterdir())
