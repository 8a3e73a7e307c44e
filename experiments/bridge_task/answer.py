"""Greedy answers of a trained model to the validation questions, with the searches that it writes itself.

The same for every architecture: `roll_out`, the loop that ``method=refrag`` trains and validates with, which goes from
hop to hop by the state of a recurrent block and by the KV cache of an attention block alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.methods.episodes import EpisodeBuilder
from refragkit.methods.rollouts import Rollout, roll_out
from refragkit.models.checkpoint import load_model
from refragkit.models.location import model_location
from refragkit.retrievers.bm25 import BM25Retriever
from refragkit.retrievers.multi_hop import MultiHopRetriever
from refragkit.retrievers.planners.model import ModelPlanner
from refragkit.rewards.answer import exact_match

#: As in training.
MAX_HOPS, TOP_K, MAX_SEQ_LEN, MAX_NEW_TOKENS = 2, 1, 256, 12


def answers(model_folder: Path, data_folder: Path, max_hops: int = MAX_HOPS) -> list[dict[str, Any]]:
    """A record for each validation question: what was asked for, what was found, what was answered.

    Args:
        model_folder: of a run that trained one.
        data_folder: ``warm`` or ``more``, whose validation questions are the same.
        max_hops: searches at most, the question's own among them; 1 leaves no search to the model.
    """
    data = MultiHopQA(str(data_folder))
    data.prepare()
    location = model_location(model_folder)
    tokenizer, model = Tokenizer.load(location), load_model(location).eval()
    retriever = MultiHopRetriever(BM25Retriever(), ModelPlanner(), max_hops, TOP_K)
    retriever.index(data.corpus or [])
    episodes = EpisodeBuilder(retriever, tokenizer, MAX_SEQ_LEN, MAX_NEW_TOKENS)
    rolled = roll_out(model, tokenizer, episodes, data.validation)
    return [record(r) for r in rolled.all]


def record(rollout: Rollout) -> dict[str, Any]:
    """What is kept of a rollout."""
    question = rollout.question
    found = {hit.doc_id for hop in rollout.hops for hit in hop.new_documents}
    return {
        "id": question.id,
        "question": question.question,
        "hops_needed": question.hops,
        "gold": question.answers[0],
        "answer": rollout.text,
        "em": exact_match(rollout.text, question.answers),
        "queries": [hop.query for hop in rollout.hops[1:]],
        "hops": 1 + rollout.searches,
        "support": float(found.issuperset(question.supporting_ids)),
        "ended": rollout.ended,
    }


def answers_of(model_folder: Path, data_folder: Path, max_hops: int = MAX_HOPS) -> list[dict[str, Any]]:
    """`answers`, kept beside the model and not asked for again unless it has changed."""
    file = model_folder / f"answers{'' if max_hops == MAX_HOPS else f'_{max_hops}'}.jsonl"
    weights = model_location(model_folder) / "model.safetensors"
    if not file.exists() or file.stat().st_mtime < weights.stat().st_mtime:
        write_records(file, answers(model_folder, data_folder, max_hops))
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_records(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """One a line."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    temporary.replace(file)
