"""Batched generation with state: prompts are read once, forked into samples, and decoded token by token.

Every prompt is read once (the prefill) whatever the number of samples; its state is forked. Each decoding
step feeds one token to every row that is still open; rows that are done leave the batch, and their memory
with them. What a row generates does not depend on the rows beside it: padding is invisible to the models, and
each row has random numbers of its own.

Multi-hop: ``generate_with_state`` also returns the state after everything that was read and written. Pass it
to the next call with the new tokens only (the next hop's documents), and nothing is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from refragkit.errors import ConfigError, DataError, RefragError
from refragkit.generation.concatenate import concatenate_states
from refragkit.generation.sampling import RowGenerator, choose_tokens, token_logprobs
from refragkit.models.base import SequenceModel
from refragkit.models.state import ModelState

TokenListener = Callable[[int, int, int], bool]
"""Called as ``listener(prompt, sample, token_id)`` for each token as it is chosen, in order for each completion.
What it returns says whether that completion ends here."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How to pick tokens and when to stop.

    Attributes:
        max_new_tokens: at most this many tokens a row, the stop token included; >= 0.
        temperature: 0 always takes the likeliest token (greedy).
        top_p: sample from the fewest likeliest tokens that hold this much probability, in (0, 1].
        top_k: sample from this many of the likeliest tokens; 0 from all.
        stop_ids: a row is finished by any of these tokens.

    Raises:
        ConfigError: for a value out of its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens: expected a number >= 0, got {self.max_new_tokens!r}.")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature: expected a finite number >= 0, got {self.temperature!r}.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number in (0, 1], got {self.top_p!r}.")
        if self.top_k < 0:
            raise ConfigError(f"top_k: expected a number >= 0 (0 keeps all tokens), got {self.top_k!r}.")


@dataclass(frozen=True, slots=True)
class Completion:
    """What one row generated.

    Attributes:
        token_ids: the generated tokens, the stop token included where one was seen.
        finished: whether a stop token ended it; False where it ran out of ``max_new_tokens``.
        interrupted: whether the listener ended it, at a stop string for example, and no stop token did.
        logprobs: natural log-probability of each token under the model itself (temperature 1, nothing cut
            off); None where not asked for.
    """

    token_ids: tuple[int, ...]
    finished: bool
    logprobs: tuple[float, ...] | None = None
    interrupted: bool = False

    @property
    def content_ids(self) -> tuple[int, ...]:
        """The tokens without the stop token."""
        return self.token_ids[:-1] if self.finished else self.token_ids


@dataclass(frozen=True, slots=True)
class Generated:
    """Completions with the state behind them.

    Attributes:
        completions: ``[prompt][sample]``.
        state: one row per completion, ordered by prompt, then sample; it has read the prompt and all of
            ``token_ids``.
    """

    completions: list[list[Completion]]
    state: ModelState


@dataclass(slots=True)
class _Row:
    """A completion in the making."""

    prompt: int
    sample: int
    generator: RowGenerator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    interrupted: bool = False


def generate(
    model: SequenceModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    pad_id: int,
    seed: int = 0,
    num_samples: int = 1,
    state: ModelState | None = None,
    return_logprobs: bool = False,
    max_batch_tokens: int | None = None,
    on_token: TokenListener | None = None,
) -> list[list[Completion]]:
    """Continues each prompt ``num_samples`` times, in eval mode and without gradients.

    Args:
        model: stays as it was; each module's training flag is restored.
        prompts: token ids, of any lengths, none empty. With ``state``, only the tokens that follow it.
        config: how to pick tokens and when to stop.
        pad_id: the token that fills short rows; it has no influence on the result.
        seed: sample s of prompt i draws from a generator seeded by (seed, i, s).
        num_samples: completions per prompt; with temperature 0 they are all the same.
        state: one row per prompt, from an earlier call; it is not changed.
        return_logprobs: also record the log-probability of each generated token.
        max_batch_tokens: read the prompts in groups of at most this many tokens, padding included, which
            bounds the memory for activations; a longer prompt is read in pieces. None reads all at once.
        on_token: hears of every token, stop tokens included, as soon as it is chosen, and may end a completion.
            Greedy samples are decoded once: only sample 0 is heard of.

    Returns:
        ``[prompt][sample]``.

    Raises:
        DataError: for an empty prompt or a token id outside the vocabulary, naming the row.
        ConfigError: for ``num_samples`` or ``max_batch_tokens`` below 1, or a state with another number of
            rows.
        RefragError: when the model's logits are not numbers.
    """
    with torch.inference_mode(), _eval_mode(model), _casts_kept(model):
        completions, _ = _generate(
            model,
            prompts,
            config,
            pad_id=pad_id,
            seed=seed,
            num_samples=num_samples,
            state=state,
            return_logprobs=return_logprobs,
            max_batch_tokens=max_batch_tokens,
            on_token=on_token,
            keep_state=False,
        )
    return completions


