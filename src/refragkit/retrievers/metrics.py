"""Retrieval metrics on one ranking, as trec_eval defines them.

A ranking is a list of doc_ids, best first; qrels map doc_ids to gains, and a document counts as relevant where its
gain is above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def relevant_ids(qrels: Mapping[str, float]) -> set[str]:
    """The documents with a gain above 0."""
    return {doc_id for doc_id, gain in qrels.items() if gain > 0}


def recall_at(ranking: Sequence[str], qrels: Mapping[str, float], k: int) -> float:
    """The share of the relevant documents among the first k; 0 where nothing is relevant."""
    relevant = relevant_ids(qrels)
    return len(relevant.intersection(ranking[:k])) / len(relevant) if relevant else 0.0


def all_support_at(ranking: Sequence[str], qrels: Mapping[str, float], k: int) -> float:
    """1 where every relevant document is among the first k, else 0."""
    relevant = relevant_ids(qrels)
    return float(bool(relevant) and relevant.issubset(ranking[:k]))


def ndcg_at(ranking: Sequence[str], qrels: Mapping[str, float], k: int) -> float:
    """Discounted gain of the first k (``gain / log2(rank + 1)``), divided by the best possible one.

    Source: Järvelin and Kekäläinen 2002, with trec_eval's linear gain.
    """
    gained = sum(max(qrels.get(d, 0.0), 0.0) / math.log2(rank + 1) for rank, d in enumerate(ranking[:k], 1))
    gains = sorted((g for g in qrels.values() if g > 0), reverse=True)[:k]
    ideal = sum(g / math.log2(rank + 1) for rank, g in enumerate(gains, 1))
    return gained / ideal if ideal else 0.0


def reciprocal_rank(ranking: Sequence[str], qrels: Mapping[str, float]) -> float:
    """One over the rank of the first relevant document; 0 where the ranking has none."""
    relevant = relevant_ids(qrels)
    return next((1.0 / rank for rank, d in enumerate(ranking, 1) if d in relevant), 0.0)
