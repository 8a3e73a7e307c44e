"""``task=index``: build the index that the run's retriever needs, whole or in parts.

``python run.py -m task=index retriever=hybrid index.shard=0/4,1/4,2/4,3/4`` encodes four parts, one job each (on one
machine after the other, or at once by a launcher such as SLURM's, with ``paths.outputs`` on a shared disk); then
``python run.py task=index retriever=hybrid`` reads them and builds the index.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from refragkit.config import nearest
from refragkit.console import console
from refragkit.errors import ConfigError, RetrievalError
from refragkit.experiment import Run

if TYPE_CHECKING:
    from refragkit.retrievers.multi_hop import MultiHopRetriever

log = logging.getLogger("refragkit")

_KEYS = ("shard", "merge_only")
_SHOWN_SHARDS = 20


def index(run: Run, index: Mapping[str, Any]) -> None:
    """Encode a part of the corpus, or build the index.

    Args:
        run: the run. No model and no tokenizer is built.
        index: ``shard`` (``"0/8"``: every eighth shard of passages, from the first on; None: build) and
            ``merge_only`` (refuse to encode what the parts have not).

    Raises:
        ConfigError: an ``index`` key that can't be, or a retriever without an index or without parts.
        RetrievalError: ``merge_only``, and shards are missing.
    """
    part = _check(run, index)
    retriever = run.build_retriever()
    if not retriever.retriever.cached:
        raise ConfigError(
            f"task=index: retriever={retriever.name} keeps no index; choose retriever=dense, bm25 or hybrid"
        )
    corpus = run.corpus
    metrics: dict[str, float] = {"passages": len(corpus)}
    started = time.perf_counter()
    if part is not None:
        retriever.retriever.encode_part(corpus, *part)
        what = f"part {part[0]} of {part[1]}: {retriever.retriever.counts['shards']} shards"
    else:
        if index["merge_only"]:
            _require_all_shards(retriever, run)
        retriever.open_index(corpus, run.cache_dir)
        what = f"index of {len(corpus):,} passages"
    seconds = time.perf_counter() - started
    counts = retriever.retriever.counts
    metrics |= {name: float(value) for name, value in counts.items()}
    metrics["seconds"] = seconds
    handled = counts.get("encoded", 0) + counts.get("cached", 0) if part is not None else len(corpus)
    metrics["passages_per_second"] = handled / seconds
    log.info("%s in %.1f s (%.0f passages/s)", what, seconds, metrics["passages_per_second"])
    if "encoded" in counts:
        log.info("vectors: %d encoded, %d read from the cache", counts["encoded"], counts["cached"])
    if part is not None:
        log.info("vectors are in %s", _shown(run.cache_dir / "vectors"))
    else:
        folders = _folders(retriever)
        sizes = {name: size for folder in folders.values() for name, size in _sizes(folder).items()}
        metrics |= {f"bytes_{name}": float(size) for name, size in sizes.items()}
        metrics["bytes"] = float(sum(sizes.values()))
        if sizes:
            console.print(_table(sizes, len(corpus)))
        for name, folder in folders.items():
            log.info("%s: %s", name, _shown(folder))
            run.summary.artifacts[name] = os.path.relpath(folder, run.folder)
    run.log_metrics({f"index/{name}": value for name, value in metrics.items()}, step=0)


def _check(run: Run, index: Mapping[str, Any]) -> tuple[int, int] | None:
    """The part that ``index.shard`` means, None for all."""
    if run.cfg.dry_run:
        raise ConfigError("dry_run=true is for task=train; task=index has no dry run")
    for key in index:
        if key not in _KEYS:
            near = nearest(str(key), _KEYS)
            raise ConfigError(
                f"unknown key 'index.{key}'" + (f"; did you mean 'index.{near}'?" if near else "")
            )
    for key in _KEYS:
        if key not in index:
            raise ConfigError(f"index.{key}: missing key")
    if not isinstance(index["merge_only"], bool):
        raise ConfigError(f"index.merge_only: expected true or false, got {index['merge_only']!r}")
    if run.cfg.choices.retriever == "none":
        raise ConfigError("task=index: retriever=none has no index; choose retriever=dense, bm25 or hybrid")
    part = parse_shard(index["shard"])
    if part is not None and index["merge_only"]:
        raise ConfigError(
            "index.merge_only=true is for the build that follows all parts: leave index.shard=null"
        )
    return part


def parse_shard(shard: Any) -> tuple[int, int] | None:
    """``"2/8"`` as (2, 8); None as None.

    Raises:
        ConfigError: anything else.
    """
    if shard is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", str(shard))
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"index.shard={shard}: expected I/N with I from 0 to N-1, such as 0/8 (the first of eight parts) to 7/8, "
            "or null for the whole index"
        )
    return int(match[1]), int(match[2])


def _require_all_shards(retriever: MultiHopRetriever, run: Run) -> None:
    missing = retriever.retriever.missing_shards(run.corpus)
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN_SHARDS]))
        more = f" and {len(missing) - _SHOWN_SHARDS} more" if len(missing) > _SHOWN_SHARDS else ""
        raise RetrievalError(
            f"index.merge_only=true: {len(missing)} shards of vectors are not in {run.cache_dir / 'vectors'} yet: "
            f"{shown}{more}. Part I of N encodes the shards I, I+N, I+2N, ...: run the missing parts, or leave "
            "index.merge_only out to encode them here"
        )


def _folders(retriever: MultiHopRetriever) -> dict[str, Path]:
    """Where the index and what the planner needs are kept."""
    found = {"index": retriever.retriever.index_path, "graph": retriever.planner.index_path}
    return {name: folder for name, folder in found.items() if folder is not None}


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each part of an index, by its file's name or its folder's."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "manifest.json":
            parts = file.relative_to(folder).with_suffix("").parts
            name = "_".join(p for p in parts[:-1] if p not in ("dense", "bm25")) or file.stem
            if folder.name.startswith("passage_graph") and name != "graph":
                name = f"graph_{name}"
            sizes[name] = sizes.get(name, 0) + file.stat().st_size
    return sizes


def _table(sizes: Mapping[str, int], passages: int) -> Table:
    table = Table(title="index", box=None, title_justify="left")
    for column in ("part", "MiB", "bytes per passage"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, size in [*sizes.items(), ("total", sum(sizes.values()))]:
        table.add_row(name.replace("_", " "), f"{size / 2**20:,.1f}", f"{size / passages:,.0f}")
    return table


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
