from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import refragkit.data.chunking
from refragkit.data.chunking import Chunker, check_chunking, load_chunk_tokenizer
from refragkit.errors import ConfigError, DataError

LATIN = [
    "the",
    "running",
    "antidisestablishmentarianism",
    "naïve",
    "Straße.",
    "J.",
    "(so)",
    "U.S.",
    "#",
    "...",
    "don't",
]
OTHER = [
    "😀👩\u200d👩\u200d👧",
    "日本語のテキスト。",
    "한국어",
    "שלום",
    "e\u0301te\u0301",
    "\ufdfa",
    "\u200b",
    "\x0c",
    "\x00",
]
LONG = ["x" * 250, "ab1" * 40, "https://example.org/a/b?c=d&e=f", "[SEP]"]
WORDS = st.one_of(st.sampled_from([*LATIN, *OTHER, *LONG]), st.text(max_size=6))
GAPS = st.sampled_from(
    [" ", " ", " ", "  ", "\n", "\r\n", "\n\n", "\r\n\r\n", ". ", "\t", "", "\u00a0", "\u3000", " " * 30]
)
TEXTS = st.lists(st.tuples(WORDS, GAPS), max_size=120).map(lambda parts: "".join(w + g for w, g in parts))
SIZES = st.integers(16, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))


@pytest.fixture(scope="module")
def encoder_tokenizer() -> tokenizers.Tokenizer:
    return load_chunk_tokenizer(None)


@pytest.fixture(scope="module")
def byte_tokenizer(pretrained_folder: Callable[..., Path]) -> tokenizers.Tokenizer:
    return load_chunk_tokenizer(str(pretrained_folder(None)))


def restored(text: str, spans: list[tuple[int, int]]) -> str:
    """The chunks put together again, without what each repeats of those before."""
    whole, done = "", 0
    for start, end in spans:
        assert start <= done < end or (start, end) == (0, len(text))
        whole += text[start:end][done - start :]
        done = end
    return whole


@pytest.mark.parametrize("name", ["encoder_tokenizer", "byte_tokenizer"])
def test_properties(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: tokenizers.Tokenizer = request.getfixturevalue(name)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, SIZES, st.sampled_from([1 << 20, 300]))
    def check(text: str, sizes: tuple[int, int], block: int) -> None:
        limit, overlap = sizes
        chunker = Chunker(tokenizer, limit, overlap)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(refragkit.data.chunking, "_BLOCK_CHARACTERS", block)
            spans = list(chunker.spans(text))
        assert restored(text, spans) == text
        counts = chunker.count([text[a:b] for a, b in spans])
        assert max(counts) <= limit
        # Short texts take a shorter way, to the same end.
        if chunker.fits([text])[0]:
            assert spans == [(0, len(text))]
        for (_, end), (start, _) in pairwise(spans):
            assert start <= end
            # A word is divided only where it alone is longer than a chunk, and sentences of some scripts are words.
            for cut in {start, end}:
                inside = not text[cut - 1].isspace() and not text[cut].isspace() and text[cut - 1] not in "。"
                if inside:
                    left = max((i + 1 for i in range(cut) if text[i].isspace()), default=0)
                    right = next((i for i in range(cut, len(text)) if text[i].isspace()), len(text))
                    assert sum(chunker.count(pieces(text[left:right]))) > limit

    check()


