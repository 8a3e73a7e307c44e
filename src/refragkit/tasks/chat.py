"""``task=chat``: a conversation in the terminal; the model keeps its state, so a turn costs its new tokens only."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Literal

from refragkit.errors import ConfigError
from refragkit.experiment import Run

log = logging.getLogger("refragkit")

COMMANDS = {"/reset": "forget the conversation", "/exit": "end it (so does the end of the input)"}


def chat(
    run: Run,
    system: str = "",
    use_retrieval: bool = False,
    first_query: Literal["question", "model"] = "question",
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.9,
    top_k: int = 0,
    stop: str | list[str] | None = None,
    adapter_path: str | None = None,
) -> None:
    """Read user turns from standard input, one a line, and answer each.

    Args:
        run: the run; ``model.path`` names the model and ``seed`` the random numbers.
        system: text of a system turn in front, none if empty.
        use_retrieval: put documents of the run's retriever behind each question; with ``retriever.planner=model`` the
            model may search for more.
        first_query: who writes the first query there: the ``question`` itself is searched for, or the ``model`` asks.
        max_new_tokens: tokens of each answer at most.
        temperature: 0 always takes the likeliest token.
        top_p: sample from the fewest likeliest tokens that hold this much probability.
        top_k: sample from this many of the likeliest tokens; 0 from all.
        stop: one or several strings that end an answer and are left out; None for none.
        adapter_path: an adapter to put on the model.

    Raises:
        ConfigError: a setting out of its range.
    """
    from refragkit.console import console, is_terminal, write_text
    from refragkit.data.jsonl import append_jsonl
    from refragkit.generation.chat_session import ChatSession
    from refragkit.generation.engine import GenerationConfig
    from refragkit.generation.text_stream import stop_strings
    from refragkit.tasks.retrieval import hop_records, log_hop, task_retriever
    from refragkit.tasks.trained_model import check_run, trained_model

    check_run(run)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    stops = stop_strings(stop)
    tokenizer = run.tokenizer
    config = GenerationConfig(max_new_tokens, temperature, top_p, top_k, (tokenizer.end_id,))
    retriever = task_retriever(run, first_query) if use_retrieval else None
    model = trained_model(run, tokenizer, adapter_path)
    session = ChatSession(
        model, tokenizer, config, system=system, stop=stops, seed=run.seed, retriever=retriever
    )

    watched = is_terminal()
    if watched:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() line editing and a history)
        console.print("; ".join(f"{name}: {what}" for name, what in COMMANDS.items()), highlight=False)
    read_tokens = new_tokens = turns = further_tokens = 0
    read_seconds = write_seconds = 0.0
    conversation = 0
    while True:
        try:
            line = input("you> " if watched else "").strip()
        except EOFError:
            write_text("\n" if watched else "")
            break
        if line == "/exit":
            break
        if line == "/reset":
            session.reset()
            conversation += 1
            continue
        if line.startswith("/") and " " not in line and line.count("/") == 1:
            known = ", ".join(COMMANDS)
            console.print(f"{line} is not a command; there are {known}", highlight=False, markup=False)
            continue
        if not line:
            continue
        heading = ["model> "] if watched else []
        if retriever is None:
            _write_behind(heading, "")
        answer = session.ask(line, partial(_write_behind, heading), log_hop)
        _write_behind(heading, "")
        write_text("\n")
        append_jsonl(
            run.folder / "samples.jsonl",
            [
                {
                    "conversation": conversation,
                    "turn": session.turns,
                    "prompt": line,
                    "completion": answer.text,
                    "ended_by": answer.ended_by,
                    "read_tokens": answer.read_tokens,
                    "new_tokens": len(answer.token_ids),
                    **({"hops": hop_records(answer.hops)} if use_retrieval else {}),
                }
            ],
        )
        turns += 1
        read_tokens += answer.read_tokens
        new_tokens += answer.clock.tokens
        further_tokens += answer.clock.tokens - answer.clock.turns
        read_seconds += answer.clock.prefill_seconds
        write_seconds += answer.clock.decode_seconds
    if turns:
        run.artifact("samples", run.folder / "samples.jsonl")
    run.log_metrics(
        {
            "chat/turns": turns,
            "chat/read_tokens": read_tokens,
            "chat/new_tokens": new_tokens,
            "chat/prefill_seconds": read_seconds,
            "chat/tokens_per_second": further_tokens / write_seconds if write_seconds > 0 else 0.0,
        },
        step=0,
    )


def _write_behind(heading: list[str], text: str) -> None:
    """Write a piece of an answer, the first one behind its heading: what is searched for is said in front of it."""
    from refragkit.console import write_text

    while heading:
        write_text(heading.pop())
    write_text(text)
