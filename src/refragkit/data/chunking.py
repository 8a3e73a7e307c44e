"""Cuts long documents into chunks of at most so many tokens, which overlap.

A chunk ends, where it can, at a paragraph, else at a sentence, a line or a word; inside a word only where the word
alone is longer than a chunk. Every chunk is a piece of the document as it stands: text between two characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refragkit.errors import ConfigError, DataError, RetrievalError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_CHUNK_TOKENS = 16
"""One character can take a few tokens; a chunk must have room for it."""

_BLOCK_CHARACTERS = 1 << 20
_BATCH_CHARACTERS = 1 << 20
# Words by the hundred, tokenized together. One of more than 100 characters is taken in slices: tokenizers make a single
# unknown token of it, however long it is, or take quadratic time over it.
_PIECE = re.compile(r"(?:\s*+\S{1,100}+(?!\S)){1,500}+|\s*+\S{1,100}+|\s++")
_LONG_WORD = re.compile(r"\S{101}")

# Where a chunk may end, the better ones later: each match ends where the next chunk starts.
_QUOTES = "\"'”’»)\\]」』）】"
_BREAKS = (
    re.compile(r"(?<=\s)|(?=\s)"),  # word, or the space around it
    re.compile(r"[\r\n]\s*+"),  # line
    # Sentence: not after an initial ("J. Smith"), not before a small letter ("e.g. this"); some scripts leave no space.
    re.compile(
        rf"(?:(?<!\b[A-Z])[.!?…][{_QUOTES}]*+\s++(?=[^\Wa-z]|[^\w\s])|[。！？｡][{_QUOTES}]*+\s*+(?=\S))"
    ),
    re.compile(r"(?:(?>\r\n|\n|\r)[^\S\r\n]*+[\r\n]|\f)\s*+"),  # paragraph or page
)
_WORD, _LINE, _SENTENCE = 1, 2, 3

Span = tuple[int, int]
_Array = NDArray[np.int64]


def load_chunk_tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer whose tokens are counted.

    Args:
        name: a folder with a ``tokenizer.json``, or the name of a sentence encoder; None for the default encoder.

    Raises:
        DataError: there is none.
    """
    from tokenizers import Tokenizer

    from refragkit.retrievers.encoder import resolve_encoder

    folder = Path(name).expanduser() if name is not None else None
    if folder is None or not folder.is_dir():
        try:
            folder = resolve_encoder(name)
        except RetrievalError as error:
            raise DataError(
                f"data.chunk_tokenizer={'null' if name is None else name}: documents are cut by tokens, and there is no"
                f" tokenizer to count them; set it to a folder with a tokenizer.json ({error})"
            ) from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"data.chunk_tokenizer={folder}: expected a folder with a tokenizer.json")
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"data.chunk_tokenizer: {file} can't be read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_chunking(chunk_tokens: int, chunk_overlap: int) -> None:
    """Check the sizes of chunks.

    Raises:
        ConfigError: too few tokens, or an overlap that is negative or not smaller than a chunk.
    """
    if chunk_tokens < MIN_CHUNK_TOKENS:
        raise ConfigError(
            f"data.chunk_tokens: expected an integer of at least {MIN_CHUNK_TOKENS}, got {chunk_tokens}"
        )
    if not 0 <= chunk_overlap < chunk_tokens:
        raise ConfigError(
            f"data.chunk_overlap: expected 0 or more tokens and fewer than a chunk has"
            f" (chunk_tokens={chunk_tokens}), got {chunk_overlap}"
        )


