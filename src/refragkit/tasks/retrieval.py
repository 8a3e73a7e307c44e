"""The retriever of ``task=generate`` and ``task=chat``, and what they say of its searches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from refragkit.errors import ConfigError
from refragkit.types import Hop

if TYPE_CHECKING:
    from refragkit.experiment import Run
    from refragkit.retrievers.multi_hop import MultiHopRetriever

log = logging.getLogger("refragkit")


def task_retriever(run: Run, first_query: Literal["question", "model"]) -> MultiHopRetriever:
    """The run's retriever.

    Args:
        run: the run.
        first_query: who writes the first query where ``retriever.planner=model``.

    Raises:
        ConfigError: there is none.
    """
    from refragkit.retrievers.planners.model import ModelPlanner

    retriever = run.retriever
    if retriever is None:
        raise ConfigError(
            "use_retrieval=true needs a knowledge base, and retriever=none has none; choose retriever=dense, bm25"
            " or hybrid"
        )
    if isinstance(retriever.planner, ModelPlanner):
        retriever.planner.first_query = first_query
    return retriever


def log_hop(hop: Hop) -> None:
    """Say what was asked and found."""
    titles = "; ".join(hit.document.title or hit.doc_id for hit in hop.new_documents)
    log.info("hop %d: %s -> %s", hop.hop, hop.query, titles or "nothing new")


def hop_records(hops: Sequence[Hop]) -> list[dict[str, Any]]:
    """Searches as ``samples.jsonl`` keeps them."""
    return [
        {
            "hop": hop.hop,
            "query": hop.query,
            "documents": [{"doc_id": hit.doc_id, "title": hit.document.title} for hit in hop.new_documents],
        }
        for hop in hops
    ]
