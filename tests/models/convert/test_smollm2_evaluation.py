"""The real thing: what SmolLM2 scores before any conversion, on the bundled text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from refragkit.data.datamodule import MultiHopQA
from refragkit.data.tokenizer import Tokenizer
from refragkit.models.checkpoint import load_model
from refragkit.models.convert.evaluate import WINDOW, evaluate_model, greedy_samples
from refragkit.models.convert.text import question_pieces, split_text, windows


@pytest.mark.slow
def test_the_source_answers_recalls_and_reads_in_bfloat16_as_in_float32(smollm2: Path) -> None:
    tokenizer, model = Tokenizer.load(smollm2), load_model(smollm2, torch.float32).eval()
    data = MultiHopQA()
    data.prepare()
    tested = {i for q in data.validation for i in q.supporting_ids}
    corpus = [d for d in data.corpus or [] if d.doc_id not in tested]
    questions = list(question_pieces(data.train, corpus, tokenizer))
    assert len(questions) == len(data.train)
    split = split_text([*corpus, *questions])
    mixed = windows(split.calibration, tokenizer, 50_000, WINDOW, "training")
    chat = (mixed == tokenizer.end_id).any(1)  # windows in which a conversation's turn ends
    assert 0.2 < float(chat.float().mean()) < 0.9
    assert {i for q in questions for i in q.ids if i in tokenizer.control_ids} == set(
        tokenizer.encode_template("<|im_start|><|im_end|>")
    )

    texts = {"held-out text": windows(split.held_out, tokenizer, 2048, WINDOW, "held out")}
    precise = evaluate_model(model, tokenizer, texts, recall_contexts=5, contexts=())
    found = evaluate_model(model, tokenizer, texts, dtype=torch.bfloat16)
    assert 10 < found["perplexity/held-out text"] < 40
    assert found["perplexity/held-out text"] == pytest.approx(precise["perplexity/held-out text"], rel=0.01)
    assert found["induction_perplexity"] == pytest.approx(precise["induction_perplexity"], rel=0.03)
    assert found["induction_perplexity"] < 25 and found["recall"] > 0.7
    assert found["tokens_per_second/1024"] > found["tokens_per_second/16384"] > 0
    samples = greedy_samples(model, tokenizer, dtype=torch.bfloat16)
    assert "Paris" in samples[0].text and all(sample.text for sample in samples)
