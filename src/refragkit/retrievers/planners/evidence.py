"""How likely it is that a passage is part of a question's evidence, given what was found so far.

Fourteen features of a (question, passage) pair and a network of one hidden layer. The features say how well the
passage fits the question and the follow-up query, whether the question names it, and how the passages found lead to
it: do they mention it, where, in which words, and does it bring the words of the question that they lack.

The weights ship with the package; ``fit`` makes them from annotated questions. No label is used when retrieving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refragkit.errors import RetrievalError
from refragkit.retrievers.passage_graph import FloatArray, IntArray, PassageGraph

WEIGHTS_FILE = Path(__file__).with_name("evidence.json")

FEATURES = (
    "relevance",  # the retriever's score for the question, divided by the best one
    "follow_up",  # the same for the best of the follow-up queries
    "named",  # the question mentions the title
    "covered",  # share of the question's words (by rarity) that the passage has
    "linked",  # strength of the best seed that mentions it
    "link_missing",  # share of the question's words that this seed lacks and the passage has
    "link_context",  # share of the question's words around that mention
    "link_early",  # near 1 for a mention at the seed's beginning
    "link_count",  # how many seeds mention it
    "links_back",  # strength of the best seed that it mentions
    "back_missing",  # share of the question's words that this seed lacks and the passage has
    "shared_names",  # rarity of the names it shares with a seed and not with the question
    "shared_missing",  # the same times the missing words it brings
    "popularity",  # how many passages mention it (log)
    "copies",  # how many passages share its title (log)
)
#: Seeds whose names are compared with every candidate's.
NAME_SEEDS = 3


@dataclass(slots=True)
class QuestionTerms:
    """A question's content words and the passages that it names.

    Attributes:
        ids: distinct stems that occur in the corpus, question words left out.
        total: their summed rarity, stems that no passage has included.
        named: the documents whose title it mentions.
    """

    ids: IntArray
    total: float
    named: dict[int, None] = field(default_factory=dict)


class EvidenceFeatures:
    """Computes the features of all candidates of a question at once."""

    def __init__(self, graph: PassageGraph) -> None:
        """Prepare for the passages of a graph."""
        self.graph = graph
        # Scratch: all zero, all false and all -1 between calls.
        self._weight = np.zeros(len(graph.vocabulary))
        self._mark = np.zeros(len(graph.vocabulary), dtype=bool)
        self._row = np.full(len(graph.terms), -1, dtype=np.int64)
        self._seed = np.full(len(graph.terms), -1, dtype=np.int64)

    def _without(self, ids: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        """The ids that are not among the others."""
        self._mark[others] = True
        kept: NDArray[Any] = ids[~self._mark[ids]]
        self._mark[others] = False
        return kept

    def _occurrences(
        self, pool: IntArray, parts: Sequence[NDArray[Any]]
    ) -> tuple[NDArray[np.int32], IntArray]:
        """Where the given terms stand in the candidates: their ids, and the candidate's number for each."""
        indices, rows = self.graph.terms.span(pool)
        terms = self.graph.terms.values[indices]
        for ids in parts:
            self._mark[ids] = True
        among = np.flatnonzero(self._mark[terms])
        for ids in parts:
            self._mark[ids] = False
        return terms[among], rows[among]

    def coverage(self, ids: NDArray[Any], span: tuple[NDArray[np.int32], IntArray], size: int) -> FloatArray:
        """Summed rarity of the given terms in each of ``size`` documents whose terms lie at ``span``."""
        terms, rows = span
        self._weight[ids] = self.graph.idf[ids]
        sums = np.bincount(rows, weights=self._weight[terms], minlength=size)
        self._weight[ids] = 0.0
        return np.asarray(sums, dtype=np.float64)

    @staticmethod
    def _first_of(rows: IntArray, n: int) -> IntArray:
        """The index of the first occurrence of each row number below n."""
        first = np.full(n, -1, dtype=np.int64)
        first[rows[::-1]] = np.arange(len(rows))[::-1]
        return first[first >= 0]

    def _names(self, document: int) -> NDArray[np.int32]:
        """The ids of the stems that a document writes as names."""
        own = slice(self.graph.terms.starts[document], self.graph.terms.starts[document + 1])
        names: NDArray[np.int32] = self.graph.terms.values[own][self.graph.is_name[own]]
        return names

    def __call__(
        self,
        question: QuestionTerms,
        seeds: Mapping[int, float],
        pool: IntArray,
        relevance: FloatArray,
        follow_up: FloatArray,
    ) -> NDArray[np.float64]:
        """The features of every candidate.

        Args:
            question: the question.
            seeds: documents to start from and their strengths, the strongest first.
            pool: [n] candidate documents, distinct.
            relevance: [n] see ``FEATURES``.
            follow_up: [n] see ``FEATURES``.

        Returns:
            [n, len(FEATURES)].
        """
        graph, total = self.graph, question.total or 1.0
        x = np.zeros((len(pool), len(FEATURES)))
        column = {name: x[:, i] for i, name in enumerate(FEATURES)}
        n = len(pool)
        starts = np.fromiter(seeds, dtype=np.int64, count=len(seeds))
        strength = np.fromiter(seeds.values(), dtype=np.float64, count=len(seeds))
        names = [self._without(self._names(seed), question.ids) for seed in list(seeds)[:NAME_SEEDS]]
        # Of all the candidates' terms only these are ever weighed.
        span = self._occurrences(pool, [question.ids, *names])
        self._row[pool] = np.arange(n)
        column["relevance"][:] = relevance
        column["follow_up"][:] = follow_up
        named = self._row[np.fromiter(question.named, dtype=np.int64, count=len(question.named))]
        column["named"][named[named >= 0]] = 1.0
        column["covered"][:] = self.coverage(question.ids, span, n) / total
        column["popularity"][:] = np.log1p(graph.backlinks.starts[pool + 1] - graph.backlinks.starts[pool])
        column["copies"][:] = np.log(graph.copies[pool])
        missing = (self._without(question.ids, graph.terms[seed]) for seed in seeds)
        # [seeds, n] what each candidate brings that the seed lacks
        brings = np.array([self.coverage(ids, span, n) for ids in missing]).reshape(len(starts), n) / total

        # Mentions in the seeds. Of several seeds that mention a candidate the first, the strongest, counts.
        links, numbers = graph.links.span(starts)
        rows = self._row[graph.links.values[links]]
        column["link_count"][:] = np.bincount(rows[rows >= 0], minlength=n)
        inside = np.flatnonzero((rows >= 0) & (strength[numbers] > 0))
        links, numbers, rows = links[inside], numbers[inside], rows[inside]
        first = self._first_of(rows, n)
        links, numbers, rows = links[first], numbers[first], rows[first]
        column["linked"][rows] = strength[numbers]
        column["link_missing"][rows] = brings[numbers, rows]
        column["link_early"][rows] = 1.0 / (1.0 + graph.link_position[links] / 10.0)
        indices, numbers = graph.contexts.span(links)
        context = (graph.contexts.values[indices], numbers)
        column["link_context"][rows] = self.coverage(question.ids, context, len(links)) / total

        # Mentions of the seeds.
        self._seed[starts] = np.arange(len(starts))
        links, rows = graph.links.span(pool)
        numbers = self._seed[graph.links.values[links]]
        self._seed[starts] = -1
        inside = np.flatnonzero((numbers >= 0) & (strength[numbers] > 0))
        inside = inside[np.argsort(numbers[inside], kind="stable")]
        inside = inside[self._first_of(rows[inside], n)]
        rows, numbers = rows[inside], numbers[inside]
        column["links_back"][rows] = strength[numbers]
        column["back_missing"][rows] = brings[numbers, rows]

        for number, ids in enumerate(names):
            shared = self.coverage(ids, span, n)
            shared = strength[number] * shared / (shared + 20.0)
            if self._row[starts[number]] >= 0:  # a passage shares all its names with itself
                shared[self._row[starts[number]]] = 0.0
            np.maximum(column["shared_names"], shared, out=column["shared_names"])
            np.maximum(column["shared_missing"], shared * brings[number], out=column["shared_missing"])
        self._row[pool] = -1
        return x


