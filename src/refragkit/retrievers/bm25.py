"""BM25 over stemmed words (bm25s' sparse scores, PyStemmer's Snowball stemmers).

Source: Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond"; the scores are
computed when indexing, as in bm25s (arXiv 2407.03618), in Lucene's variant.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from refragkit.data.document_table import PassageTexts
from refragkit.errors import RetrievalError
from refragkit.retrievers.base import IntArray, Retriever, ScoreArray, best_first
from refragkit.types import Document, Hit

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever

_WORD = re.compile(r"(?u)\b\w\w+\b")
# Lucene's list, as in bm25s: longer lists remove words that name things ("who", "it", "us").
_STOPWORDS_TEXT = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with
"""
_STOPWORDS = frozenset(_STOPWORDS_TEXT.split())

#: Documents whose words are split and stemmed at a time.
TEXT_BLOCK = 4096


def words(text: str) -> list[str]:
    """Lower-case words of two or more letters or digits, without stop words."""
    return [w for w in _WORD.findall(text.lower()) if w not in _STOPWORDS]


class _Ids(Sequence[list[int]]):
    """The ids of each document's words, four bytes each, as bm25s reads them: ``ids`` and ``vocab``."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocab = vocabulary
        self._values = array("i")
        self._starts = array("q", [0])

    @property
    def ids(self) -> Sequence[list[int]]:
        return self

    def append(self, values: Iterable[int]) -> None:
        self._values.extend(values)
        self._starts.append(len(self._values))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._values[self._starts[index] : self._starts[index + 1]].tolist()


class BM25Retriever(Retriever):
    """Ranks by words in common, the rarer the better."""

    name: ClassVar[str] = "bm25"

    def __init__(
        self, k1: float = 1.5, b: float = 0.75, stemmer: str = "english", cache_dir: str | Path | None = None
    ) -> None:
        """Args are BM25's two parameters and the Snowball language (``none`` leaves words as they are).

        Raises:
            RetrievalError: ``k1`` or ``b`` is out of range, or the stemmer's language is unknown.
        """
        super().__init__()
        if not 0 <= k1 < math.inf or not 0 <= b <= 1:
            raise RetrievalError(
                f"expected a finite retriever.k1 >= 0 and 0 <= retriever.b <= 1, got k1={k1}, b={b}"
            )
        self.k1 = k1
        self.b = b
        self.stemmer = stemmer
        self.cache_dir = cache_dir
        self._stem_cache: dict[str, str] = {}
        self._vocabulary: dict[str, int] = {}
        self._bm25: Any = None
        self._arrays: tuple[NDArray[np.float32], NDArray[np.int32], IntArray] | None = None

    def settings(self) -> dict[str, Any]:
        """The parameters; the index also depends on how words are split, which ``words`` numbers."""
        return {"k1": float(self.k1), "b": float(self.b), "stemmer": self.stemmer, "words": 1}

    def _stems(self, texts: Sequence[str]) -> list[list[str]]:
        split = [words(t) for t in texts]
        if self.stemmer == "none":
            return split
        new = sorted({w for text in split for w in text} - self._stem_cache.keys())
        if new:
            import Stemmer

            try:
                stemmer = Stemmer.Stemmer(self.stemmer)
            except KeyError:
                raise RetrievalError(
                    f"retriever.stemmer={self.stemmer!r} is unknown: expected none or one of "
                    f"{', '.join(Stemmer.algorithms())}"
                ) from None
            self._stem_cache.update(zip(new, stemmer.stemWords(new), strict=True))
        return [[self._stem_cache[w] for w in text] for text in split]

    def index(self, documents: Sequence[Document]) -> None:
        """Compute the score of every word in every document."""
        self._set_documents(documents)
        self.build()

    def build(self) -> None:
        """``index`` for the documents that are already set."""
        import bm25s

        self._stem_cache = {}
        vocabulary: dict[str, int] = {}
        ids = _Ids(vocabulary)
        texts = PassageTexts(self.documents, np.arange(len(self.documents)))
        for start in range(0, len(texts), TEXT_BLOCK):
            for stems in self._stems(texts[start : start + TEXT_BLOCK]):
                ids.append(vocabulary.setdefault(stem, len(vocabulary)) for stem in stems)
        self._vocabulary = vocabulary
        self._stem_cache = {}
        self._bm25 = self._arrays = None
        if vocabulary:  # a corpus of nothing but stop words matches no query
            self._bm25 = bm25s.BM25(k1=self.k1, b=self.b, method="lucene", backend="numpy")
            self._bm25.index(ids, create_empty_token=False, show_progress=False)

    def _scores(self, query_stems: Sequence[str]) -> ScoreArray:
        """[n_documents] the sum of the query's words' columns.

        The same sum as bm25s' own, which adds word by word; one pass over all of them is several times faster.
        """
        ids = [self._vocabulary[s] for s in query_stems if s in self._vocabulary]
        if not ids:
            return np.zeros(len(self.documents))
        data, indices, starts = self._columns
        spans = [slice(starts[i], starts[i + 1]) for i in ids]
        scores = np.bincount(
            np.concatenate([indices[span] for span in spans]),
            weights=np.concatenate([data[span] for span in spans]),
            minlength=len(self.documents),
        )
        return np.asarray(scores, dtype=np.float64)

    @property
    def _columns(self) -> tuple[NDArray[np.float32], NDArray[np.int32], IntArray]:
        """Bm25s' scores by word, as plain arrays (indexing a memory-mapped one is slow)."""
        if self._arrays is None:
            scores = self._bm25.scores
            self._arrays = (
                np.asarray(scores["data"]),
                np.asarray(scores["indices"]),
                np.asarray(scores["indptr"]),
            )
        return self._arrays

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k best documents of each query; those that share no word with it come last, with score 0."""
        self._require_index()
        self._require_k(k)
        return [self._hits(*best) for best in self.top(queries, k)]

    def top(self, queries: Sequence[str], k: int) -> list[tuple[IntArray, ScoreArray]]:
        """``search`` as arrays: per query, the positions of the best documents and their scores."""
        found = []
        for scores in self.all_scores(queries):
            positions = self.best_of(scores, k)
            found.append((positions, scores[positions]))
        return found

    def all_scores(self, queries: Sequence[str]) -> Iterator[ScoreArray]:
        """Each query's scores of all documents, one query at a time: [n_documents]."""
        return map(self._scores, self._stems(queries))

    def best_of(self, scores: ScoreArray, k: int) -> IntArray:
        """The positions of the k best documents that may be returned, the best first."""
        if len(self._searchable) == len(scores):
            return best_first(scores, self._searchable, self._id_rank, k)
        best = best_first(scores[self._searchable], self._searchable, self._id_rank, k)
        return np.asarray(self._searchable[best], dtype=np.int64)

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """BM25 of the given documents only."""
        return [scores for scores, _ in self.score_with_best(queries, positions)]

    def score_with_best(
        self, queries: Sequence[str], positions: Sequence[IntArray]
    ) -> list[tuple[ScoreArray, float]]:
        """BM25 of the given documents, and each query's best score over the whole corpus."""
        self._require_index()
        result = []
        for scores, chosen in zip(self.all_scores(queries), positions, strict=True):
            result.append((scores[chosen], float(scores.max())))
        return result

    def write_files(self, folder: Path) -> None:
        """The sparse scores as bm25s stores them, and the vocabulary."""
        (folder / "vocabulary.json").write_text(
            json.dumps(self._vocabulary, ensure_ascii=False), encoding="utf-8"
        )
        if self._bm25 is not None:
            self._bm25.save(folder / "bm25s", show_progress=False)

    def read_files(self, folder: Path) -> None:
        """Open the scores memory-mapped."""
        self._vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        self._stem_cache = {}
        self._bm25 = self._arrays = None
        if self._vocabulary:
            import bm25s

            self._bm25 = bm25s.BM25.load(folder / "bm25s", mmap=True, load_vocab=False)


def bm25(
    k1: float = 1.5,
    b: float = 0.75,
    stemmer: str = "english",
    planner: str = "expand",
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
    rerank: str | None = None,
    state_cache: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> MultiHopRetriever:
    """``retriever=bm25``: BM25 search in the multi-hop loop."""
    from refragkit.retrievers.multi_hop import MultiHopRetriever

    base = BM25Retriever(k1=k1, b=b, stemmer=stemmer, cache_dir=cache_dir)
    return MultiHopRetriever(
        base, planner, max_hops, top_k_per_hop, rerank=rerank, state_cache=state_cache, cache_dir=cache_dir
    )
