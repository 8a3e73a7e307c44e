"""States after the beginnings of prompts, kept so that the same documents are not read twice.

A prompt is looked up by its token ids: the longest beginning that was kept is where reading goes on, and only the rest
is read. A beginning matches as a whole, token by token, or not at all, so documents that come first serve every
question behind them (``documents_first``), and a question that comes first only itself. Prompts of one batch share what
they have in common before anything was kept: it is read once and forked.

Where a state is kept: behind the documents of a prompt, and behind what all prompts begin with (a system turn, solved
examples). It is keyed by everything that it depends on: the model's weights with their adapter (all values, as they
are in memory now: a training step means another key), the tokenizer, the precision and the device's kind, and the ids.

Costs: a state of its own for each kept beginning, which attention blocks let grow with every token and recurrent ones
don't; one more forward pass for each batch that has something to keep; and hashing the weights once.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from refragkit.adapters.lora import lora_layers
from refragkit.generation.concatenate import concatenate_states
from refragkit.generation.engine import GenerationConfig, generate_with_state
from refragkit.generation.state_files import StateFiles
from refragkit.models.base import SequenceModel
from refragkit.models.state import ModelState
from refragkit.models.weights_hash import hash_tensors

if TYPE_CHECKING:
    from refragkit.data.conversation import Rendered
    from refragkit.data.tokenizer import Tokenizer
    from refragkit.retrievers.state_cache import StateCacheSettings

log = logging.getLogger("refragkit")

_FORMAT = 1
MIN_PREFIX_TOKENS = 32
"""A shorter beginning takes less time to read than to look after."""


@dataclass(slots=True)
class StateCacheCounts:
    """What a cache was asked for so far.

    Attributes:
        prompts: that were begun.
        hits: of these, the ones of which all that is worth keeping had been read already.
        prompt_tokens: in all of them.
        tokens_not_read: of these, what was read already, for an earlier prompt or for one beside it.
    """

    prompts: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    tokens_not_read: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per prompt; 0 before the first."""
        return self.hits / self.prompts if self.prompts else 0.0

    def text(self) -> str:
        """One line for the screen."""
        return (
            f"state cache: {self.hits:,} of {self.prompts:,} prompts went on from kept documents (hit rate"
            f" {self.hit_rate:.1%}); {self.tokens_not_read:,} of {self.prompt_tokens:,} prompt tokens weren't read"
        )


@dataclass(slots=True)
class _Prompt:
    """A prompt on its way: what it has reached, from what state, and where it stops next."""

    ids: Sequence[int]
    stops: list[int]
    keys: dict[int, str]
    reached: int = 0
    read_tokens: int = 0
    state: ModelState | None = None

    @property
    def next_stop(self) -> int | None:
        return next((stop for stop in self.stops if stop > self.reached), None)


