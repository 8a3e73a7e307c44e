from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from refragkit.ops import int8
from refragkit.ops.int8 import (
    dequantize_rows,
    int8_embedding,
    int8_linear,
    int8_linear_reference,
    int8_swiglu,
    precise_input_gradient,
    quantize_rows,
)

SHAPES = [(5, 64, 96), (1, 128, 48), (33, 7, 5), (3, 1, 1), (2, 96, 3), (17, 200, 130)]


def problem(tokens: int, width: int, out: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + width + out)
    return torch.randn(tokens, width, generator=generator), torch.randn(out, width, generator=generator)


def relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def hadamard(width: int) -> Tensor:
    """By its definition: the sign of an entry is the parity of the bits that its two indices share."""
    index = range(width)
    return torch.tensor(
        [[(-1.0) ** bin(i & j).count("1") for j in index] for i in index], dtype=torch.float64
    )


@pytest.fixture(params=["native", "floating point"])
def both_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With integer products in hardware, and on a machine that has none and no bfloat16 either."""
    if request.param != "native":
        monkeypatch.setattr(int8, "_integer_units", lambda: False)
        monkeypatch.setattr(int8, "cpu_has_bf16", lambda: False)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_comes_back_within_half_a_step(shape: tuple[int, int, int]) -> None:
    _, weight = problem(*shape)
    values, scale = quantize_rows(weight)
    assert values.dtype == torch.int8 and values.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == weight.shape[:1]
    width = math.gcd(weight.shape[1], 64)
    blocks = weight.double().view(len(weight), -1, width)
    rotated = (blocks @ hadamard(width) / math.sqrt(width)).view(weight.shape)
    steps = rotated.abs().amax(1) / 127
    torch.testing.assert_close(scale.double(), steps, rtol=1e-5, atol=0)
    assert bool(((values.double() * steps[:, None] - rotated).abs() <= 0.501 * steps[:, None]).all())
    assert relative(dequantize_rows(values, scale), weight) < 0.02
    assert dequantize_rows(values, scale, torch.float64).dtype == torch.float64


def test_rounding_twice_changes_nothing() -> None:
    _, weight = problem(1, 192, 50)
    first = quantize_rows(weight)
    second = quantize_rows(dequantize_rows(*first))
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1], second[1], rtol=1e-6, atol=0)


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = problem(4, 64, 37)
    whole = quantize_rows(weight)
    grad = torch.randn(4, 37)
    expected = precise_input_gradient(grad, *whole)
    monkeypatch.setattr(int8, "_PIECE_ELEMENTS", 5 * 64)
    pieces = quantize_rows(weight)
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])
    torch.testing.assert_close(dequantize_rows(*pieces), dequantize_rows(*whole))
    assert relative(precise_input_gradient(grad, *whole), expected) < 5e-3
    monkeypatch.setattr(int8, "_integer_units", lambda: False)
    assert relative(int8_linear(x, *pieces), int8_linear_reference(x, *whole)) < 0.02


@pytest.mark.usefixtures("both_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradient_are_those_of_the_dequantised_weight(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight = problem(*shape)
    values, scale = quantize_rows(weight)
    bias = torch.linspace(0, 1, shape[2])
    x = x.to(dtype).requires_grad_()
    y = int8_linear(x, values, scale, bias)
    assert y.dtype == dtype and y.shape == (shape[0], shape[2])
    exact = x.detach().double().requires_grad_()
    wanted = int8_linear_reference(exact, values, scale, bias)
    assert relative(y, wanted) < 0.02
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    wanted.backward(upstream)
    y.backward(upstream.to(dtype))
    assert x.grad is not None and x.grad.dtype == dtype and exact.grad is not None
    assert relative(x.grad, exact.grad) < 0.02


@pytest.mark.usefixtures("both_products")
def test_the_product_is_that_of_the_rounded_integers() -> None:
    """Against the same rounding spelt out in float64: nothing is lost in the integer product itself."""
    x, weight = problem(9, 128, 40)
    values, scale = quantize_rows(weight)
    rotated = int8._rotate_fast(x).double()
    steps = rotated.abs().amax(1, keepdim=True) / 127
    rounded = (rotated / steps).round()
    wanted = (rounded @ values.double().T) * steps * scale.double()
    torch.testing.assert_close(int8_linear(x, values, scale).double(), wanted, rtol=1e-4, atol=1e-5)


def test_integers_do_not_saturate() -> None:
    a = torch.full((20, 640), 127, dtype=torch.int8)
    for sign in (1, -1):
        product = int8._integer_product(a, sign * a.T.contiguous())
        assert bool((product == sign * 640 * 127 * 127).all())


def test_one_outlying_channel_does_not_drown_the_others() -> None:
    """As in language models, where some channels are a hundred times larger than the rest."""
    x, weight = problem(50, 512, 64)
    x[:, 3] = 100
    weight[:, 3] = 0  # so that the rest is all that counts
    values, scale = quantize_rows(weight)
    wanted = x.double() @ weight.double().T
    rounded = x / (x.abs().amax(1, keepdim=True) / 127)
    plain = (rounded.round() * x.abs().amax(1, keepdim=True) / 127).double() @ weight.double().T
    ours = relative(int8_linear(x, values, scale), wanted)
    assert ours < 0.06 < 0.2 < relative(plain, wanted)


@pytest.mark.parametrize("scale_of_x", [1e-30, 1e-6, 1e6, 1e30])
def test_any_range(scale_of_x: float) -> None:
    x, weight = problem(5, 64, 16)
    values, scale = quantize_rows(weight)
    got = int8_linear(x * scale_of_x, values, scale) / scale_of_x
    assert relative(got, int8_linear_reference(x, values, scale)) < 0.02


def test_zeros() -> None:
    x, weight = problem(5, 64, 16)
    x[2], weight[3] = 0, 0
    values, scale = quantize_rows(weight)
    assert bool((dequantize_rows(values, scale)[3] == 0).all())
    x.requires_grad_()
    y = int8_linear(x, values, scale)
    assert bool((y[2] == 0).all()) and bool((y[:, 3] == 0).all())
    y.backward(torch.zeros_like(y))
    assert x.grad is not None and bool((x.grad == 0).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_own_row(value: float) -> None:
    x, weight = problem(5, 64, 16)
    values, scale = quantize_rows(weight)
    clean = int8_linear(x, values, scale)
    broken = x.clone()
    broken[1, 7] = value
    broken.requires_grad_()
    y = int8_linear(broken, values, scale)
    rest = [0, 2, 3, 4]
    assert bool(y[1].isnan().all()) and torch.equal(y[rest], clean[rest])
    upstream = torch.ones_like(y)
    upstream[3, 2] = value
    y.backward(upstream)
    assert broken.grad is not None
    assert bool(broken.grad[3].isnan().all()) and bool(broken.grad[rest[:2]].isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight = torch.randn(6, 8)
    weight[4, 1] = value
    with pytest.raises(ValueError, match="row 4 holds values that are not finite"):
        quantize_rows(weight)


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    values, scale = quantize_rows(torch.randn(6, 8))
    for arguments in [
        (torch.randn(2, 7), values, scale),
        (torch.randn(2, 8), values.float(), scale),
        (torch.randn(2, 8), values, scale[:5]),
    ]:
        with pytest.raises(ValueError, match="int8_linear needs"):
            int8_linear(*arguments)
    for weight in (torch.zeros(3, 4, dtype=torch.int64), torch.randn(3)):
        with pytest.raises(ValueError, match="floating-point matrix"):
            quantize_rows(weight)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 1, 64), (2, 3, 4, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    values, scale = quantize_rows(torch.randn(10, 64))
    x = torch.randn(shape, requires_grad=True)
    y = int8_linear(x, values, scale)
    assert y.shape == (*shape[:-1], 10)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    flat = int8_linear(x.detach().reshape(-1, 64), values, scale)
    assert torch.equal(y.detach().reshape(-1, 10), flat)


def test_a_token_depends_on_nothing_else_in_the_batch() -> None:
    x, weight = problem(40, 128, 32)
    values, scale = quantize_rows(weight)
    together = int8_linear(x, values, scale)
    x[20:] *= 1000
    assert torch.equal(int8_linear(x, values, scale)[:20], together[:20])
    for token in (0, 7, 19):
        torch.testing.assert_close(int8_linear(x[token : token + 1], values, scale)[0], together[token])


def test_transposed_inputs_and_weights_need_not_be_contiguous() -> None:
    x, weight = problem(12, 64, 20)
    values, scale = quantize_rows(weight.T.contiguous().T)
    assert torch.equal(values, quantize_rows(weight)[0])
    x = x.T.contiguous().T
    assert relative(int8_linear(x, values, scale), int8_linear_reference(x, values, scale)) < 0.02


def test_autocast_decides_the_type_of_the_output() -> None:
    x, weight = problem(3, 64, 20)
    quantised = quantize_rows(weight)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = int8_linear(x, *quantised)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_frozen_inputs_get_no_graph_and_the_bias_can_be_trained() -> None:
    x, weight = problem(3, 64, 20)
    values, scale = quantize_rows(weight)
    assert not int8_linear(x, values, scale).requires_grad
    bias = torch.zeros(20, requires_grad=True)
    int8_linear(x, values, scale, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((20,), 3.0))


@pytest.mark.usefixtures("both_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 11, 64), (1, 64), (0, 64)])
def test_swiglu_is_that_of_the_dequantised_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(size, generator=generator) * 0.2 for size in ((96, 64), (96, 64), (64, 96))]
    gate, up, down = (quantize_rows(weight) for weight in weights)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    y = int8_swiglu(x, gate, up, down)
    assert y.dtype == dtype and y.shape == shape
    exact = x.detach().double().requires_grad_()
    inner = functional.silu(int8_linear_reference(exact, *gate)) * int8_linear_reference(exact, *up)
    wanted = int8_linear_reference(inner, *down)
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    wanted.backward(upstream)
    y.backward(upstream.to(dtype))
    assert x.grad is not None and x.grad.dtype == dtype and exact.grad is not None
    if x.numel():
        assert relative(y, wanted) < 0.03
        assert relative(x.grad, exact.grad) < 0.03
    with torch.autocast("cpu", torch.bfloat16):
        assert int8_swiglu(x.detach(), gate, up, down).dtype == torch.bfloat16


@pytest.mark.parametrize("channels", [256, 50])
def test_what_is_kept_for_the_backward_pass_is_rounded_by_groups(channels: int) -> None:
    x = torch.randn(6, channels, generator=torch.Generator().manual_seed(1))
    x[2, 5], x[4] = 1000, 0
    rounded, scale = int8._packed(x)
    assert rounded.dtype == torch.int8 and rounded.nbytes + scale.nbytes < 1.13 * x.numel()
    back = int8._unpacked(rounded, scale, channels)
    assert back.shape == x.shape and bool((back[4] == 0).all())
    width = 64 if channels == 256 else 50
    assert relative(back[2, width:], x[2, width:]) < 0.01 if width < channels else True
    assert relative(back[:2], x[:2]) < 0.01


def test_rows_of_an_embedding() -> None:
    _, weight = problem(1, 96, 50)
    values, scale = quantize_rows(weight)
    ids = torch.tensor([[3, 0, 49], [7, 7, 1]])
    wanted = functional.embedding(ids, dequantize_rows(values, scale))
    torch.testing.assert_close(int8_embedding(ids, values, scale), wanted)
    assert int8_embedding(ids[:, :0], values, scale).shape == (2, 0, 96)


def test_small_probabilities_reach_the_precise_gradient() -> None:
    """Most of a token's probability lies in values that int8 rounds to nothing beside the largest."""
    _, weight = problem(1, 64, 5000)
    values, scale = quantize_rows(weight + 0.5)
    grad = torch.full((3, 5000), 1e-4)
    grad[:, 17] = -0.5
    wanted = grad.double() @ dequantize_rows(values, scale, torch.float64)
    assert relative(precise_input_gradient(grad, values, scale), wanted) < 5e-3
    assert relative(int8.int8_input_gradient(grad, values, scale), wanted) > 0.1
