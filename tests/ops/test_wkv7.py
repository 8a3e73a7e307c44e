from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from refragkit.ops.wkv7 import wkv7, wkv7_reference


def inputs(
    T: int, dtype: torch.dtype, *, with_state: bool, N: int = 6, strongest: float = 0.6065
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)
    batch, H = 2, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    r, k, v = (normal(batch, T, H, N) for _ in range(3))
    log_decay = -strongest * torch.sigmoid(3 * normal(batch, T, H, N))
    kk = functional.normalize(normal(batch, T, H, N), dim=-1)
    iclr = torch.sigmoid(normal(batch, T, H, N))
    tensors = [r, log_decay, k, v, -kk, kk * iclr]
    if with_state:
        tensors.append(normal(batch, H, N, N))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def values_and_gradients(function, tensors: list[Tensor], **options) -> list[Tensor]:
    out, state = function(*tensors, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * weights).sum() + (state * state.detach().cos()).sum()
    return [out, state, *torch.autograd.grad(loss, tensors)]


def relative_errors(fast: list[Tensor], slow: list[Tensor]) -> list[float]:
    return [float((f - s).detach().norm() / s.detach().norm()) for f, s in zip(fast, slow, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("T", [2, 7, 8, 9, 40])
def test_equals_the_recurrence_in_value_and_gradient(T: int, with_state: bool, dtype: torch.dtype) -> None:
    tensors = inputs(T, dtype, with_state=with_state)
    fast = values_and_gradients(wkv7, tensors, chunk_tokens=8)
    slow = values_and_gradients(wkv7_reference, tensors)
    assert max(relative_errors(fast, slow)) < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("with_state", [False, True])
def test_one_token(with_state: bool) -> None:
    tensors = inputs(1, torch.float64, with_state=with_state)
    fast, state = wkv7(*tensors)
    slow, slow_state = wkv7_reference(*tensors)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(state, slow_state)


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64])
def test_real_head_width_and_the_strongest_decay_in_float32(chunk_tokens: int) -> None:
    tensors = inputs(100, torch.float32, with_state=True, N=64)
    with torch.no_grad():
        tensors[1][..., ::2] = -0.6065  # half of the channels forget as fast as RWKV-7 can
    fast = values_and_gradients(wkv7, tensors, chunk_tokens=chunk_tokens)
    slow = values_and_gradients(
        wkv7_reference, [tensor.detach().double().requires_grad_() for tensor in tensors]
    )
    assert max(relative_errors(fast, slow)) < 1e-5


def test_decays_beyond_rwkv7_are_computed_in_shorter_chunks() -> None:
    tensors = inputs(40, torch.float32, with_state=True, strongest=30.0)
    fast = values_and_gradients(wkv7, tensors)
    slow = values_and_gradients(wkv7_reference, tensors)
    assert max(relative_errors(fast, slow)) < 1e-5


def test_total_forgetting_and_divergence_pass_through() -> None:
    tensors = [tensor.detach() for tensor in inputs(9, torch.float32, with_state=True)]
    tensors[1][:, 4] = -torch.inf
    fast, slow = wkv7(*tensors), wkv7_reference(*tensors)
    assert max(relative_errors(list(fast), list(slow))) < 1e-5
    tensors[1][:, 4] = torch.nan
    assert wkv7(*tensors)[0].isnan().any()


def test_segments_equal_separate_documents_in_value_and_gradient() -> None:
    lengths = [3, 8, 1, 5]  # borders inside chunks of 4 and on them
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    tensors = inputs(sum(lengths), torch.float64, with_state=False)
    packed = values_and_gradients(wkv7, tensors, segment_ids=ids, chunk_tokens=4)
    slow = values_and_gradients(wkv7_reference, tensors, segment_ids=ids)
    assert max(relative_errors(packed, slow)) < 1e-12
    start = 0
    for length in lengths:
        out, state = wkv7(*(tensor[:, start : start + length] for tensor in tensors))
        torch.testing.assert_close(packed[0][:, start : start + length], out, rtol=1e-10, atol=1e-10)
        start += length
    torch.testing.assert_close(packed[1], state, rtol=1e-10, atol=1e-10)


def test_state_belongs_to_the_first_segment() -> None:
    tensors = inputs(9, torch.float64, with_state=True)
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2], [0] * 9])
    fast = values_and_gradients(wkv7, tensors, segment_ids=ids, chunk_tokens=4)
    slow = values_and_gradients(wkv7_reference, tensors, segment_ids=ids)
    assert max(relative_errors(fast, slow)) < 1e-12


def test_zero_tokens_leave_the_state_untouched() -> None:
    r, log_decay, k, v, _, b, state = inputs(6, torch.float32, with_state=True)
    zero = torch.zeros_like(k)
    _, after = wkv7(r, torch.zeros_like(log_decay), zero, v, zero, b, state, chunk_tokens=4)
    assert torch.equal(after, state)


def test_half_precision_inputs_keep_a_float32_state() -> None:
    tensors = [tensor.detach().to(torch.bfloat16) for tensor in inputs(20, torch.float32, with_state=False)]
    out, state = wkv7(*tensors)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    wanted, _ = wkv7_reference(*(tensor.double() for tensor in tensors))
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("T", [1, 3])
def test_gradcheck(T: int) -> None:
    tensors = inputs(T, torch.float64, with_state=True, N=3)
    tensors = [tensor.detach()[:1].clone().requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(lambda *t: wkv7(*t, chunk_tokens=2), tensors)


def test_shapes_are_checked() -> None:
    r, log_decay, k, v, a, b = inputs(3, torch.float32, with_state=False)
    with pytest.raises(ValueError, match="k must have shape"):
        wkv7(r, log_decay, k[:, :2], v, a, b)
    with pytest.raises(ValueError, match=r"state must have shape \(2, 3, 6, 6\)"):
        wkv7(r, log_decay, k, v, a, b, torch.zeros(1, 3, 6, 6))
    with pytest.raises(ValueError, match="at least one token"):
        wkv7(*(tensor[:, :0] for tensor in (r, log_decay, k, v, a, b)))
