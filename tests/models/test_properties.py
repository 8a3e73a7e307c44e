"""Random block patterns, lengths, paddings, segmentations and splits: every layout of the same tokens agrees."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refragkit.models.build import build_from_config
from refragkit.models.config import ModelConfig
from refragkit.models.hybrid import HybridLM

VOCAB = 29
SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
patterns = st.text(alphabet="TMR", min_size=1, max_size=4)


@cache
def model_of(pattern: str) -> HybridLM:
    config = ModelConfig(
        block_pattern=pattern,
        d_model=16,
        vocab_size=VOCAB,
        n_heads=4,
        n_kv_heads=2,
        head_dim=4,
        d_ff=24,
        d_state=6,
        ssm_head_dim=8,
        n_groups=2,
        wkv_head_dim=8,
        decay_rank=3,
        iclr_rank=3,
        value_rank=3,
        gate_rank=3,
    )
    model = build_from_config(config).double().eval()
    generator = torch.Generator().manual_seed(len(pattern))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.1 * noise).requires_grad_(False)
    return model


def tokens(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Rows with their real tokens anywhere, or nowhere."""
    width = draw(st.integers(1, 12))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4))
    return torch.tensor(rows)


@SETTINGS
@given(pattern=patterns, mask=masks(), seed=st.integers(0, 99))
def test_any_padding(pattern: str, mask: torch.Tensor, seed: int) -> None:
    model = model_of(pattern)
    ids = tokens(mask.numel(), seed).view(mask.shape)
    out = model(ids, attention_mask=mask, return_state=True)
    for i, row in enumerate(mask):
        if row.any():
            alone = model(ids[i, row][None], return_state=True)
            assert_close(out.logits[i, row], alone.logits[0])
            for got, wanted in zip(out.state.select([i]).tensors(), alone.state.tensors(), strict=True):
                assert_close(got, wanted)


@SETTINGS
@given(
    pattern=patterns,
    rows=st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=4), min_size=1, max_size=3),
    margins=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    seed=st.integers(0, 99),
)
def test_any_packing(pattern: str, rows: list[list[int]], margins: tuple[int, int], seed: int) -> None:
    model = model_of(pattern)
    width = max(sum(row) for row in rows) + sum(margins)
    if width == 0:
        return
    ids = tokens(len(rows) * width, seed).view(len(rows), width)
    segment_ids = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        column = margins[0]
        for number, length in enumerate(row, start=1):
            segment_ids[i, column : column + length] = number
            column += length
    out = model(ids, segment_ids=segment_ids, return_state=True)
    for i, row in enumerate(rows):
        for number in range(1, len(row) + 1):
            inside = segment_ids[i] == number
            alone = model(ids[i, inside][None], return_state=True)
            assert_close(out.logits[i, inside], alone.logits[0])
            if number == len(row):
                for got, wanted in zip(out.state.select([i]).tensors(), alone.state.tensors(), strict=True):
                    assert_close(got, wanted)


@SETTINGS
@given(pattern=patterns, pieces=st.lists(masks(), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_any_sequence_of_ragged_calls(pattern: str, pieces: list[torch.Tensor], seed: int) -> None:
    """Each call adds any number of tokens to each row, padded anywhere; only the tokens matter."""
    model = model_of(pattern)
    batch = min(len(piece) for piece in pieces)
    state = None
    read: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    logits: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    for number, piece in enumerate(pieces):
        mask = piece[:batch]
        ids = tokens(mask.numel(), seed + number).view(mask.shape)
        out = model(ids, attention_mask=mask, state=state, return_state=True)
        state = out.state
        for i in range(batch):
            read[i].append(ids[i, mask[i]])
            logits[i].append(out.logits[i, mask[i]])
    assert state is not None
    for i in range(batch):
        row = torch.cat(read[i])
        assert int(state.lengths[i]) == len(row)
        if len(row):
            whole = model(row[None], return_state=True)
            assert_close(torch.cat(logits[i]), whole.logits[0])
            for got, wanted in zip(state.select([i]).tensors(), whole.state.tensors(), strict=True):
                assert_close(got, wanted)
