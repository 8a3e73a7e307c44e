"""Conversations of a JSONL file as token ids: read in parts, rendered by several processes, written in file order.

Neither the file nor its ids are ever in memory as a whole, and the result doesn't depend on how many processes there
are.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from refragkit.data.conversation import Rendered, render, render_counts
from refragkit.data.conversation_file import parse_conversation
from refragkit.data.datamodule import opening
from refragkit.data.jsonl import MAX_REPORTED_LINES, LineError, Record, bad_lines, scan_lines
from refragkit.data.token_file import Flags, Ids, TokenFileWriter
from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import DataError
from refragkit.types import Conversation

TooLong = Literal["drop", "cut"]

PART_BYTES = 1 << 19
"""Of the file, that a process gets at a time."""

_WORTH_PROCESSES_BYTES = 1 << 22  # a process takes seconds to start, in which one alone tokenizes this much


@dataclass(frozen=True)
class Rendering:
    """How conversations become ids.

    Attributes:
        tokenizer: its folder.
        max_seq_len: tokens of an example.
        max_document_tokens: tokens of one document; None: no limit of its own.
        too_long: what becomes of a conversation that doesn't fit, documents left out: ``drop`` it, or ``cut`` its end
            off.
    """

    tokenizer: str
    max_seq_len: int
    max_document_tokens: int | None = None
    too_long: TooLong = "drop"


@dataclass
class _Part:
    """What a part of the file became; see `TokenFileWriter.append`."""

    ids: Ids
    learnt: Flags
    lengths: NDArray[np.int64]
    groups: NDArray[np.uint64]
    counts: Counter[str]
    problems: list[str]
    n_problems: int


def tokenize_conversations(
    file: Path,
    rendering: Rendering,
    tokenizer: Tokenizer,
    writer: TokenFileWriter,
    workers: int = 1,
    on_part: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """Append every conversation of a file to a token file.

    Args:
        file: JSONL of conversations; ids need not be unique here.
        rendering: how.
        tokenizer: that of ``rendering.tokenizer``.
        writer: takes the examples.
        workers: processes; with 1 there is none but this.
        on_part: called after each part of the file, of which there are `n_parts` at most.

    Returns:
        The counts ``conversations`` (in the file), ``examples`` (written), ``dropped_too_long``,
        ``dropped_no_supervised_token``, ``cut_conversations``, ``truncated_documents``, ``left_out_documents``.

    Raises:
        DataError: broken lines or unknown roles, with file and line, as many as `read_jsonl` names; a process died.
        OSError: the file can't be read, or the disk is full.
    """
    counts: Counter[str] = Counter(conversations=0, cut_conversations=0, **render_counts([]))
    problems: list[str] = []
    n_problems = 0
    with file.open("rb") as f:
        for part in _parts(f, file, rendering, tokenizer, workers):
            problems += part.problems
            n_problems += part.n_problems
            counts.update(part.counts)
            if not n_problems:
                writer.append(part.ids, part.learnt, part.lengths, part.groups)
            on_part()
    if n_problems:
        raise DataError(bad_lines(file, problems[:MAX_REPORTED_LINES], n_problems))
    return dict(counts)


def n_parts(file: Path) -> int:
    """How many parts a file is read in, at most."""
    return -(-file.stat().st_size // PART_BYTES)


def useful_workers(file: Path) -> int:
    """How many processes make a file's tokenization fastest: one for each core, but for a small file."""
    if file.stat().st_size < _WORTH_PROCESSES_BYTES:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lines(file: BinaryIO) -> Iterator[tuple[int, list[bytes]]]:
    """Parts of a file, each with its first line's number; only where the file ends, one may end with a blank line."""
    first = 1
    while lines := file.readlines(PART_BYTES):
        while not lines[-1].strip() and (more := file.readline()):
            lines.append(more)
        yield first, lines
        first += len(lines)


def _parts(
    f: BinaryIO, file: Path, rendering: Rendering, tokenizer: Tokenizer, workers: int
) -> Iterator[_Part]:
    """The parts in the order of the file."""
    if workers == 1:
        for first, lines in _lines(f):
            yield _tokenize(lines, first, file, rendering, tokenizer)
        return
    # Not forked: the tokenizer's library and torch have threads, and a fork of those can hang.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(file, rendering)
    )
    waiting: deque[Future[_Part]] = deque()
    try:
        for first, lines in _lines(f):
            waiting.append(pool.submit(_tokenize_in_worker, lines, first))
            if len(waiting) > 2 * workers:  # what is read ahead is bounded
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"{file}: one of the {workers} processes that tokenize ended unexpectedly (killed for want of memory?); "
            "use fewer with workers=N"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_work: tuple[Path, Rendering, Tokenizer] | None = None


def _start_worker(file: Path, rendering: Rendering) -> None:
    """Load the tokenizer once, and end with the process that started this one."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and says what there is to say
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = file, rendering, Tokenizer.load(rendering.tokenizer)


def _end_with_parent() -> None:
    """A parent that is killed can't stop its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenize_in_worker(lines: list[bytes], first: int) -> _Part:
    assert _work is not None
    return _tokenize(lines, first, *_work)


def _tokenize(
    lines: list[bytes], first: int, file: Path, rendering: Rendering, tokenizer: Tokenizer
) -> _Part:
    """Render the conversations of some lines, the first of which is line ``first`` of the file."""
    counts: Counter[str] = Counter()
    ids: list[int] = []
    learnt: list[bool] = []
    lengths: list[int] = []
    groups: list[int] = []
    problems: list[str] = []
    n_problems = 0
    for number, record in scan_lines(lines, first):
        counts["conversations"] += 1
        try:
            conversation = _conversation(record)
            example, was_cut = _render(conversation, rendering, tokenizer)
        except (LineError, DataError) as problem:  # the second: a chat template refuses the turns
            n_problems += 1
            if len(problems) < MAX_REPORTED_LINES:
                problems.append(f"{file}:{number}: {problem}")
            continue
        counts.update(render_counts([example]))
        counts["cut_conversations"] += was_cut
        if not example.dropped:
            ids += example.input_ids
            learnt += example.loss_mask
            lengths.append(len(example))
            groups.append(_group(opening(conversation)))
    return _Part(
        np.array(ids, dtype=np.uint32),
        np.array(learnt, dtype=np.bool_),
        np.array(lengths, dtype=np.int64),
        np.array(groups, dtype=np.uint64),
        counts,
        problems,
        n_problems,
    )


def _conversation(record: Record | LineError) -> Conversation:
    if isinstance(record, LineError):
        raise record
    return parse_conversation(record)[1]


def _render(conversation: Conversation, rendering: Rendering, tokenizer: Tokenizer) -> tuple[Rendered, bool]:
    """The example, and whether the end of the conversation is missing."""
    limit = rendering.max_seq_len
    # Without documents there is nothing to shorten: one rendering of the whole is enough.
    if rendering.too_long == "drop" or any(message.documents for message in conversation.messages):
        rendered = render(conversation, tokenizer, limit, max_document_tokens=rendering.max_document_tokens)
        if rendering.too_long == "drop" or rendered.dropped != "too_long":
            return rendered, False
    whole = render(conversation, tokenizer, sys.maxsize, max_document_tokens=0)
    if len(whole) <= limit:
        return whole, False
    mask = whole.loss_mask[:limit]
    if not any(mask):
        return Rendered([], [], dropped="too_long"), False
    return replace(
        whole,
        input_ids=whole.input_ids[:limit],
        loss_mask=mask,
        truncated_documents=0,
        left_out_documents=whole.truncated_documents,
    ), True


def _group(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "little")
