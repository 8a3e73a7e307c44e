"""Multi-hop questions with their gold annotation, one JSON object a line.

``{id, question, answers[, supporting_ids, hops, candidate_ids, decomposition, ...]}``
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from refragkit.data.jsonl import LineError, Record, read_jsonl
from refragkit.types import Question

_SHOWN_IDS = 3


def _resolve(record: Record, key: str, doc_ids: Collection[str] | None) -> tuple[str, ...]:
    ids = record.strings(key, default=(), may_be_empty=True)
    repeated = sorted({i for i in ids if ids.count(i) > 1})
    if repeated:
        raise LineError(f"key '{key}': {repeated[0]!r} is there more than once")
    unknown = [i for i in ids if i not in doc_ids] if doc_ids is not None else []
    if unknown:
        shown = ", ".join(map(repr, unknown[:_SHOWN_IDS]))
        more = f" and {len(unknown) - _SHOWN_IDS} more" if len(unknown) > _SHOWN_IDS else ""
        raise LineError(f"key '{key}': {shown}{more}: no passage of the corpus has this id")
    return ids


def _decomposition(record: Record, doc_ids: Collection[str] | None) -> tuple[dict[str, Any], ...]:
    steps: list[dict[str, Any]] = []
    for step in record.objects("decomposition", default=()):
        step.string("question")
        supporting_id = step.string("supporting_id", default="", may_be_empty=True)
        if supporting_id and doc_ids is not None and supporting_id not in doc_ids:
            raise LineError(
                f"key '{step.where}supporting_id': {supporting_id!r}: no passage of the corpus has this id"
            )
        steps.append(dict(step.fields))
    return tuple(steps)


def load_questions(path: str | Path, doc_ids: Collection[str] | None = None) -> list[Question]:
    """The questions of ``path`` in file order.

    ``id``, ``question`` and ``answers`` are required. ``hops`` defaults to the number of supporting
    passages. Keys that are not named in `Question` become metadata.

    Args:
        path: the file.
        doc_ids: ids of the corpus (a set or dict); when given, every supporting, candidate and
            decomposition id must be among them.

    Raises:
        DataError: a missing or empty file, broken lines, repeated ids, ids that don't resolve; names
            file and line.
    """

    def question(record: Record) -> tuple[str, Question]:
        question_id = record.string("id")
        text = record.string("question")
        answers = record.strings("answers")
        supporting_ids = _resolve(record, "supporting_ids", doc_ids)
        hops = record.integer("hops", default=len(supporting_ids))
        candidate_ids = _resolve(record, "candidate_ids", doc_ids)
        decomposition = _decomposition(record, doc_ids)
        return question_id, Question(
            id=question_id,
            question=text,
            answers=answers,
            supporting_ids=supporting_ids,
            hops=hops,
            candidate_ids=candidate_ids,
            decomposition=decomposition,
            metadata=record.rest(),
        )

    return read_jsonl(path, "questions", question)