class EvidenceModel:
    """Probability that a candidate is evidence: ``sigmoid(b2 + w2 · tanh(b1 + w1 · standardised features))``."""

    def __init__(self, weights: Mapping[str, Sequence[float] | Sequence[Sequence[float]]]) -> None:
        """Wrap weights.

        Args:
            weights: ``mean`` and ``scale`` [features], ``w1`` [features, hidden], ``b1`` [hidden], ``w2`` [hidden],
                ``b2`` [1].

        Raises:
            RetrievalError: a shape doesn't fit the features.
        """
        arrays = {key: np.asarray(value, dtype=np.float64) for key, value in weights.items()}
        hidden = arrays["b1"].shape[0]
        expected = {
            "mean": (len(FEATURES),),
            "scale": (len(FEATURES),),
            "w1": (len(FEATURES), hidden),
            "b1": (hidden,),
            "w2": (hidden,),
            "b2": (1,),
        }
        for key, shape in expected.items():
            if key not in arrays or arrays[key].shape != shape:
                got = arrays[key].shape if key in arrays else "nothing"
                raise RetrievalError(f"evidence weights: expected {key} of shape {shape}, got {got}")
        self.weights = arrays

    def __call__(self, features: NDArray[np.float64]) -> FloatArray:
        """[n, len(FEATURES)] -> [n] in (0, 1)."""
        w = self.weights
        hidden = np.tanh((features - w["mean"]) / w["scale"] @ w["w1"] + w["b1"])
        probability: FloatArray = 1.0 / (1.0 + np.exp(-(hidden @ w["w2"] + w["b2"])))
        return probability

    @classmethod
    def load(cls, path: Path = WEIGHTS_FILE) -> EvidenceModel:
        """Read weights that ``save`` wrote; by default those of the package."""
        return cls(json.loads(path.read_text(encoding="utf-8"))["weights"])

    def save(self, path: Path, note: str) -> None:
        """Write the weights with a note on where they come from."""
        rounded = {k: np.round(v, 5).tolist() for k, v in self.weights.items()}
        content = {"note": note, "features": list(FEATURES), "weights": rounded}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def fit_evidence(
    features: Sequence[NDArray[np.float64]],
    labels: Sequence[NDArray[np.bool_]],
    hidden: int = 16,
    weight_decay: float = 0.02,
    steps: int = 600,
    seed: int = 0,
) -> EvidenceModel:
    """Fit the network by logistic loss, full batch, on the CPU; the same arguments give the same weights.

    Args:
        features: per question, [n, len(FEATURES)].
        labels: per question, [n] whether the candidate is a supporting passage.
        hidden: units of the hidden layer.
        weight_decay: of the weights, not the biases.
        steps: of Adam.
        seed: of the initial weights.
    """
    import torch

    x = np.concatenate(features)
    y = torch.from_numpy(np.concatenate(labels).astype(np.float32))
    mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-6)
    standard = torch.from_numpy(((x - mean) / scale).astype(np.float32))
    generator = torch.Generator().manual_seed(seed)
    w1 = (torch.randn(x.shape[1], hidden, generator=generator) / x.shape[1] ** 0.5).requires_grad_()
    w2 = (torch.randn(hidden, generator=generator) / hidden**0.5).requires_grad_()
    b1, b2 = torch.zeros(hidden, requires_grad=True), torch.full((1,), -2.0, requires_grad=True)
    decayed = {"params": [w1, w2], "weight_decay": weight_decay}
    optimiser = torch.optim.AdamW([decayed, {"params": [b1, b2], "weight_decay": 0.0}], lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, steps)
    for _ in range(steps):
        logits = torch.tanh(standard @ w1 + b1) @ w2 + b2
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    tensors = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
    weights = {k: v.detach().double().numpy() for k, v in tensors.items()}
    return EvidenceModel({"mean": mean, "scale": scale, **weights})
