"""The real thing: six of SmolLM2's thirty attention blocks as RWKV-7, without any training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.models.checkpoint import load_model
from refragkit.models.convert import calibrate, convert_blocks
from refragkit.models.convert.evaluate import INDUCTION_LENGTH, WINDOW
from refragkit.models.convert.probes import induction_perplexity, induction_rows, perplexity
from refragkit.models.convert.text import split_text, windows

LAYERS = [12, 15, 21, 24, 25, 28]


@pytest.mark.slow
def test_six_blocks_cost_a_fifth_of_perplexity_before_training(smollm2: Path) -> None:
    tokenizer, teacher = Tokenizer.load(smollm2), load_model(smollm2).eval()
    data = MultiHopQA()
    data.prepare()
    tested = {i for q in data.validation for i in q.supporting_ids}
    split = split_text(d for d in data.corpus or [] if d.doc_id not in tested)
    fitted = windows(split.calibration, tokenizer, 8192, WINDOW, "calibration")
    unseen = windows(split.held_out, tokenizer, 4096, WINDOW, "held out")
    probe = induction_rows(tokenizer.vocab_size, tokenizer.control_ids, 8, INDUCTION_LENGTH, 0)
    student = convert_blocks(teacher, LAYERS, "R").eval()
    reports = calibrate(student, teacher, LAYERS, torch.split(fitted, 4), "lsq")
    assert all(report.fitted < 0.7 < 1.5 < report.copied for report in reports)
    assert perplexity(student, unseen) <= 1.25 * perplexity(teacher, unseen)
    assert induction_perplexity(student, probe) <= 2 * induction_perplexity(teacher, probe)
