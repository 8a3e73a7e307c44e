from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refragkit.ops import distillation
from refragkit.ops.distillation import linear_kl


def problem(tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    student = normal(tokens, 16).requires_grad_(), normal(vocab, 16).requires_grad_()
    return *student, normal(tokens, 12), normal(vocab, 12)


def plain(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    log_q = functional.log_softmax(student_hidden @ student_weight.T / temperature, -1)
    log_p = functional.log_softmax(teacher_hidden @ teacher_weight.T / temperature, -1)
    return functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("block_elements", [1, 37 * 5, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equals_kl_div_on_full_logits_in_value_and_gradient(
    block_elements: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_BLOCK_ELEMENTS", block_elements)
    inputs = problem(23, 37, torch.float32)
    scale = torch.linspace(0.5, 2, 23)
    got = linear_kl(*inputs, temperature)
    wanted = plain(*inputs, temperature)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert got.dtype == torch.float32 and bool((got > 0).all())
    got_grads = torch.autograd.grad((got * scale).sum(), inputs[:2], retain_graph=True)
    again = torch.autograd.grad((got * scale).sum(), inputs[:2])
    wanted_grads = torch.autograd.grad((wanted * scale).sum(), inputs[:2])
    for g, a, w in zip(got_grads, again, wanted_grads, strict=True):
        assert torch.equal(g, a)
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_BLOCK_ELEMENTS", 25)
    student_hidden, student_weight, *teacher = problem(7, 11, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_kl(h, w, *teacher, 1.5), (student_hidden, student_weight)
    )


def test_is_zero_for_equal_distributions_and_the_teacher_gets_no_gradient() -> None:
    _, _, hidden, weight = (t.detach() for t in problem(9, 37, torch.float32))
    teacher_hidden, teacher_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    student_hidden = hidden.clone().requires_grad_()
    divergence = linear_kl(student_hidden, weight, teacher_hidden, teacher_weight)
    assert float(divergence.detach().abs().max()) < 1e-6
    divergence.sum().backward()
    assert teacher_hidden.grad is None and teacher_weight.grad is None
    assert student_hidden.grad is not None and float(student_hidden.grad.abs().max()) < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_gives_float32_losses_and_gradients_of_the_inputs_type(autocast: bool) -> None:
    stored = torch.float32 if autocast else torch.bfloat16
    exact = problem(50, 37, torch.bfloat16)
    inputs = [t.detach().to(stored) for t in exact]
    for tensor in inputs[:2]:
        tensor.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        divergence = linear_kl(*inputs)
    assert divergence.dtype == torch.float32
    divergence.mean().backward()
    references = [t.detach().double() for t in exact]
    for tensor in references[:2]:
        tensor.requires_grad_()
    wanted = plain(*references)
    wanted.mean().backward()
    torch.testing.assert_close(divergence.detach().double(), wanted.detach(), rtol=0.05, atol=0.1)
    for tensor, reference in zip(inputs[:2], references[:2], strict=True):
        assert tensor.grad is not None and reference.grad is not None
        assert tensor.grad.dtype == stored
        assert (tensor.grad.double() - reference.grad).norm() < 0.02 * reference.grad.norm()


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.elements = max(self.elements, *sizes, 0) if sizes else self.elements
        return out


@pytest.mark.parametrize("train_head", [False, True])
def test_never_holds_the_logits_of_all_tokens(train_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab, block = 256, 64, 4
    monkeypatch.setattr(distillation, "_BLOCK_ELEMENTS", block * vocab)
    student_hidden, student_weight, *teacher = problem(tokens, vocab, torch.float32)
    with LargestTensor() as largest:
        loss = linear_kl(student_hidden, student_weight.requires_grad_(train_head), *teacher)
        loss.sum().backward()
    assert largest.elements <= tokens * 16  # the hidden states; logits would be 4 times that
    assert student_hidden.grad is not None
    assert (student_weight.grad is not None) == train_head


@pytest.mark.parametrize(
    ("shapes", "temperature", "message"),
    [
        (((5, 4), (9, 3), (5, 4), (9, 4)), 1.0, "student_hidden"),
        (((5, 4), (9, 4), (5, 4), (9, 3)), 1.0, "teacher_hidden"),
        (((5, 4), (9, 4), (6, 4), (9, 4)), 1.0, "5 and 6"),
        (((5, 4), (9, 4), (5, 4), (8, 4)), 1.0, "9 and 8"),
        (((5, 4), (9, 4), (5, 4), (9, 4)), 0.0, "temperature"),
        (((5, 4), (9, 4), (5, 4), (9, 4)), float("nan"), "temperature"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: Any, temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_kl(*(torch.zeros(shape) for shape in shapes), temperature)
