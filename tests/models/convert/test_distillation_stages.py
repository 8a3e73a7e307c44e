"""Both stages of distillation on a small teacher: what they lower, what they leave alone, and that they repeat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refragkit.errors import ConfigError
from refragkit.models.build import transformer
from refragkit.models.convert import calibrate, convert_blocks, run_mixer
from refragkit.models.convert.activation_cache import ActivationCache, cached_activations
from refragkit.models.convert.activations import mixer_activations
from refragkit.models.convert.align import Alignment, trained_mixers, training_steps, window_rows
from refragkit.models.convert.blocks import mixer_of
from refragkit.models.convert.match import Matching, divergence
from refragkit.models.hybrid import HybridLM

VOCAB, T = 61, 64
LAYERS = [1, 2]


def windows(n: int, seed: int) -> Tensor:
    """Text in which a token depends on the one before it, so that attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(0, VOCAB, (VOCAB, 2), generator=torch.Generator().manual_seed(99))
    ids = torch.randint(0, VOCAB, (n, T), generator=generator)
    for t in range(1, T):
        ids[:, t] = follows[ids[:, t - 1], torch.randint(0, 2, (n,), generator=generator)]
    return ids


@pytest.fixture(scope="module")
def teacher() -> HybridLM:
    model = transformer(
        n_layers=4, vocab_size=VOCAB, d_model=48, n_heads=3, n_kv_heads=1, head_dim=16, d_ff=96, seed=1
    )
    assert isinstance(model, HybridLM)
    with (
        torch.no_grad()
    ):  # heads that look for their own token, and blocks that matter: a fresh model's hardly do
        for block in model.blocks:
            attention = block.get_submodule("mixer")
            attention.q_proj.weight.mul_(3)
            attention.k_proj.weight.copy_(attention.q_proj.weight[:16])
            attention.o_proj.weight.mul_(8)
        model.embed_tokens.weight.mul_(4)
    return model.eval()


@pytest.fixture(scope="module")
def cache(teacher: HybridLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActivationCache]:
    folder = tmp_path_factory.mktemp("activations")
    with cached_activations(teacher, LAYERS, windows(128, seed=0), folder, max_bytes=2**30) as made:
        yield made


def converted(teacher: HybridLM, to: Any, calibration: Any = "cal") -> HybridLM:
    student = convert_blocks(teacher, LAYERS, to, seed=3)
    calibrate(student, teacher, LAYERS, [windows(32, seed=0)], calibration)
    return student


def error(student: HybridLM, teacher: HybridLM, layer: int) -> float:
    """Relative squared error on the teacher's inputs, on tokens that nothing was trained on."""
    with torch.no_grad():
        x, y = mixer_activations(teacher, [layer], windows(16, seed=5))[layer]
        y_mean = y.mean((0, 1))
        return float(
            (run_mixer(mixer_of(student, layer), x) - y).square().sum() / (y - y_mean).square().sum()
        )


def align(student: HybridLM, cache: ActivationCache, **settings: Any) -> dict[int, list[float]]:
    with trained_mixers(student, cache.layers) as mixers:
        stage = Alignment(mixers, cache, **settings)
        steps = [stage.step(i) for i in range(stage.steps)]
    return {layer: [losses[f"align_loss/{layer}"] for losses in steps] for layer in cache.layers}


def match(student: HybridLM, cache: ActivationCache, **settings: Any) -> list[float]:
    with trained_mixers(student, cache.layers) as mixers:
        stage = Matching(student, mixers, cache, **settings)
        return [stage.step(i)["match_loss"] for i in range(stage.steps)]


def kl(student: HybridLM, teacher: HybridLM, input_ids: Tensor) -> Tensor:
    """KL(teacher || student) from whole logits of both: ``[B * T]``."""
    with torch.no_grad():
        log_p = teacher(input_ids).logits.log_softmax(-1)
    log_q = student(input_ids).logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).flatten()


def snapshot(model: HybridLM) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_only_mixers_moved(before: dict[str, Tensor], student: HybridLM) -> None:
    moved = tuple(f"blocks.{i}.mixer." for i in LAYERS)
    for name, value in student.state_dict().items():
        assert name.startswith(moved) or torch.equal(value, before[name]), name
    for name in (name for name in before if name.startswith(moved) and name.endswith("proj.weight")):
        assert not torch.equal(student.state_dict()[name], before[name]), name
    assert all(p.grad is None and p.requires_grad for p in student.parameters())


