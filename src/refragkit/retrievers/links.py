"""Which passages mention the titles of which others: the link graph of a corpus, built once when indexing.

Titles are matched as whole words with the longest title winning ("New York City" over "New York"), in one pass
over each text: a table from a title's first word to the titles that start with it, so the cost does not grow
with the number of titles.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from refragkit.retrievers.index import load_or_build, write_folder
from refragkit.types import Document

IntArray = NDArray[np.int64]
#: Raise it when the rules below change: cached graphs are then built again.
MENTIONS_VERSION = 1

_TOKEN = re.compile(r"\w+")
_QUALIFIER = re.compile(r"\s*\([^()]*\)\s*$")  # "Mercury (planet)" is written "Mercury" in running text
# Titles that are ordinary words ("It", "Her", "The Who") would link everything with everything.
_COMMON_TEXT = """
a about after all also american an and are as at be been before between both but by can did do does
during each english film first for from had has have he her him his how i if in into is it its life love
made many may me more most my new no not now of off on one only or other our out over part same she since
so some song such than that the their them then there these they this time to two under until up us used
was we were what when where which while who will with you your
"""
_COMMON = frozenset(_COMMON_TEXT.split())


def fold(text: str) -> str:
    """Case and accents removed: what is compared."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(c for c in decomposed if not unicodedata.combining(c)).casefold()


class TitleIndex:
    """Finds mentions of a corpus' titles in any text."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Index the titles; documents without a title can't be mentioned."""
        by_words: dict[tuple[str, ...], list[int]] = {}
        for i, document in enumerate(documents):
            names = {document.title, _QUALIFIER.sub("", document.title)}
            for words in {tuple(_TOKEN.findall(fold(name))) for name in names}:
                if words and not (len(words) == 1 and (words[0] in _COMMON or len(words[0]) < 2)):
                    by_words.setdefault(words, []).append(i)
        self._documents = by_words
        lengths: dict[str, set[int]] = {}
        for words in by_words:
            lengths.setdefault(words[0], set()).add(len(words))
        self._lengths = {first: sorted(n, reverse=True) for first, n in lengths.items()}

    def mentions(self, text: str) -> list[int]:
        """Positions of the documents whose title occurs in the text, in the order of their first mention.

        A title counts only where the text writes it with a capital letter or digit: names, not words.
        """
        words = [m.group() for m in _TOKEN.finditer(text)]
        found: dict[int, None] = {}
        i = 0
        while i < len(words):
            step = 1
            if not words[i][0].islower():
                for n in self._lengths.get(fold(words[i]), ()):
                    documents = self._documents.get(tuple(map(fold, words[i : i + n])))
                    if documents:
                        found.update(dict.fromkeys(documents))
                        step = n
                        break
            i += step
        return list(found)


class LinkGraph:
    """For each document, the documents that its text mentions by title, itself excluded."""

    def __init__(self, starts: IntArray, targets: IntArray) -> None:
        """Rows in compressed form.

        Args:
            starts: [n + 1] int64; document i mentions ``targets[starts[i]:starts[i + 1]]``.
            targets: [n_links] int64, per document in the order of first mention.
        """
        self.starts = starts
        self.targets = targets

    def __getitem__(self, position: int) -> list[int]:
        return [int(t) for t in self.targets[self.starts[position] : self.starts[position + 1]]]

    @classmethod
    def build(cls, documents: Sequence[Document], titles: TitleIndex) -> LinkGraph:
        """Read every text once."""
        rows = [[j for j in titles.mentions(d.text) if j != i] for i, d in enumerate(documents)]
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(starts, np.array([j for row in rows for j in row], dtype=np.int64))

    @classmethod
    def open(
        cls, documents: Sequence[Document], corpus_hash: str, titles: TitleIndex, cache_dir: str | Path | None
    ) -> LinkGraph:
        """The graph of these documents from the cache, or built and put there."""
        if cache_dir is None:
            return cls.build(documents, titles)
        graphs: list[LinkGraph] = []

        def load(folder: Path) -> None:
            tensors = load_file(folder / "links.safetensors")
            graphs.append(cls(tensors["starts"], tensors["targets"]))

        def build(folder: Path) -> None:
            graph = cls.build(documents, titles)
            tensors = {"starts": graph.starts, "targets": graph.targets}
            write_folder(folder, wanted, lambda f: save_file(tensors, f / "links.safetensors"))

        wanted = {
            "corpus_hash": corpus_hash,
            "count": len(documents),
            "settings": {"mentions": MENTIONS_VERSION},
        }
        load_or_build(Path(cache_dir), "links", wanted, load, build)
        return graphs[-1]
