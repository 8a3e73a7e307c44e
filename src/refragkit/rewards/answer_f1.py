"""Token F1 of the answer alone."""

from __future__ import annotations

from typing import ClassVar

from refragkit.rewards.answer import AnswerReward


class AnswerF1(AnswerReward):
    """Token F1 with the best gold answer, after SQuAD's normalisation."""

    name: ClassVar[str] = "answer_f1"

    def __init__(self) -> None:
        super().__init__("f1")
