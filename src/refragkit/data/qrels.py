"""Test collections with relevance judgements: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels.tsv`` in one folder.

``queries.jsonl`` holds ``{id, text}`` a line; ``qrels.tsv`` has a header and ``query_id, doc_id, score`` a line, with
tabs between them. A score above 0 means relevant, a higher one more so.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from refragkit.data.corpus import load_corpus
from refragkit.data.jsonl import MAX_REPORTED_LINES, LineError, Record, existing_file, read_jsonl
from refragkit.errors import DataError
from refragkit.types import Document, Question

QRELS_FILE = "qrels.tsv"
#: The second is BEIR's.
HEADERS = (("query_id", "doc_id", "score"), ("query-id", "corpus-id", "score"))
_SCORE = re.compile(r"[+-]?[0-9]{1,9}")

Qrels = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class TestCollection:
    """What a folder with qrels holds.

    Attributes:
        corpus: all documents.
        queries: all queries, in file order; without answers, ``supporting_ids`` are the relevant documents, the best
            first.
        qrels: query id -> doc_id -> score, for judged pairs only.
    """

    __test__ = False  # not one of pytest's

    corpus: list[Document]
    queries: list[Question]
    qrels: Qrels


def has_qrels(folder: str | Path) -> bool:
    """Whether a folder is a test collection.

    Raises:
        DataError: it also holds annotated questions, so that what is meant is unclear.
    """
    folder = Path(folder).expanduser()
    if not (folder / QRELS_FILE).is_file():
        return False
    both = [name for name in ("questions.jsonl", "train.jsonl") if (folder / name).is_file()]
    if both:
        raise DataError(
            f"data.path={folder}: holds both {QRELS_FILE} and {both[0]}; expected a test collection or annotated "
            "questions: put them into folders of their own"
        )
    return True


def load_collection(folder: str | Path) -> TestCollection:
    """Read a test collection.

    Raises:
        DataError: a file is missing or broken, or a judgement names a query or document that is not there; names file
            and line.
    """
    folder = Path(folder).expanduser()
    corpus = load_corpus(folder / "corpus.jsonl")
    queries = read_jsonl(folder / "queries.jsonl", "queries", _query)
    qrels = load_qrels(folder / QRELS_FILE, {q.id for q in queries}, {d.doc_id for d in corpus})
    return TestCollection(corpus, [_with_relevant(q, qrels.get(q.id, {})) for q in queries], qrels)


def _with_relevant(query: Question, scores: dict[str, int]) -> Question:
    relevant = sorted((d for d, score in scores.items() if score > 0), key=lambda d: -scores[d])
    return replace(query, supporting_ids=tuple(relevant))


def _query(record: Record) -> tuple[str, Question]:
    query_id, text = record.string("id"), record.string("text")
    return query_id, Question(query_id, text, answers=(), metadata=record.rest())


def load_qrels(path: str | Path, query_ids: Collection[str], doc_ids: Collection[str]) -> Qrels:
    """The judgements of a file, by query.

    A judgement that doesn't resolve is refused: the files don't belong together then, and recall would count documents
    that no retriever can find.

    Args:
        path: the file.
        query_ids: all queries (a set or dict).
        doc_ids: all documents (a set or dict).

    Raises:
        DataError: names file and line, at most the first five.
    """
    file = existing_file(path, f"judgements ({', '.join(HEADERS[0])}, with tabs between them)")
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: expected UTF-8, got byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
        ) from None
    if tuple(lines[0].rstrip("\r").split("\t")) not in HEADERS:
        raise DataError(
            f"{file}:1: expected the header {', '.join(HEADERS[0])}, with tabs between them, got {lines[0][:60]!r}"
        )
    qrels: Qrels = {}
    problems: list[str] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            query_id, doc_id, score = _judgement(line.rstrip("\r"), query_ids, doc_ids)
            if doc_id in qrels.setdefault(query_id, {}):
                raise LineError(f"query {query_id!r} and document {doc_id!r} were judged on an earlier line")
            qrels[query_id][doc_id] = score
        except LineError as problem:
            problems.append(f"{file}:{number}: {problem}")
    if problems:
        shown = "\n  ".join(problems[:MAX_REPORTED_LINES])
        more = len(problems) - MAX_REPORTED_LINES
        tail = f"\n  ... and {more} more" if more > 0 else ""
        raise DataError(
            problems[0] if len(problems) == 1 else f"{len(problems)} bad lines in {file}:\n  {shown}{tail}"
        )
    return qrels


def _judgement(line: str, query_ids: Collection[str], doc_ids: Collection[str]) -> tuple[str, str, int]:
    fields = line.split("\t")
    if len(fields) != 3:
        raise LineError(
            f"expected query_id, doc_id and score with tabs between them, got {len(fields)} field(s): {line[:60]!r}"
        )
    query_id, doc_id, score = fields
    if query_id not in query_ids:
        raise LineError(f"query_id {query_id!r}: no query of queries.jsonl has this id")
    if doc_id not in doc_ids:
        raise LineError(f"doc_id {doc_id!r}: no document of corpus.jsonl has this id")
    if not _SCORE.fullmatch(score):
        raise LineError(f"score: expected a whole number, got {score[:60]!r}")
    return query_id, doc_id, int(score)
