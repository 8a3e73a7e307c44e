"""Free text on the command line: ``prompt="Who wrote Hamlet, and when?"`` means just that.

Hydra reads the value of an override in a grammar of its own, in which a comma makes a sweep and an apostrophe or a
bracket is an error; the quotes that a user types are the shell's, and Hydra never sees them. The values of the keys
below are therefore quoted for Hydra before it parses them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TEXT_KEYS: tuple[str, ...] = ("prompt", "system", "stop", "rag.system", "rag.instruction")
"""Keys whose values are text as it stands. Hydra's own quotes and lists still work: ``prompt='"a","b"'`` sweeps,
``stop=[a,b]`` is a list."""

EXPRESSION_KEYS: tuple[str, ...] = ("retriever.filter",)
"""Keys whose values are taken as they stand where Hydra's grammar can't read them: ``year > 1990``."""


def quote_text(overrides: Sequence[str]) -> list[str]:
    """The overrides, with the values of `TEXT_KEYS` quoted where Hydra would read them as anything but a string."""
    return [_quote(override) for override in overrides]


def _quote(override: str) -> str:
    key, separator, value = override.partition("=")
    text = key in TEXT_KEYS and not _is_hydra_text(key, override)
    # A path with letters that Hydra's grammar lacks can only mean itself, and so can an expression.
    foreign = (not override.isascii() or key in EXPRESSION_KEYS) and not _parses(override)
    if not separator or override.startswith("-") or not (text or foreign):
        return override
    # Hydra: a quote is escaped, and so are the backslashes before it or at the end. OmegaConf: so is ${.
    value = re.sub(r"(\\*)\$\{", lambda m: 2 * m.group(1) + r"\${", value)
    value = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m.group(1) + ("\\'" if m.group(2) else ""), value)
    return f"{key}='{value}'"


def _parses(override: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return False
    return True


def _is_hydra_text(key: str, override: str) -> bool:
    """Whether a value is written in Hydra's syntax on purpose: quoted strings, or a list of stop strings."""
    if key == "stop" and override.endswith("]") and override.startswith("stop=["):
        return True
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString
    from hydra.errors import OverrideParseException

    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return False
    if parsed.is_sweep_override():
        values = parsed._value.list if parsed.is_choice_sweep() else []  # type: ignore[union-attr]
        return bool(values) and all(isinstance(value, QuotedString) for value in values)
    return isinstance(parsed._value, QuotedString)
