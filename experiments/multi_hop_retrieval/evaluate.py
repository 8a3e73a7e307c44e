"""Multi-hop retrieval on a folder with questions.jsonl and corpus.jsonl: quality by part, and the cost of the loop.

python experiments/multi_hop_retrieval/evaluate.py DIR --retriever hybrid [--fit weights.json] [--speed]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from refragkit.data.corpus import load_corpus
from refragkit.data.questions import load_questions
from refragkit.retrievers.bm25 import bm25
from refragkit.retrievers.dense import dense
from refragkit.retrievers.hybrid import HybridRetriever, hybrid
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.expand import ExpandPlanner
from refragkit.retrievers.planners.fit_expand import fit_expand, in_tuning_part
from refragkit.tasks.evaluate_retrieval import as_table, evaluate_retrieval
from refragkit.types import Hop, Question

RETRIEVERS = {"hybrid": hybrid, "dense": dense, "bm25": bm25}


def speed(retriever: MultiHopRetriever, questions: list[Question]) -> None:
    """Two hops for all questions at once, against the parts alone and against one question at a time.

    Every measurement starts without any query vector, neither in memory nor on disk.
    """
    import faiss
    import torch

    base = retriever.retriever
    if not isinstance(base, HybridRetriever):
        raise SystemExit("--speed measures the hybrid retriever: add --retriever hybrid")
    encoder, bm25_part, depth = base.dense.encoder, base.bm25, base.pool
    retriever.warm_up()
    retriever.retrieve(questions[:4], max_hops=2)

    def timed(action: Callable[[], Any]) -> tuple[float, float]:
        with TemporaryDirectory() as folder:
            encoder._queries.clear()
            encoder.cache_dir = Path(folder)
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            return time.perf_counter() - wall, time.process_time() - cpu

    hops: list[tuple[Hop, ...]] = []
    together = timed(lambda: hops.extend(retriever.retrieve(questions, max_hops=2)))
    batches = [[trail[n].query for trail in hops if len(trail) > n] for n in (0, 1)]
    vectors: list[Any] = []
    encoding = timed(lambda: vectors.extend(encoder.encode(queries) for queries in batches))
    matrix = np.ascontiguousarray(base.dense._matrix())
    dense_search = timed(
        lambda: [faiss.knn(rows, matrix, depth, metric=faiss.METRIC_INNER_PRODUCT) for rows in vectors]
    )
    bm25_search = timed(lambda: [bm25_part.top(queries, depth) for queries in batches])
    apart = timed(lambda: [retriever.retrieve([question], max_hops=2) for question in questions])
    parts = tuple(map(sum, zip(encoding, dense_search, bm25_search, strict=True)))
    table = Table(
        "", "wall s", "CPU s", title=f"{len(questions)} questions, {torch.get_num_threads()} threads"
    )
    for name, (wall, cpu) in {
        f"encoder, {sum(map(len, batches))} queries": encoding,
        f"faiss, the first {depth}": dense_search,
        f"BM25, the first {depth}": bm25_search,
        "two hops, all questions at once": together,
        "two hops, one question at a time": apart,
    }.items():
        table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}")
    for name, one, other in (
        ("all at once / (encoder + faiss + BM25)", together, parts),
        ("one at a time / all at once", apart, together),
    ):
        table.add_row(name, f"{one[0] / other[0]:.2f}x", f"{one[1] / other[1]:.2f}x")
    Console().print(table)


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
        ).rows
        Console(width=190).print(as_table(rows, f"{arguments.retriever}, {arguments.planner}: {name}"))
    if arguments.speed:
        speed(retriever, list(questions))


if __name__ == "__main__":
    main()
