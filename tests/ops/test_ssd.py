from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from refragkit.ops.ssd import ssd, ssd_reference


def inputs(T: int, dtype: torch.dtype, *, with_state: bool, G: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)
    batch, H, P, N = 2, 4, 5, 6

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        normal(batch, T, H, P),
        functional.softplus(normal(batch, T, H)),
        -normal(H).exp(),
        normal(batch, T, G, N),
        normal(batch, T, G, N),
    ]
    if with_state:
        tensors.append(normal(batch, H, P, N))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def values_and_gradients(function, tensors: list[Tensor], **options) -> list[Tensor]:
    y, state = function(*tensors, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weights).sum() + (state * state.detach().cos()).sum()
    return [y, state, *torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 40])
def test_equals_the_recurrence_in_value_and_gradient(T: int, with_state: bool, dtype: torch.dtype) -> None:
    tensors = inputs(T, dtype, with_state=with_state)
    fast = values_and_gradients(ssd, tensors, chunk_tokens=8)
    slow = values_and_gradients(ssd_reference, tensors)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for got, wanted in zip(fast, slow, strict=True):
        assert (got - wanted).abs().max() <= tolerance * max(1.0, float(wanted.detach().abs().max()))


def test_one_group_and_the_default_chunk() -> None:
    tensors = inputs(150, torch.float64, with_state=True, G=1)
    for got, wanted in zip(
        values_and_gradients(ssd, tensors), values_and_gradients(ssd_reference, tensors), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("T", [1, 9])
def test_the_skip_term_in_value_and_gradient(T: int) -> None:
    tensors = inputs(T, torch.float64, with_state=True)
    D = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()

    def with_skip(function):
        return lambda *t, **options: function(*t[:-1], D=t[-1], **options)

    fast = values_and_gradients(with_skip(ssd), [*tensors, D], chunk_tokens=4)
    for got, wanted in zip(fast, values_and_gradients(with_skip(ssd_reference), [*tensors, D]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_chunks_that_do_not_fit_in_the_cache_together(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(40, torch.float64, with_state=True)
    together = values_and_gradients(ssd, tensors, chunk_tokens=4)
    monkeypatch.setattr("refragkit.ops.ssd._CACHE_ELEMENTS", 3 * 2 * 4 * 4 * 5)  # three chunks at a time
    for got, wanted in zip(values_and_gradients(ssd, tensors, chunk_tokens=4), together, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_half_precision_gradients_follow_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refragkit.ops.precision.cpu_has_bf16", lambda: True)  # emulated where it is not
    tensors = [t.detach() for t in inputs(150, torch.float32, with_state=True)]
    half = [
        t.bfloat16().requires_grad_() if i in (0, 3, 4) else t.clone().requires_grad_()
        for i, t in enumerate(tensors)
    ]
    exact = [t.detach().double().requires_grad_() for t in half]
    for got, wanted in zip(
        values_and_gradients(ssd, half), values_and_gradients(ssd_reference, exact), strict=True
    ):
        assert (got.double() - wanted).norm() < 0.02 * wanted.norm()


def test_strong_decay_does_not_overflow() -> None:
    tensors = inputs(40, torch.float32, with_state=True)
    with torch.no_grad():
        tensors[1].mul_(200)
    fast = values_and_gradients(ssd, tensors)
    assert all(bool(tensor.isfinite().all()) for tensor in fast)
    slow = values_and_gradients(
        ssd_reference, [tensor.detach().double().requires_grad_() for tensor in tensors]
    )
    for got, wanted in zip(fast[:3], slow[:3], strict=True):
        assert (got - wanted).norm() < 1e-4 * wanted.norm()


def test_segments_equal_separate_documents_in_value_and_gradient() -> None:
    lengths = [3, 8, 1, 5]  # borders inside chunks of 4 and on them
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    tensors = inputs(sum(lengths), torch.float64, with_state=False)
    packed = values_and_gradients(ssd, tensors, segment_ids=ids, chunk_tokens=4)
    slow = values_and_gradients(ssd_reference, tensors, segment_ids=ids)
    for got, wanted in zip(packed, slow, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    x, dt, A, B, C = tensors
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        y, state = ssd(x[:, part], dt[:, part], A, B[:, part], C[:, part])
        torch.testing.assert_close(packed[0][:, part], y, rtol=1e-10, atol=1e-10)
        start += length
    torch.testing.assert_close(packed[1], state, rtol=1e-10, atol=1e-10)


def test_state_belongs_to_the_first_segment() -> None:
    tensors = inputs(9, torch.float64, with_state=True)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2], [0] * 9])
    fast = values_and_gradients(ssd, tensors, segment_ids=ids, chunk_tokens=4)
    slow = values_and_gradients(ssd_reference, tensors, segment_ids=ids)
    for got, wanted in zip(fast, slow, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_zero_step_leaves_the_state_untouched() -> None:
    x, dt, A, B, C, state = inputs(6, torch.float32, with_state=True)
    _, after = ssd(x, torch.zeros_like(dt), A, B, C, state, chunk_tokens=4)
    assert torch.equal(after, state)


def test_half_precision_inputs_keep_a_float32_state() -> None:
    tensors = [tensor.detach().to(torch.bfloat16) for tensor in inputs(20, torch.float32, with_state=False)]
    y, state = ssd(*tensors)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    wanted, _ = ssd_reference(*(tensor.double() for tensor in tensors))
    torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("T", [1, 3])
def test_gradcheck(T: int) -> None:
    x, dt, A, B, C, state = inputs(T, torch.float64, with_state=True)
    tensors = [x[:1, ..., :2], dt[:1], A, B[:1, ..., :3], C[:1, ..., :3], state[:1, :, :2, :3]]
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(lambda *t: ssd(*t, chunk_tokens=2), tensors)


def test_the_state_is_overwritten_only_where_asked_for_and_without_gradients() -> None:
    x, dt, A, B, C, state = (t.detach() for t in inputs(1, torch.float32, with_state=True))
    wanted, after = ssd(x, dt, A, B, C, state)
    before = state.clone()
    y, kept = ssd(x, dt, A, B, C, state, overwrite_state=True)  # gradients are on: left alone
    assert torch.equal(state, before) and kept.data_ptr() != state.data_ptr()
    with torch.no_grad():
        y, kept = ssd(x, dt, A, B, C, state, overwrite_state=True)
    assert kept.data_ptr() == state.data_ptr() and not torch.equal(state, before)
    torch.testing.assert_close((y, kept), (wanted, after))


def test_shapes_are_checked() -> None:
    x, dt, A, B, C = inputs(3, torch.float32, with_state=False)
    with pytest.raises(ValueError, match=r"dt must have shape \(2, 3, 4\)"):
        ssd(x, dt[..., :1], A, B, C)
    with pytest.raises(ValueError, match="multiple of the 3 groups"):
        ssd(x, dt, A, torch.zeros(2, 3, 3, 6), torch.zeros(2, 3, 3, 6))
    with pytest.raises(ValueError, match="at least one token"):
        ssd(x[:, :0], dt[:, :0], A, B[:, :0], C[:, :0])
