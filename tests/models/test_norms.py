from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from refragkit.models.layers.norm import GatedRMSNorm, RMSNorm


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (1, 1, 12)])
def test_the_gated_norm_equals_its_definition_in_value_and_gradient(
    groups: int, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(groups)
    norm = GatedRMSNorm(12, 1e-5, groups).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2, generator=generator)
    x, z = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    gated = (x * functional.silu(z)).unflatten(-1, (groups, -1))
    plain = (gated * (gated.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * norm.weight
    torch.testing.assert_close(norm(x, z), plain)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    inputs = (x, z, norm.weight)
    got = torch.autograd.grad(norm(x, z), inputs, grad)
    for g, w in zip(got, torch.autograd.grad(plain, inputs, grad), strict=True):
        torch.testing.assert_close(g, w)
    assert torch.autograd.gradcheck(lambda a, b: norm(a, b), (x, z))


def test_the_gated_norm_in_half_precision_follows_the_same_definition() -> None:
    norm = GatedRMSNorm(16, 1e-5, 1)
    norm.init_weights(torch.Generator())
    x, z = (torch.randn(3, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    half = norm.bfloat16()(x.bfloat16(), z.bfloat16())
    torch.testing.assert_close(half.float(), norm.float()(x, z), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_norm_equals_torchs_own(dtype: torch.dtype) -> None:
    norm = RMSNorm(16, 1e-6).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 2, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    plain = norm.weight * functional.rms_norm(x.float(), (16,), eps=1e-6).to(dtype)
    torch.testing.assert_close(norm(x), plain)
    grad = torch.ones(3, 4, 16, dtype=dtype).cumsum(-1)
    got = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    for g, w in zip(got, torch.autograd.grad(plain, (x, norm.weight), grad), strict=True):
        torch.testing.assert_close(g, w)
