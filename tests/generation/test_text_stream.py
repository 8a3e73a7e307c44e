"""Streaming text: what comes out piece by piece against what the whole decodes to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.generation.incremental_decoder import IncrementalDecoder
from refragkit.generation.text_stream import TextStream, stop_strings

TEXT = "Straße 你好, naïve café 👩‍🚀 12:30 – the end. " * 3
TOKENIZER = Tokenizer.train([TEXT, "the end of the street, the end"], 300)


def _pieces(ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER)
    return [*[decoder.push(token_id) for token_id in ids], decoder.finish()]


def test_every_character_comes_whole_and_at_once() -> None:
    ids = TOKENIZER.encode(TEXT)
    pieces = _pieces(ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    # Nothing is held back longer than a character needs.
    for n in range(1, len(ids)):
        shown, whole = "".join(pieces[:n]), TOKENIZER.decode(ids[:n])
        assert shown == whole.rstrip("\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    pieces = _pieces(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    # Bytes that are no text don't block the stream: at most three of them, or three tokens, are held.
    held = len(TOKENIZER.decode(ids)) - len("".join(pieces[:-1]))
    assert held <= max(3, len(TOKENIZER.decode(ids[-3:])))


def test_a_real_replacement_character_and_an_unfinished_one_are_given_out() -> None:
    text = "a\ufffdb"
    assert "".join(_pieces(TOKENIZER.encode(text))) == text
    unfinished = TOKENIZER.encode("語")[:-1]
    assert "".join(_pieces(unfinished)) == "\ufffd"


def test_control_tokens_are_silent() -> None:
    end = TOKENIZER.end_id
    ids = [end, *TOKENIZER.encode("the"), end, end, end, end, *TOKENIZER.encode(" end"), end]
    assert "".join(_pieces(ids)) == "the end"


def test_a_decoder_that_drops_leading_spaces_and_falls_back_to_bytes(tmp_path: Path) -> None:
    # As in Llama 2: a word's space is part of its token, and dropped at the start of whatever is decoded.
    words = ["<unk>", "</s>", "▁the", "▁end", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(
        str(tmp_path)
    )
    tokenizer = Tokenizer.load(tmp_path)
    ids = [2, 3, 4, *(words.index(f"<0x{byte:02X}>") for byte in "你好!".encode()), 2]
    decoder = IncrementalDecoder(tokenizer)
    pieces = [*[decoder.push(token_id) for token_id in ids], decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids) == "the ends你好! the"
    assert pieces[:3] == ["the", " end", "s"]
    assert "你" in pieces
    assert "好" in pieces


def _stream(text: str, *stop: str, written: list[str] | None = None) -> TextStream:
    stream = TextStream(TOKENIZER, stop, written.append if written is not None else None)
    for token_id in TOKENIZER.encode(text):
        if stream.push(token_id):
            break
    stream.finish()
    return stream


def test_a_stop_string_across_tokens_ends_the_text() -> None:
    for stop in ("the end", "e e", ".", "你好", "end. Str"):
        stream = _stream(TEXT, stop)
        assert stream.stopped
        assert stream.text == TEXT[: TEXT.index(stop)], stop


def test_the_first_of_several_wins_and_none_is_ever_half_written() -> None:
    written: list[str] = []
    stream = _stream("one, two; three", "three", "; t", "two; th", written=written)
    assert stream.text == "".join(written) == "one, two"  # "; t" is complete first
    written.clear()
    stream = _stream("aab aabaab", "aabaac", written=written)
    assert not stream.stopped
    assert stream.text == "".join(written) == "aab aabaab"  # held back, then given


def test_stop_strings_against_a_search_in_the_whole_text() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab ") for _ in range(draw.randrange(20)))
        stops = ["".join(draw.choice("ab ") for _ in range(draw.randrange(1, 5))) for _ in range(2)]
        written: list[str] = []
        stream = _stream(text, *stops, written=written)
        # Character by character: how the text falls into tokens decides nothing.
        ends = (n for n in range(len(text) + 1) if text[:n].endswith(tuple(stops)))
        end = next(ends, None)
        longest = max(
            (len(stop) for stop in stops if end is not None and text[:end].endswith(stop)), default=0
        )
        want = text if end is None else text[: end - longest]
        assert (stream.text, "".join(written), stream.stopped) == (want, want, end is not None)


def test_escapes_and_empty_stop_strings() -> None:
    assert stop_strings(None) == ()
    assert stop_strings("\\n") == ("\n",)
    assert stop_strings(["a\\tb", "c\\\\n"]) == ("a\tb", "c\\n")
    for empty in ("", ["a", ""]):
        with pytest.raises(ConfigError, match="stop: expected strings of at least one character"):
            stop_strings(empty)
    with pytest.raises(ConfigError, match="empty"):
        TextStream(TOKENIZER, [""])
