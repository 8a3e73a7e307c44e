"""Kept states against reading everything again, on the real stacks: values, batches, bounds and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from refragkit.adapters.lora import LoRA, lora_layers
from refragkit.data.conversation import Rendered
from refragkit.data.tokenizer import Tokenizer
from refragkit.generation.engine import GenerationConfig, generate
from refragkit.generation.state_cache import MIN_PREFIX_TOKENS, StateCache, common_prefix
from refragkit.models.base import SequenceModel
from refragkit.models.build import build_from_config, hybrid, mamba, rwkv_qwen, transformer
from refragkit.models.config import ModelConfig
from tests.generation.kept_states import (
    DOCUMENTS,
    ENDS,
    PAD,
    PROMPTS,
    QUESTIONS,
    ROOM,
    VOCAB,
    begin,
    check,
    ids,
)


def _build(factory: Any, **options: Any) -> SequenceModel:
    model: SequenceModel = factory(size="tiny", vocab_size=VOCAB, tie_embeddings=False, seed=1, **options)
    return model.eval()


CHANNEL_MIX = ModelConfig(
    block_pattern="RR",
    d_model=64,
    vocab_size=VOCAB,
    mlp="channel_mix",
    d_ff=96,
    wkv_head_dim=32,
    norm="layer",
    embedding_norm=True,
    tie_embeddings=False,
)
FACTORIES: dict[str, Callable[[], SequenceModel]] = {
    "T": lambda: _build(transformer),
    "M": lambda: _build(mamba),
    "R": lambda: _build(rwkv_qwen, block_pattern="RR"),
    "RWKV-7 and attention": lambda: _build(rwkv_qwen),
    "hybrid": lambda: _build(hybrid),
    "all kinds": lambda: _build(hybrid, block_pattern="TMRTRM", wkv_head_dim=32),
    "RWKV-7 with channel mix": lambda: build_from_config(CHANNEL_MIX).eval(),
}


@pytest.fixture(scope="module", params=FACTORIES)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    return FACTORIES[request.param]()


@pytest.fixture(scope="module")
def mixed() -> SequenceModel:
    return FACTORIES["all kinds"]()


def test_kept_equals_read_again(model: SequenceModel) -> None:
    cache = StateCache(ROOM)
    first = begin(cache, model)  # reads, and forks what rows have in common
    assert first.lengths.tolist() == [40, 57, 40, 33, 0]
    check(model, first)
    assert (cache.counts.prompts, cache.counts.hits, cache.counts.tokens_not_read) == (5, 1, 40)
    second = begin(cache, model)  # reads nothing
    check(model, second)
    assert (cache.counts.prompts, cache.counts.hits) == (10, 5)
    assert cache.counts.tokens_not_read == 40 + 40 + 57 + 40 + 33
    assert cache.counts.prompt_tokens == 2 * sum(map(len, PROMPTS))


def test_a_batch_of_hits_and_misses_is_read_together(
    mixed: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = StateCache(ROOM)
    begin(cache, mixed, PROMPTS[:1], [[36]])  # the beginning of what the others begin with
    shapes = []
    forward = type(mixed).forward

    def recording(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(mixed), "forward", recording)
    state = begin(cache, mixed)
    # One pass: 4 tokens behind the 36 for two prompts at once, 57 and 33 from nothing; padded to 57.
    assert shapes == [(3, 57)]
    assert cache.counts.tokens_not_read == 36 + 40
    check(mixed, state)


def test_prefixes_of_prefixes(mixed: SequenceModel) -> None:
    """A common front, then documents: each kept, each found as far as it matches."""
    front = ids(7, MIN_PREFIX_TOKENS)
    prompts = [front + prompt for prompt in PROMPTS]
    ends = [[len(front), *(len(front) + end for end in stops)] for stops in ENDS]
    cache = StateCache(ROOM)
    state = begin(cache, mixed, prompts, ends)
    assert state.lengths.tolist() == [32 + 40, 32 + 57, 32 + 40, 32 + 33, 32]
    check(mixed, state, prompts)
    # The front is read for the first, the documents of the first two once
    assert cache.counts.tokens_not_read == 32 + (32 + 40) + 32 + 32
    assert (
        cache.counts.hits == 2
    )  # the second question about the documents, and the prompt that has no others
    other = [front + DOCUMENTS[0][:-1] + [1 + DOCUMENTS[0][-1] % 40] + QUESTIONS[0]]
    before = cache.counts.tokens_not_read
    check(mixed, begin(cache, mixed, other, [[32, 72]]), other)
    assert cache.counts.tokens_not_read - before == 32


def test_the_longest_kept_beginning_is_taken_wherever_a_prompt_would_stop(mixed: SequenceModel) -> None:
    cache = StateCache(ROOM)
    begin(cache, mixed, PROMPTS[:1], [[35, 40]])
    state = begin(cache, mixed, [PROMPTS[2]], [[]])
    assert state.lengths.tolist() == [40]
    # Never the whole prompt: its last token has to be read for the logits behind it.
    state = begin(cache, mixed, [DOCUMENTS[0]], [[40]])
    assert state.lengths.tolist() == [35]
    check(mixed, state, [DOCUMENTS[0]])
    assert cache.begin(mixed, [DOCUMENTS[1]], [[57, 9]], pad_id=PAD) is None


@pytest.mark.parametrize("max_batch_tokens", [7, 60, 100])
def test_reading_in_groups_changes_nothing(mixed: SequenceModel, max_batch_tokens: int) -> None:
    check(mixed, begin(StateCache(ROOM), mixed, max_batch_tokens=max_batch_tokens))


def test_generation_goes_on_from_it_and_leaves_it_as_it_is(model: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=8)
    want = generate(model, PROMPTS, config, pad_id=PAD)
    cache = StateCache(ROOM)
    begin(cache, model)
    kept = {key: state for key, (_, state) in cache._kept.items()}
    before = [tensor.clone() for state in kept.values() for tensor in state.tensors()]
    for _ in range(2):
        for rows in ([0, 1, 2, 3, 4], [2]):
            prompts = [PROMPTS[i] for i in rows]
            state = begin(cache, model, prompts, [ENDS[i] for i in rows])
            rests = [prompt[n:] for prompt, n in zip(prompts, state.lengths.tolist(), strict=True)]
            # What generation may overwrite is its own
            got = generate(model, rests, config, pad_id=PAD, state=state.overwritable())
            assert got == [want[i] for i in rows]
    assert {key: state for key, (_, state) in cache._kept.items()} == kept
    after = [tensor for state in kept.values() for tensor in state.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bounded_in_bytes_and_least_recently_used_first(model: SequenceModel) -> None:
    sizes = [begin(StateCache(ROOM), model, [PROMPTS[i]], [ENDS[i]]).nbytes for i in (0, 1, 3)]
    assert sizes[0] == model.state_bytes(1, 40)
    cache = StateCache(max(sizes[0] + sizes[1], sizes[0] + sizes[2]))
    for i in (0, 1, 0, 3):  # the second documents are the oldest when the third need room
        begin(cache, model, [PROMPTS[i]], [ENDS[i]])
        assert cache.nbytes <= cache.max_bytes
        assert cache.nbytes == sum(kept.nbytes for _, kept in cache._kept.values())
    assert cache.nbytes == sizes[0] + sizes[2]
    hits = []
    for i in (0, 3, 1):
        before = cache.counts.hits
        check(model, begin(cache, model, [PROMPTS[i]], [ENDS[i]]), [PROMPTS[i]])
        hits.append(cache.counts.hits - before)
    assert hits == [1, 1, 0]


def test_kept_states_hold_no_more_memory_than_they_say(mixed: SequenceModel) -> None:
    cache = StateCache(ROOM)
    begin(cache, mixed)
    tensors = [tensor for _, kept in cache._kept.values() for tensor in kept.tensors()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == cache.nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_a_state_that_is_too_large_is_used_and_not_kept(
    mixed: SequenceModel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = StateCache(100)
    for _ in range(2):
        check(mixed, begin(cache, mixed))
    assert cache.nbytes == 0 and cache.counts.hits == 2  # rows beside each other still share
    (warning,) = [r.message for r in caplog.records if "not kept" in r.message]
    assert "retriever.state_cache.max_bytes=100" in warning


# --- keys -------------------------------------------------------------------------------------------------


def _hits(cache: StateCache, model: SequenceModel, prompt: Sequence[int] = PROMPTS[0]) -> int:
    before = cache.counts.hits
    begin(cache, model, [prompt], [[40]])
    return cache.counts.hits - before


def test_other_weights_are_another_model() -> None:
    cache = StateCache(ROOM)
    model = FACTORIES["hybrid"]()
    assert [_hits(cache, model), _hits(cache, model)] == [0, 1]
    assert _hits(cache, FACTORIES["hybrid"]()) == 1  # the same one, loaded again
    changed = FACTORIES["hybrid"]()
    with torch.no_grad():
        changed.get_parameter("norm.weight")[-1] += 1e-3
    assert _hits(cache, changed) == 0
    other: SequenceModel = hybrid(size="tiny", vocab_size=VOCAB, tie_embeddings=False, seed=2).eval()
    assert _hits(cache, other) == 0


def test_weights_that_change_under_it_are_noticed() -> None:
    cache = StateCache(ROOM)
    model = FACTORIES["hybrid"]()
    assert [_hits(cache, model), _hits(cache, model)] == [0, 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([PROMPTS[0]])).logits.square().mean().backward()
    optimizer.step()
    assert _hits(cache, model) == 0
    check(model, begin(cache, model))
    loaded = FACTORIES["hybrid"]()
    model.load_state_dict(loaded.state_dict())
    assert _hits(cache, model) == 1  # as it was at first


def test_adapters_tell_models_apart() -> None:
    def adapted(alpha: float, seed: int = 0) -> SequenceModel:
        model = FACTORIES["hybrid"]()
        LoRA(rank=4, alpha=alpha).apply(model)
        for _, layer in lora_layers(model):
            torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(seed))
        return model.eval()

    cache = StateCache(ROOM)
    assert _hits(cache, FACTORIES["hybrid"]()) == 0
    model = adapted(8)
    assert [
        _hits(cache, model),
        _hits(cache, adapted(8)),
        _hits(cache, adapted(16)),
        _hits(cache, adapted(8, 1)),
    ] == [
        0,
        1,
        0,
        0,
    ]
    with torch.no_grad():
        next(layer for _, layer in lora_layers(model)).lora_B[0, 0] += 1e-3
    assert _hits(cache, model) == 0
    check(model, begin(cache, model))


def test_tokenizer_and_tokens_tell_prompts_apart() -> None:
    model = FACTORIES["hybrid"]()
    cache = StateCache(ROOM, "one tokenizer")
    assert [_hits(cache, model), _hits(cache, model)] == [0, 1]
    for place in (0, 20, 39):
        other = list(PROMPTS[0])
        other[place] = 1 + other[place] % (VOCAB - 1)
        assert _hits(cache, model, other) == 0
    cache.tokenizer_fingerprint = "another tokenizer"
    assert _hits(cache, model) == 0


def test_precisions_tell_states_apart() -> None:
    cache = StateCache(ROOM)
    model = FACTORIES["all kinds"]()
    assert [_hits(cache, model), _hits(cache, model)] == [0, 1]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert [_hits(cache, model), _hits(cache, model)] == [0, 1]
    half = FACTORIES["all kinds"]().to(torch.bfloat16)
    assert [_hits(cache, half), _hits(cache, half), _hits(cache, model)] == [0, 1, 1]


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_lower_precision_generates_the_same(precision: str) -> None:
    """Kept states are those of reading in the same two parts, bit for bit."""
    model = FACTORIES["all kinds"]()
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast", cache_enabled=False):
        cache = StateCache(ROOM)
        first, second = (begin(cache, model) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))
        kept = [kept for _, kept in cache._kept.values() if int(kept.lengths) == 40]
        alone = model(torch.tensor([DOCUMENTS[0]]), return_state=True).state
        for a, b in zip(kept[0].tensors(), alone.tensors(), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.float(), b.float(), atol=0.05, rtol=0.05)


# --- prompts of an evaluation -------------------------------------------------------------------------------


def test_common_prefix() -> None:
    assert common_prefix([]) == common_prefix([[1, 2]]) == 0
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == 2
    assert common_prefix([[1], [2, 1]]) == 0
    assert common_prefix([[1, 2]] * 2) == 2


def test_starter_keeps_documents_and_what_all_begin_with(mixed: SequenceModel) -> None:
    tokenizer = Tokenizer.train(["a b c"] * 3, 300)
    front = ids(7, MIN_PREFIX_TOKENS + 3)
    prompts = [
        Rendered(front + DOCUMENTS[0] + QUESTIONS[0], [], documents_end=75),
        Rendered([], [], dropped="too_long"),
        Rendered(front + QUESTIONS[1], []),
        Rendered(front + DOCUMENTS[0] + QUESTIONS[2], [], documents_end=75),
    ]
    cache = StateCache(ROOM)
    start = cache.starter(mixed, tokenizer, prompts, 1000)
    state = start([3, 1, 0])
    assert state is not None and state.lengths.tolist() == [75, 75]
    state = start([2])
    assert state is not None and state.lengths.tolist() == [35]
    assert sorted(tokens for tokens, _ in cache._kept.values()) == [35, 75]
    assert (cache.counts.prompts, cache.counts.hits) == (3, 2)
    # Questions that begin alike are no reason to keep the documents twice
    alike = [Rendered(DOCUMENTS[0] + [5, 6, n], [], documents_end=40) for n in (7, 8)]
    cache = StateCache(ROOM)
    cache.starter(mixed, tokenizer, alike, 1000)([0, 1])
    assert [tokens for tokens, _ in cache._kept.values()] == [40]
