from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from refragkit.ops.causal_conv import causal_conv


def problem(taps: int, T: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(taps)
    shapes = ((2, T, 5), (2, taps - 1, 5), (taps, 5), (5,))
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize("with_history", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 3, 9])
def test_equals_conv1d_in_value_and_gradient(taps: int, T: int, with_history: bool) -> None:
    x, history, weight, bias = problem(taps, T)
    if not with_history:
        history = torch.zeros_like(history).requires_grad_()
    y = causal_conv(x, history if with_history else None, weight, bias)
    extended = torch.cat([history, x], dim=1).transpose(1, 2)
    plain = functional.conv1d(extended, weight.T[:, None], bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(y, plain)
    scale = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    inputs = (x, history, weight, bias) if with_history else (x, weight, bias)
    got = torch.autograd.grad((y * scale).sum(), inputs)
    wanted = torch.autograd.grad((plain * scale).sum(), inputs)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)
    torch.testing.assert_close(causal_conv(x, history, weight, None), plain - bias)


@pytest.mark.parametrize("packed", [False, True])
def test_silu_and_packing_in_value_and_gradient(packed: bool) -> None:
    x, history, weight, bias = problem(4, 7)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4], [0, 0, 0, 0, 1, 2, 3]]) if packed else None
    inputs = (x, weight, bias) if packed else (x, history, weight, bias)
    past = None if packed else history
    y = causal_conv(x, past, weight, bias, positions, silu=True)
    torch.testing.assert_close(y, functional.silu(causal_conv(x, past, weight, bias, positions)))
    assert torch.autograd.gradcheck(
        lambda *t: causal_conv(t[0], None if packed else t[1], t[-2], t[-1], positions, silu=True), inputs
    )


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    x, history, weight, bias = (t.detach().bfloat16() for t in problem(4, 9))
    wanted = causal_conv(x.float(), history.float(), weight.float(), bias.float(), silu=True)
    assert torch.equal(causal_conv(x, history, weight, bias, silu=True), wanted.bfloat16())


def test_a_slice_of_a_wider_tensor_and_frozen_weights() -> None:
    x, _, weight, bias = problem(4, 6)
    wide = torch.cat([x, x, x], dim=2).detach().requires_grad_()
    y = causal_conv(wide[..., 5:10], None, weight.detach(), bias.detach())
    torch.testing.assert_close(y, causal_conv(x, None, weight, bias))
    y.sum().backward()
    assert wide.grad is not None and float(wide.grad[..., :5].abs().sum()) == 0.0


def test_documents_do_not_see_each_other() -> None:
    x, _, weight, bias = problem(4, 7)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4]]).expand(2, -1)
    y = causal_conv(x, None, weight, bias, positions)
    for part in (slice(0, 2), slice(2, 7)):
        torch.testing.assert_close(y[:, part], causal_conv(x[:, part], None, weight, bias))