class Chunker:
    """Finds where to cut.

    Args:
        tokenizer: counts tokens; without truncation and padding.
        chunk_tokens: tokens of a chunk at most, special tokens not counted.
        chunk_overlap: tokens of a chunk's end that the next one repeats, at most and fewer than ``chunk_tokens``: whole
            sentences that fit, else whole lines or words, and nothing where the last word alone is longer.
    """

    def __init__(self, tokenizer: Tokenizer, chunk_tokens: int, chunk_overlap: int) -> None:
        self.tokenizer = tokenizer
        self.chunk_tokens = chunk_tokens
        self.chunk_overlap = chunk_overlap

    def count(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(e) for e in encodings]

    def fits(self, texts: Sequence[str]) -> list[bool]:
        """Which texts are no longer than one chunk."""
        fits = [len(t) <= 100 * self.chunk_tokens for t in texts]
        short = [i for i, fit in enumerate(fits) if fit]
        for i, count in zip(short, self.count([texts[i] for i in short]), strict=True):
            fits[i] = count <= self.chunk_tokens
            if fits[i] and _LONG_WORD.search(texts[i]):  # of which slices are counted
                fits[i] = next(self.spans(texts[i])) == (0, len(texts[i]))
        return fits

    def spans(self, text: str) -> Iterator[Span]:
        """The chunks of a text as (start, end) in characters.

        The first starts at 0, the last ends at ``len(text)``, nothing is left out, and each ends beyond the one before.
        What is held besides the text, and the time for each of its characters, don't grow with its length.
        """
        position = previous_end = 0
        size = _BLOCK_CHARACTERS
        while True:
            block = text[position : position + size]
            final = position + size >= len(text)
            found, rest = self._cut(block, previous_end - position, final)
            for start, end in self._within_limit(block, found, previous_end - position):
                yield position + start, position + end
            if final:
                return
            if not found:  # hardly a token in it: look at more at once
                size *= 2
                continue
            previous_end = position + found[-1][1]
            position += rest
            size = _BLOCK_CHARACTERS

    def _cut(self, text: str, floor: int, final: bool) -> tuple[list[Span], int]:
        """The chunks of a block of text.

        Args:
            text: the block; its first chunk starts at 0.
            floor: where the chunk before it ended; every chunk must go beyond.
            final: whether the document ends with the block. If not, what is too near its end is left for the next.

        Returns:
            The spans, and where the next block must start.
        """
        limit = self.chunk_tokens
        tokens = self._token_starts(text)
        levels = _break_levels(text)
        spans: list[Span] = []
        start = 0
        while True:
            first = int(np.searchsorted(tokens, start))
            if len(tokens) - first <= limit:
                if final:
                    spans.append((start, len(text)))
                return spans, start
            end = self._end(tokens, levels, first, max(start, floor))
            after = int(np.searchsorted(tokens, end))
            if not final and after + limit >= len(tokens):
                return spans, start
            spans.append((start, end))
            if end == len(text):
                return spans, end
            start, floor = self._next_start(tokens, levels, start, end, after), end

    def _end(self, tokens: _Array, levels: NDArray[np.uint8], first: int, floor: int) -> int:
        """The best place beyond ``floor`` to end a chunk whose first token is number ``first``."""
        limit = self.chunk_tokens
        last = int(tokens[first + limit])
        # The overlap and half of the rest at least: a chunk always brings something new.
        early = max(int(tokens[first + (limit + self.chunk_overlap) // 2]), floor + 1)
        window = levels[early : last + 1]
        if len(window) and window.max():
            return early + int(np.flatnonzero(window == window.max())[-1])
        window = levels[floor + 1 : early]
        if window.any():
            return floor + 1 + int(np.flatnonzero(window)[-1])
        if last > floor:
            return last
        # A single character of more tokens than a chunk has
        beyond = int(np.searchsorted(tokens, floor, side="right"))
        return int(tokens[beyond]) if beyond < len(tokens) else len(levels) - 1

    def _next_start(self, tokens: _Array, levels: NDArray[np.uint8], start: int, end: int, after: int) -> int:
        """Where the chunk that follows (start, end) starts; ``after`` is the first token behind it."""
        limit, room = self.chunk_tokens, self.chunk_overlap
        # The next word must fit behind the overlap, unless it fits into no chunk anyway.
        horizon = int(tokens[after + limit]) if after + limit < len(tokens) else len(levels) - 1
        ahead = np.flatnonzero(levels[end + 1 : horizon + 1])
        if len(ahead) or horizon == len(levels) - 1:
            word_end = end + 1 + int(ahead[0]) if len(ahead) else horizon
            word_tokens = int(np.searchsorted(tokens, word_end)) - after
            if word_tokens <= limit:
                room = min(room, limit - word_tokens)
        if not room:
            return end
        earliest = max(int(tokens[max(after - room, 0)]), start + 1)
        if after - room > 0 and tokens[after - room - 1] == earliest:  # half of a character's tokens
            earliest += 1
        window = levels[earliest:end]
        for level in (_SENTENCE, _LINE, _WORD):
            places = np.flatnonzero(window >= level)
            if len(places):
                return earliest + int(places[0])
        if levels[end]:
            return end
        return min(int(tokens[np.searchsorted(tokens, earliest)]), end)

    def _within_limit(self, text: str, spans: Sequence[Span], previous_end: int) -> Iterator[Span]:
        """The spans, cut again where the tokens of a chunk alone are more than they were within the document."""
        for at in range(0, len(spans), 256):
            group = spans[at : at + 256]
            counts = self.count([text[a:b] for a, b in group])
            for (start, end), count in zip(group, counts, strict=True):
                if count <= self.chunk_tokens:
                    yield start, end
                else:
                    start = max(start, previous_end)
                    yield from ((start + a, start + b) for a, b in self._tighter(text[start:end]))
                previous_end = end

    def _tighter(self, text: str) -> list[Span]:
        limit = self.chunk_tokens
        while True:
            spans, _ = Chunker(self.tokenizer, limit, min(self.chunk_overlap, limit // 2))._cut(text, 0, True)
            excess = max(self.count([text[a:b] for a, b in spans])) - self.chunk_tokens
            if excess <= 0 or limit == 1:
                return spans
            limit = max(limit - excess, 1)

    def _token_starts(self, text: str) -> _Array:
        """[n_tokens] the character at which each token starts, white space that belongs to it left out."""
        pieces = [m.span() for m in _PIECE.finditer(text)]
        starts: list[_Array] = []
        for group in _groups(pieces, _BATCH_CHARACTERS):
            encodings: list[Any] = self.tokenizer.encode_batch(
                [text[a:b] for a, b in group], add_special_tokens=False
            )
            for (offset, _), encoding in zip(group, encodings, strict=True):
                starts.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + offset)
        if not starts:
            return np.zeros(0, dtype=np.int64)
        first, last = np.concatenate(starts).T
        # Byte-level tokens hold the space before a word, yet a chunk that starts with the word has all of it.
        space = _is_space(text)
        while (inside := (first < last - 1) & space[np.minimum(first, len(text) - 1)]).any():
            first = first + inside
        return np.maximum.accumulate(first)


def _groups(pieces: Sequence[Span], characters: int) -> Iterator[list[Span]]:
    group: list[Span] = []
    for piece in pieces:
        if group and piece[1] - group[0][0] > characters:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _is_space(text: str) -> NDArray[np.bool_]:
    space = np.zeros(len(text), dtype=np.bool_)
    for match in re.finditer(r"\s+", text):
        space[match.start() : match.end()] = True
    return space


def _break_levels(text: str) -> NDArray[np.uint8]:
    """[len(text) + 1] how well a chunk may start at each character: 0 is inside a word, 4 starts a paragraph."""
    levels = np.zeros(len(text) + 1, dtype=np.uint8)
    for level, pattern in enumerate(_BREAKS, start=1):
        levels[np.fromiter((m.end() for m in pattern.finditer(text)), dtype=np.int64)] = level
    return levels
