"""Answered questions as the rows of a table, for a tracking store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def sample_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One flat row for each record of ``samples.jsonl``: what was asked, found and answered, and the scores.

    Args:
        records: as `refragkit.methods.answers.score_answers` gives them, and more of it where an evaluation adds more.
    """
    rows = []
    for record in records:
        hops = record["hops"]
        documents = [d for hop in hops for d in hop["documents"]]
        rows.append(
            {
                "id": record["id"],
                "question": record["question"],
                "answers": "\n".join(record["answers"]),
                "completion": record["completion"],
                "em": record["em"],
                "f1": record["f1"],
                "reward": record["rewards"]["total"],
                "hops": len(hops),
                "queries": "\n".join(hop["query"] for hop in hops),
                "documents": "\n".join(d["title"] or d["doc_id"] for d in documents),
                "supporting": "\n".join(d["title"] or d["doc_id"] for d in documents if d["supporting"]),
                "ended_by": record.get("ended_by", record.get("ended", "")),
            }
        )
    return rows
