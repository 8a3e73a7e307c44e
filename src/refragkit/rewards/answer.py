"""How good the generated answer is: token F1 or exact match after SQuAD's normalisation.

Source: Rajpurkar et al. 2016 (SQuAD), evaluate-v1.1; Yang et al. 2018 (HotpotQA), hotpot_evaluate_v1 for
    yes and no.
Differs: an answer that repeats the question is scored without the repetition, because a question that names
the candidates ("Who was born later, A or B?") would otherwise earn F1 by being copied.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from refragkit.errors import ConfigError
from refragkit.rewards.base import Reward
from refragkit.types import Episode

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the normalised prediction equals a normalised answer, else 0; 0 for an empty prediction."""
    return max((_exact(prediction, a) for a in answers), default=0.0)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best token F1 of the prediction with any of the answers; 0 for an empty prediction.

    Yes and no are all or nothing, as in HotpotQA's script: "yes no" is not half right.
    """
    return max((_f1(prediction, a) for a in answers), default=0.0)


def _exact(prediction: str, answer: str) -> float:
    if not prediction.strip():
        return 0.0
    p, a = normalize_answer(prediction), normalize_answer(answer)
    if (
        not a
    ):  # an answer of articles or punctuation only ("The"): nothing is left to compare but the text itself
        return float(prediction.strip().lower() == answer.strip().lower())
    return float(p == a)


def _f1(prediction: str, answer: str) -> float:
    p, a = normalize_answer(prediction), normalize_answer(answer)
    if not p or not a or p == a or p in _CLOSED or a in _CLOSED:
        return _exact(prediction, answer)
    p_tokens, a_tokens = p.split(), a.split()
    common = sum((Counter(p_tokens) & Counter(a_tokens)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(p_tokens), common / len(a_tokens)
    return 2 * precision * recall / (precision + recall)


def without_question(completion: str, question: str) -> str:
    """The completion without verbatim repetitions of the question; untouched where there are none."""
    asked = normalize_answer(question).split()
    if len(asked) < 3:  # "Capital?" may well be part of an honest answer
        return completion
    # As it stands first: glued to what follows ("?Who"), its last word would not be one any more
    rest = re.sub(re.escape(question.strip()), " ", completion, flags=re.IGNORECASE)
    said = normalize_answer(rest).split()
    kept: list[str] = []
    i = 0
    while i < len(said):
        if said[i : i + len(asked)] == asked:
            i += len(asked)
        else:
            kept.append(said[i])
            i += 1
    return " ".join(kept) if len(kept) < len(said) or rest != completion else completion


class AnswerReward(Reward):
    """Token F1 (``metric="f1"``) or exact match (``metric="em"``) with the best of the gold answers."""

    name: ClassVar[str] = "answer"

    def __init__(self, metric: str = "f1") -> None:
        """Choose the measure.

        Raises:
            ConfigError: the metric is neither ``f1`` nor ``em``.
        """
        if metric not in ("f1", "em"):
            raise ConfigError(f"reward: expected metric f1 or em, got {metric!r}")
        self.metric = metric

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """One value per episode; an episode without gold answers earns 0."""
        measure = token_f1 if self.metric == "f1" else exact_match
        return [measure(without_question(e.completion, e.question), e.answers) for e in episodes]
