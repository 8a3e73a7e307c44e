"""What the ``expand`` planner knows of a corpus: who mentions whom, in which words, and each passage's terms.

Built once per corpus, cached beside its index, and shared by every retriever of that corpus.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refragkit.data.mapped_tensors import map_tensors, write_tensors
from refragkit.retrievers.bm25 import words as content_words
from refragkit.retrievers.index import load_or_build, write_folder
from refragkit.retrievers.links import WORD, TitleIndex, bare_title
from refragkit.types import Document

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
#: Raise it when the rules below change: cached graphs are then built again.
GRAPH_VERSION = 3
#: Words on each side of a mention that say what the mention is about.
CONTEXT_WORDS = 8
_NAME = re.compile(r"\b[A-Z0-9][\w'-]*")


class Stemmer:
    """English stems of a text's content words, each word stemmed once."""

    def __init__(self) -> None:
        self._stems: dict[str, str] = {}
        self._snowball: Any = None

    def __call__(self, text: str) -> list[str]:
        """The stems, in order, repetitions kept."""
        split = content_words(text)
        new = [w for w in split if w not in self._stems]
        if new:
            if self._snowball is None:
                import Stemmer as Snowball

                self._snowball = Snowball.Stemmer("english")
            self._stems.update(zip(new, self._snowball.stemWords(new), strict=True))
        return [self._stems[w] for w in split]


