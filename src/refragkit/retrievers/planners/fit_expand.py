"""Fit the weights of ``expand`` on annotated questions.

The weights in the package were fitted this way on the questions of ``multihop_qa`` for which ``in_tuning_part`` is
true; figures are reported on the others. Fit your own where your documents look different::

    retriever = hybrid(cache_dir="outputs/cache").open_index(documents)
    fit_expand(retriever, questions).save(Path("evidence.json"), "my corpus")
    retriever.planner = ExpandPlanner(EvidenceModel.load(Path("evidence.json")))
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from refragkit.errors import DataError
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.evidence import EvidenceModel, fit_evidence
from refragkit.retrievers.planners.expand import ExpandPlanner, Memory
from refragkit.types import Question


def in_tuning_part(question_id: str) -> bool:
    """Whether a question belongs to the two thirds on which the package's weights were fitted."""
    return int(hashlib.sha1(question_id.encode()).hexdigest(), 16) % 3 != 2


def fit_expand(
    retriever: MultiHopRetriever,
    questions: Sequence[Question],
    hidden: int = 16,
    weight_decay: float = 0.1,
    steps: int = 400,
    seed: int = 0,
) -> EvidenceModel:
    """Walk two hops for every question and learn which of the candidates are supporting passages.

    The candidates don't depend on the weights in use, so the result doesn't either.

    Args:
        retriever: with its index open and the ``expand`` planner.
        questions: with ``supporting_ids``.
        hidden: units of the hidden layer.
        weight_decay: of the weights.
        steps: of the optimiser.
        seed: of the initial weights.

    Raises:
        DataError: the planner is another one, or nothing can be learned from the questions.
    """
    if not isinstance(retriever.planner, ExpandPlanner):
        raise DataError(f"fit_expand: expected a retriever with planner expand, got {retriever.planner.name}")
    features, labels = [], []
    for trail in retriever.walk(questions, max_hops=2):
        if isinstance(trail.memory, Memory) and trail.memory.features is not None:
            gold = set(trail.question.supporting_ids)
            features.append(trail.memory.features)
            labels.append(np.array([retriever.documents[d].doc_id in gold for d in trail.memory.pool]))
    if not labels or not any(row.any() for row in labels):
        raise DataError(
            f"fit_expand: none of {len(questions)} questions has a supporting passage among its candidates, or "
            "no passage of the corpus mentions another's title"
        )
    return fit_evidence(features, labels, hidden, weight_decay, steps, seed)
