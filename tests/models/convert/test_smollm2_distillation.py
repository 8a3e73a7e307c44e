"""The real thing: six of SmolLM2's thirty attention blocks as RWKV-7, aligned on 16 thousand tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.models.checkpoint import load_model
from refragkit.models.convert import calibrate, convert_blocks
from refragkit.models.convert.activation_cache import cached_activations
from refragkit.models.convert.align import align
from refragkit.models.convert.evaluate import WINDOW
from refragkit.models.convert.probes import perplexity
from refragkit.models.convert.text import split_text, windows

LAYERS = [12, 15, 21, 24, 25, 28]
TOKENS = 16_384


@pytest.mark.slow
def test_alignment_brings_six_blocks_near_the_teacher(smollm2: Path, tmp_path: Path) -> None:
    tokenizer, teacher = Tokenizer.load(smollm2), load_model(smollm2, torch.float32).eval()
    data = MultiHopQA()
    data.prepare()
    tested = {i for q in data.validation for i in q.supporting_ids}
    split = split_text(d for d in data.corpus or [] if d.doc_id not in tested)
    trained = windows(split.calibration, tokenizer, TOKENS, WINDOW, "training")
    unseen = windows(split.held_out, tokenizer, 4096, WINDOW, "held out")
    student = convert_blocks(teacher, LAYERS, "R").eval()
    calibrate(student, teacher, LAYERS, torch.split(trained[:16], 4), "cal")
    with cached_activations(teacher, LAYERS, trained, tmp_path, max_bytes=2**30) as cache:
        curves = align(student, cache, tokens=TOKENS)
    for curve in curves.values():
        assert sum(curve[-5:]) < 0.8 * 5 * curve[0]
    assert perplexity(student, unseen) < 1.2 * perplexity(teacher, unseen)
