"""Exact match of the answer alone."""

from __future__ import annotations

from typing import ClassVar

from refragkit.rewards.answer import AnswerReward


class ExactMatch(AnswerReward):
    """1 where the answer equals a gold answer after SQuAD's normalisation, else 0."""

    name: ClassVar[str] = "exact_match"

    def __init__(self) -> None:
        super().__init__("em")