def generate_with_state(
    model: SequenceModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    pad_id: int,
    seed: int = 0,
    num_samples: int = 1,
    state: ModelState | None = None,
    return_logprobs: bool = False,
    max_batch_tokens: int | None = None,
    on_token: TokenListener | None = None,
) -> Generated:
    """The same as ``generate``, and the state after the last token of each completion.

    It costs one more step a row, for the last token. The state may be used with gradients afterwards.
    """
    # Not inference mode: its tensors could never take part in autograd later.
    with torch.no_grad(), _eval_mode(model), _casts_kept(model):
        completions, final = _generate(
            model,
            prompts,
            config,
            pad_id=pad_id,
            seed=seed,
            num_samples=num_samples,
            state=state,
            return_logprobs=return_logprobs,
            max_batch_tokens=max_batch_tokens,
            on_token=on_token,
            keep_state=True,
        )
    if final is None:
        raise ConfigError("generate_with_state: expected at least one prompt, got none.")
    return Generated(completions, final)


def _generate(
    model: SequenceModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    pad_id: int,
    seed: int,
    num_samples: int,
    state: ModelState | None,
    return_logprobs: bool,
    max_batch_tokens: int | None,
    on_token: TokenListener | None,
    keep_state: bool,
) -> tuple[list[list[Completion]], ModelState | None]:
    """Checks the arguments, reads the prompts, forks, decodes, and groups the rows by prompt."""
    if num_samples < 1:
        raise ConfigError(f"num_samples: expected at least 1, got {num_samples}.")
    if max_batch_tokens is not None and max_batch_tokens < 1:
        raise ConfigError(f"max_batch_tokens: expected at least 1 or None, got {max_batch_tokens}.")
    if state is not None and state.batch_size != len(prompts):
        raise ConfigError(
            f"state: expected one row per prompt, got {state.batch_size} rows for {len(prompts)} prompts."
        )
    _check_prompts(prompts, model.vocab_size, continuing=state is not None)
    if not prompts:
        return [], None

    # Greedy samples of one prompt are the same: decode one.
    forks = 1 if config.temperature == 0 else num_samples
    rows = [
        _Row(prompt, sample, RowGenerator(seed, prompt, sample))
        for prompt in range(len(prompts))
        for sample in range(forks)
    ]
    final: ModelState | None = None
    if config.max_new_tokens > 0 or keep_state:
        logits, read = _prefill(model, prompts, state, pad_id, max_batch_tokens)
        if forks > 1:
            logits, read = logits.repeat_interleave(forks, dim=0), read.expand(forks)
        final = _decode(model, rows, logits, read, config, return_logprobs, on_token, keep_state)
        if final is not None and forks < num_samples:
            final = final.expand(num_samples)

    completions = [
        Completion(
            tuple(row.token_ids),
            row.finished,
            tuple(row.logprobs) if return_logprobs else None,
            row.interrupted,
        )
        for row in rows
    ]
    grouped = [completions[i * forks : (i + 1) * forks] * (num_samples // forks) for i in range(len(prompts))]
    return grouped, final


def _prefill(
    model: SequenceModel,
    prompts: Sequence[Sequence[int]],
    state: ModelState | None,
    pad_id: int,
    max_batch_tokens: int | None,
) -> tuple[Tensor, ModelState]:
    """Reads all prompts; returns the logits [B, V] after each one's last token, and the state there."""
    groups = _groups([len(prompt) for prompt in prompts], max_batch_tokens)
    logits, states = [], []
    for group in groups:
        before = state if state is None or len(groups) == 1 else state.select(group)
        piece = max_batch_tokens if max_batch_tokens and len(group) == 1 else None
        after = _read(model, [prompts[row] for row in group], before, pad_id, piece)
        logits.append(after[0])
        states.append(after[1])
    order = [row for group in groups for row in group]
    if order == list(range(len(prompts))):
        return torch.cat(logits), concatenate_states(states)
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(logits)[back], concatenate_states(states).select(back)


def _read(
    model: SequenceModel,
    prompts: Sequence[Sequence[int]],
    state: ModelState | None,
    pad_id: int,
    piece: int | None,
) -> tuple[Tensor, ModelState]:
    """Reads one group of prompts, right-padded; with ``piece``, that many columns at a time."""
    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), longest), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
        mask[row, : len(prompt)] = True
    attention_mask = None if bool(mask.all()) else mask.to(device)
    ids = ids.to(device)
    width = piece or longest
    for start in range(0, longest, width):
        output = model(
            ids[:, start : start + width],
            state=state,
            attention_mask=None if attention_mask is None else attention_mask[:, start : start + width],
            return_state=True,
            logits_to_keep=1,
        )
        state = output.state
    return _last_logits(output.logits), _present(state)


