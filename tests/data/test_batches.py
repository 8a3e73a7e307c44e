from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refragkit.data.batches import BatchDataset, SequentialBatches, batch_loader
from refragkit.data.collate import IGNORED, collate, micro_batch_indices, micro_batches
from refragkit.data.conversation import Rendered
from refragkit.data.order import batch_indices
from refragkit.types import Question

QUESTIONS = [Question(str(n), f"question {n}", ("yes",)) for n in range(7)]


def test_labels_are_the_next_learnt_token() -> None:
    batch = collate(
        [Rendered([5, 6, 7, 8], [False, False, True, True]), Rendered([9, 4], [False, True])], pad_id=4
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 4, 4, 4]]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, True, False, False]]
    # The 4 that is learnt counts although it is the pad id too.
    assert batch.labels.tolist() == [[IGNORED, 7, 8, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    assert batch.supervised_tokens == 3
    assert (
        batch.input_ids.dtype == batch.labels.dtype == torch.int64
        and batch.attention_mask.dtype == torch.bool
    )


rendered = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=12).map(
    lambda pairs: Rendered([i for i, _ in pairs], [m for _, m in pairs])
)


@given(st.lists(rendered, min_size=1, max_size=6), st.integers(0, 99))
def test_nothing_is_lost_or_added_by_padding(examples: list[Rendered], pad_id: int) -> None:
    batch = collate(examples, pad_id)
    for row, example in enumerate(examples):
        n = len(example)
        assert batch.input_ids[row, :n].tolist() == example.input_ids
        assert batch.attention_mask[row].tolist() == [True] * n + [False] * (batch.input_ids.shape[1] - n)
        labels = batch.labels[row].tolist()
        pairs = zip(example.input_ids[1:], example.loss_mask[1:], strict=True)
        assert labels[: n - 1] == [i if m else IGNORED for i, m in pairs]
        assert set(labels[n - 1 :]) <= {IGNORED}


@given(st.lists(rendered, max_size=20), st.integers(1, 8))
def test_micro_batches_hold_every_example_once_with_little_padding(
    examples: list[Rendered], size: int
) -> None:
    lengths = [len(e) for e in examples]
    groups = micro_batch_indices(lengths, size)
    assert sorted(i for g in groups for i in g) == list(range(len(examples)))
    assert all(0 < len(g) <= size for g in groups) and all(len(g) == size for g in groups[:-1])
    flat = [lengths[i] for g in groups for i in g]
    assert flat == sorted(flat, reverse=True)
    assert micro_batches(examples, size) == [[examples[i] for i in g] for g in groups]


def test_what_can_not_be_collated_is_refused() -> None:
    with pytest.raises(ValueError, match="expected examples with tokens, got 0"):
        collate([], 0)
    with pytest.raises(ValueError, match=r"empty ones at \[1\]"):
        collate([Rendered([1], [True]), Rendered([], [], dropped="too_long")], 0)
    with pytest.raises(ValueError, match="micro_batch_size"):
        micro_batch_indices([1], 0)


def test_a_run_and_its_resumed_rest_see_the_same_batches() -> None:
    whole = list(batch_loader(BatchDataset(QUESTIONS, seed=3, global_batch_size=4, n_steps=6)))
    assert [b.index for b in whole] == list(range(6))
    for i, batch in enumerate(whole):
        assert [q.id for q in batch.examples] == [str(n) for n in batch_indices(3, i, 7, 4)]
    rest = list(batch_loader(BatchDataset(QUESTIONS, 3, 4, 6, first_step=2)))
    assert rest == whole[2:]
    assert len(BatchDataset(QUESTIONS, 3, 4, 6, first_step=6)) == 0


def test_validation_sees_everything_once_in_order() -> None:
    batches = list(batch_loader(SequentialBatches(QUESTIONS, 3)))
    assert [[q.id for q in b.examples] for b in batches] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    assert [q.id for b in SequentialBatches(QUESTIONS, 3, max_examples=4) for q in b.examples] == list("0123")


def test_impossible_loaders_are_refused() -> None:
    for arguments in ([[], 0, 4, 6], [QUESTIONS, 0, 0, 6], [QUESTIONS, 0, 4, 6, 7]):
        with pytest.raises(ValueError, match="BatchDataset"):
            BatchDataset(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size"):
        SequentialBatches(QUESTIONS, 0)
    with pytest.raises(IndexError):
        BatchDataset(QUESTIONS, 0, 4, 6)[6]
