"""``evaluate=retrieval``: how much of what questions need a retriever finds, by dataset, hop count and hop."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError, DataError
from refragkit.retrievers.metrics import all_support_at, ndcg_at, recall_at, reciprocal_rank
from refragkit.types import Hit, Hop, Question

if TYPE_CHECKING:
    from rich.table import Table

    from refragkit.experiment import Run
    from refragkit.retrievers.multi_hop import MultiHopRetriever

log = logging.getLogger("refragkit")

RECALL_CUTS = (2, 5, 10, 20)
SUPPORT_CUTS = (5, 10, 20)
#: How many documents of each ranking are looked at.
DEPTH = 20

Row = dict[str, str | float]
Qrels = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class RetrievalEvaluation:
    """What was measured.

    Attributes:
        rows: one per group: ``all``, each ``metadata["dataset"]`` where there are several, each hop count
            (``2 hops``). Every row has ``group``, ``questions``, the means of :func:`measure` over the ranking of all
            hops, and of what the hops handed on: ``found_recall`` (share of the relevant documents among them),
            ``found_recall_hop_<n>`` (after hop n), ``documents`` and ``hops`` per question. The row ``all`` also has
            ``seconds``, ``questions_per_second`` and ``queries_per_second`` (every hop's query counts), encoding
            included.
        records: one per question, as in ``retrieval.jsonl``.
    """

    rows: list[Row]
    records: list[dict[str, Any]]


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
    qrels: Qrels | None = None,
    max_hops: int | None = None,
    top_k_per_hop: int | None = None,
) -> RetrievalEvaluation:
    """Retrieve for all questions at once and measure.

    Args:
        retriever: with its index open.
        questions: with ``supporting_ids``, unless ``qrels`` are given.
        qrels: gain per question id and doc_id; None takes every supporting passage as gain 1.
        max_hops: overrides the retriever's.
        top_k_per_hop: overrides the retriever's.

    Raises:
        DataError: no question, or one without anything relevant.
    """
    if not questions:
        raise DataError("evaluate=retrieval: there are no questions; expected at least one in data.path")
    gains = [_gains(q, qrels) for q in questions]
    for question, gain in zip(questions, gains, strict=True):
        if not _has_relevant(gain):
            raise DataError(
                f"evaluate=retrieval: question {question.id!r} has no relevant document "
                f"({'supporting_ids is empty' if qrels is None else 'none in the qrels'}): remove or annotate it"
            )
    retriever.warm_up()
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
        for group, members in question_groups(questions, by_hops=qrels is None).items()
    ]
    rows[0].update(
        {
            "seconds": seconds,
            "questions_per_second": len(questions) / seconds,
            "queries_per_second": sum(map(len, hops)) / seconds,
        }
    )
    return RetrievalEvaluation(rows, list(map(_record, questions, gains, hops, rankings, measured)))


def _gains(question: Question, qrels: Qrels | None) -> Mapping[str, float]:
    return dict.fromkeys(question.supporting_ids, 1.0) if qrels is None else qrels.get(question.id, {})


def _has_relevant(gain: Mapping[str, float]) -> bool:
    return any(g > 0 for g in gain.values())


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


def question_groups(questions: Sequence[Question], by_hops: bool) -> dict[str, list[int]]:
    """Name -> positions: ``all``, each data set where there are several, each hop count where ``by_hops``."""
    groups: dict[str, list[int]] = {"all": list(range(len(questions)))}
    datasets = sorted({str(q.metadata["dataset"]) for q in questions if q.metadata.get("dataset")})
    counts = sorted({q.hops for q in questions if q.hops}) if by_hops else []
    by_count = {f"{n} hops": [i for i, q in enumerate(questions) if q.hops == n] for n in counts}
    if len(datasets) > 1:
        for name in datasets:
            # A data set may be called as a row of another kind is.
            group = f"dataset {name}" if name in {"all", *by_count} else name
            groups[group] = [i for i, q in enumerate(questions) if str(q.metadata.get("dataset")) == name]
    return groups | by_count


def _mean(group: str, measured: Sequence[Mapping[str, float]]) -> Row:
    means = {key: sum(m[key] for m in measured) / len(measured) for key in measured[0]}
    return {"group": group, "questions": float(len(measured)), **means}


def _record(
    question: Question,
    gain: Mapping[str, float],
    hops: Sequence[Hop],
    ranking: Sequence[Hit],
    measured: Mapping[str, float],
) -> dict[str, Any]:
    def shown(hits: Iterable[Hit]) -> list[dict[str, Any]]:
        return [{"doc_id": h.doc_id, "title": h.document.title, "score": round(h.score, 6)} for h in hits]

    return {
        "id": question.id,
        "question": question.question,
        "dataset": question.metadata.get("dataset"),
        "relevant": {doc_id: g for doc_id, g in gain.items() if g > 0},
        "ranking": shown(ranking),
        "hops": [
            {
                "hop": hop.hop,
                "query": hop.query,
                "documents": shown(hop.new_documents),
                "latency_seconds": hop.latency_seconds,
            }
            for hop in hops
        ],
        "metrics": dict(measured),
    }


def as_metrics(rows: Iterable[Row], prefix: str = "retrieval") -> dict[str, float]:
    """Rows as flat metrics: ``retrieval/recall@5`` of all, ``retrieval/hotpotqa/recall@5`` of a group."""
    return {
        f"{prefix}/{'' if row['group'] == 'all' else str(row['group']).replace(' ', '_') + '/'}{key}": float(
            value
        )
        for row in rows
        for key, value in row.items()
        if key != "group"
    }


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name beside ``path``, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line per group; columns that a group lacks stay empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def as_table(rows: Sequence[Row], title: str = "retrieval") -> Table:
    """The rows for the screen."""
    from rich import box
    from rich.table import Table

    headings = {
        **{f"recall@{k}": f"R@{k}" for k in RECALL_CUTS},
        **{f"all_support@{k}": f"all@{k}" for k in SUPPORT_CUTS},
        "ndcg@10": "nDCG@10",
        "mrr": "MRR",
    }
    n_hops = sum(key.startswith("found_recall_hop_") for key in rows[0])
    headings |= {f"found_recall_hop_{n}": f"hop {n}" for n in range(1, n_hops + 1)}
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group")
    for heading in ("questions", *headings.values(), "docs"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = [f"{float(row[key]):.3f}".removeprefix("0") for key in headings]
        table.add_row(
            str(row["group"]), f"{float(row['questions']):.0f}", *values, f"{float(row['documents']):.1f}"
        )
    return table


# --- the task ---------------------------------------------------------------------------------------------


def run_retrieval(run: Run, split: str) -> None:
    """Measure the run's retriever on the run's data and record everything.

    Raises:
        ConfigError: there is nothing to retrieve with or from, or a setting doesn't fit the data.
        DataError: a broken data file, or no question with anything relevant.
    """
    from refragkit.console import console
    from refragkit.data.qrels import has_qrels
    from refragkit.tracking.plots import plot_retrieval

    cfg = run.cfg
    if cfg.choices.retriever == "none":
        raise ConfigError(
            "retriever=none finds nothing, so there is nothing to measure; choose dense, bm25 or hybrid, or the "
            "controls random and gold"
        )
    qrels: Qrels | None = None
    path = cfg.data.get("path")
    if cfg.choices.data == "multihop_qa" and path is not None and has_qrels(path):
        questions, qrels, retriever = _test_collection(run, split)
    else:
        questions, retriever = _annotated_questions(run, split)
    judged = [q for q in questions if _has_relevant(_gains(q, qrels))]
    left_out = len(questions) - len(judged)
    where = f"data.path={path or 'null (the bundled sample)'}"
    if not judged:
        raise DataError(
            f"{where}: none of {len(questions)} questions has a relevant document "
            f"({'supporting_ids' if qrels is None else 'a score above 0 in qrels.tsv'}); nothing can be measured"
        )
    if left_out:
        log.warning("%d of %d questions have no relevant document: left out", left_out, len(questions))
    log.info(
        "retriever %s, planner %s: at most %d hops of %d documents for %s questions over %s documents",
        retriever.name,
        retriever.planner.name,
        retriever.max_hops,
        retriever.top_k_per_hop,
        f"{len(judged):,}",
        f"{len(retriever.documents):,}",
    )
    evaluation = evaluate_retrieval(retriever, judged, qrels=qrels)
    rows = evaluation.rows
    rows[0]["left_out"] = float(left_out)
    title = (
        f"{retriever.name}, planner {retriever.planner.name}, {retriever.max_hops} hop(s), {split} questions"
    )
    console.print(as_table(rows, title))
    console.print(
        "R: recall; all: every relevant document found; hop n: recall of what hops 1 to n handed on; docs: how many\n",
        style="dim",
        highlight=False,
    )
    log.info(
        "%.1f s: %.0f questions/s, %.0f queries/s (vectors of queries that an earlier run encoded come from the cache)",
        *(float(rows[0][key]) for key in ("seconds", "questions_per_second", "queries_per_second")),
    )
    write_csv(rows, run.folder / "retrieval.csv")
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in evaluation.records)
    write_atomically(run.folder / "retrieval.jsonl", "".join(lines))
    run.log_metrics(as_metrics(rows), step=0)
    run.artifact("retrieval", run.folder / "retrieval.csv")
    run.artifact("rankings", run.folder / "retrieval.jsonl")
    plot = plot_retrieval(rows, run.folder / "plots" / "retrieval.png", title)
    run.artifact("retrieval_plot", plot)


def _annotated_questions(run: Run, split: str) -> tuple[list[Question], MultiHopRetriever]:
    data = run.data
    parts: dict[str, Sequence[Any]] = {"train": data.train, "validation": data.validation}
    questions = [q for name, part in parts.items() if split in ("all", name) for q in part]
    if not all(isinstance(q, Question) for q in questions):
        raise ConfigError(
            f"evaluate=retrieval needs questions with supporting passages, and data={run.cfg.choices.data} has none; "
            "choose data=multihop_qa"
        )
    retriever = run.retriever
    assert retriever is not None  # retriever=none was refused
    name, source = str(run.cfg.choices.data), str(run.cfg.data.path or "bundled sample")
    run.tracking.log_dataset(f"{name}-{split}", "evaluation", data.fingerprint, source, len(questions))
    run.tracking.log_dataset(
        f"{name}-corpus", "knowledge base", data.fingerprint, source, len(retriever.documents)
    )
    return questions, retriever


def _test_collection(run: Run, split: str) -> tuple[list[Question], Qrels, MultiHopRetriever]:
    import hashlib

    from refragkit.data.qrels import load_collection
    from refragkit.retrievers.base import corpus_hash

    data = run.cfg.data
    if split != "all":
        raise ConfigError(f"split={split}: a collection with qrels.tsv has no splits; use split=all")
    for key in ("corpus", "max_train_questions", "max_validation_questions"):
        if data.get(key) is not None:
            raise ConfigError(
                f"data.{key}={data[key]}: a collection with qrels.tsv is evaluated whole, on its own corpus; use null"
            )
    collection = load_collection(data.path)
    retriever = run.open_retriever(collection.corpus)
    name = Path(data.path).resolve().name
    digest = hashlib.sha256(repr((collection.queries, collection.qrels)).encode()).hexdigest()
    run.tracking.log_dataset(f"{name}-queries", "evaluation", digest, str(data.path), len(collection.queries))
    run.tracking.log_dataset(
        f"{name}-corpus",
        "knowledge base",
        corpus_hash(collection.corpus),
        str(data.path),
        len(collection.corpus),
    )
    return collection.queries, collection.qrels, retriever
