"""Memory, time and bytes of building and opening indexes of growing size; see README.md beside it.

Each measurement is a process of its own. The size sweep repeats the passages of DIR with changed ids and suffixes and
takes random vectors from `StandInEncoder`, so that it measures everything but the encoding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refragkit.data import corpus as corpus_module
from refragkit.data.corpus import open_corpus
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.dense import DenseRetriever
from refragkit.retrievers.encoder import FloatArray, SentenceEncoder
from refragkit.retrievers.hybrid import hybrid
from refragkit.retrievers.passage_graph import PassageGraph
from refragkit.summary import peak_rss_bytes, reset_peak_rss

WIDTH = 384
MIB = 1 << 20


class StandInEncoder(SentenceEncoder):
    """NOT an encoder: random vectors of all-MiniLM-L6-v2's width, to measure everything but the encoding."""

    fingerprint = "stand-in"

    def encode(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> FloatArray:
        """[n, 384] float32 of length 1, seeded by the first text."""
        seed = int.from_bytes(texts[0].encode()[:64].ljust(1, b"\0"), "little")
        vectors = np.random.default_rng(seed).standard_normal((len(texts), WIDTH), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_corpus(source: Path, target: Path, passages: int) -> None:
    """The passages of a corpus over and over, each time with another id and suffix, until there are enough."""
    rows = [json.loads(line) for line in source.open(encoding="utf-8")]
    with target.open("w", encoding="utf-8") as f:
        for i in range(passages):
            row, copy = rows[i % len(rows)], i // len(rows)
            if copy:
                row = {
                    "id": f"{row['id']}-{copy}",
                    "title": f"{row['title']} {copy}",
                    "text": f"{row['text']} ({copy})",
                }
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


class Phases:
    """Seconds and peak resident memory of one step after the other."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, float]] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        """Do the work and note what it took; peaks are of the whole process."""
        reset_peak_rss()
        started = time.perf_counter()
        result = work()
        self.rows[name] = (round(time.perf_counter() - started, 2), round(peak_rss_bytes() / MIB))
        return result


def resident_bytes() -> int:
    """Private memory now, without mapped files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def size_of(folder: Path) -> dict[str, int]:
    return {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}


def measure(what: str, file: Path, cache: Path) -> dict[str, Any]:
    """One measurement in this process: ``what`` is a faiss factory, ``bm25``, ``graph``, ``encode`` or ``open``."""
    import bm25s  # noqa: F401 - so that the first line holds all imports
    import faiss  # noqa: F401
    import sentence_transformers  # noqa: F401

    corpus_module.LARGE_CORPUS_BYTES = 0  # as a corpus of any size is read
    phases = Phases()
    phases("imports", lambda: None)
    documents = phases("corpus, first time", lambda: open_corpus(file, cache))
    documents = phases("corpus", lambda: open_corpus(file, cache))
    result: dict[str, Any] = {"what": what, "passages": len(documents)}
    if what == "graph":
        before = resident_bytes()
        graph = phases("build", lambda: PassageGraph.open(documents, "measured", cache))
        result["bytes"] = size_of(graph.path)
        del graph
        graph = phases("open", lambda: PassageGraph.open(documents, "measured", cache))
        result["resident_bytes_per_passage"] = round((resident_bytes() - before) / len(documents))
    elif what in ("encode", "open"):
        retriever = hybrid(cache_dir=cache)
        phases("build" if what == "encode" else "open", lambda: retriever.open_index(documents))
        phases("50 queries", lambda: retriever.search([d.text[:80] for d in documents[:50]], 10))
        result["bytes"] = size_of(retriever.retriever.index_path)
        encoded = retriever.retriever.counts.get("encoded")
        if encoded:
            result["passages_per_second"] = round(encoded / phases.rows["build"][0], 1)
    else:

        def make() -> DenseRetriever | BM25Retriever:
            if what == "bm25":
                return BM25Retriever(cache_dir=cache)
            return DenseRetriever(StandInEncoder(cache_dir=cache), what, cache_dir=cache)

        retriever = make()
        if isinstance(retriever, DenseRetriever):
            phases("random vectors", lambda: retriever.encode_part(documents, 0, 1))
        phases("build", lambda: retriever.open_index(documents, cache))
        result["bytes"] = size_of(retriever.index_path)
        del retriever
        before = resident_bytes()
        retriever = make()
        phases("open", lambda: retriever.open_index(documents, cache))
        result["resident_bytes_per_passage"] = round((resident_bytes() - before) / len(documents))
        phases("50 queries", lambda: retriever.search([d.text[:80] for d in documents[:50]], 10))
    result["phases"] = {name: {"seconds": s, "peak_mib": m} for name, (s, m) in phases.rows.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, help="a folder with corpus.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="a folder for corpora and indexes (3 GB)")
    parser.add_argument("--passages", type=int, nargs="+", default=[18_966, 75_864, 303_456])
    parser.add_argument("--what", nargs="+", default=["Flat", "HNSW32", "IVF1024,PQ48", "bm25", "graph"])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for passages in arguments.passages:
        file = arguments.work / f"corpus-{passages}.jsonl"
        if not file.is_file():
            write_corpus(arguments.dir / "corpus.jsonl", file, passages)
        for what in arguments.what:
            cache = arguments.work / f"cache-{passages}"
            if arguments.one:
                print(json.dumps(measure(what, file, cache)), flush=True)
                continue
            command = [sys.executable, __file__, str(arguments.dir), "--work", str(arguments.work), "--one"]
            subprocess.run([*command, "--passages", str(passages), "--what", what], check=True)


if __name__ == "__main__":
    main()