def _decode(
    model: SequenceModel,
    rows: list[_Row],
    logits: Tensor,
    state: ModelState,
    config: GenerationConfig,
    return_logprobs: bool,
    on_token: TokenListener | None,
    keep_state: bool,
) -> ModelState | None:
    """Generates into ``rows``; returns their final states, in order, if they are to be kept."""
    stop_ids = frozenset(config.stop_ids)
    active = list(range(len(rows)))
    done: list[int] = []
    done_states: list[ModelState] = []
    for step in range(config.max_new_tokens):
        tokens = _choose(logits, [rows[row] for row in active], config)
        logprobs = token_logprobs(logits, tokens).tolist() if return_logprobs else None
        last = step + 1 == config.max_new_tokens
        staying: list[int] = []
        leaving: list[int] = []
        for position, token in enumerate(tokens.tolist()):
            row = rows[active[position]]
            row.token_ids.append(token)
            row.finished = token in stop_ids
            if on_token is not None:
                row.interrupted = on_token(row.prompt, row.sample, token) and not row.finished
            if logprobs is not None:
                row.logprobs.append(logprobs[position])
            (leaving if row.finished or row.interrupted or last else staying).append(position)
        if not keep_state:
            # A finished row's last token needs not be read: it leaves before the step.
            if not staying:
                return None
            if leaving:
                state, tokens = state.select(staying), tokens[staying]
            logits, state = _step(model, tokens, state)
        else:
            logits, state = _step(model, tokens, state)
            if leaving:
                done += [active[position] for position in leaving]
                done_states.append(state.select(leaving) if staying else state)
                if not staying:
                    break
                logits, state = logits[staying], state.select(staying)
        active = [active[position] for position in staying]
    if not keep_state:
        return None
    if not done_states:  # max_new_tokens = 0: the state after the prompts
        return state
    final = concatenate_states(done_states)
    back = sorted(range(len(done)), key=done.__getitem__)
    return final if back == done else final.select(back)


def _step(model: SequenceModel, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    """Feeds one token [B] to each row; returns the next logits [B, V] and the new state. The old one is used up."""
    output = model(tokens[:, None], state=state.overwritable(), return_state=True, logits_to_keep=1)
    return _last_logits(output.logits), _present(output.state)


def _choose(logits: Tensor, rows: Sequence[_Row], config: GenerationConfig) -> Tensor:
    """Picks each row's next token [B]."""
    if bool(logits.amax(dim=-1).isnan().any()):
        raise RefragError(
            "generate: the model's logits are not numbers (NaN). Its weights have diverged or a "
            "half-precision value overflowed; use an earlier checkpoint or full precision."
        )
    uniforms = None
    if config.temperature > 0:
        uniforms = torch.tensor([row.generator.uniform() for row in rows], dtype=torch.float64)
    return choose_tokens(
        logits, uniforms, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
    )


def _groups(lengths: Sequence[int], max_batch_tokens: int | None) -> list[list[int]]:
    """Splits rows into groups of at most ``max_batch_tokens``, padding included; similar lengths together."""
    if max_batch_tokens is None or len(lengths) * max(lengths) <= max_batch_tokens:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    # Longest first: a group's first row sets its width, and the largest allocation comes first.
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_batch_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, *, continuing: bool) -> None:
    """Refuses prompts that can't be read."""
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            what = (
                "a continuation needs at least one new token"
                if continuing
                else "there is nothing to continue"
            )
            raise DataError(f"generate: prompt {row} is empty; {what}.")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"generate: prompt {row} holds token id {low if low < 0 else high}; the model's vocabulary "
                f"is [0, {vocab_size}). Use the tokenizer that the model was built with."
            )


def _last_logits(logits: Tensor) -> Tensor:
    """[B, 1, V] -> [B, V]."""
    return logits[:, -1]


def _present(state: ModelState | None) -> ModelState:
    """The state that a forward pass with ``return_state=True`` gave."""
    if state is None:
        raise TypeError("the model returned no state although it was asked for one")
    return state


@contextmanager
def _casts_kept(model: SequenceModel) -> Iterator[None]:
    """Under autocast, weights are cast once and not for every token: nothing updates them meanwhile."""
    device = model.head_weight.device.type
    if not torch.is_autocast_enabled(device):
        yield
        return
    try:
        with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=True):
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switches to eval mode and gives every module its own training flag back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
