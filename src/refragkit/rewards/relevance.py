"""How well the retrieved documents fit the question: gold passages found, or else cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from refragkit.errors import ConfigError
from refragkit.rewards.base import Reward
from refragkit.types import Episode

if TYPE_CHECKING:
    from refragkit.retrievers.encoder import SentenceEncoder


def support_recall(episode: Episode) -> float:
    """The share of the gold passages that were retrieved; 0 where there are none."""
    gold = set(episode.supporting_ids)
    return len(gold & {h.doc_id for h in episode.documents}) / len(gold) if gold else 0.0


def support_precision(episode: Episode) -> float:
    """The share of the retrieved documents that are gold passages; 0 where nothing was retrieved."""
    found = {h.doc_id for h in episode.documents}
    return len(found & set(episode.supporting_ids)) / len(found) if found else 0.0


class RelevanceReward(Reward):
    """F-beta of recall and precision of the supporting passages.

    ``beta`` > 1 makes recall count more: a missing passage makes the answer impossible, a superfluous one
    only costs context. Where a question has no gold passages, it is the mean cosine of the question with
    the retrieved documents, negative cosines counting 0. Retrieving nothing earns 0.
    """

    name: ClassVar[str] = "relevance"

    def __init__(self, beta: float = 2.0, encoder: str | None = None) -> None:
        """Nothing is loaded yet.

        Args:
            beta: how many times more recall counts than precision.
            encoder: the sentence encoder for questions without gold; None for the default one.

        Raises:
            ConfigError: beta is not positive.
        """
        if not beta > 0:
            raise ConfigError(f"reward: expected relevance beta > 0, got {beta}")
        self.beta = beta
        self.encoder = encoder
        self._encoder: SentenceEncoder | None = None

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """One value per episode."""
        cosines = iter(self._mean_cosines([e for e in episodes if not e.supporting_ids]))
        return [self._f_beta(e) if e.supporting_ids else next(cosines) for e in episodes]

    def _f_beta(self, episode: Episode) -> float:
        recall, precision = support_recall(episode), support_precision(episode)
        if recall == 0.0:
            return 0.0
        b2 = self.beta**2
        return (1 + b2) * precision * recall / (b2 * precision + recall)

    def _mean_cosines(self, episodes: Sequence[Episode]) -> list[float]:
        if not any(e.documents for e in episodes):
            return [0.0] * len(episodes)
        from refragkit.retrievers.base import passage_text
        from refragkit.retrievers.encoder import SentenceEncoder

        if self._encoder is None:
            self._encoder = SentenceEncoder(self.encoder)
        questions = self._encoder.encode_queries([e.question for e in episodes])
        texts = list(dict.fromkeys(passage_text(h.document) for e in episodes for h in e.documents))
        passages = dict(zip(texts, self._encoder.encode_passages(texts), strict=True))
        values = []
        for question, episode in zip(questions, episodes, strict=True):
            cosines = [
                max(0.0, float(question @ passages[passage_text(h.document)])) for h in episode.documents
            ]
            # Rounding may push the cosine of two equal unit vectors a hair above 1.
            values.append(min(1.0, sum(cosines) / len(cosines)) if cosines else 0.0)
        return values
