"""Follow the titles and names that found passages and question mention; ask for what the question still misses.

Hop 1 asks the question; a passage whose title the question mentions moves up. Each later hop takes the strongest
passage not yet followed (the seed) and asks for the names in it that the question doesn't have, with the question's
words that the seed lacks. What this search finds, what the seeds mention by title and what mentions them are the
candidates, and the hop keeps those that are most likely evidence (see ``evidence.py``). No language model is needed.

In a corpus whose passages don't mention each other's titles there is nothing to follow: it stops after hop 1, whose
order is then exactly the retriever's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from refragkit.retrievers.base import Retriever, best_first
from refragkit.retrievers.links import WORD
from refragkit.retrievers.passage_graph import PassageGraph
from refragkit.retrievers.planners.base import QueryPlanner, Trail
from refragkit.retrievers.planners.evidence import EvidenceFeatures, EvidenceModel, QuestionTerms
from refragkit.types import Hit

# Words that ask, and say nothing about what is asked for.
_ASKING_TEXT = (
    "what which who whom whose when where why how does did do has have had were was are is many much name"
)
#: Hits of the question, and of each follow-up query, that become candidates.
QUESTION_DEPTH, FOLLOW_UP_DEPTH = 40, 15
#: Passages whose mentions are followed.
SEEDS = 5
#: A passage that more passages mention than this leads nowhere in particular.
MAX_BACKLINKS = 60
#: Names of the seed in a follow-up query.
QUERY_NAMES = 8
#: How far a passage moves up in hop 1 when the question mentions its title (in best scores), for a title of this
#: summed rarity or more.
NAMED_BONUS, NAMED_WEIGHT = 0.33, 15.0
#: From hop 3 on, a question stops when no passage that it doesn't have is likelier evidence than this.
STOP_BELOW = 0.05
# A capitalised word, or several with small words between them.
_NAME = re.compile(r"\b[A-Z][\w'-]*(?:\s+(?:of|the|de|von|van|and)?\s*[A-Z][\w'-]*)*")


@dataclass(slots=True)
class QueryScores:
    """One query's scores.

    Attributes:
        unit: the score of the search's best hit.
        of: the score of each candidate, in that unit.
    """

    unit: float
    of: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Memory:
    """What the planner keeps about one question.

    Attributes:
        terms: the question's words and the passages that it names.
        pool: every candidate seen, by position in the corpus.
        scores: what each query so far makes of the candidates.
        strength: each candidate's fit to the question alone.
        evidence: each candidate's probability after the last hop; empty after hop 1.
        followed: the seeds that were asked about.
        features: of the pool at the last hop, in its order.
    """

    terms: QuestionTerms
    pool: dict[int, None] = field(default_factory=dict)
    scores: dict[str, QueryScores] = field(default_factory=dict)
    strength: dict[int, float] = field(default_factory=dict)
    evidence: dict[int, float] = field(default_factory=dict)
    followed: set[int] = field(default_factory=set)
    features: NDArray[np.float64] | None = None

    def best(self) -> list[tuple[int, float]]:
        """The candidates, the likeliest evidence first."""
        values = self.evidence or self.strength
        return sorted(values.items(), key=lambda item: -item[1])


class ExpandPlanner(QueryPlanner):
    """Hop 1 asks the question, later hops ask for what it leads to."""

    name: ClassVar[str] = "expand"

    def __init__(self, model: EvidenceModel | None = None) -> None:
        """``model`` replaces the package's own weights."""
        self._model = model

    def open_index(self, retriever: Retriever, cache_dir: str | Path | None = None) -> None:
        """Load or build the graph of the retriever's corpus."""
        self._retriever = retriever
        self._allowed = retriever.allowed()
        self._graph = PassageGraph.open(retriever.documents, retriever.corpus_hash, cache_dir)
        self.index_path = self._graph.path
        self._features = EvidenceFeatures(self._graph)
        self._asking = frozenset(self._graph.stem(_ASKING_TEXT))
        if self._model is None:
            self._model = EvidenceModel.load()

    def depth(self, k: int) -> int:
        """Enough to choose from."""
        return max(k, QUESTION_DEPTH)

    # --- what to ask --------------------------------------------------------------------------------------

    def plan(self, trails: Sequence[Trail]) -> list[str | None]:
        """The question, then one query per seed until nothing promising is left."""
        return [t.question.question if not t.hops else self._follow_up(t) for t in trails]

    def _follow_up(self, trail: Trail) -> str | None:
        if not self._graph.has_links:
            return None
        memory: Memory = trail.memory
        position = self._retriever._positions
        found = {position[i] for i in trail.found}
        if (
            memory.evidence
            and max((p for d, p in memory.evidence.items() if d not in found), default=0) < STOP_BELOW
        ):
            return None
        for seed, _ in memory.best():
            if seed in found and seed not in memory.followed:
                memory.followed.add(seed)
                query = self._query(trail.question.question, memory.terms, seed)
                if query and query not in trail.queries:
                    return query
        return None

    def _query(self, question: str, terms: QuestionTerms, seed: int) -> str:
        """The seed's rarest names that the question doesn't have, then the question's words the seed lacks."""
        graph = self._graph
        asked = set(terms.ids.tolist())
        names: dict[str, float] = {}
        for name in dict.fromkeys(_NAME.findall(self._retriever.documents[seed].text)):
            ids, _ = graph.term_ids(name)
            if not asked.issuperset(ids):
                names[name] = float(graph.idf[ids].max())
        rarest = sorted(names, key=lambda n: -names[n])[:QUERY_NAMES]
        if not rarest:
            return ""
        has = set(graph.terms[seed].tolist())
        missing = []
        for word in dict.fromkeys(WORD.findall(question)):
            ids, unknown = graph.term_ids(word)
            if unknown or any(i in asked and i not in has for i in ids):
                missing.append(word)
        return " ".join([*rarest, *missing])

    # --- what to keep -------------------------------------------------------------------------------------

    def merge(
        self, trails: Sequence[Trail], queries: Sequence[str], found: Sequence[Sequence[Hit]], k: int
    ) -> list[list[Hit]]:
        """The k likeliest of the candidates that the question doesn't have yet."""
        if not self._graph.has_links:
            for trail, hits in zip(trails, found, strict=True):
                trail.memory = list(hits)
            return [list(hits[:k]) for hits in found]
        position = self._retriever._positions
        seeds = []
        for trail, query, hits in zip(trails, queries, found, strict=True):
            if trail.memory is None:
                trail.memory = Memory(self._terms(trail.question.question))
            # A best score of 0 or below is no unit to measure others with.
            unit = hits[0].score if hits and hits[0].score > 0 else 1.0
            scores = {position[h.doc_id]: h.score / unit for h in hits}
            trail.memory.scores[query] = QueryScores(unit, scores)
            seeds.append(self._extend(trail.memory, list(scores), bool(trail.hops)))
        self._score(trails)
        for trail, start in zip(trails, seeds, strict=True):
            memory: Memory = trail.memory
            self._weigh_strength(trail)
            if trail.hops:
                self._weigh_evidence(memory, start, trail.question.question)
        return [self._hits(t.memory, k, {position[i] for i in t.found}) for t in trails]

    def rank(self, trails: Sequence[Trail], k: int) -> list[list[Hit]]:
        """Every candidate that was seen, the likeliest first."""
        if not self._graph.has_links:
            return [t.memory[:k] for t in trails]
        return [self._hits(t.memory, k, set()) for t in trails]

    def _hits(self, memory: Memory, k: int, known: set[int]) -> list[Hit]:
        documents = self._retriever.documents
        values = {d: v for d, v in (memory.evidence or memory.strength).items() if d not in known}
        positions = np.fromiter(values, dtype=np.int64, count=len(values))
        scores = np.fromiter(values.values(), dtype=np.float64, count=len(values))
        best = best_first(scores, positions, self._retriever._id_rank, k)
        ranked = zip(positions[best].tolist(), scores[best].tolist(), strict=True)
        return [Hit(documents[d], score) for d, score in ranked]

    def _terms(self, question: str) -> QuestionTerms:
        graph = self._graph
        text = " ".join(w for w in WORD.findall(question) if not self._asking.issuperset(graph.stem(w)))
        stems, unknown = graph.term_ids(text)
        ids = np.array(stems, dtype=np.int64)
        total = float(graph.idf[ids].sum()) + unknown * math.log(len(graph.terms))
        return QuestionTerms(ids, total, dict.fromkeys(graph.title_index.mentions(question)))

    def _extend(self, memory: Memory, hits: Sequence[int], follow_up: bool) -> dict[int, float]:
        """Add a hop's candidates to the pool; returns the seeds that they come from, with their strengths."""
        if not follow_up:
            self._admit(memory, [*hits, *memory.terms.named])
            return {}
        strongest = sorted(memory.strength.items(), key=lambda item: -item[1])[:SEEDS]
        seeds = dict(strongest)
        for d, p in memory.best()[:SEEDS] if memory.evidence else ():
            seeds[d] = max(memory.strength[d], p)
        seeds = dict(sorted(seeds.items(), key=lambda item: -item[1]))
        self._admit(memory, hits[:FOLLOW_UP_DEPTH])
        for seed in seeds:
            self._admit(memory, map(int, self._graph.links[seed]))
            back = self._graph.backlinks[seed]
            if len(back) <= MAX_BACKLINKS:
                self._admit(memory, map(int, back))
        return seeds

    def _admit(self, memory: Memory, candidates: Iterable[int]) -> None:
        """Add candidates to the pool; what the retriever's filter leaves out must not come back through a link."""
        allowed = self._allowed
        memory.pool.update(dict.fromkeys(d for d in candidates if allowed is None or allowed[d]))

    def _score(self, trails: Sequence[Trail]) -> None:
        """Complete every query's scores for the pools, in one batch."""
        jobs: list[tuple[str, QueryScores, list[int]]] = []
        for trail in trails:
            memory: Memory = trail.memory
            for asked, scores in memory.scores.items():
                new = [d for d in memory.pool if d not in scores.of]
                if new:
                    jobs.append((asked, scores, new))
        positions = [np.array(new, dtype=np.int64) for *_, new in jobs]
        values = self._retriever.score_at([asked for asked, *_ in jobs], positions)
        for (_, scores, new), value in zip(jobs, values, strict=True):
            scores.of.update(zip(new, (value / scores.unit).tolist(), strict=True))

    def _weigh_strength(self, trail: Trail) -> None:
        memory: Memory = trail.memory
        weights = self._graph.title_weight
        for d, relevance in memory.scores[trail.question.question].of.items():
            if d not in memory.strength:
                named = NAMED_BONUS * min(1.0, weights[d] / NAMED_WEIGHT) if d in memory.terms.named else 0.0
                memory.strength[d] = relevance + float(named)

    def _weigh_evidence(self, memory: Memory, seeds: dict[int, float], question: str) -> None:
        assert self._model is not None
        pool = np.array(list(memory.pool), dtype=np.int64)
        relevance = np.array([memory.scores[question].of[d] for d in memory.pool])
        others = [scores.of for query, scores in memory.scores.items() if query != question]
        follow_up = np.array([max(scores[d] for scores in others) for d in memory.pool])
        memory.features = self._features(memory.terms, seeds, pool, relevance, follow_up)
        memory.evidence = dict(zip(memory.pool, self._model(memory.features).tolist(), strict=True))
