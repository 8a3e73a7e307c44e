r"""The final number of a worked answer, as GSM8K asks for it.

The answer is what follows the last sign that announces one: ``#### 72``, ``\boxed{72}``, ``A: 72``, ``The answer is
72``. Without such a sign it is the last number of the text. ``$1,080.00``, ``1080 dollars`` and ``1{,}080`` are the
same number, and so are ``1/2``, ``\frac{1}{2}`` and ``0.5``; a percentage is its number.

Source: Cobbe et al. 2021 (arXiv 2110.14168), whose answers end in ``#### N``.
Differs: numbers are compared by value, not by spelling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

from refragkit.errors import ConfigError
from refragkit.rewards.answer import exact_match, without_question
from refragkit.rewards.base import Reward
from refragkit.types import Episode

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
# A sign belongs to a number unless something to subtract from precedes it. A slash makes a fraction, unless there are
# two of them (a date); what precedes a fraction after a space is its whole part.
_NUMBER = re.compile(
    rf"(?<![\w./])(?P<sign>(?<![\w)\]}}])-)?\s?[$€£¥]?\s?(?P<minus>-)?"
    rf"(?:(?P<whole>[0-9]+)\s(?=[0-9]+\s?/\s?[0-9]))?"
    rf"(?P<number>{_DIGITS})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?!\w))?"
    rf"(?:\s?/\s?(?P<denominator>{_DIGITS})(?!\s?/\s?[0-9]))?"
)
# What is longer is no number but a model that repeats itself
_LONGEST = 200
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_BOXED = r"\\boxed\s*\{"
_SIGN = re.compile(
    rf"(?P<hashes>####)|(?P<boxed>{_BOXED})"
    r"|(?:^|\n)[\s*_>]*(?:final\s+)?(?:a|ans|answer)[\s*_]*:"
    r"|\banswer[\s*_]*(?:is|are|was|=)\b[\s*_]*:?",
    re.IGNORECASE,
)
_LATEX = (
    ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("−", "-"), ("–", "-"),
    ("\u00a0", " "), ("\u202f", " "), ("\\left", ""), ("\\right", ""), ("÷", "/"),
)  # fmt: skip


def final_number(text: str) -> Fraction | None:
    """The number that a worked answer arrives at, exactly; None where it doesn't arrive at any.

    A sign that announces an answer but is followed by no number means that there is none: what was calculated on the
    way is not the answer.
    """
    for spelling, plain in _LATEX:
        text = text.replace(spelling, plain)
    text = _FRACTION.sub(r"\1/\2", _ANNOTATION.sub("", text))
    signs = list(_SIGN.finditer(text))
    if not signs:
        return _last(text)
    sign = signs[-1]
    rest = text[sign.end() :]
    if sign["boxed"]:
        return _last(_inside_braces(rest))
    line = next((line for line in rest.splitlines() if line.strip()), "")
    # "5 + 3 = 8 apples in 2 bags": what the calculation comes to, and not what is said about it
    return _first(line.rpartition("=")[2])


def _inside_braces(text: str) -> str:
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    return text


def _first(text: str) -> Fraction | None:
    return next((value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None), None)


def _last(text: str) -> Fraction | None:
    values = [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]
    return values[-1] if values else None


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > _LONGEST:
        return None
    value = Fraction(match["number"].replace(",", ""))
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    if match["denominator"]:
        denominator = Fraction(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    if match["whole"]:
        value += int(match["whole"])
    return -value if match["sign"] or match["minus"] else value


class NumericReward(Reward):
    """1 where the final number is a gold answer's, else 0.

    A gold answer without a number (``yes``, a name) is compared as `ExactMatch` does.
    """

    name: ClassVar[str] = "numeric"

    def __init__(self, tolerance: float = 1e-6) -> None:
        """Choose how close is equal.

        Args:
            tolerance: largest difference, relative to the gold number (absolute where that is 0).

        Raises:
            ConfigError: the tolerance is not in [0, 1).
        """
        if not 0 <= tolerance < 1:
            raise ConfigError(f"reward.tolerance: expected a number in [0, 1), got {tolerance}")
        self.tolerance = tolerance

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """One value per episode; an episode without gold answers earns 0."""
        return [self._score(e) for e in episodes]

    def _score(self, episode: Episode) -> float:
        gold = {answer: final_number(answer) for answer in episode.answers}
        said = final_number(episode.completion)
        if said is not None and any(self._equal(said, g) for g in gold.values() if g is not None):
            return 1.0
        words = [answer for answer, number in gold.items() if number is None]
        return exact_match(without_question(episode.completion, episode.question), words) if words else 0.0

    def _equal(self, said: Fraction, gold: Fraction) -> bool:
        return said == gold or abs(said - gold) <= Fraction(self.tolerance) * (abs(gold) or 1)
