"""What is measured of a conversion, and what its models say."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from refragkit.data.conversation import render_prompt
from refragkit.data.tokenizer import Tokenizer
from refragkit.models.base import SequenceModel
from refragkit.models.build import hybrid
from refragkit.models.convert.evaluate import (
    CHAT_PROMPTS,
    CONTEXTS,
    LENGTHS,
    PLAIN_PROMPTS,
    RECALL_CONTEXTS,
    WINDOW,
    Sample,
    as_table,
    compare,
    evaluate_model,
    evaluation_steps,
    greedy_samples,
    in_type,
    samples_table,
)
from refragkit.models.convert.probes import COUNTED
from refragkit.types import Conversation, Message


def model_for(tokenizer: Tokenizer) -> SequenceModel:
    model = hybrid(block_pattern="TR", vocab_size=tokenizer.vocab_size, d_model=64, d_ff=64, seed=2).eval()
    with torch.no_grad():  # a fresh model likes all tokens the same
        model.get_parameter("embed_tokens.weight").mul_(20)
    return model


def texts(tokenizer: Tokenizer) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    high = tokenizer.vocab_size
    return {
        name: torch.randint(8, high, (n, WINDOW // 8), generator=generator)
        for name, n in (("a", 8), ("b", 1))
    }


def test_all_measures_side_by_side(chat_tokenizer: Tokenizer) -> None:
    model = model_for(chat_tokenizer)
    steps: list[None] = []
    sets = texts(chat_tokenizer)
    asked: dict[str, Any] = {"recall_contexts": 3, "contexts": (64, 256)}
    found = evaluate_model(model, chat_tokenizer, sets, **asked, advance=lambda: steps.append(None))
    assert len(steps) == evaluation_steps(sets)
    expected = ["perplexity/a", "perplexity/b", "induction_perplexity", "recall"]
    expected += [f"perplexity_at/{n}" for n in (64, 128, 192, 256)]
    expected += [f"{m}/{n}" for n in (64, 256) for m in ("state_bytes", "tokens_per_second")]
    assert list(found) == expected and all(isinstance(value, float) for value in found.values())
    assert found["state_bytes/256"] == model.state_bytes(1, 256) > found["state_bytes/64"]
    rows = compare({"x": found, "y": {key: 2 * value for key, value in found.items()}})
    assert [row["measure"] for row in rows] == list(found)
    assert rows[0]["y / x"] == 2 and list(rows[0]) == ["measure", "x", "y", "y / x"]
    assert as_table(rows, "t").row_count == len(rows)
    few = evaluate_model(model, chat_tokenizer, {"b": sets["b"]}, recall_contexts=1, contexts=())
    assert list(few) == ["perplexity/b", "induction_perplexity", "recall"]
    assert few["perplexity/b"] == pytest.approx(found["perplexity/b"])


def test_the_defaults_are_those_of_a_report() -> None:
    assert RECALL_CONTEXTS * COUNTED >= 200 and CONTEXTS == (1024, 4096, 16384) and LENGTHS == 4


def test_another_precision_is_measured_in_a_copy(chat_tokenizer: Tokenizer) -> None:
    model = model_for(chat_tokenizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sets = {"a": texts(chat_tokenizer)["a"][:2]}
    asked: dict[str, Any] = {"recall_contexts": 1, "contexts": (64,)}
    plain, again = (evaluate_model(model, chat_tokenizer, sets, **asked) for _ in range(2))
    low = evaluate_model(model, chat_tokenizer, sets, dtype=torch.bfloat16, **asked)
    assert plain["perplexity/a"] == again["perplexity/a"] != low["perplexity/a"]
    assert low["perplexity/a"] == pytest.approx(plain["perplexity/a"], rel=0.05)
    assert low["state_bytes/64"] < plain["state_bytes/64"]
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name])


def test_kept_measures_are_those_of_the_same_model_and_texts_only(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, sets = model_for(chat_tokenizer), {"a": texts(chat_tokenizer)["a"][:2]}
    steps: list[None] = []

    def measured(sets: dict[str, Tensor], **more: Any) -> dict[str, float]:
        steps.clear()
        options: dict[str, Any] = {"recall_contexts": 1, "contexts": (), "cache_dir": tmp_path, **more}
        found = evaluate_model(model, chat_tokenizer, sets, **options, advance=lambda: steps.append(None))
        assert len(steps) == evaluation_steps(sets)
        return found

    first = measured(sets)
    (file,) = (tmp_path / "measures").iterdir()
    file.write_text(file.read_text().replace('"recall"', '"kept"'))
    assert "kept" in measured(sets) and "state_bytes/64" in measured(sets, contexts=(64,))
    assert measured({"b": sets["a"]}).keys() == {"perplexity/b", "induction_perplexity", "recall"}
    for other in ({"seed": 1}, {"dtype": torch.bfloat16}, {"recall_contexts": 2}, {"cache_dir": None}):
        assert "kept" not in measured(sets, **other)
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] += 1
    assert "kept" not in measured(sets)
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] -= 1
    file.write_text(file.read_text()[:-20])  # damaged
    assert measured(sets) == pytest.approx(first) and file.read_text().endswith("}\n")


def test_in_type_casts_each_weight_once_and_keeps_what_is_shared(chat_tokenizer: Tokenizer) -> None:
    model = model_for(chat_tokenizer)
    assert in_type(model, None) is model and in_type(model, torch.float32) is model
    low = in_type(model, torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    reference = model_for(chat_tokenizer).to(torch.bfloat16)
    ids = texts(chat_tokenizer)["b"][:, :40]
    with torch.no_grad():
        assert torch.equal(low(ids).logits, reference(ids).logits)
    tied = hybrid(vocab_size=300, tie_embeddings=True, seed=1)
    low = in_type(tied, torch.bfloat16)
    assert low.head_weight is low.get_parameter("embed_tokens.weight")
    assert low.training and not low.get_parameter("embed_tokens.weight").requires_grad


def test_samples_are_greedy_and_in_the_models_own_form(
    chat_tokenizer: Tokenizer, base_tokenizer: Tokenizer
) -> None:
    model = model_for(chat_tokenizer)
    samples = greedy_samples(model, chat_tokenizer, max_new_tokens=6)
    assert [sample.prompt for sample in samples] == list(CHAT_PROMPTS) and len(CHAT_PROMPTS) == 5
    assert samples == greedy_samples(model, chat_tokenizer, CHAT_PROMPTS, max_new_tokens=6)
    question = Conversation("", (Message("user", CHAT_PROMPTS[1]),))
    assert samples[1].text == continued(
        model, chat_tokenizer, render_prompt(question, chat_tokenizer, 1000, 6), 6
    )
    base = model_for(base_tokenizer)
    plain = greedy_samples(base, base_tokenizer, max_new_tokens=6)
    assert [sample.prompt for sample in plain] == list(PLAIN_PROMPTS)
    assert plain[0].text == continued(base, base_tokenizer, base_tokenizer.encode(PLAIN_PROMPTS[0]), 6)
    assert len({sample.text for sample in [*samples, *plain]}) > 1
    own = greedy_samples(base, base_tokenizer, ["the user asks"], max_new_tokens=3, dtype=torch.bfloat16)
    assert [sample.prompt for sample in own] == ["the user asks"]


def continued(model: SequenceModel, tokenizer: Tokenizer, ids: list[int], tokens: int) -> str:
    """Greedy decoding without state: the whole text is read again for each token."""
    new: list[int] = []
    with torch.no_grad():
        for _ in range(tokens):
            token = int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax())
            if token == tokenizer.end_id:
                break
            new.append(token)
    return tokenizer.decode(new).strip()


def test_samples_stand_side_by_side() -> None:
    rows = {"source": [Sample("Q", "[bold]A")], "converted": [Sample("Q", "B")]}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(samples_table(rows, "Samples"))
    text = console.export_text()
    assert "[bold]A" in text and "converted" in text and "B" in text
