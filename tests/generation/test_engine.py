"""Generation on the real stacks, against a plain loop that reads everything again for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from refragkit.errors import ConfigError, DataError, RefragError
from refragkit.generation.concatenate import concatenate_states
from refragkit.generation.engine import Completion, GenerationConfig, generate, generate_with_state
from refragkit.generation.sampling import RowGenerator, choose_tokens
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid, mamba, rwkv_qwen, transformer

VOCAB = 48
PAD = 0
PROMPTS = [[5, 9, 2], [7], [11, 3, 3, 8, 1, 30, 22], [4, 4, 40, 13]]
FACTORIES = [hybrid, rwkv_qwen, mamba, transformer]


def _spread(factory: Any, **options: Any) -> SequenceModel:
    """A tiny model whose logits lie well apart (deviation 2), so that float noise decides no token."""
    model: SequenceModel = factory(size="tiny", vocab_size=VOCAB, tie_embeddings=False, **options)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(10)
    return model


@pytest.fixture(scope="module", params=FACTORIES, ids=lambda f: f.__name__)
def model(request: pytest.FixtureRequest) -> SequenceModel:
    return _spread(request.param, seed=1)


@pytest.fixture(scope="module")
def mixed() -> SequenceModel:
    """All three kinds of blocks."""
    return _spread(hybrid, block_pattern="TMRTRM", wkv_head_dim=32)


@torch.no_grad()
def _reference(
    model: SequenceModel, prompt: Sequence[int], config: GenerationConfig, seed: int, row: int, sample: int
) -> tuple[tuple[int, ...], bool, tuple[float, ...]]:
    """One row alone, without state: the whole text again for every token."""
    training = model.training
    model.eval()
    generator, text, logprobs, finished = RowGenerator(seed, row, sample), list(prompt), [], False
    for _ in range(config.max_new_tokens):
        logits = model(torch.tensor([text])).logits[:, -1]
        uniforms = torch.tensor([generator.uniform()], dtype=torch.float64)
        token = choose_tokens(
            logits, uniforms, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
        )
        logprobs.append(torch.log_softmax(logits, -1)[0, token].item())
        text.append(int(token))
        finished = text[-1] in config.stop_ids
        if finished:
            break
    model.train(training)
    return tuple(text[len(prompt) :]), finished, tuple(logprobs)


def _tokens(results: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in row] for row in results]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.9, "top_k": 20}])
def test_equals_a_loop_without_state(model: SequenceModel, options: dict[str, Any]) -> None:
    # Four stop tokens out of 48: rows leave the batch at different steps.
    config = GenerationConfig(max_new_tokens=10, stop_ids=(6, 17, 25, 33), **options)
    results = generate(model, PROMPTS, config, pad_id=PAD, seed=3, num_samples=2, return_logprobs=True)
    assert [len(row) for row in results] == [2] * len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        for sample in range(2):
            tokens, finished, logprobs = _reference(model, prompt, config, 3, row, sample)
            completion = results[row][sample]
            assert (completion.token_ids, completion.finished) == (tokens, finished)
            assert completion.logprobs == pytest.approx(logprobs, rel=1e-3, abs=1e-3)
            assert completion.content_ids == (tokens[:-1] if finished else tokens)


def test_rows_do_not_depend_on_their_neighbours(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=8, temperature=1.0, stop_ids=(6, 17, 25))
    together = generate(mixed, PROMPTS, config, pad_id=PAD, seed=7, num_samples=3)
    # Row 0 alone, with other pad and other neighbours; fewer samples are a prefix of more.
    assert generate(mixed, PROMPTS[:1], config, pad_id=9, seed=7, num_samples=3) == together[:1]
    assert generate(mixed, [PROMPTS[0], [1] * 12], config, pad_id=PAD, seed=7)[0] == together[0][:1]
    shorter = GenerationConfig(max_new_tokens=3, temperature=1.0, stop_ids=(6, 17, 25))
    for short, long in zip(
        generate(mixed, PROMPTS, shorter, pad_id=PAD, seed=7, num_samples=3), together, strict=True
    ):
        assert [c.token_ids for c in short] == [c.token_ids[:3] for c in long]


def test_seeds_and_samples_differ_and_repeat(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=6, temperature=1.5)
    first = generate(mixed, PROMPTS[:1] * 2, config, pad_id=PAD, seed=0, num_samples=3)
    assert first == generate(mixed, PROMPTS[:1] * 2, config, pad_id=PAD, seed=0, num_samples=3)
    assert len({c.token_ids for row in first for c in row}) == 6
    assert first != generate(mixed, PROMPTS[:1] * 2, config, pad_id=PAD, seed=1, num_samples=3)


def test_global_generator_is_not_touched(mixed: SequenceModel) -> None:
    before = torch.get_rng_state()
    generate(mixed, PROMPTS, GenerationConfig(max_new_tokens=2, temperature=1.0), pad_id=PAD)
    assert torch.equal(before, torch.get_rng_state())


def test_greedy_samples_are_one_row_decoded_once(
    mixed: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    forward = type(mixed).forward

    def counting(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        batches.append(tuple(input_ids.shape))
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(mixed), "forward", counting)
    config = GenerationConfig(max_new_tokens=3)
    results = generate(mixed, PROMPTS, config, pad_id=PAD, num_samples=4)
    # One prefill, and no step after the last token.
    assert batches == [(4, 7), (4, 1), (4, 1)]
    assert all(len(set(row)) == 1 and len(row) == 4 for row in results)


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 8, 14, 1000])
@pytest.mark.parametrize("with_state", [False, True])
def test_reading_in_groups_changes_nothing(
    mixed: SequenceModel, max_batch_tokens: int, with_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = None
    if with_state:
        hop = GenerationConfig(max_new_tokens=2)
        state = generate_with_state(mixed, [[1, 2], [3], [4, 5, 6], [7]], hop, pad_id=PAD).state
    config = GenerationConfig(max_new_tokens=6, temperature=0.8, stop_ids=(6, 17))
    options: dict[str, Any] = {"pad_id": PAD, "seed": 2, "num_samples": 2, "state": state}
    want = generate(mixed, PROMPTS, config, **options)
    forward, sizes = type(mixed).forward, []

    def measuring(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        sizes.append(input_ids.numel())
        return forward(self, input_ids, **rest)

    monkeypatch.setattr(type(mixed), "forward", measuring)
    got = generate(mixed, PROMPTS, config, max_batch_tokens=max_batch_tokens, **options)
    assert got == want
    steps_from = next(i for i in range(len(sizes)) if sum(sizes[:i]) >= sum(map(len, PROMPTS)))
    assert max(sizes[:steps_from]) <= max_batch_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stop_ids", [(), (6, 17, 25, 33)])
def test_the_final_state_has_read_everything(
    model: SequenceModel, temperature: float, stop_ids: tuple[int, ...]
) -> None:
    config = GenerationConfig(max_new_tokens=5, temperature=temperature, stop_ids=stop_ids)
    generated = generate_with_state(model, PROMPTS, config, pad_id=PAD, seed=5, num_samples=2)
    assert generated.completions == generate(model, PROMPTS, config, pad_id=PAD, seed=5, num_samples=2)
    texts = [
        [*prompt, *completion.token_ids]
        for prompt, row in zip(PROMPTS, generated.completions, strict=True)
        for completion in row
    ]
    assert generated.state.lengths.tolist() == [len(text) for text in texts]
    # The next hop: new tokens only, on top of the state, against the whole text at once.
    new = [[20 + i, 21, 22][: 1 + i % 3] for i in range(len(texts))]
    hop = GenerationConfig(max_new_tokens=4)
    continued = generate(model, new, hop, pad_id=PAD, state=generated.state)
    at_once = generate(model, [t + n for t, n in zip(texts, new, strict=True)], hop, pad_id=PAD)
    assert _tokens(continued) == _tokens(at_once)


def test_the_given_state_is_not_changed_and_serves_again(mixed: SequenceModel) -> None:
    hop = GenerationConfig(max_new_tokens=3)
    state = generate_with_state(mixed, PROMPTS, hop, pad_id=PAD).state
    copies = [tensor.clone() for tensor in state.tensors()]
    first = generate(mixed, [[1]] * 4, hop, pad_id=PAD, state=state)
    assert all(torch.equal(a, b) for a, b in zip(copies, state.tensors(), strict=True))
    assert generate(mixed, [[1]] * 4, hop, pad_id=PAD, state=state) == first


def test_training_goes_on_after_generation(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=2)
    mixed.train()
    mixed.get_submodule("blocks.0").eval()  # a part that its owner froze
    flags = [module.training for module in mixed.modules()]
    state = generate_with_state(mixed, PROMPTS, config, pad_id=PAD).state
    generate(mixed, PROMPTS, config, pad_id=PAD)
    assert [module.training for module in mixed.modules()] == flags
    with pytest.raises(DataError):
        generate(mixed, [[]], config, pad_id=PAD)
    assert [module.training for module in mixed.modules()] == flags
    # Nothing in the model or the state was made in inference mode.
    mixed.zero_grad()
    mixed(torch.tensor(PROMPTS[:1] * 4), state=state).logits.square().mean().backward()
    assert all(p.grad is not None for p in mixed.parameters())
    mixed.zero_grad()
    mixed.eval()


def test_weights_cast_for_generation_are_not_used_after_it() -> None:
    """Under autocast they are cast once and kept: a step of the optimiser must not be lost to the next forward pass."""
    model = _spread(transformer)
    ids = torch.tensor(PROMPTS[:1])
    with torch.autocast("cpu", torch.bfloat16):  # an outer context that keeps casts itself is the worst case
        generate(model, PROMPTS, GenerationConfig(max_new_tokens=2), pad_id=PAD)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        found = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(found, model(ids).logits)
    assert not torch.is_autocast_enabled("cpu")


def test_dropout_of_an_adapter_is_off_while_generating() -> None:
    from refragkit.adapters.lora import LoRA, lora_layers

    model = _spread(hybrid).train()
    LoRA(rank=4, dropout=0.9).apply(model)
    for _, layer in lora_layers(model):
        torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(max_new_tokens=6)
    assert generate(model, PROMPTS, config, pad_id=PAD) == generate(model, PROMPTS, config, pad_id=PAD)
    assert model.training


def test_no_new_tokens(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=0, temperature=1.0)
    empty = Completion((), False, ())
    assert (
        generate(mixed, PROMPTS, config, pad_id=PAD, num_samples=2, return_logprobs=True) == [[empty] * 2] * 4
    )
    generated = generate_with_state(mixed, PROMPTS, config, pad_id=PAD, num_samples=2)
    assert generated.state.lengths.tolist() == [len(p) for p in PROMPTS for _ in range(2)]


def test_every_token_stops(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=50, temperature=1.0, stop_ids=tuple(range(VOCAB)))
    results = generate_with_state(mixed, PROMPTS, config, pad_id=PAD, num_samples=2)
    for row in results.completions:
        for completion in row:
            assert len(completion.token_ids) == 1
            assert completion.finished
            assert completion.content_ids == ()
    assert results.state.lengths.tolist() == [len(p) + 1 for p in PROMPTS for _ in range(2)]


def test_no_prompts(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=2)
    assert generate(mixed, [], config, pad_id=PAD) == []
    with pytest.raises(ConfigError, match="at least one prompt"):
        generate_with_state(mixed, [], config, pad_id=PAD)


def test_bad_prompts_name_their_row(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=2)
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate(mixed, [[1], []], config, pad_id=PAD)
    with pytest.raises(DataError, match=r"prompt 1 holds token id 48.*\[0, 48\)"):
        generate(mixed, [[1], [2, 48]], config, pad_id=PAD)
    with pytest.raises(DataError, match="token id -1"):
        generate(mixed, [[-1]], config, pad_id=PAD)
    state = generate_with_state(mixed, [[1]], config, pad_id=PAD).state
    with pytest.raises(DataError, match="needs at least one new token"):
        generate(mixed, [[]], config, pad_id=PAD, state=state)
    with pytest.raises(ConfigError, match="1 rows for 2 prompts"):
        generate(mixed, [[1], [2]], config, pad_id=PAD, state=state)
    with pytest.raises(ConfigError, match="num_samples"):
        generate(mixed, [[1]], config, pad_id=PAD, num_samples=0)
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        generate(mixed, [[1]], config, pad_id=PAD, max_batch_tokens=0)


def test_broken_weights_are_an_error() -> None:
    model = _spread(transformer)
    with torch.no_grad():
        model.get_parameter("embed_tokens.weight").fill_(torch.nan)
    for temperature in (0.0, 1.0):
        config = GenerationConfig(max_new_tokens=2, temperature=temperature)
        with pytest.raises(RefragError, match="not numbers"):
            generate(model, PROMPTS, config, pad_id=PAD)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_bad_settings_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected"):
        GenerationConfig(**options)


def test_joined_states_are_the_rows_of_a_batch(mixed: SequenceModel) -> None:
    with torch.no_grad():
        states = [mixed(torch.tensor([prompt]), return_state=True).state for prompt in PROMPTS]
        joined = concatenate_states(states)
        assert joined.lengths.tolist() == [len(p) for p in PROMPTS]
        step = torch.tensor([[3], [4], [5], [6]])
        together = mixed(step, state=joined).logits
        for row, state in enumerate(states):
            alone = mixed(step[row : row + 1], state=state).logits
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)
    assert concatenate_states(states[:1]) is states[0]


@pytest.mark.parametrize("with_state", [False, True])
def test_a_listener_hears_every_token_in_order(mixed: SequenceModel, with_state: bool) -> None:
    config = GenerationConfig(max_new_tokens=8, temperature=1.0, stop_ids=(6, 17, 25))
    heard: dict[tuple[int, int], list[int]] = {}

    def hear(prompt: int, sample: int, token_id: int) -> bool:
        heard.setdefault((prompt, sample), []).append(token_id)
        return False

    options: dict[str, Any] = {"pad_id": PAD, "seed": 7, "num_samples": 3, "on_token": hear}
    if with_state:
        results = generate_with_state(mixed, PROMPTS, config, **options).completions
    else:
        results = generate(mixed, PROMPTS, config, **options)
    assert results == generate(mixed, PROMPTS, config, pad_id=PAD, seed=7, num_samples=3)
    assert heard == {
        (i, j): list(completion.token_ids)
        for i, row in enumerate(results)
        for j, completion in enumerate(row)
    }


def test_a_listener_ends_its_completion_and_no_other(mixed: SequenceModel) -> None:
    config = GenerationConfig(max_new_tokens=8, temperature=1.0, stop_ids=(6, 17, 25))
    options: dict[str, Any] = {"pad_id": PAD, "seed": 7, "num_samples": 2}
    whole = generate(mixed, PROMPTS, config, **options)
    count = {(i, j): 0 for i in range(len(PROMPTS)) for j in range(2)}

    def after_two(prompt: int, sample: int, token_id: int) -> bool:
        count[prompt, sample] += 1
        return prompt != 1 and count[prompt, sample] == 2

    generated = generate_with_state(mixed, PROMPTS, config, on_token=after_two, **options)
    texts = []
    for i, (row, long) in enumerate(zip(generated.completions, whole, strict=True)):
        for completion, other in zip(row, long, strict=True):
            n = len(other.token_ids) if i == 1 else 2
            assert completion.token_ids == other.token_ids[:n]
            # Where a stop token comes at the same time, it is what ended the row.
            stopped = completion.token_ids[-1] in config.stop_ids
            assert completion.finished == stopped
            assert completion.interrupted == (i != 1 and len(completion.token_ids) == 2 and not stopped)
            texts.append([*PROMPTS[i], *completion.token_ids])
    # The state has read exactly what was generated.
    hop = GenerationConfig(max_new_tokens=3)
    continued = generate(mixed, [[1]] * len(texts), hop, pad_id=PAD, state=generated.state)
    assert _tokens(continued) == _tokens(generate(mixed, [[*text, 1] for text in texts], hop, pad_id=PAD))


def test_greedy_samples_are_heard_once(mixed: SequenceModel) -> None:
    heard = []
    config = GenerationConfig(max_new_tokens=3)
    generate(mixed, PROMPTS[:1], config, pad_id=PAD, num_samples=4, on_token=lambda *a: bool(heard.append(a)))
    assert [(prompt, sample) for prompt, sample, _ in heard] == [(0, 0)] * 3
