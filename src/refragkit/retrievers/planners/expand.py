"""Follow the titles that found passages and question mention; ask for what the question still misses.

No model is needed: a graph of title mentions is built when the corpus is indexed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from refragkit.retrievers.base import Retriever
from refragkit.retrievers.bm25 import words
from refragkit.retrievers.links import LinkGraph, TitleIndex
from refragkit.retrievers.planners.base import Ask, QueryPlanner, Trail
from refragkit.types import Hit

_ASKING_TEXT = """
what which who whom whose when where why how does did do has have had were was are is many much name
"""
_ASKING = frozenset(_ASKING_TEXT.split())
_WORD = re.compile(r"\w+")


class ExpandPlanner(QueryPlanner):
    """Hop 1 asks the question; later hops ask for the linked passages with the question's open words."""

    name: ClassVar[str] = "expand"

    def open_index(self, retriever: Retriever, cache_dir: str | Path | None = None) -> None:
        """Build the link graph."""
        self._retriever = retriever
        self._titles = TitleIndex(retriever.documents)
        self._links = LinkGraph.open(retriever.documents, retriever.corpus_hash, self._titles, cache_dir)
        self._positions = {d.doc_id: i for i, d in enumerate(retriever.documents)}

    def plan(self, trails: Sequence[Trail]) -> list[Ask | None]:
        """Rank what the question and the found passages mention by how well it fits the question."""
        documents = self._retriever.documents
        candidates: list[list[str]] = []
        for trail in trails:
            linked = dict.fromkeys(self._titles.mentions(trail.question.question))
            for doc_id in trail.found:
                linked.update(dict.fromkeys(self._links[self._positions[doc_id]]))
            candidates.append([documents[i].doc_id for i in linked if documents[i].doc_id not in trail.found])
        scores = self._retriever.score([t.question.question for t in trails], candidates)
        return [self._ask(t, ids, s) for t, ids, s in zip(trails, candidates, scores, strict=True)]

    def _ask(self, trail: Trail, doc_ids: Sequence[str], scores: Sequence[float]) -> Ask | None:
        documents = self._retriever.documents
        ranked = sorted(zip(doc_ids, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
        linked = tuple(Hit(documents[self._positions[i]], s) for i, s in ranked)
        if not trail.hops:
            return Ask(trail.question.question, linked)
        if not linked:
            return None
        seen = {w for h in trail.found.values() for w in words(f"{h.document.title} {h.document.text}")}
        missing = [
            w
            for w in _WORD.findall(trail.question.question)
            if w.lower() not in seen and w.lower() not in _ASKING and words(w)
        ]
        titles = list(dict.fromkeys(h.document.title for h in linked[:3]))
        query = " ".join(["; ".join(titles), *missing])
        return None if query in trail.queries else Ask(query, linked)

    def merge(self, trail: Trail, ask: Ask, hits: Sequence[Hit], k: int) -> list[Hit]:
        """Linked passages first; what the search found fills up."""
        linked = ask.linked[:k] if trail.hops else ask.linked[:1]
        merged = {h.doc_id: h for h in (*linked, *hits)}
        return list(merged.values())[:k]