def pieces(word: str) -> list[str]:
    return [word[i : i + 100] for i in range(0, len(word), 100)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["one", "two.", "Three", "naïve", "日本", "A."]), min_size=40, max_size=200),
    SIZES,
)
def test_chunks_overlap(words: list[str], sizes: tuple[int, int]) -> None:
    limit, overlap = sizes
    tokenizer = load_chunk_tokenizer(None)
    text = " ".join(words)
    starts = [a for a, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
    spans = list(Chunker(tokenizer, limit, overlap).spans(text))
    assert (len(spans) > 1) == (len(starts) > limit)
    for (_, end), (start, _) in pairwise(spans):
        shared = bisect_left(starts, end) - bisect_left(starts, start)
        assert shared <= overlap
        last_word = bisect_left(starts, end) - bisect_left(starts, text.rindex(" ", 0, end - 1) + 1)
        assert shared or last_word > overlap


def test_it_cuts_where_a_reader_would(encoder_tokenizer: tokenizers.Tokenizer) -> None:
    chunker = Chunker(encoder_tokenizer, 16, 6)
    prose = (
        "Dr. A. Smith wrote it down in 1999, e.g. on paper. She signed it. Then all of them went home again."
    )
    assert [prose[a:b].strip() for a, b in chunker.spans(prose)] == [
        "Dr. A. Smith wrote it down in 1999, e.g. on",
        "e.g. on paper. She signed it.",
        "She signed it. Then all of them went home again.",
    ]
    paragraphs = (
        "One two three four five six. Seven eight nine ten.\r\n\r\nEleven twelve. Thirteen fourteen fifteen."
    )
    assert [paragraphs[a:b] for a, b in chunker.spans(paragraphs)] == [
        "One two three four five six. Seven eight nine ten.\r\n\r\n",
        "Seven eight nine ten.\r\n\r\nEleven twelve. Thirteen fourteen fifteen.",
    ]
    lines = "\n".join(f"entry {n} = {n}" for n in range(20))
    for a, b in list(chunker.spans(lines))[:-1]:
        assert lines[b - 1] == "\n" and (a == 0 or lines[a - 1] == "\n")


def test_what_has_hardly_a_token_or_none(
    encoder_tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refragkit.data.chunking, "_BLOCK_CHARACTERS", 500)
    chunker = Chunker(encoder_tokenizer, 16, 4)
    assert list(chunker.spans("")) == [(0, 0)]
    assert list(chunker.spans(" \r\n" * 2000)) == [(0, 6000)]
    assert list(chunker.spans("a" + " " * 5000 + "b")) == [(0, 5002)]
    # The encoder's tokenizer makes one unknown token of such a word; nobody wants it as one passage.
    spans = list(chunker.spans("x1" * 5000))
    assert max(b - a for a, b in spans) < 200
    assert not any(chunker.fits(["x1" * 5000, "word " * 17])) and all(chunker.fits(["", "word " * 16]))


class Spy:
    """Counts the characters that are tokenized."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.characters = 0

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.tokenizer.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.tokenizer.encode_batch_fast(texts, **options)


def test_work_grows_with_the_length_and_not_faster(
    encoder_tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refragkit.data.chunking, "_BLOCK_CHARACTERS", 10_000)
    for text in ("A few words, then some more. " * 10_000, "x" * 100_000, "\n" * 200_000, "日本語" * 30_000):
        spy = Spy(encoder_tokenizer)
        chunks = list(Chunker(spy, 100, 16).spans(text))  # type: ignore[arg-type]
        assert chunks[-1][1] == len(text)
        assert spy.characters < 4 * len(text)


def test_sizes_that_can_not_be() -> None:
    with pytest.raises(ConfigError, match=r"data.chunk_tokens: expected an integer of at least 16, got 15"):
        check_chunking(15, 0)
    for overlap in (-1, 20, 21):
        with pytest.raises(ConfigError, match=rf"data.chunk_overlap: .*chunk_tokens=20.*got {overlap}"):
            check_chunking(20, overlap)
    check_chunking(16, 15)


def test_a_tokenizer_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data.chunk_tokenizer=.*: expected a folder with a tokenizer.json"):
        load_chunk_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data.chunk_tokenizer: .*tokenizer.json can't be read"):
        load_chunk_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"data.chunk_tokenizer=/nowhere: documents are cut by tokens"):
        load_chunk_tokenizer("/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("refragkit.retrievers.encoder.in_hub_cache", lambda name: None)
    with pytest.raises(DataError, match=r"data.chunk_tokenizer=null: .*pip install"):
        load_chunk_tokenizer(None)
