"""Reranking: a cross-encoder reads query and passage together and reorders what a retriever found.

Source: Nogueira and Cho 2019 (arXiv 1901.04085); models are sentence-transformers CrossEncoders.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from refragkit.errors import RetrievalError
from refragkit.retrievers.base import IntArray, Retriever, ScoreArray, passage_text
from refragkit.retrievers.encoder import in_hub_cache, quiet_loading
from refragkit.types import Document, Hit, Question

logger = logging.getLogger(__name__)

#: Hits of the first retriever that are read again.
RERANK_DEPTH = 50
#: As in dense retrieval: the last bits, which depend on the batch, decide nothing.
SCORE_DECIMALS = 6
#: How the architectures end that can score a pair of texts.
_HEADS = ("ForSequenceClassification", "ForCausalLM")


def resolve_cross_encoder(name: str) -> Path:
    """The folder of a cross-encoder, found without the network.

    Raises:
        RetrievalError: it is neither a local folder nor in the hub cache, or it is another kind of model.
    """
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise RetrievalError(
                f"retriever.rerank={name}: the folder has no config.json: expected a CrossEncoder model"
            )
        found: Path | None = Path(name)
    else:
        found = in_hub_cache(name)
    if found is None:
        raise RetrievalError(
            f"cross-encoder {name!r} is not here. Set retriever.rerank to a local folder that holds it, or fetch it "
            f"into the hub cache once with network (hf download {name}), or leave it null"
        )
    _check_architecture(name, found)
    return found


def _check_architecture(name: str, folder: Path) -> None:
    """Refuse what sentence-transformers would load as well, with a head of random weights that ranks at random."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = list(map(str, config.get("architectures") or ()))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RetrievalError(
            f"retriever.rerank={name}: {folder / 'config.json'} can't be read ({error})"
        ) from error
    if not any(a.endswith(_HEADS) for a in architectures):
        raise RetrievalError(
            f"retriever.rerank={name}: expected a CrossEncoder model (architectures in config.json: one of "
            f"*{', *'.join(_HEADS)}), got {', '.join(architectures) or 'none'}, which has no head that scores a pair"
        )


class RerankRetriever(Retriever):
    """Another retriever's hits in the order of a cross-encoder, whose scores are squeezed into 0 to 1."""

    def __init__(self, base: Retriever, model: str, depth: int = RERANK_DEPTH, batch_size: int = 32) -> None:
        """Nothing is loaded yet.

        Args:
            base: finds the candidates.
            model: a local folder or a hub name.
            depth: how many of its hits are read again.
            batch_size: pairs per forward pass.
        """
        super().__init__()
        self.base = base
        self.model = model
        self.depth = depth
        self.batch_size = batch_size
        self._cross_encoder: Any = None

    @property
    def name(self) -> str:  # type: ignore[override]
        """The first retriever's name."""
        return self.base.name

    def settings(self) -> dict[str, Any]:
        """The first retriever's: reranking stores nothing."""
        return self.base.settings()

    def index(self, documents: Sequence[Document]) -> None:
        """Index the first retriever."""
        self.base.index(documents)
        self._share_documents(self.base)

    def open_index(self, documents: Sequence[Document], cache_dir: str | Path | None = None) -> Self:
        """Open the first retriever's index: it is the same with and without reranking."""
        resolve_cross_encoder(self.model)  # fail before an hour of indexing, not after
        self.base.open_index(documents, cache_dir)
        self._share_documents(self.base)
        self.index_path, self.counts = self.base.index_path, self.base.counts
        return self

    def encode_part(self, documents: Sequence[Document], part: int, parts: int) -> None:
        """The first retriever's."""
        self.base.encode_part(documents, part, parts)
        self.counts = self.base.counts

    def missing_shards(self, documents: Sequence[Document]) -> list[int]:
        """The first retriever's."""
        return self.base.missing_shards(documents)

    def allowed(self) -> NDArray[np.bool_] | None:
        """The first retriever's."""
        return self.base.allowed()

    def write_files(self, folder: Path) -> None:
        """The first retriever's files."""
        self.base.write_files(folder)

    def read_files(self, folder: Path) -> None:
        """The first retriever's files."""
        self.base._share_documents(self)
        self.base.read_files(folder)

    def warm_up(self) -> None:
        """Load both models."""
        self.base.warm_up()
        self._load()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The k best of the first retriever's ``depth`` hits."""
        self._require_index()
        self._require_k(k)
        return self._rerank(queries, self.base.search(queries, max(k, self.depth)), k)

    def search_for(
        self,
        questions: Sequence[Question],
        queries: Sequence[str],
        k: int,
        skip: Sequence[Collection[str]] | None = None,
    ) -> list[list[Hit]]:
        """``search`` on behalf of questions."""
        found = self.base.search_for(questions, queries, max(k, self.depth), skip)
        return self._rerank(queries, found, k)

    def _rerank(self, queries: Sequence[str], found: Sequence[Sequence[Hit]], k: int) -> list[list[Hit]]:
        positions = [np.array([self._position(h.doc_id) for h in hits], dtype=np.int64) for hits in found]
        reranked = []
        for hits, scores in zip(found, self.score_at(queries, positions), strict=True):
            order = sorted(range(len(hits)), key=lambda i: (-scores[i], hits[i].doc_id))[:k]
            reranked.append([Hit(hits[i].document, float(scores[i])) for i in order])
        return reranked

    def score_at(self, queries: Sequence[str], positions: Sequence[IntArray]) -> list[ScoreArray]:
        """The cross-encoder's score of each pair, in 0 to 1."""
        pairs = [
            (query, passage_text(self.documents[int(p)]))
            for query, chosen in zip(queries, positions, strict=True)
            for p in chosen
        ]
        scores = np.zeros(0)
        if pairs:
            logits = self._load().predict(pairs, batch_size=self.batch_size, show_progress_bar=False)
            squeezed = 1.0 / (1.0 + np.exp(-np.asarray(logits, dtype=np.float64).reshape(-1)))
            scores = np.round(squeezed, SCORE_DECIMALS)
        return (
            np.split(scores, np.cumsum([len(chosen) for chosen in positions])[:-1]) if len(positions) else []
        )

    def _load(self) -> Any:
        if self._cross_encoder is None:
            path = resolve_cross_encoder(self.model)
            logger.info("loading the cross-encoder from %s", path)
            import torch
            from sentence_transformers import CrossEncoder

            with quiet_loading():
                self._cross_encoder = CrossEncoder(
                    str(path),
                    num_labels=1,
                    device="cuda" if torch.cuda.is_available() else "cpu",
                    local_files_only=True,
                    activation_fn=torch.nn.Identity(),
                )
        return self._cross_encoder
