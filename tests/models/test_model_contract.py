"""What design section 3 promises of every model, over every option of ``conf/model``.

In float64, where a leak of one token into another can't hide in rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from refragkit.models.base import SequenceModel
from refragkit.models.build import build_model, transformer
from refragkit.models.checkpoint import load_model, save_model
from refragkit.models.convert.blocks import convert_blocks
from refragkit.models.state import KVCache, ModelState

CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
VOCAB = 61
EXTRA = {  # patterns and switches that no default has
    "all-kinds": {"block_pattern": "MRTRMT"},
    "arwkv": {"block_pattern": "RRTR", "wkv_gate": "none", "wkv_group_norm": False},
}


def node(name: str) -> dict[str, Any]:
    if name in EXTRA:
        option = "rwkv-qwen" if name == "arwkv" else "hybrid"
        return {**yaml.safe_load((CONFIGS[0].parent / f"{option}.yaml").read_text()), **EXTRA[name]}
    cfg: dict[str, Any] = yaml.safe_load((CONFIGS[0].parent / f"{name}.yaml").read_text())
    return cfg


CONVERTED = ["converted-R", "converted-M"]


def build(name: str) -> SequenceModel:
    if name not in CONVERTED:
        return build_model(node(name), vocab_size=VOCAB, seed=3)
    # An odd number of heads, keys and values shared, biases
    shape: dict[str, Any] = {"n_layers": 5, "d_model": 48, "n_heads": 3, "n_kv_heads": 1, "head_dim": 16}
    teacher = transformer(vocab_size=VOCAB, d_ff=64, qkv_bias=True, seed=3, **shape)
    return convert_blocks(teacher, [1, 2, 4], name[-1])  # type: ignore[arg-type]


def disturb(model: torch.nn.Module) -> None:
    """Move every weight off its initial value, so that zeros and ones can't hide a path."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@pytest.fixture(scope="module", params=[path.stem for path in CONFIGS] + list(EXTRA) + CONVERTED)
def model(request: pytest.FixtureRequest) -> Iterator[SequenceModel]:
    built = build(request.param)
    if not isinstance(built, SequenceModel):
        pytest.skip(f"{request.param} is not a causal sequence model")
    built = built.double().eval()
    disturb(built)
    with torch.no_grad():
        yield built


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def assert_same_state(got: ModelState, wanted: ModelState) -> None:
    assert torch.equal(got.lengths, wanted.lengths)
    for g, w in zip(got.tensors(), wanted.tensors(), strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def copy_of(state: ModelState) -> ModelState:
    return copy.deepcopy(state)


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """A batch of rows, padded with a token that would show if it were read."""
    width = max(len(row) for row in rows) + 2  # even the longest row gets padding
    ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = {
            "left": torch.arange(width - len(row), width),
            "right": torch.arange(len(row)),
            "holes": torch.randperm(width, generator=torch.Generator().manual_seed(i))[: len(row)]
            .sort()
            .values,
        }[side]
        ids[i, where], mask[i, where] = row, 1
    return ids, mask


ROWS = [tokens(n, seed=n) for n in (9, 1, 5, 2)]


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_is_invisible(model: SequenceModel, side: str) -> None:
    ids, mask = padded(ROWS, side)
    out = model(ids, attention_mask=mask, return_state=True)
    assert bool((out.logits[mask == 0] == 0).all())
    for i, row in enumerate(ROWS):
        alone = model(row[None], return_state=True)
        assert_close(out.logits[i][mask[i] == 1], alone.logits[0])
        assert_same_state(out.state.select([i]), alone.state)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_is_invisible_behind_a_state(model: SequenceModel, side: str) -> None:
    first = [tokens(n, seed=20 + n) for n in (3, 6, 1, 4)]
    ids, mask = padded(first, "left")
    state = model(ids, attention_mask=mask, return_state=True).state
    ids, mask = padded(ROWS, side)
    out = model(ids, attention_mask=mask, state=state, return_state=True)
    for i, row in enumerate(ROWS):
        whole = model(torch.cat([first[i], row])[None], return_state=True)
        assert_close(out.logits[i][mask[i] == 1], whole.logits[0, len(first[i]) :])
        assert_same_state(out.state.select([i]), whole.state)


def test_an_all_padding_row_is_harmless(model: SequenceModel) -> None:
    row = tokens(5)
    ids = torch.stack([row, row])
    mask = torch.tensor([[1] * 5, [0] * 5])
    out = model(ids, attention_mask=mask, return_state=True)
    alone = model(row[None], return_state=True)
    assert_close(out.logits[:1], alone.logits)
    assert bool((out.logits[1] == 0).all())
    assert_same_state(out.state.select([0]), alone.state)
    # and its state is that of a row which has read nothing: continuing from it is starting afresh
    after = model(torch.stack([row, row]), state=out.state, return_state=True)
    assert_close(after.logits[1:], alone.logits)
    # with earlier tokens behind it, such a row keeps its state
    kept = model(ids, attention_mask=mask, state=alone.state.expand(2), return_state=True)
    assert_same_state(kept.state.select([1]), alone.state)
    nothing = model(ids, attention_mask=torch.zeros(2, 5), return_state=True)
    assert bool((nothing.logits == 0).all()) and nothing.state.lengths.tolist() == [0, 0]


def test_gradients_ignore_padding(model: SequenceModel) -> None:
    rows = ROWS[:3]
    ids, mask = padded(rows, "left")
    with torch.enable_grad():
        packed_loss = model(ids, attention_mask=mask).logits.square().sum()
        got = torch.autograd.grad(packed_loss, list(model.parameters()))
        loss = torch.stack([model(row[None]).logits.square().sum() for row in rows]).sum()
        wanted = torch.autograd.grad(loss, list(model.parameters()))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-7, atol=1e-7)


