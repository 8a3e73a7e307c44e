"""The keys of ``retriever.state_cache``: room for what a model remembers of documents that it may read again.

What is done with them is in `refragkit.generation.state_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from refragkit.config import nearest, type_problem
from refragkit.errors import ConfigError

_KEY = "retriever.state_cache"


@dataclass(frozen=True, slots=True)
class StateCacheSettings:
    """Where states are kept, and how many.

    Attributes:
        max_bytes: of memory (on the model's device).
        path: a folder where they are kept from one run to the next; None for none.
        path_max_bytes: of that folder; None for as much as ``max_bytes``.
    """

    max_bytes: int
    path: str | None = None
    path_max_bytes: int | None = None


def state_cache_settings(values: Mapping[str, Any] | None) -> StateCacheSettings | None:
    """The settings in a configuration's node; None where it asks for no cache.

    Raises:
        ConfigError: an unknown key, a value of another type, or one that can't be.
    """
    if values is None:
        return None
    hints: dict[str, Any] = {**get_type_hints(StateCacheSettings), "max_bytes": int | None}
    problems = []
    for key, value in values.items():
        if key not in hints:
            near = nearest(str(key), hints)
            problems.append(
                f"{_KEY}.{key}: unknown key" + (f"; did you mean '{_KEY}.{near}'?" if near else "")
            )
        elif expected := type_problem(value, hints[key]):
            problems.append(f"{_KEY}.{key}: expected {expected}, got {value!r}")
    if problems:
        raise ConfigError("\n".join(problems))
    if values.get("max_bytes") is None:
        given = [key for key in ("path", "path_max_bytes") if values.get(key) is not None]
        if given:
            raise ConfigError(
                f"{_KEY}.{given[0]}={values[given[0]]} is set, and without {_KEY}.max_bytes there is no cache; give"
                " that a number of bytes too"
            )
        return None
    settings = StateCacheSettings(**values)
    for key in ("max_bytes", "path_max_bytes"):
        value = getattr(settings, key)
        if value is not None and value < 1:
            problems.append(f"{_KEY}.{key}: expected at least 1 byte or null, got {value}")
    if settings.path == "":
        problems.append(f"{_KEY}.path: expected a folder or null, got ''")
    if settings.path is None and settings.path_max_bytes is not None:
        problems.append(f"{_KEY}.path_max_bytes is set, and there is no {_KEY}.path for it to limit")
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def refuse_in_training(values: Mapping[str, Any] | None, method: str) -> None:
    """Say that training can't keep states.

    Raises:
        ConfigError: it was asked to.
    """
    if state_cache_settings(values) is not None:
        raise ConfigError(
            f"{_KEY} keeps states of a model whose weights don't change, and method={method} changes them at every"
            f" step; leave {_KEY}.max_bytes=null, and set it with task=evaluate evaluate=rag"
        )
