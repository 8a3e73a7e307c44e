"""Supervised fine-tuning: cross-entropy on assistant tokens, averaged over all of them in the global batch."""

from __future__ import annotations

from refragkit.methods.base import MethodModule, Prepared
from refragkit.types import Batch, Question


class SFTModule(MethodModule):
    """Trains on gold answers, given the same retrieved documents as the other methods, or on conversations."""

    def prepare(self, batch: Batch) -> Prepared:
        """Render questions with what was retrieved for them, and conversations as they are."""
        questions = [e for e in batch.examples if isinstance(e, Question)]
        hops = dict(zip((q.id for q in questions), self.episodes.retrieve(questions), strict=True))
        return Prepared(
            [
                self.episodes.example(e, hops[e.id], e.answers[0])
                if isinstance(e, Question)
                else self.episodes.conversation(e)
                for e in batch.examples
            ]
        )
