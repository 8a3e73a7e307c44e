"""The real thing, CI-sized: six of SmolLM2's thirty attention blocks, 48 thousand tokens of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.methods.distill import train_stages
from refragkit.models.checkpoint import load_model
from refragkit.models.convert import calibrate, convert_blocks
from refragkit.models.convert.activation_cache import ActivationCache, cached_activations
from refragkit.models.convert.evaluate import WINDOW
from refragkit.models.convert.probes import induction_perplexity, induction_rows, perplexity
from refragkit.models.convert.ready_made import LAYERS, recipe
from refragkit.models.convert.text import split_text, windows, with_recall
from refragkit.models.hybrid import HybridLM
from refragkit.training.hardware import Hardware

TOKENS = 49_152
ALIGN_TOKENS = 65_536


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def teacher(smollm2: Path) -> HybridLM:
    model = load_model(smollm2, torch.float32).eval()
    assert isinstance(model, HybridLM)
    return model


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    data = MultiHopQA()
    data.prepare()
    tested = {i for q in data.validation for i in q.supporting_ids}
    split = split_text(d for d in data.corpus or [] if d.doc_id not in tested)
    trained = windows(split.calibration, tokenizer, TOKENS, WINDOW, "training")
    trained = with_recall(trained, recipe().recall_share, seed=0)
    return trained, windows(split.held_out, tokenizer, 8192, WINDOW, "held out")


@pytest.fixture(scope="module")
def cache(
    teacher: HybridLM, texts: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ActivationCache]:
    folder = tmp_path_factory.mktemp("activations")
    with (
        Hardware().autocast(),
        cached_activations(teacher, LAYERS, texts[0], folder, max_bytes=2**30) as made,
    ):
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("to", ["M", "R"])
def test_a_short_distillation_brings_six_blocks_near_the_teacher(
    teacher: HybridLM,
    tokenizer: Tokenizer,
    texts: tuple[Tensor, Tensor],
    cache: ActivationCache,
    to: Any,
    tmp_path: Path,
) -> None:
    student = convert_blocks(teacher, LAYERS, to).eval()
    calibrate(student, teacher, LAYERS, torch.split(texts[0][:16], 4), "cal")
    settings = dataclasses.replace(recipe(), align_tokens=ALIGN_TOKENS)
    student, losses = train_stages(
        student,
        cache,
        settings,
        Hardware(),
        seed=0,
        folder=tmp_path,
        log_metrics=lambda values, step: None,
        progress=lambda what, steps: nullcontext(lambda: None),
    )
    for layer in LAYERS:
        curve = losses[f"align_loss/{layer}"]
        assert sum(curve[-5:]) < 0.85 * sum(curve[:5]), layer
    assert perplexity(student, texts[1]) < 1.1 * perplexity(teacher, texts[1])
    rows = induction_rows(tokenizer.vocab_size, tokenizer.control_ids, 8, 128, seed=0)
    assert induction_perplexity(student, rows) < 1.5 * induction_perplexity(teacher, rows)