class Rows:
    """Lists of integers of different lengths in one array: row i is ``values[starts[i]:starts[i + 1]]``."""

    def __init__(self, starts: IntArray, values: NDArray[np.int32]) -> None:
        self.starts = starts
        self.values = values

    def __getitem__(self, i: int) -> NDArray[np.int32]:
        return self.values[self.starts[i] : self.starts[i + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def span(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Where the values of several rows are: (indices into ``values``, the row's number for each)."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        numbers = np.repeat(np.arange(len(rows)), lengths)
        firsts = np.cumsum(lengths) - lengths
        return self.starts[rows][numbers] + np.arange(len(numbers)) - firsts[numbers], numbers


class RowsBuilder:
    """Collects `Rows` one by one, four bytes a value."""

    def __init__(self) -> None:
        self._values = array("i")
        self._starts = array("q", [0])

    def append(self, row: Iterable[int]) -> None:
        """The next row."""
        self._values.extend(row)
        self._starts.append(len(self._values))

    def rows(self) -> Rows:
        """All rows so far."""
        return Rows(np.array(self._starts, dtype=np.int64), np.array(self._values, dtype=np.int32))


class PassageGraph:
    """Links and terms of the passages of one corpus.

    Attributes:
        path: the folder that it was opened from, None where it is only in memory.
        terms: per document, the ids of its distinct stems (title and text).
        is_name: [len(terms.values)] bool, whether the stem is written with a capital or in the title.
        titles: per document, the ids of its title's stems.
        idf: [n_terms] how rare each stem is.
        links: per document, the documents that its text mentions by title, in the order of first mention.
        link_position: [n_links] the word at which the first mention stands.
        contexts: per link, the ids of the stems around its mentions.
        copies: [n_documents] how many documents share the title.
    """

    def __init__(
        self, vocabulary: dict[str, int], tensors: dict[str, NDArray[Any]], titles: TitleIndex
    ) -> None:
        """Wrap what ``build`` made."""
        self.path: Path | None = None
        self.vocabulary = vocabulary
        self.tensors = tensors
        self.title_index = titles
        self.stem = Stemmer()
        self.terms = Rows(tensors["term_starts"], tensors["terms"])
        self.is_name = tensors["is_name"].view(np.bool_)
        self.titles = Rows(tensors["title_starts"], tensors["titles"])
        self.idf: FloatArray = tensors["idf"]
        self.links = Rows(tensors["link_starts"], tensors["links"])
        self.link_position = tensors["link_position"]
        self.contexts = Rows(tensors["context_starts"], tensors["contexts"])
        self.copies = tensors["copies"]

    @property
    def has_links(self) -> bool:
        """Whether passages mention each other at all (one link per twenty passages is taken for noise)."""
        return len(self.links.values) * 20 >= len(self.links)

    @cached_property
    def backlinks(self) -> Rows:
        """Per document, the documents that mention it."""
        sources = np.repeat(np.arange(len(self.links)), np.diff(self.links.starts))
        order = np.argsort(self.links.values, kind="stable")
        counts = np.bincount(self.links.values, minlength=len(self.links))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Rows(starts, sources[order].astype(np.int32))

    @cached_property
    def title_weight(self) -> FloatArray:
        """[n_documents] the summed rarity of each title's stems."""
        indices, rows = self.titles.span(np.arange(len(self.titles)))
        weights = self.idf[self.titles.values[indices]]
        return np.asarray(np.bincount(rows, weights=weights, minlength=len(self.titles)), dtype=np.float64)

    def term_ids(self, text: str) -> tuple[list[int], int]:
        """The ids of a text's distinct stems, and how many of its stems no passage has."""
        stems = dict.fromkeys(self.stem(text))
        ids = [self.vocabulary[s] for s in stems if s in self.vocabulary]
        return ids, len(stems) - len(ids)

    # --- building and caching -----------------------------------------------------------------------------

    @classmethod
    def build(cls, documents: Sequence[Document]) -> PassageGraph:
        """Read every passage once."""
        titles = [d.title for d in documents]
        title_index, stem = TitleIndex(titles), Stemmer()
        vocabulary: dict[str, int] = {}

        def ids(text: str) -> list[int]:
            return [vocabulary.setdefault(s, len(vocabulary)) for s in dict.fromkeys(stem(text))]

        term_rows, title_rows, link_rows, context_rows = (RowsBuilder() for _ in range(4))
        name_flags, positions = array("b"), array("i")
        copies: dict[str, int] = {}
        for i, document in enumerate(documents):
            copies[document.title] = copies.get(document.title, 0) + 1
            title_rows.append(ids(bare_title(document.title)))
            terms = ids(f"{document.title} {document.text}")
            names = {*ids(document.title), *ids(" ".join(_NAME.findall(document.text)))}
            term_rows.append(terms)
            name_flags.extend(t in names for t in terms)
            words = WORD.findall(document.text)
            mentioned: dict[int, tuple[int, dict[int, None]]] = {}
            for at, length, found in title_index.find(words):
                around = (
                    words[max(0, at - CONTEXT_WORDS) : at] + words[at + length : at + length + CONTEXT_WORDS]
                )
                context = dict.fromkeys(ids(" ".join(around)))
                for j in found:
                    if j != i:
                        mentioned.setdefault(j, (at, {}))[1].update(context)
            link_rows.append(mentioned)
            positions.extend(at for at, _ in mentioned.values())
            for _, context in mentioned.values():
                context_rows.append(context)
        terms_all, links, contexts = term_rows.rows(), link_rows.rows(), context_rows.rows()
        title_ids = title_rows.rows()
        frequency = np.bincount(terms_all.values, minlength=len(vocabulary))
        tensors: dict[str, NDArray[Any]] = {
            "term_starts": terms_all.starts,
            "terms": terms_all.values,
            "is_name": np.array(name_flags, dtype=np.uint8),
            "title_starts": title_ids.starts,
            "titles": title_ids.values,
            "idf": np.log1p((len(documents) - frequency + 0.5) / (frequency + 0.5)),
            "link_starts": links.starts,
            "links": links.values,
            "link_position": np.array(positions, dtype=np.int32),
            "context_starts": contexts.starts,
            "contexts": contexts.values,
            "copies": np.array([copies[title] for title in titles], dtype=np.int32),
        }
        return cls(vocabulary, tensors, title_index)

    @classmethod
    def open(
        cls, documents: Sequence[Document], corpus_hash: str, cache_dir: str | Path | None
    ) -> PassageGraph:
        """The graph of these documents from the cache, or built and put there."""
        if cache_dir is None:
            return cls.build(documents)
        opened: list[PassageGraph] = []

        def load(folder: Path) -> None:
            stems = json.loads((folder / "vocabulary.json").read_bytes())
            titles = json.loads((folder / "titles.json").read_bytes())
            tensors, _ = map_tensors(folder / "graph.safetensors")
            graph = cls({s: i for i, s in enumerate(stems)}, tensors, TitleIndex(titles))
            graph.path = folder
            opened.append(graph)

        def build(folder: Path) -> None:
            graph = cls.build(documents)

            def write(temporary: Path) -> None:
                for name, words in (
                    ("vocabulary", list(graph.vocabulary)),
                    ("titles", [d.title for d in documents]),
                ):
                    (temporary / f"{name}.json").write_text(json.dumps(words), encoding="utf-8")
                write_tensors(temporary / "graph.safetensors", graph.tensors)

            write_folder(folder, wanted, write)

        wanted = {"corpus_hash": corpus_hash, "count": len(documents), "settings": {"graph": GRAPH_VERSION}}
        load_or_build(Path(cache_dir), "passage_graph", wanted, load, build)
        return opened[-1]