@dataclass(slots=True)
class StateCache:
    """Kept states, the least recently used ones dropped where room is short.

    Args:
        max_bytes: of all states in memory together.
        tokenizer_fingerprint: of the tokenizer that made the prompts.
        files: where states are kept beyond the process; None for nowhere.

    Attributes:
        counts: what was asked for.
        nbytes: what is in memory now.
    """

    max_bytes: int
    tokenizer_fingerprint: str = ""
    files: StateFiles | None = None
    counts: StateCacheCounts = field(default_factory=StateCacheCounts)
    nbytes: int = 0
    _kept: OrderedDict[str, tuple[int, ModelState]] = field(default_factory=OrderedDict)
    _weights: tuple[object, str] = (None, "")
    _warned: bool = False

    def begin(
        self,
        model: SequenceModel,
        prompts: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
        *,
        pad_id: int,
        max_batch_tokens: int | None = None,
    ) -> ModelState | None:
        """Read prompts as far as they are worth keeping, from what is kept.

        Args:
            model: reads; as it is now.
            prompts: N lists of token ids, none empty.
            ends: for each prompt, the lengths of beginnings that are worth keeping; those of fewer than
                `MIN_PREFIX_TOKENS` and those that leave nothing to read are not.
            pad_id: fills short rows.
            max_batch_tokens: see `refragkit.generation.engine.generate`.

        Returns:
            A state with N rows, of which row i has read the first ``lengths[i]`` tokens of prompt i, at least one less
            than there are; None where no prompt has such a beginning. It may be continued in any way: it shares no
            memory with what is kept.
        """
        identity = self._identity(model)
        on_disk = {} if self.files is None else self.files.names()
        lengths = {tokens for tokens, _ in self._kept.values()} | set(on_disk.values())
        device = model.head_weight.device
        rows = []
        for ids, stops in zip(prompts, ends, strict=True):
            stops = sorted({stop for stop in stops if MIN_PREFIX_TOKENS <= stop < len(ids)})
            row = _Prompt(ids, stops, _prefix_keys(identity, ids, lengths.union(stops)))
            for tokens in sorted(lengths & row.keys.keys(), reverse=True):
                row.state = self._get(row.keys[tokens], tokens, on_disk, device)
                if row.state is not None:
                    row.reached = tokens
                    break
            rows.append(row)
        while self._advance(model, rows, pad_id, max_batch_tokens):
            pass
        for row in rows:
            not_read = row.reached - row.read_tokens
            self.counts.prompts += 1
            self.counts.hits += row.reached > 0 and not row.read_tokens
            self.counts.prompt_tokens += len(row.ids)
            self.counts.tokens_not_read += not_read
        return _joined(model, [row.state for row in rows])

    def starter(
        self, model: SequenceModel, tokenizer: Tokenizer, prompts: Sequence[Rendered], max_batch_tokens: int
    ) -> Callable[[Sequence[int]], ModelState | None]:
        """`begin` for parts of a list of prompts, by their positions; empty prompts get no row.

        Worth keeping are the documents of each prompt, and what all prompts begin with.
        """
        front = common_prefix([prompt.input_ids for prompt in prompts if prompt.input_ids])

        def ends(prompt: Rendered) -> tuple[int, ...]:
            end = prompt.documents_end
            return (end,) if 0 < end <= front else (front, end)

        def begin(positions: Sequence[int]) -> ModelState | None:
            chosen = [prompts[i] for i in positions if prompts[i].input_ids]
            return self.begin(
                model,
                [prompt.input_ids for prompt in chosen],
                [ends(prompt) for prompt in chosen],
                pad_id=tokenizer.pad_id,
                max_batch_tokens=max_batch_tokens,
            )

        return begin

    def _advance(
        self, model: SequenceModel, rows: Sequence[_Prompt], pad_id: int, max_batch_tokens: int | None
    ) -> bool:
        """Read every prompt to its next stop in one batch, what several have in common once; False without any."""
        going: dict[str, list[_Prompt]] = {}
        for row in rows:
            if row.next_stop is not None:
                going.setdefault(row.keys[row.next_stop], []).append(row)
        if not going:
            return False
        firsts = [alike[0] for alike in going.values()]
        read = generate_with_state(
            model,
            [row.ids[row.reached : row.next_stop] for row in firsts],
            GenerationConfig(max_new_tokens=0),
            pad_id=pad_id,
            state=_joined(model, [row.state for row in firsts]),
            max_batch_tokens=max_batch_tokens,
        ).state
        for n, (key, alike) in enumerate(going.items()):
            state = read.select([n]).compact()
            first = alike[0]
            stop = first.next_stop
            assert stop is not None
            first.read_tokens += stop - first.reached
            self._put(key, stop, state)
            if self.files is not None:
                self.files.write(key, stop, state)
            for row in alike:
                row.state, row.reached = state, stop
        return True

    def metrics(self) -> dict[str, float]:
        """The counts as an evaluation logs them, tokens as means over prompts."""
        counts = self.counts
        return {
            "state_cache_hit_rate": counts.hit_rate,
            "state_cache_tokens_not_read": counts.tokens_not_read / max(1, counts.prompts),
            "state_cache_bytes": float(self.nbytes),
        }

    # --- what is kept -----------------------------------------------------------------------------------------

    def _get(self, key: str, tokens: int, on_disk: dict[str, int], device: torch.device) -> ModelState | None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        if self.files is None or on_disk.get(key) != tokens:
            return None
        state = self.files.read(key, tokens, device)
        if state is None:
            del on_disk[key]
        else:
            self._put(key, tokens, state)
        return state

    def _put(self, key: str, tokens: int, state: ModelState) -> None:
        size = state.nbytes
        if size > self.max_bytes:
            if not self._warned:
                log.warning(
                    "the state after %d tokens takes %s bytes and is not kept: retriever.state_cache.max_bytes=%s",
                    tokens,
                    f"{size:,}",
                    f"{self.max_bytes:,}",
                )
            self._warned = True
            return
        if key in self._kept:
            self.nbytes -= self._kept.pop(key)[1].nbytes
        while self.nbytes + size > self.max_bytes:
            self.nbytes -= self._kept.popitem(last=False)[1][1].nbytes
        self._kept[key] = (tokens, state)
        self.nbytes += size

    # --- what it is a state of --------------------------------------------------------------------------------

    def _identity(self, model: SequenceModel) -> bytes:
        """Everything besides token ids that a state depends on."""
        versions = [_version(tensor) for tensor in model.state_dict(keep_vars=True).values()]
        stamp = (model, versions, [layer.scaling for _, layer in lora_layers(model)])
        if stamp != self._weights[0]:
            self._weights = (stamp, weights_key(model))
        device = model.head_weight.device.type
        computed_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        parts = [_FORMAT, self._weights[1], self.tokenizer_fingerprint, device, computed_in]
        return "\n".join(map(str, [*parts, torch.get_float32_matmul_precision()])).encode()


