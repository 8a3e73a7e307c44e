from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from refragkit.ops.causal_conv import causal_conv


def problem(taps: int, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(taps)
    shapes = ((2, taps - 1 + T, 5), (taps, 5), (5,))
    x, weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_equals_conv1d_in_value_and_gradient(taps: int, T: int) -> None:
    x, weight, bias = problem(taps, T)
    y = causal_conv(x, weight, bias)
    plain = functional.conv1d(x.transpose(1, 2), weight.T[:, None], bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(y, plain)
    scale = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    got = torch.autograd.grad((y * scale).sum(), (x, weight, bias))
    wanted = torch.autograd.grad((plain * scale).sum(), (x, weight, bias))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)
    torch.testing.assert_close(causal_conv(x, weight, None), plain - bias)


def test_documents_do_not_see_each_other() -> None:
    x, weight, bias = problem(4, 7)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4]]).expand(2, -1)
    y = causal_conv(x, weight, bias, positions)
    for part in (slice(0, 2), slice(2, 7)):
        alone = functional.pad(x[:, 3:][:, part], (0, 0, 3, 0))
        torch.testing.assert_close(y[:, part], causal_conv(alone, weight, bias))