LAYOUTS = {  # segment ids: documents of 3, 4 and 1 tokens, with padding nowhere, behind, in front, on both sides
    "full": [[1, 1, 1, 2, 2, 2, 2, 3]],
    "padded": [[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [0, 0, 1, 1, 1, 2, 2, 2, 2, 3]],
    "scattered": [[0, 5, 5, 5, 9, 9, 9, 9, 2, 0], [1, 1, 1, 0, 2, 2, 2, 2, 0, 3]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_is_invisible(model: SequenceModel, layout: str) -> None:
    segment_ids = torch.tensor(LAYOUTS[layout])
    documents = [tokens(n, seed=40 + n) for n in (3, 4, 1)]
    flat = torch.cat(documents)
    ids = torch.full_like(segment_ids, 7)
    for i in range(len(ids)):
        ids[i, segment_ids[i] > 0] = flat
    with torch.enable_grad():
        out = model(ids, segment_ids=segment_ids, return_state=True)
        got = torch.autograd.grad(out.logits.square().sum(), list(model.parameters()))
        alone = [model(document[None], return_state=True) for document in documents]
        loss = len(ids) * torch.stack([each.logits.square().sum() for each in alone]).sum()
        wanted = torch.autograd.grad(loss, list(model.parameters()))
    for i in range(len(ids)):
        real = out.logits[i, segment_ids[i] > 0]
        assert_close(real, torch.cat([each.logits[0] for each in alone]))
        assert_same_state(out.state.select([i]), alone[-1].state)  # that of the last document
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-7, atol=1e-7)


def test_packing_with_a_state_is_refused(model: SequenceModel) -> None:
    ids = tokens(1, 4)
    state = model(ids, return_state=True).state
    with pytest.raises(ValueError, match="can't be combined with state"):
        model(ids, segment_ids=torch.ones(1, 4), state=state)


def test_state_is_exact_at_every_split(model: SequenceModel) -> None:
    ids = tokens(2, 11)
    whole = model(ids, return_state=True)
    for n in range(12):
        first = model(ids[:, :n], return_state=True)
        second = model(ids[:, n:], state=first.state, return_state=True)
        assert_close(torch.cat([first.logits, second.logits], dim=1), whole.logits)
        assert_same_state(second.state, whole.state)


def test_step_by_step_decoding_equals_one_pass(model: SequenceModel) -> None:
    ids = tokens(3, 9)
    whole = model(ids, return_state=True)
    state, logits = None, []
    for t in range(9):
        out = model(ids[:, t : t + 1], state=state, return_state=True)
        state = out.state
        logits.append(out.logits)
    assert_close(torch.cat(logits, dim=1), whole.logits)
    assert_same_state(state, whole.state)


def test_decoding_rows_of_different_lengths(model: SequenceModel) -> None:
    ids, mask = padded(ROWS, "left")
    state = model(ids, attention_mask=mask, return_state=True).state
    following = tokens(len(ROWS), 3, seed=9)
    for t in range(3):
        out = model(following[:, t : t + 1], state=state, return_state=True)
        state = out.state
        for i, row in enumerate(ROWS):
            whole = model(torch.cat([row, following[i, : t + 1]])[None])
            assert_close(out.logits[i, -1], whole.logits[0, -1])


def test_gradients_flow_through_the_state(model: SequenceModel) -> None:
    ids = tokens(2, 9)
    parameters = list(model.parameters())
    with torch.enable_grad():
        wanted = torch.autograd.grad(model(ids).logits.square().sum(), parameters)
        first = model(ids[:, :4], return_state=True)
        second = model(ids[:, 4:], state=first.state)
        loss = first.logits.square().sum() + second.logits.square().sum()
        got = torch.autograd.grad(loss, parameters)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-7, atol=1e-7)


def test_a_state_is_never_changed_and_can_be_forked(model: SequenceModel) -> None:
    ids = tokens(2, 6)
    state = model(ids, return_state=True).state
    before = copy_of(state)
    forks = state.expand(3)
    assert forks.batch_size == 6
    continuation = tokens(6, 4, seed=2)
    forked = model(continuation, state=forks, return_state=True)
    model(continuation[:2, :1], state=state, return_state=True)
    model(continuation[2:4, :1], state=state, return_state=True)
    assert_same_state(state, before)
    assert_same_state(forks, before.expand(3))
    for i in range(6):
        whole = model(torch.cat([ids[i // 3], continuation[i]])[None], return_state=True)
        assert_close(forked.logits[i], whole.logits[0, 6:])
        assert_same_state(forked.state.select([i]), whole.state)


def test_continuing_without_copies_changes_no_earlier_state(
    model: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode far enough to use and outgrow the room behind a cache, and go back to every state on the way."""
    monkeypatch.setattr("refragkit.models.layers.attention._LEAST_SPARE", 3)
    ids = tokens(2, 14)
    states, snapshots = [], []
    state = model(ids[:, :3], return_state=True).state
    for t in range(3, 14):
        states.append(state)
        snapshots.append(copy_of(state))
        state = model(ids[:, t : t + 1], state=state, return_state=True).state
    other = tokens(2, 2, seed=9)
    for t in (0, 1, 5, 10):
        out = model(other, state=states[t], return_state=True)
        whole = model(torch.cat([ids[:, : 3 + t], other], dim=1), return_state=True)
        assert_close(out.logits, whole.logits[:, 3 + t :])
        assert_same_state(out.state, whole.state)
    for kept, snapshot in zip(states, snapshots, strict=True):
        assert_same_state(kept, snapshot)
    with torch.inference_mode():  # and across gradient modes
        inside = model(other, state=state, return_state=True).state
    after = model(other, state=inside, return_state=True)
    whole = model(torch.cat([ids, other, other], dim=1))
    assert_close(after.logits, whole.logits[:, -2:])
    with torch.enable_grad():
        loss = model(other, state=states[5]).logits.sum()
        model(other[:, :1], state=states[5], return_state=True)
        loss.backward()
    model.zero_grad()


def test_rows_are_independent_and_can_be_permuted(model: SequenceModel) -> None:
    ids = tokens(4, 7)
    out = model(ids, return_state=True)
    order = torch.tensor([2, 0, 3, 1])
    permuted = model(ids[order], return_state=True)
    assert_close(permuted.logits, out.logits[order])
    assert_same_state(permuted.state, out.state.select(order))
    continuation = tokens(4, 1, seed=3)
    a = model(continuation[order], state=out.state.select(order))
    b = model(continuation, state=out.state)
    assert_close(a.logits, b.logits[order])


@pytest.mark.parametrize("T", [1, 2, 33, 65])
def test_causal_at_any_length(model: SequenceModel, T: int) -> None:
    """A token changes nothing before it, and something at and after it; lengths around the chunk sizes."""
    ids = tokens(1, T)
    changed = ids.clone()
    position = T // 2
    changed[0, position] = (ids[0, position] + 1) % VOCAB
    a, b = model(ids).logits, model(changed).logits
    assert_close(a[:, :position], b[:, :position])
    assert bool(((a - b)[:, position:].abs().amax(-1) > 1e-8).all())


def test_logits_to_keep(model: SequenceModel) -> None:
    ids, mask = padded(ROWS, "left")
    full = model(ids, attention_mask=mask).logits
    kept = model(ids, attention_mask=mask, logits_to_keep=2).logits
    assert kept.shape == (len(ROWS), 2, VOCAB)
    for i, row in enumerate(ROWS):
        n = min(2, len(row))
        assert_close(kept[i, 2 - n :], full[i][mask[i] == 1][-n:])
        assert bool((kept[i, : 2 - n] == 0).all())


def test_hidden_states_and_head_give_the_logits(model: SequenceModel) -> None:
    ids = tokens(2, 5)
    hidden, state = model.hidden_states(ids)
    assert state is None and hidden.shape == (2, 5, model.d_model)
    assert_close(hidden @ model.head_weight.T, model(ids).logits)


def test_gradient_checkpointing_changes_no_gradient(model: SequenceModel) -> None:
    ids, mask = padded(ROWS, "left")
    parameters = list(model.parameters())
    gradients = []
    try:
        for recompute in (False, True):
            model.gradient_checkpointing = recompute
            model.train()
            with torch.enable_grad():
                loss = model(ids, attention_mask=mask).logits.square().sum()
                gradients.append(torch.autograd.grad(loss, parameters))
    finally:
        model.gradient_checkpointing = False
        model.eval()
    for got, wanted in zip(*gradients, strict=True):
        assert torch.equal(got, wanted)


def test_save_and_load(model: SequenceModel, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    ids = tokens(2, 5)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config == model.config
    if model.config.tie_embeddings:
        assert loaded.head_weight is loaded.get_parameter("embed_tokens.weight")


def test_state_bytes_are_predicted(model: SequenceModel) -> None:
    state = model(tokens(2, 6), return_state=True).state
    assert state.nbytes == model.state_bytes(2, 6)
    assert state.nbytes == sum(t.numel() * t.element_size() for t in state.tensors())


def test_bfloat16_weights_keep_float32_recurrent_states(model: SequenceModel) -> None:
    ids = tokens(2, 20)
    wanted = model(ids).logits
    low = copy.deepcopy(model).bfloat16()
    out = low(ids, return_state=True)
    assert out.logits.dtype == torch.bfloat16
    for block in out.state:
        if isinstance(block, KVCache):
            assert block.keys.dtype == torch.bfloat16
        else:
            assert {t.dtype for t in vars(block).values() if isinstance(t, Tensor)} == {torch.float32}
    assert (out.logits.double() - wanted).norm() < 0.1 * wanted.norm()
    again = low(ids, state=out.state, return_state=True)
    assert again.logits.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = copy.deepcopy(model).float()(ids, return_state=True)
    assert (mixed.logits.double() - wanted).norm() < 0.1 * wanted.norm()
