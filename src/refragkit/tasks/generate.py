"""``task=generate``: continue a prompt, streaming to a terminal."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from refragkit.errors import ConfigError, DataError
from refragkit.experiment import Run
from refragkit.types import Conversation, Hop, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer

log = logging.getLogger("refragkit")

_PREFILL_TOKENS = 4096
"""A longer prompt is read in pieces of this many tokens, which bounds the memory for activations."""


def generate(
    run: Run,
    prompt: str | None = None,
    raw: bool = False,
    system: str = "",
    use_retrieval: bool = False,
    num_samples: int = 1,
    max_new_tokens: int = 256,
    max_seq_len: int = 6144,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: str | list[str] | None = None,
    adapter_path: str | None = None,
) -> None:
    """Answer or continue one prompt.

    Args:
        run: the run; ``model.path`` names the model and ``seed`` the random numbers.
        prompt: the user's turn; with ``raw`` the text to continue.
        raw: read the prompt as plain text, without the tokens of a conversation.
        system: text of a system turn in front, none if empty.
        use_retrieval: put documents of the run's retriever behind the question.
        num_samples: completions; they differ only with a temperature.
        max_new_tokens: tokens of each completion at most.
        max_seq_len: tokens of prompt and completion together at most; documents are cut to fit.
        temperature: 0 always takes the likeliest token.
        top_p: sample from the fewest likeliest tokens that hold this much probability.
        top_k: sample from this many of the likeliest tokens; 0 from all.
        stop: one or several strings that end a completion and are left out; None for none.
        adapter_path: an adapter to put on the model.

    Raises:
        ConfigError: no prompt, or a setting out of its range.
        DataError: the prompt doesn't fit into ``max_seq_len``.
    """
    from refragkit.console import is_terminal, write_text
    from refragkit.data.conversation import conversation_from_hops, render_prompt
    from refragkit.data.jsonl import append_jsonl
    from refragkit.generation.engine import GenerationConfig
    from refragkit.generation.engine import generate as decode
    from refragkit.generation.text_stream import TextStream, ended_by, stop_strings
    from refragkit.generation.token_clock import TokenClock
    from refragkit.tasks.trained_model import check_run, trained_model

    check_run(run)
    if prompt is None or not prompt.strip():
        raise ConfigError('prompt: task=generate needs a text to answer, got none; give prompt="..."')
    if num_samples < 1:
        raise ConfigError(f"num_samples: expected at least 1, got {num_samples}")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if raw and (use_retrieval or system):
        raise ConfigError(
            "raw=true continues the prompt as it is: it takes neither system nor use_retrieval=true"
        )
    if num_samples > 1 and temperature == 0:
        log.warning(
            "temperature=0 always takes the likeliest token: all %d samples are the same", num_samples
        )
    stops = stop_strings(stop)
    tokenizer = run.tokenizer
    config = GenerationConfig(max_new_tokens, temperature, top_p, top_k, (tokenizer.end_id,))
    model = trained_model(run, tokenizer, adapter_path)

    conversation: Conversation | None = None
    if raw:
        ids = _raw_prompt(prompt, tokenizer, max_seq_len, max_new_tokens)
    else:
        hops = _retrieve(run, prompt) if use_retrieval else ()
        conversation = conversation_from_hops(prompt, hops, system=system, conversation_id="prompt")
        ids = render_prompt(conversation, tokenizer, max_seq_len, max_new_tokens)

    # Samples are decoded side by side: only a single one can be shown while it grows.
    streaming = is_terminal() and num_samples == 1
    streams = [TextStream(tokenizer, stops, write_text if streaming else None) for _ in range(num_samples)]
    clock = TokenClock()

    def hear(row: int, sample: int, token_id: int) -> bool:
        clock.tick()
        return streams[sample].push(token_id)

    (completions,) = decode(
        model,
        [ids],
        config,
        pad_id=tokenizer.pad_id,
        seed=run.seed,
        num_samples=num_samples,
        on_token=hear,
        max_batch_tokens=_PREFILL_TOKENS,
    )
    texts = [stream.finish() for stream in streams]
    if temperature == 0:  # decoded once
        texts = texts[:1] * num_samples
    if streaming:
        write_text("\n")
    else:
        for sample, text in enumerate(texts):
            write_text((f"--- sample {sample}\n" if num_samples > 1 else "") + text + "\n")

    common: dict[str, Any] = {"prompt": prompt}
    if conversation is not None:
        common["messages"] = conversation.to_dict()["messages"]
    append_jsonl(
        run.folder / "samples.jsonl",
        [
            {
                **common,
                "sample": sample,
                "completion": text,
                "ended_by": ended_by(completion),
                "new_tokens": len(completion.token_ids),
            }
            for sample, (text, completion) in enumerate(zip(texts, completions, strict=True))
        ],
    )
    run.artifact("samples", run.folder / "samples.jsonl")
    rows = 1 if temperature == 0 else num_samples
    run.log_metrics(
        {
            "generate/prompt_tokens": len(ids),
            "generate/new_tokens": clock.tokens,
            "generate/prefill_seconds": clock.prefill_seconds,
            "generate/tokens_per_second": clock.tokens_per_second(rows),
        },
        step=0,
    )


def _raw_prompt(prompt: str, tokenizer: Tokenizer, max_seq_len: int, max_new_tokens: int) -> list[int]:
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        ids.insert(0, tokenizer.bos_id)
    if len(ids) + max_new_tokens > max_seq_len:
        raise DataError(
            f"prompt: its {len(ids)} tokens and max_new_tokens={max_new_tokens} are more than"
            f" max_seq_len={max_seq_len}; raise that or shorten the prompt"
        )
    return ids


def _retrieve(run: Run, question: str) -> tuple[Hop, ...]:
    retriever = run.retriever
    if retriever is None:
        raise ConfigError(
            "use_retrieval=true needs a knowledge base, and retriever=none has none; choose retriever=dense, bm25"
            " or hybrid"
        )
    (hops,) = retriever.retrieve([Question(id="prompt", question=question, answers=())])
    for hop in hops:
        titles = "; ".join(hit.document.title or hit.doc_id for hit in hop.new_documents)
        log.info("hop %d: %s -> %s", hop.hop, hop.query, titles)
    return hops
