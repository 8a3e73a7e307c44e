"""Mentions of passage titles in running text.

Titles are matched as whole words with the longest title winning ("New York City" over "New York"), in one
pass over each text: a table from a title's first word to the titles that start with it, so the cost does not
grow with the number of titles.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

WORD = re.compile(r"\w+")
_QUALIFIER = re.compile(r"\s*\([^()]*\)\s*$")  # "Mercury (planet)" is written "Mercury" in running text
# Titles that are ordinary words ("It", "Her", "The Who") would link everything with everything.
_COMMON_TEXT = """
a about after all also american an and are as at be been before between both but by can did do does during each
english film first for from had has have he her him his how i if in into is it its life love made many may me
more most my new no not now of off on one only or other our out over part same she since so some song such than
that the their them then there these they this time to two under until up us used was we were what when where
which while who will with you your
"""
_COMMON = frozenset(_COMMON_TEXT.split())


def fold(text: str) -> str:
    """Case and accents removed: what is compared."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(c for c in decomposed if not unicodedata.combining(c)).casefold()


def bare_title(title: str) -> str:
    """The title as it is written in running text: without a qualifier in parentheses at its end."""
    return _QUALIFIER.sub("", title)


class TitleIndex:
    """Finds mentions of a corpus' titles in any text."""

    def __init__(self, titles: Sequence[str]) -> None:
        """Index each document's title; documents without one can't be mentioned."""
        by_words: dict[tuple[str, ...], list[int]] = {}
        for i, title in enumerate(titles):
            names = {title, bare_title(title)}
            for words in {tuple(WORD.findall(fold(name))) for name in names}:
                if words and not (len(words) == 1 and (words[0] in _COMMON or len(words[0]) < 2)):
                    by_words.setdefault(words, []).append(i)
        self._documents = by_words
        lengths: dict[str, set[int]] = {}
        for words in by_words:
            lengths.setdefault(words[0], set()).add(len(words))
        self._lengths = {first: sorted(n, reverse=True) for first, n in lengths.items()}

    def find(self, words: Sequence[str]) -> Iterator[tuple[int, int, list[int]]]:
        """Mentions in a text that is split by ``WORD``: (first word's position, words, documents' positions).

        A title counts only where the text writes it with a capital letter or digit: names, not words.
        """
        i = 0
        while i < len(words):
            step = 1
            if not words[i][0].islower():
                for n in self._lengths.get(fold(words[i]), ()):
                    documents = self._documents.get(tuple(map(fold, words[i : i + n])))
                    if documents:
                        yield i, n, documents
                        step = n
                        break
            i += step

    def mentions(self, text: str) -> list[int]:
        """Positions of the documents whose title the text mentions, in the order of their first mention."""
        return list(dict.fromkeys(d for _, _, found in self.find(WORD.findall(text)) for d in found))
