r"""The equations of a worked answer: what it calculated, apart from how it said so.

GSM8K's calculator annotations ``<<48/2=24>>`` where a text has any, else the sums that it writes out (``48 / 2 = 24``).

Source: Yuan et al. 2023 (arXiv 2308.01825), section 3.3: of sampled answers with the same list of equations one is
kept, and none whose equations don't hold.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction

_ANNOTATION = re.compile(r"<<([^<>\n]*)>>")
# Repetitions are bounded, so that endless text is read in linear time
_NUMBER = r"[$€£]?\d[\d,]{0,20}(?:\.\d{1,20})?%?"
_SUM = re.compile(rf"(?<![\w.])\(?-?{_NUMBER}(?:\s?[-+*/x×÷]\s?\(?{_NUMBER}\)?){{1,20}}\s?=\s?-?{_NUMBER}")
_SPELLING = str.maketrans(
    {"x": "*", "×": "*", "÷": "/", "−": "-", ",": "", "$": "", "€": "", "£": "", " ": ""}
)
_ZEROS = re.compile(r"(?<![\d.])(\d+)\.0+(?![\d.])")
# A sum that goes on before or behind what was found, as in "x + 5 - 3 = 10" or "5 / 2 = 2 1/2", is not judged
_GOES_ON_BEFORE = re.compile(r"[-+*/x×÷)=.,]\s*$")
_GOES_ON_BEHIND = re.compile(r"\s*[-+*/x×÷(]\s*[\d(]|[\d,.]*\d|\s+\d+\s?/\s?\d")
# What is longer is no calculation but a model that repeats itself
_LONGEST = 200
_LARGEST_BASE, _LARGEST_POWER = 10**6, 64
# Gold answers round to hundredths
_TOLERANCE = Fraction(1, 100)


def equation_list(text: str) -> tuple[str, ...]:
    """The equations of a text in order, each in one spelling; empty where there are none."""
    found = _ANNOTATION.findall(text) or _SUM.findall(text)
    return tuple(_ZEROS.sub(r"\1", equation.translate(_SPELLING)) for equation in found)


def equations_hold(text: str) -> bool:
    """Whether all equations of a text are right, rounding to hundredths or to whole numbers allowed.

    An annotation that can't be calculated is wrong; such a sum in a text without annotations is left alone. A text
    without equations has nothing to be wrong about.
    """
    annotations = _ANNOTATION.findall(text)
    if annotations:
        return all(_holds(a.translate(_SPELLING)) for a in annotations)
    return not any(_is_wrong(match, text) for match in _SUM.finditer(text))


def _is_wrong(match: re.Match[str], text: str) -> bool:
    before, behind = text[max(0, match.start() - 3) : match.start()], text[match.end() : match.end() + 12]
    if _GOES_ON_BEFORE.search(before) or _GOES_ON_BEHIND.match(behind):
        return False
    spellings = {match[0].translate(_SPELLING), match[0].translate(_SPELLING).replace("%", "")}
    calculations = [spelling.rpartition("=")[0] for spelling in spellings]
    return None not in map(_evaluate, calculations) and not any(map(_holds, spellings))


def _holds(equation: str) -> bool:
    calculation, _, stated = equation.rpartition("=")
    left, right = (_evaluate(side) for side in (calculation.rpartition("=")[2], stated))
    if left is None or right is None:
        return False
    rounded = right.denominator == 1 and left.denominator != 1 and abs(left - right) < 1
    return rounded or abs(left - right) <= _TOLERANCE


def _evaluate(expression: str) -> Fraction | None:
    """The exact value of an arithmetic expression; None for anything else."""
    if not expression or len(expression) > _LONGEST:
        return None
    text = re.sub(r"(\d+(?:\.\d+)?|\.\d+)%", r"(\1/100)", expression)
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", text)  # Python refuses 007
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return Fraction(left // right)
            case ast.Pow() if (
                right.denominator == 1 and abs(right) <= _LARGEST_POWER and left <= _LARGEST_BASE
            ):
                return left ** int(right)
    raise ValueError(f"{ast.dump(node)} is no arithmetic")
