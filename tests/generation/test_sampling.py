"""The token-choice rule."""

from __future__ import annotations

import pytest
import torch

from refragkit.generation.sampling import RowGenerator, choose_tokens, token_logprobs

LOGITS = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()


def _draw(logits: torch.Tensor, n: int = 4000, **options: float) -> torch.Tensor:
    """Frequencies over an even grid of uniforms: exact to 1/n."""
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = choose_tokens(logits.expand(n, -1), uniforms, **options)  # type: ignore[arg-type]
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / n


def _expected(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64)


def test_frequencies_are_the_softmax() -> None:
    torch.testing.assert_close(_draw(LOGITS), _expected([0.5, 0.1, 0.3, 0.1]), rtol=0, atol=1e-3)


def test_temperature_sharpens() -> None:
    squares = torch.tensor([0.25, 0.01, 0.09, 0.01], dtype=torch.float64)
    torch.testing.assert_close(_draw(LOGITS, temperature=0.5), squares / squares.sum(), rtol=0, atol=1e-3)


def test_top_k_keeps_k() -> None:
    torch.testing.assert_close(_draw(LOGITS, top_k=2), _expected([0.625, 0, 0.375, 0]), rtol=0, atol=1e-3)
    assert _draw(LOGITS, top_k=1).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(_draw(LOGITS, top_k=99), _draw(LOGITS), rtol=0, atol=1e-3)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert _draw(LOGITS, top_p=0.49).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(_draw(LOGITS, top_p=0.7), _expected([0.625, 0, 0.375, 0]), rtol=0, atol=1e-3)
    three = _expected([5 / 9, 1 / 9, 3 / 9, 0])  # of two equals, the first
    torch.testing.assert_close(_draw(LOGITS, top_p=0.85), three, rtol=0, atol=1e-3)
    assert _draw(LOGITS, top_p=1e-9).tolist() == [1, 0, 0, 0]


def test_top_p_counts_within_top_k() -> None:
    # Of the two kept tokens the first has 0.625: enough for 0.6, not for 0.7.
    assert _draw(LOGITS, top_k=2, top_p=0.6).tolist() == [1, 0, 0, 0]
    assert _draw(LOGITS, top_k=2, top_p=0.7)[2] > 0


def test_extremes_of_the_uniform_stay_inside() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    below_one = 1.0 - 2.0**-53
    for uniform, want in ((0.0, 1), (below_one, 2)):
        assert choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64)).item() == want
    wide = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"top_p": 0.9}, {"top_k": 7}):
        token = choose_tokens(wide, torch.tensor([below_one], dtype=torch.float64), **options)  # type: ignore[arg-type]
        assert 0 <= token.item() < 50_000


def test_greedy_takes_the_first_of_equals_and_needs_no_numbers() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    assert choose_tokens(logits, None, temperature=0).tolist() == [1, 0]
    with pytest.raises(ValueError, match="uniform"):
        choose_tokens(logits, None)


def test_half_precision_logits() -> None:
    assert _draw(LOGITS.bfloat16(), top_p=0.7).nonzero().flatten().tolist() == [0, 2]


def test_rows_of_uniforms_differ_and_repeat() -> None:
    def numbers(seed: int, row: int, sample: int) -> tuple[float, ...]:
        generator = RowGenerator(seed, row, sample)
        return tuple(generator.uniform() for _ in range(3))

    before = torch.get_rng_state()
    keys = [(seed, row, sample) for seed in (-1, 0, 1) for row in (0, 1) for sample in (0, 1)]
    rows = {numbers(*key) for key in keys}
    assert len(rows) == len(keys)
    assert numbers(1, 0, 1) == numbers(1, 0, 1)
    assert all(0 <= u < 1 for row in rows for u in row)
    assert torch.equal(before, torch.get_rng_state())


def test_logprobs_are_the_models_own() -> None:
    tokens = torch.tensor([2, 0])
    logits = torch.stack([LOGITS, LOGITS * 2])
    want = torch.log_softmax(logits, -1)[torch.arange(2), tokens]
    torch.testing.assert_close(token_logprobs(logits, tokens), want)
