"""``task=generate``: continue a prompt, streaming to a terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from refragkit.errors import ConfigError, DataError
from refragkit.experiment import Run
from refragkit.types import Conversation, Question

if TYPE_CHECKING:
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.generation.engine import GenerationConfig
    from refragkit.generation.token_clock import TokenClock
    from refragkit.models.base import SequenceModel
    from refragkit.retrievers.multi_hop import MultiHopRetriever

log = logging.getLogger("refragkit")

_PREFILL_TOKENS = 4096
"""A longer prompt is read in pieces of this many tokens, which bounds the memory for activations."""


def generate(
    run: Run,
    prompt: str | None = None,
    raw: bool = False,
    system: str = "",
    use_retrieval: bool = False,
    first_query: Literal["question", "model"] = "question",
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
        use_retrieval: put documents of the run's retriever behind the question; with ``retriever.planner=model`` the
            model may search for more.
        first_query: who writes the first query there: the ``question`` itself is searched for, or the ``model`` asks.
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
    from refragkit.data.jsonl import append_jsonl
    from refragkit.generation.engine import GenerationConfig
    from refragkit.generation.text_stream import stop_strings
    from refragkit.generation.token_clock import TokenClock
    from refragkit.tasks.retrieval import task_retriever
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
    retriever = task_retriever(run, first_query) if use_retrieval else None
    model = trained_model(run, tokenizer, adapter_path)

    # Samples are decoded side by side: only a single one can be shown while it grows.
    streaming = is_terminal() and num_samples == 1
    asked = _Asked(
        model,
        tokenizer,
        config,
        num_samples,
        run.seed,
        stops,
        write_text if streaming else None,
        TokenClock(),
    )
    if raw:
        samples = asked.continue_ids(_raw_prompt(prompt, tokenizer, max_seq_len, max_new_tokens))
    else:
        samples = asked.answer(prompt, system, retriever, max_seq_len)
    if streaming:
        write_text("\n")
    else:
        for number, sample in enumerate(samples):
            heading = f"--- sample {number}\n" if num_samples > 1 else ""
            write_text(heading + sample.text + "\n")
    append_jsonl(
        run.folder / "samples.jsonl",
        [
            {
                "prompt": prompt,
                **(
                    {}
                    if sample.conversation is None
                    else {"messages": sample.conversation.to_dict()["messages"]}
                ),
                "sample": number,
                "completion": sample.text,
                "ended_by": sample.ended_by,
                "new_tokens": sample.new_tokens,
            }
            for number, sample in enumerate(samples)
        ],
    )
    run.artifact("samples", run.folder / "samples.jsonl")
    rows = 1 if temperature == 0 else num_samples
    run.log_metrics(
        {
            "generate/prompt_tokens": samples[0].prompt_tokens,
            "generate/new_tokens": asked.clock.tokens,
            "generate/prefill_seconds": asked.clock.prefill_seconds,
            "generate/tokens_per_second": asked.clock.tokens_per_second(rows),
        },
        step=0,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """One completion: its text, why it ended, what it was given, and the conversation in front of it, if any."""

    text: str
    ended_by: str
    new_tokens: int
    prompt_tokens: int
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """How to ask, whatever is asked."""

    model: SequenceModel
    tokenizer: Tokenizer
    config: GenerationConfig
    num_samples: int
    seed: int
    stops: Sequence[str]
    write: Callable[[str], object] | None
    clock: TokenClock

    def answer(
        self, prompt: str, system: str, retriever: MultiHopRetriever | None, max_seq_len: int
    ) -> list[_Sample]:
        """Answer a user's turn, behind what is found for it."""
        from refragkit.data.conversation import conversation_from_hops, render_prompt
        from refragkit.retrievers.planners.model import ModelPlanner
        from refragkit.tasks.retrieval import log_hop

        if retriever is not None and isinstance(retriever.planner, ModelPlanner):
            return self._live(prompt, system, retriever, max_seq_len)
        hops = () if retriever is None else retriever.retrieve([Question("prompt", prompt, ())])[0]
        for hop in hops:
            log_hop(hop)
        conversation = conversation_from_hops(prompt, hops, system=system, conversation_id="prompt")
        ids = render_prompt(conversation, self.tokenizer, max_seq_len, self.config.max_new_tokens)
        return self.continue_ids(ids, conversation)

    def continue_ids(self, ids: list[int], conversation: Conversation | None = None) -> list[_Sample]:
        """Continue a prompt as it is."""
        from refragkit.generation.engine import generate as decode
        from refragkit.generation.text_stream import TextStream, ended_by

        streams = [TextStream(self.tokenizer, self.stops, self.write) for _ in range(self.num_samples)]

        def hear(row: int, sample: int, token_id: int) -> bool:
            self.clock.tick()
            return streams[sample].push(token_id)

        (completions,) = decode(
            self.model,
            [ids],
            self.config,
            pad_id=self.tokenizer.pad_id,
            seed=self.seed,
            num_samples=self.num_samples,
            on_token=hear,
            max_batch_tokens=_PREFILL_TOKENS,
        )
        texts = [stream.finish() for stream in streams]
        if self.config.temperature == 0:  # decoded once
            texts = texts[:1] * self.num_samples
        return [
            _Sample(text, ended_by(completion), len(completion.token_ids), len(ids), conversation)
            for text, completion in zip(texts, completions, strict=True)
        ]

    def _live(
        self, prompt: str, system: str, retriever: MultiHopRetriever, max_seq_len: int
    ) -> list[_Sample]:
        """Answer in rollouts, in which the model may search."""
        from refragkit.data.conversation import PromptTooLongError, conversation_from_hops
        from refragkit.generation.answer_stream import AnswerStream
        from refragkit.methods.episodes import EpisodeBuilder
        from refragkit.methods.rollouts import Rollout, first_written_hop, roll_out
        from refragkit.tasks.retrieval import log_hop
        from refragkit.types import Message

        greedy = self.config.temperature == 0
        turns: dict[int, tuple[int, AnswerStream]] = {}
        said: dict[int, int] = {}
        episodes = EpisodeBuilder(
            retriever,
            self.tokenizer,
            max_seq_len,
            self.config.max_new_tokens,
            front=lambda question: [Message("system", system)] if system else [],
        )

        def say(rollout: Rollout) -> None:
            for hop in rollout.hops[said.get(id(rollout), 0) :]:
                log_hop(hop)
            said[id(rollout)] = len(rollout.hops)

        def hear(rollout: Rollout, token_id: int) -> bool:
            turn = turns.get(id(rollout))
            if turn is None or turn[0] != rollout.searches:  # one begins
                if turn is not None and (greedy or self.num_samples == 1):
                    self.clock.begin()
                if self.write is not None:  # what was found stands in front of the answer
                    say(rollout)
                turn = (rollout.searches, AnswerStream(self.tokenizer, self.stops, self.write))
                turns[id(rollout)] = turn
            self.clock.tick()
            return turn[1].push(token_id)

        rollouts = roll_out(
            self.model,
            self.tokenizer,
            episodes,
            [Question("prompt", prompt, ())],
            group_size=1 if greedy else self.num_samples,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            seed=self.seed,
            prefill_tokens=_PREFILL_TOKENS,
            listener=hear,
        ).all
        if not rollouts[0].token_ids:
            raise PromptTooLongError(
                f"prompt: the question and {self.config.max_new_tokens} tokens for each of"
                f" {retriever.max_hops} queries and the answer don't fit into max_seq_len={max_seq_len}; raise that,"
                " or lower max_new_tokens or retriever.max_hops"
            )
        for number, rollout in enumerate(rollouts):
            if len(rollouts) > 1:
                log.info("sample %d:", number)
            say(rollout)
        samples = [
            _Sample(
                turns[id(rollout)][1].finish(),
                {"end_token": "stop_token"}.get(rollout.ended, rollout.ended),
                sum(rollout.written),
                rollout.prompt_tokens,
                conversation_from_hops(
                    prompt,
                    rollout.hops,
                    system=system,
                    conversation_id="prompt",
                    written_from_hop=first_written_hop(episodes),
                ),
            )
            for rollout in rollouts
        ]
        return samples * self.num_samples if greedy else samples


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
