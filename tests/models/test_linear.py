from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from refragkit.models.layers.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(8, 1), (2, 8), (1, 3), (17, 1)])
def test_the_decoding_form_equals_the_usual_one(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(512, 640, bias=bias)
    x = torch.randn(*shape, 512, generator=generator)
    wanted = functional.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        got = layer(x)
    assert got.shape == wanted.shape and got.is_contiguous()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert layer(x).requires_grad


def test_other_precisions_take_the_usual_form() -> None:
    layer = Linear(512, 640).bfloat16()
    x = torch.randn(4, 1, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.float()(x.float()).dtype == torch.bfloat16