@pytest.mark.parametrize("to", ["R", "M"])
@pytest.mark.parametrize(("calibration", "least"), [("none", 3), ("cal", 1.3)])
def test_alignment_lowers_every_blocks_error_and_touches_nothing_else(
    teacher: HybridLM, cache: ActivationCache, to: Any, calibration: Any, least: float
) -> None:
    student = converted(teacher, to, calibration)
    before, teacher_before = snapshot(student), snapshot(teacher)
    errors = {layer: error(student, teacher, layer) for layer in LAYERS}
    curves = align(student, cache, tokens=50 * 1024)
    assert {len(curve) for curve in curves.values()} == {50}
    for layer in LAYERS:
        after = error(student, teacher, layer)
        assert after < errors[layer] / least
        # What it reports is what unseen tokens show
        assert curves[layer][0] == pytest.approx(errors[layer], rel=0.3)
        assert curves[layer][-1] == pytest.approx(after, rel=0.3)
    check_only_mixers_moved(before, student)
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, teacher_before[name])


@pytest.mark.parametrize("to", ["R", "M"])
def test_matching_lowers_the_divergence_on_unseen_tokens(
    teacher: HybridLM, cache: ActivationCache, to: Any
) -> None:
    student = converted(teacher, to)
    unseen = windows(16, seed=5)
    with torch.no_grad():
        start = float(kl(student, teacher, unseen).mean())
    before, teacher_before = snapshot(student), snapshot(teacher)
    curve = match(student, cache, tokens=20 * 1024, matrix_lr=2e-3, other_lr=4e-3)
    with torch.no_grad():
        end = float(kl(student, teacher, unseen).mean())
    assert len(curve) == 20 and curve[0] == pytest.approx(start, rel=0.3)
    assert end < 0.8 * start
    check_only_mixers_moved(before, student)
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, teacher_before[name])


def test_one_seed_gives_one_result_and_another_seed_another(
    teacher: HybridLM, cache: ActivationCache
) -> None:
    def trained(seed: int) -> dict[str, Tensor]:
        student = converted(teacher, "R")
        align(student, cache, tokens=4096, seed=seed)
        match(student, cache, tokens=2048, seed=seed)
        return snapshot(student)

    first, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_a_step_is_that_of_the_whole_model_on_all_its_windows(teacher: HybridLM, tmp_path: Path) -> None:
    """Neither the cached start and end nor the windows one by one change loss or gradient."""
    text = windows(16, seed=0)  # one step of 1,024 tokens reads all of it
    student = converted(teacher, "M")
    with torch.no_grad():
        whole = float(kl(student, teacher, text).mean())
    plain = converted(teacher, "M")
    mixers = [p for i in LAYERS for p in mixer_of(plain, i).parameters()]
    gradients = torch.autograd.grad(kl(plain, teacher, text).mean(), mixers)
    with cached_activations(teacher, LAYERS, text, tmp_path, max_bytes=2**30) as cache:
        assert cache.first == LAYERS[0]
        (loss,) = match(student, cache, tokens=1024, matrix_lr=1e-6, other_lr=1e-6)
    assert loss == pytest.approx(whole, rel=1e-2)  # activations are kept in bfloat16
    # AdamW's first step is its rate times the gradient's sign
    after = [p for i in LAYERS for p in mixer_of(student, i).parameters()]
    agree = total = 0
    for new, old, gradient in zip(after, mixers, gradients, strict=True):
        large = gradient.abs() > 1e-2 * gradient.abs().max()
        moved = (new - old).detach()[large]
        agree += int((moved.sign() == -gradient[large].sign()).sum())
        total += int((moved != 0).sum())
    assert total and agree > 0.95 * total


def test_blocks_below_an_r_block_are_run_as_well(teacher: HybridLM, tmp_path: Path) -> None:
    """Where a block above reads the values of the first R block, a student can't start in between."""
    below = convert_blocks(teacher, [0], "R")
    text = windows(4, seed=0)
    with cached_activations(below, [2], text, tmp_path, max_bytes=2**30) as cache:
        assert cache.first == 0
        start, final = cache.read_ends(range(4))
        again = convert_blocks(below, [2], "R", seed=1)
        with torch.no_grad():
            expected = kl(again, below, text)
            found = divergence(again, start.float(), cache.first, final.float())
    assert float(found.mean()) == pytest.approx(float(expected.mean()), rel=2e-2)


def test_the_order_of_windows_is_a_function_of_seed_and_step() -> None:
    rows = [row for step in range(7) for row in window_rows(10, 3, step, seed=4)]
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert rows[:10] != rows[10:20]
    assert window_rows(10, 3, 5, seed=4) == rows[15:18]
    assert window_rows(10, 3, 5, seed=5) != rows[15:18]


def test_tokens_become_whole_steps() -> None:
    assert training_steps(10 * 1024, 512) == (2, 10)
    assert training_steps(1, 512) == (2, 1)
    assert training_steps(4096, 2048) == (1, 2)


def test_weights_in_bfloat16_are_refused(teacher: HybridLM, cache: ActivationCache) -> None:
    student = convert_blocks(teacher, LAYERS, "R").bfloat16()
    with pytest.raises(ConfigError, match=r"bfloat16: small updates vanish.*hardware\.precision"):
        align(student, cache, tokens=1024)
