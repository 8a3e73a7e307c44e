"""How well a retriever finds what questions need: rows of metrics, by dataset and by hop count."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refragkit.errors import DataError
from refragkit.retrievers.metrics import all_support_at, ndcg_at, recall_at, reciprocal_rank
from refragkit.types import Hop, Question

if TYPE_CHECKING:
    from rich.table import Table

    from refragkit.retrievers.multi_hop import MultiHopRetriever

RECALL_CUTS = (2, 5, 10, 20)
SUPPORT_CUTS = (5, 10, 20)
#: How many documents of each ranking are looked at.
DEPTH = 20

Row = dict[str, str | float]


def measure(ranking: Sequence[str], qrels: Mapping[str, float]) -> dict[str, float]:
    """All metrics of one ranking."""
    return {
        **{f"recall@{k}": recall_at(ranking, qrels, k) for k in RECALL_CUTS},
        **{f"all_support@{k}": all_support_at(ranking, qrels, k) for k in SUPPORT_CUTS},
        "ndcg@10": ndcg_at(ranking, qrels, 10),
        "mrr": reciprocal_rank(ranking, qrels),
    }


def evaluate_retrieval(
    retriever: MultiHopRetriever,
    questions: Sequence[Question],
    *,
    qrels: Mapping[str, Mapping[str, float]] | None = None,
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
) -> list[Row]:
    """Retrieve for all questions at once and measure.

    Args:
        retriever: with its index open.
        questions: with ``supporting_ids``, unless ``qrels`` are given.
        qrels: gain per question id and doc_id; None takes every supporting passage as gain 1.
        max_hops: overrides the retriever's.
        top_k_per_hop: overrides the retriever's.

    Returns:
        One row per group: ``all``, each ``metadata["dataset"]``, each hop count (``2 hops``). Every row has ``group``,
        ``questions``, the means of :func:`measure` over the ranking of all hops, and of what the hops handed on:
        ``found_recall`` (share of the relevant documents among them), ``found_recall_hop_<n>`` (after hop n),
        ``documents`` and ``hops`` per question. The row ``all`` also has ``seconds`` and ``queries_per_second``
        (questions per second, encoding included).

    Raises:
        DataError: no question, or one without anything relevant.
    """
    if not questions:
        raise DataError("evaluate=retrieval: there are no questions; expected at least one in data.path")
    gains = [
        dict.fromkeys(q.supporting_ids, 1.0) if qrels is None else qrels.get(q.id, {}) for q in questions
    ]
    for question, gain in zip(questions, gains, strict=True):
        if not any(g > 0 for g in gain.values()):
            raise DataError(
                f"evaluate=retrieval: question {question.id!r} has no relevant document "
                f"({'supporting_ids is empty' if qrels is None else 'none in the qrels'}): remove or annotate it"
            )
    started = time.perf_counter()
    hops, rankings = retriever.retrieve_ranked(questions, DEPTH, max_hops, top_k_per_hop)
    seconds = time.perf_counter() - started
    last = max((len(h) for h in hops), default=0)
    measured = [
        {**measure([hit.doc_id for hit in ranking], gain), **_found(trail, gain, last)}
        for trail, ranking, gain in zip(hops, rankings, gains, strict=True)
    ]
    rows = [
        _mean(group, [measured[i] for i in members])
        for group, members in _groups(questions, by_hops=qrels is None).items()
    ]
    rows[0].update({"seconds": seconds, "queries_per_second": len(questions) / seconds})
    return rows


def _found(hops: Sequence[Hop], gain: Mapping[str, float], last: int) -> dict[str, float]:
    """What the hops handed on; a question that stopped early keeps its last value in later hops."""
    after: list[float] = []
    found: list[str] = []
    for hop in hops:
        found += [h.doc_id for h in hop.new_documents]
        after.append(recall_at(found, gain, len(found)))
    final = after[-1] if after else 0.0
    after += [final] * (last - len(after))
    return {
        "found_recall": final,
        **{f"found_recall_hop_{n}": value for n, value in enumerate(after, 1)},
        "documents": float(len(found)),
        "hops": float(len(hops)),
    }


def _groups(questions: Sequence[Question], by_hops: bool) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {"all": list(range(len(questions)))}
    datasets = sorted({str(q.metadata["dataset"]) for q in questions if q.metadata.get("dataset")})
    if len(datasets) > 1:
        for name in datasets:
            groups[name] = [i for i, q in enumerate(questions) if q.metadata.get("dataset") == name]
    if by_hops:
        for count in sorted({q.hops for q in questions if q.hops}):
            groups[f"{count} hops"] = [i for i, q in enumerate(questions) if q.hops == count]
    return groups


def _mean(group: str, measured: Sequence[Mapping[str, float]]) -> Row:
    means = {key: sum(m[key] for m in measured) / len(measured) for key in measured[0]}
    return {"group": group, "questions": float(len(measured)), **means}


def as_metrics(rows: Iterable[Row]) -> dict[str, float]:
    """Rows as flat metrics: ``retrieval/recall@5`` of all, ``retrieval/hotpotqa/recall@5`` of a group."""
    return {
        f"retrieval/{'' if row['group'] == 'all' else str(row['group']).replace(' ', '_') + '/'}{key}": float(
            value
        )
        for row in rows
        for key, value in row.items()
        if key != "group"
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line per group; columns that a group lacks stay empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)


def as_table(rows: Sequence[Row], title: str = "retrieval") -> Table:
    """The rows for the screen."""
    from rich.table import Table

    columns = [*measure([], {"x": 1.0}), "found_recall", "documents"]
    table = Table(title=title)
    for name in ("group", "questions", *columns):
        table.add_column(name, justify="left" if name == "group" else "right")
    for row in rows:
        values = (f"{float(row[c]):.1f}" if c == "documents" else f"{float(row[c]):.3f}" for c in columns)
        table.add_row(str(row["group"]), f"{float(row['questions']):.0f}", *values)
    return table
