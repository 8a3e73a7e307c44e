"""Multi-hop retrieval on a folder with questions.jsonl and corpus.jsonl: quality by part, and the cost of the loop.

python experiments/multi_hop_retrieval/evaluate.py DIR --retriever hybrid [--fit weights.json] [--speed]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from refragkit.data.corpus import load_corpus
from refragkit.data.questions import load_questions
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.dense import dense
from refragkit.retrievers.encoder import SentenceEncoder
from refragkit.retrievers.hybrid import hybrid
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.expand import ExpandPlanner
from refragkit.retrievers.planners.fit_expand import fit_expand, in_tuning_part
from refragkit.tasks.evaluate_retrieval import as_table, evaluate_retrieval
from refragkit.types import Question

RETRIEVERS = {"hybrid": hybrid, "dense": dense, "bm25": bm25}


def speed(folder: Path, retriever: MultiHopRetriever, questions: list[Question]) -> None:
    """CPU seconds of the loop against those of its parts alone, and of a loop over single questions."""
    import faiss

    base = retriever.retriever
    encoder: SentenceEncoder = base.dense.encoder  # type: ignore[attr-defined]
    encoder.encode(["warm up"] * 8)

    def fresh() -> None:  # no vector of an earlier run
        encoder.cache_dir = None
        encoder._queries.clear()

    fresh()
    started = time.process_time()
    hops = retriever.retrieve(questions, max_hops=2)
    loop = time.process_time() - started
    batches = [[trail[n].query for trail in hops if len(trail) > n] for n in (0, 1)]
    fresh()
    started = time.process_time()
    vectors = [encoder.encode_queries(queries) for queries in batches]
    encoding = time.process_time() - started
    started = time.process_time()
    for rows, queries in zip(vectors, batches, strict=True):
        faiss.knn(rows, base.dense._matrix(), base.pool, metric=faiss.METRIC_INNER_PRODUCT)  # type: ignore[attr-defined]
        for stems in base.bm25._stems(queries):  # type: ignore[attr-defined]
            np.argpartition(-base.bm25._scores(stems), base.pool)[: base.pool]  # type: ignore[attr-defined]
    searching = time.process_time() - started
    print(f"loop {loop:.1f} s; encoder {encoding:.1f} s + faiss and bm25 {searching:.1f} s; ", end="")
    print(f"ratio {loop / (encoding + searching):.2f}")
    some = questions[::14]
    fresh()
    started = time.perf_counter()
    retriever.retrieve(some, max_hops=2)
    together = time.perf_counter() - started
    fresh()
    started = time.perf_counter()
    for question in some:
        retriever.retrieve([question], max_hops=2)
    apart = time.perf_counter() - started
    print(
        f"{len(some)} questions: {together:.2f} s in a batch, {apart:.2f} s one by one ({apart / together:.1f}x)"
    )


def main() -> None:
    """Parse the command line and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--retriever", choices=RETRIEVERS, default="hybrid")
    parser.add_argument("--planner", default="expand")
    parser.add_argument("--max-hops", type=int, default=2)
    parser.add_argument("--top-k-per-hop", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("outputs/cache"))
    parser.add_argument(
        "--fit", type=Path, help="fit expand's weights on the tuning part, write and use them"
    )
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    documents = load_corpus(arguments.folder / "corpus.jsonl")
    questions = load_questions(arguments.folder / "questions.jsonl", {d.doc_id for d in documents})
    built = RETRIEVERS[arguments.retriever](planner=arguments.planner, cache_dir=arguments.cache)
    retriever = built.open_index(documents)
    parts = {True: "tuning part", False: "the rest"}
    split = {flag: [q for q in questions if in_tuning_part(q.id) is flag] for flag in parts}
    if arguments.fit:
        model = fit_expand(retriever, split[True])
        model.save(
            arguments.fit, f"fitted on {len(split[True])} of {len(questions)} questions of {arguments.folder}"
        )
        retriever = MultiHopRetriever(built.retriever, ExpandPlanner(model), cache_dir=arguments.cache)
        retriever.open_index(documents)
    for flag, name in parts.items():
        rows = evaluate_retrieval(
            retriever, split[flag], max_hops=arguments.max_hops, top_k_per_hop=arguments.top_k_per_hop
        )
        Console(width=190).print(as_table(rows, f"{arguments.retriever}, {arguments.planner}: {name}"))
    if arguments.speed:
        speed(arguments.folder, retriever, list(questions))


if __name__ == "__main__":
    main()
