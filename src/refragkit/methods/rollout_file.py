"""Sampled answers with their rewards, as rft keeps them in a run's ``rollouts`` folder.

One prompt a line::

    {"round": 1, "step": 1, "id": "gsm8k_train_00000", "question": "...", "answers": ["... #### 72"],
     "prompt_ids": [...], "given_ids": [...],
     "samples": [{"text": "...", "token_ids": [...], "finished": true, "rewards": {"total": 1.0},
                  "accepted": true, "distinct": true, "kept": true}, ...]}

``prompt_ids`` and ``token_ids`` are the very tokens that the model read and wrote, so that a file can be trained from
without the data, the retriever or the sampling that made it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refragkit.data.jsonl import LineError, Record, existing_file, read_jsonl
from refragkit.errors import ConfigError, DataError


@dataclass
class Sample:
    """One sampled answer.

    Attributes:
        text: without special tokens.
        token_ids: what was generated, the end token included where it came to one.
        finished: whether it came to one.
        rewards: each part, and the ``total``.
        accepted: whether it was good enough to be learnt.
        distinct: whether no earlier sample of its prompt that was judged alike says the same.
        kept: whether it was chosen to be learnt.
    """

    text: str
    token_ids: list[int]
    finished: bool
    rewards: dict[str, float] = field(default_factory=dict)
    accepted: bool = False
    distinct: bool = False
    kept: bool = False

    @property
    def reward(self) -> float:
        """The total."""
        return self.rewards["total"]


@dataclass
class SampledPrompt:
    """One prompt and what was sampled from it.

    Attributes:
        id: of the question or conversation.
        question: what was asked.
        answers: the given ones.
        prompt_ids: what the model read; never empty.
        samples: in the order of sampling.
        round: of sampling, from 1.
        step: the optimiser step that learns from it, from 1; 0 where all steps of its round may.
        given_ids: the given answer as the model would have written it, end token included; empty where it has none.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    prompt_ids: list[int]
    samples: list[Sample]
    round: int = 1
    step: int = 0
    given_ids: list[int] = field(default_factory=list)

    @property
    def kept(self) -> list[Sample]:
        """The samples that are learnt."""
        return [s for s in self.samples if s.kept]

    def to_dict(self) -> dict[str, Any]:
        """Its line of a file."""
        return {
            "round": self.round,
            "step": self.step,
            "id": self.id,
            "question": self.question,
            "answers": list(self.answers),
            "prompt_ids": self.prompt_ids,
            "given_ids": self.given_ids,
            "samples": [vars(s) for s in self.samples],
        }


def write_rollouts(path: Path, prompts: Sequence[SampledPrompt], *, append: bool = False) -> None:
    """Write whole lines: added to what is there, or a new file under a temporary name that is renamed then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(p.to_dict(), ensure_ascii=False) + "\n" for p in prompts)
    if append:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(lines, encoding="utf-8")
    temporary.replace(path)


def drop_rollouts(path: Path, first_step: int) -> None:
    """Take out what a killed run had sampled for steps from ``first_step`` on, a line cut short included."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


def read_rollouts(path: str | Path, vocab_size: int | None = None) -> list[SampledPrompt]:
    """The prompts of a file, or of all ``*.jsonl`` of a folder by name, in order.

    Args:
        path: the file or folder.
        vocab_size: token ids must be below it.

    Raises:
        DataError: nothing there, broken lines, token ids that the model doesn't know; names file and line.
    """
    given = Path(path).expanduser()
    files = sorted(given.glob("*.jsonl")) if given.is_dir() else [existing_file(given, "rollouts")]
    if not files:
        raise DataError(f"{given}: expected JSONL files of rollouts, found none")
    return [prompt for file in files for prompt in _read_file(file, vocab_size)]


def by_step(prompts: Sequence[SampledPrompt], source: str) -> list[list[SampledPrompt]]:
    """What one optimiser step learnt from together, in the order of the steps.

    Args:
        prompts: in any order.
        source: where they came from, for the error.

    Raises:
        ConfigError: they were sampled for whole rounds.
    """
    if any(p.step == 0 for p in prompts):
        rounds = len({p.round for p in prompts})
        raise ConfigError(
            f"method.rollouts={source}: these were sampled for whole rounds and not step by step; set"
            f" method.rounds={rounds}"
        )
    steps: dict[int, list[SampledPrompt]] = {}
    for prompt in sorted(prompts, key=lambda p: p.step):
        steps.setdefault(prompt.step, []).append(prompt)
    return list(steps.values())


def _read_file(file: Path, vocab_size: int | None) -> list[SampledPrompt]:
    line = 0

    def prompt(record: Record) -> tuple[str, SampledPrompt]:
        nonlocal line
        line += 1
        prompt_ids = _token_ids(record, "prompt_ids", vocab_size)
        if not prompt_ids:
            raise LineError("key 'prompt_ids': expected at least one token id, got []")
        made = SampledPrompt(
            id=record.string("id"),
            question=record.string("question", default="", may_be_empty=True),
            answers=record.strings("answers", default=(), may_be_empty=True),
            prompt_ids=prompt_ids,
            samples=[_sample(sample, vocab_size) for sample in record.objects("samples")],
            round=record.integer("round", default=1, minimum=1),
            step=record.integer("step", default=0),
            given_ids=_token_ids(record, "given_ids", vocab_size, default=[]),
        )
        return str(line), made  # a prompt may well be sampled from twice

    return read_jsonl(file, "rollouts", prompt)


def _sample(record: Record, vocab_size: int | None) -> Sample:
    token_ids = _token_ids(record, "token_ids", vocab_size)
    if not token_ids:
        raise LineError(f"key '{record.where}token_ids': expected at least one token id, got []")
    rewards = record.fields.get("rewards")
    if not isinstance(rewards, dict) or "total" not in rewards:
        raise LineError(f"key '{record.where}rewards': expected an object with a 'total', got {rewards!r}")
    values = Record(rewards, f"{record.where}rewards.")
    return Sample(
        text=record.string("text", may_be_empty=True),
        token_ids=token_ids,
        finished=_flag(record, "finished"),
        rewards={name: values.number(name) for name in rewards},
        accepted=_flag(record, "accepted"),
        distinct=_flag(record, "distinct"),
        kept=_flag(record, "kept"),
    )


def _flag(record: Record, key: str) -> bool:
    value = record.fields.get(key, False)
    if not isinstance(value, bool):
        raise LineError(f"key '{record.where}{key}': expected true or false, got {value!r}")
    return value


def _token_ids(record: Record, key: str, vocab_size: int | None, default: Any = None) -> list[int]:
    value = record.fields.get(key, default)
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise LineError(f"key '{record.where}{key}': expected a list of token ids, got {str(value)[:60]}")
    if vocab_size is not None and value and max(value) >= vocab_size:
        raise LineError(
            f"key '{record.where}{key}': token id {max(value)} is outside of the vocabulary [0, {vocab_size}); the file"
            " was written with another tokenizer"
        )
    return value
