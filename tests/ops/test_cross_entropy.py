from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from refragkit.ops import cross_entropy
from refragkit.ops.cross_entropy import linear_cross_entropy, weighted_linear_cross_entropy


def problem(tokens: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[::3] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("kept_elements", [0, 200, 10**6])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1024])
def test_equals_the_plain_loss_in_value_and_gradient(
    chunk_tokens: int, kept_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_KEPT_ELEMENTS", kept_elements)
    hidden, weight, targets = problem(23, 37, torch.float64)
    scale = torch.linspace(0.5, 2, 23, dtype=torch.float64)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens)
    got = torch.autograd.grad((loss * scale).sum(), (hidden, weight), retain_graph=True)
    again = torch.autograd.grad((loss * scale).sum(), (hidden, weight))
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    plain = functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    wanted = torch.autograd.grad((plain * scale).sum(), (hidden, weight))
    torch.testing.assert_close(loss, plain)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)
    assert bool((loss[targets == -100] == 0).all())
    assert bool((got[0][targets == -100] == 0).all())


def test_large_vocabularies_are_split_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 100)
    hidden, weight, targets = problem(23, 37, torch.float64)
    loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, functional.cross_entropy(hidden @ weight.T, targets, reduction="none"))
    hidden, weight, targets = problem(7, 11, torch.float64)
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 25)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets), (hidden, weight))


def test_half_precision_gives_float32_losses_and_gradients_of_the_inputs_type() -> None:
    hidden, weight, targets = problem(50, 37, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, 8)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    functional.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="sum").backward()
    assert weight.grad is not None and exact_weight.grad is not None
    assert (weight.grad.double() - exact_weight.grad).norm() < 0.02 * exact_weight.grad.norm()


def test_autocast_multiplies_in_low_precision_only() -> None:
    hidden, weight, targets = problem(9, 37, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    torch.testing.assert_close(
        loss, functional.cross_entropy(hidden @ weight.T, targets, reduction="none"), rtol=0.05, atol=0.1
    )


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, targets = problem(9, 37, torch.float64)
    weight = weight.detach()
    linear_cross_entropy(hidden, weight, targets).sum().backward()
    assert hidden.grad is not None


def test_nothing_supervised_is_zero_and_differentiable() -> None:
    hidden, weight, targets = problem(9, 37, torch.float64)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert float(loss.detach().sum()) == 0.0
    loss.sum().backward()
    assert hidden.grad is not None and float(hidden.grad.abs().sum()) == 0.0
    assert linear_cross_entropy(hidden[:0], weight, targets[:0]).shape == (0,)


def test_bad_targets_and_shapes_are_refused() -> None:
    hidden, weight, targets = problem(9, 37, torch.float64)
    with pytest.raises(ValueError, match=r"in \[0, 37\), got values between 0 and 37"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 37] + [1] * 7))
    with pytest.raises(ValueError, match="hidden"):
        linear_cross_entropy(hidden[None], weight, targets)
    with pytest.raises(ValueError, match="targets must have shape"):
        linear_cross_entropy(hidden, weight, targets[:3])


@pytest.mark.parametrize("fused_elements", [1, 200, 10**6])
def test_the_weighted_form_equals_the_weighted_sum(
    fused_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_FUSED_ELEMENTS", fused_elements)
    hidden, weight, targets = problem(23, 37, torch.float64)
    scale = torch.linspace(-0.5, 2, 23, dtype=torch.float64)
    total, losses = weighted_linear_cross_entropy(hidden, weight, targets, scale)
    plain = functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(losses, plain.detach())
    torch.testing.assert_close(total, (plain * scale).sum())
    assert not losses.requires_grad
    for factor in (1.0, 3.0):
        got = torch.autograd.grad(total * factor, (hidden, weight), retain_graph=True)
        wanted = torch.autograd.grad((plain * scale).sum() * factor, (hidden, weight), retain_graph=True)
        for g, w in zip(got, wanted, strict=True):
            torch.testing.assert_close(g, w)


def test_the_weighted_form_without_gradients_frozen_heads_and_nothing_to_learn() -> None:
    hidden, weight, targets = problem(9, 37, torch.float32)
    scale = torch.rand(9)
    with torch.no_grad():
        total, _ = weighted_linear_cross_entropy(hidden, weight, targets, scale)
    frozen, _ = weighted_linear_cross_entropy(hidden, weight.detach(), targets, scale)
    frozen.backward()
    torch.testing.assert_close(frozen.detach(), total)
    plain = functional.cross_entropy(hidden @ weight.detach().T, targets, reduction="none")
    (wanted,) = torch.autograd.grad((plain * scale).sum(), hidden)
    torch.testing.assert_close(hidden.grad, wanted)
    nothing, losses = weighted_linear_cross_entropy(hidden, weight, torch.full((9,), -100), scale)
    nothing.backward()
    assert float(nothing.detach()) == 0 and not losses.any()
    with pytest.raises(ValueError, match="token_weights"):
        weighted_linear_cross_entropy(hidden, weight, targets, scale[:3])


def test_the_weighted_form_in_half_precision() -> None:
    hidden, weight, targets = problem(50, 37, torch.bfloat16)
    scale = torch.rand(50)
    total, losses = weighted_linear_cross_entropy(hidden, weight, targets, scale)
    assert total.dtype == losses.dtype == torch.float32
    total.backward()
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    plain = functional.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="none")
    (plain * scale).sum().backward()
    for half, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert half.grad is not None and exact.grad is not None and half.grad.dtype == torch.bfloat16
        assert (half.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()
