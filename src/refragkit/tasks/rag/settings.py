"""The keys of ``rag`` in ``conf/task/evaluate.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from refragkit.config import nearest, type_problem
from refragkit.data.conversation import ORDERS
from refragkit.errors import ConfigError

_PREFILL_TOKENS = 16384


@dataclass(frozen=True)
class Settings:
    """The keys of ``rag``.

    Attributes:
        max_new_tokens: tokens of an answer at most, the end token included.
        max_seq_len: tokens of prompt and answer together.
        max_document_tokens: tokens of one document; None for no limit of its own.
        order: where the question stands, one of ``refragkit.data.conversation.ORDERS``.
        first_query: who writes the first query where ``retriever.planner=model``: ``question`` (it is the question
            itself) or ``model``.
        shuffle_documents: whether a question's documents come in a random order.
        system: a system turn in front; none if empty.
        instruction: a user turn behind the documents; none if empty.
        examples: how many training questions stand in front with their answers, without documents.
        batch_tokens: tokens of a batch of questions, prompts, answers and padding together; with
            ``retriever.planner=model``, if none gets longer than the longest before.
        timed_questions: how many are asked alone to time the first token.
        bootstrap_samples: resamples behind each interval.
    """

    max_new_tokens: int = 16
    max_seq_len: int = 6144
    max_document_tokens: int | None = None
    order: str = "question_first"
    first_query: Literal["question", "model"] = "question"
    shuffle_documents: bool = False
    system: str = ""
    instruction: str = ""
    examples: int = 0
    batch_tokens: int = 16384
    timed_questions: int = 4
    bootstrap_samples: int = 2000

    @property
    def prefill_tokens(self) -> int:
        """As many tokens are read at once, which bounds the memory that reading takes."""
        return min(self.batch_tokens, _PREFILL_TOKENS)


def check_settings(values: Mapping[str, Any]) -> Settings:
    """The keys of ``rag`` with their types checked.

    Raises:
        ConfigError: an unknown or missing key, or a value that can't be.
    """
    hints = get_type_hints(Settings)
    problems = []
    for key in values:
        if key not in hints:
            near = nearest(str(key), hints)
            problems.append(f"unknown key 'rag.{key}'" + (f"; did you mean 'rag.{near}'?" if near else ""))
    for key, hint in hints.items():
        if key not in values:
            problems.append(f"rag.{key}: missing key")
        elif expected := type_problem(values[key], hint):
            problems.append(f"rag.{key}: expected {expected}, got {values[key]!r}")
    if problems:
        raise ConfigError("\n".join(problems))
    settings = Settings(**{str(key): value for key, value in values.items()})
    least_values = {"max_new_tokens": 1, "max_seq_len": 2, "max_document_tokens": 1, "batch_tokens": 1}
    least_values |= {"examples": 0, "timed_questions": 0, "bootstrap_samples": 1}
    for key, least in least_values.items():
        value = getattr(settings, key)
        if value is not None and value < least:
            problems.append(f"rag.{key}: expected at least {least}, got {value}")
    if settings.max_new_tokens >= settings.max_seq_len:
        problems.append(
            f"rag.max_new_tokens={settings.max_new_tokens} leaves no room for a question in rag.max_seq_len="
            f"{settings.max_seq_len}; change one of them"
        )
    if settings.order not in ORDERS:
        problems.append(f"rag.order: expected one of {', '.join(ORDERS)}, got {settings.order!r}")
    if problems:
        raise ConfigError("\n".join(problems))
    return settings
