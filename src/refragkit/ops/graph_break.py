"""What ``torch.compile`` leaves out of its graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_marked: list[Callable[..., Any]] = []


def graph_break(function: F) -> F:
    """Mark a function of a module, or method, that runs as it is where its caller is compiled, between two graphs.

    For the chunked recurrences: without their own backward, traced with symbolic lengths, torch 2.13 generates one that
    writes beyond its buffers (on a CPU, Mamba-2 compiled at 40 tokens and called with 71: "double free or
    corruption"). And for what depends on values or keeps memory between calls.

    ``torch.compiler.disable`` alone would load the compiler (two seconds) into processes that never compile:
    :func:`exclude_from_graphs` calls it.
    """
    _marked.append(function)
    return function


def exclude_from_graphs() -> None:
    """Make the marks effective; before the first compilation."""
    while _marked:
        function = _marked.pop()
        owner: Any = sys.modules[function.__module__]
        *classes, name = function.__qualname__.split(".")
        for part in classes:
            owner = getattr(owner, part)
        excluded = torch.compiler.disable(function, reason="see graph_break")  # type: ignore[no-untyped-call]
        setattr(owner, name, excluded)