def open_state_cache(settings: StateCacheSettings, tokenizer: Tokenizer) -> StateCache:
    """The cache that a configuration asks for.

    Raises:
        ConfigError: its folder can't be made.
    """
    files = None
    if settings.path is not None:
        limit = settings.max_bytes if settings.path_max_bytes is None else settings.path_max_bytes
        files = StateFiles(Path(settings.path).expanduser(), limit).open()
    return StateCache(settings.max_bytes, tokenizer.fingerprint, files)


def weights_key(model: SequenceModel) -> str:
    """sha256 of a loaded model with its adapter: the architecture, all values, and the adapter's factors."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    hash_tensors(digest, model)
    for path, layer in lora_layers(model):
        digest.update(f"{path} {layer.scaling!r}".encode())
    return digest.hexdigest()


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts begin with; 0 of fewer than two."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)  # all others lie between them
    return next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )


def _prefix_keys(identity: bytes, ids: Sequence[int], lengths: Iterable[int]) -> dict[int, str]:
    """The key of each beginning that leaves a token to read, by its length."""
    digest, keys, start = hashlib.sha256(identity), dict[int, str](), 0
    for tokens in sorted(lengths):
        if not 0 < tokens < len(ids):
            continue
        digest.update(torch.tensor(ids[start:tokens], dtype=torch.int64).numpy().data)
        keys[tokens], start = digest.hexdigest(), tokens
    return keys


def _joined(model: SequenceModel, states: Sequence[ModelState | None]) -> ModelState | None:
    """One batch of states of one row each, None standing for nothing read; None if that is all."""
    if all(state is None for state in states):
        return None
    nothing = torch.zeros((1, 0), dtype=torch.int64, device=model.head_weight.device)
    _, empty = model.hidden_states(nothing, return_state=True)
    assert empty is not None
    rows = [empty if state is None else state for state in states]
    return concatenate_states(rows) if len(rows) > 1 else rows[0].compact()


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after every change in place; of a tensor made in inference mode none is counted."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
