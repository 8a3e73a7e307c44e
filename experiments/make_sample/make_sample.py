"""Cut the bundled multi-hop QA sample out of a full layout (``questions.jsonl`` + ``corpus.jsonl``).

    python experiments/make_sample/make_sample.py --source DIR [--output DIR]

Standard library only, no randomness: rows are taken in the order of sha256(id), so that the same source
gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Training rows come from the train split of the original data sets and validation rows from their dev split.
TRAIN_QUOTA = {"hotpotqa": 75, "musique": 70, "2wikimultihopqa": 155}
VALIDATION_QUOTA = {"hotpotqa": 20, "musique": 20, "2wikimultihopqa": 20}
MAX_GOLD_WORDS = 200
MAX_DISTRACTOR_WORDS = 160
CORPUS_PASSAGES = 1800
MAX_TOTAL_BYTES = 1_450_000


def rank(row_id: str) -> str:
    """A fixed pseudo-random order that doesn't depend on the order of the source file."""
    return hashlib.sha256(row_id.encode()).hexdigest()


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_jsonl(path: Path, rows: list[Row]) -> int:
    data = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
    path.write_bytes(data)
    return len(data)


def pick(rows: list[Row], quota: dict[str, int], taken_gold: set[str]) -> list[Row]:
    """Up to ``quota`` rows per data set, its types in turn, none with a passage of ``taken_gold``."""
    picked: list[Row] = []
    for dataset, wanted in quota.items():
        strata: dict[str, list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda r: rank(r["id"])):
            if row["dataset"] == dataset and not taken_gold.intersection(row["supporting_ids"]):
                strata[str(row["type"])].append(row)
        chosen: list[Row] = []
        while len(chosen) < wanted and any(strata.values()):
            for name in sorted(strata):
                if strata[name] and len(chosen) < wanted:
                    chosen.append(strata[name].pop(0))
        picked += chosen
    return sorted(picked, key=lambda r: rank(r["id"]))


def pick_passages(rows: list[Row], words: dict[str, int]) -> set[str]:
    """All gold passages, then one distractor per question in turn until the corpus is full."""
    kept = {doc_id for row in rows for doc_id in row["supporting_ids"]}
    distractors = [
        sorted(
            (
                i
                for i in row["candidate_ids"]
                if i not in row["supporting_ids"] and words[i] <= MAX_DISTRACTOR_WORDS
            ),
            key=rank,
        )
        for row in rows
    ]
    while len(kept) < CORPUS_PASSAGES and any(distractors):
        for queue in distractors:
            while queue and queue[0] in kept:
                queue.pop(0)
            if queue and len(kept) < CORPUS_PASSAGES:
                kept.add(queue.pop(0))
    return kept


def trimmed(row: Row, kept: set[str]) -> Row:
    """The fields that are used; a question's candidates are the ones that the bundled corpus holds."""
    fields = {k: row[k] for k in ("id", "question", "answers", "supporting_ids", "hops")}
    fields["candidate_ids"] = [i for i in row["candidate_ids"] if i in kept]
    fields |= {"dataset": row["dataset"], "type": row["type"]}
    if row["decomposition"]:
        fields["decomposition"] = row["decomposition"]
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", type=Path, required=True, help="folder with questions.jsonl and corpus.jsonl"
    )
    default = Path(__file__).resolve().parents[2] / "src/refragkit/data/samples/multihop_qa"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()

    corpus = {row["id"]: row for row in read_jsonl(args.source / "corpus.jsonl")}
    words = {doc_id: len(row["text"].split()) for doc_id, row in corpus.items()}
    rows = [
        row
        for row in read_jsonl(args.source / "questions.jsonl")
        if max(words[i] for i in row["supporting_ids"]) <= MAX_GOLD_WORDS
    ]
    train = pick([r for r in rows if r["source_split"] == "train"], TRAIN_QUOTA, set())
    train_gold = {i for row in train for i in row["supporting_ids"]}
    validation = pick([r for r in rows if r["source_split"] == "dev"], VALIDATION_QUOTA, train_gold)
    # Validation first: with the budget short it is the harder, better measured search.
    kept = pick_passages(validation + train, words)

    args.output.mkdir(parents=True, exist_ok=True)
    total = 0
    passages = [{k: corpus[i][k] for k in ("id", "title", "text")} for i in sorted(kept)]
    for name, content in (
        ("train.jsonl", [trimmed(r, kept) for r in train]),
        ("validation.jsonl", [trimmed(r, kept) for r in validation]),
        ("corpus.jsonl", passages),
    ):
        size = write_jsonl(args.output / name, content)
        total += size
        digest = hashlib.sha256((args.output / name).read_bytes()).hexdigest()
        print(f"{name}: {len(content)} lines, {size} bytes, sha256 {digest}")
    for name, part in (("train", train), ("validation", validation)):
        print(
            name,
            "by data set and type:",
            dict(sorted(Counter(f"{r['dataset']}/{r['type']}" for r in part).items())),
        )
        print(name, "by hops:", dict(sorted(Counter(r["hops"] for r in part).items())))
    if total > MAX_TOTAL_BYTES:
        raise SystemExit(f"the sample has {total} bytes, more than {MAX_TOTAL_BYTES}: lower CORPUS_PASSAGES")


if __name__ == "__main__":
    main()
