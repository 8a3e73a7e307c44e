"""Shared memory of workers, and the processes themselves without a run around them."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from refragkit.adapters.lora import LoRA
from refragkit.data.conversation import Rendered
from refragkit.models.build import build_model
from refragkit.models.hybrid import HybridLM
from refragkit.training.optim import LearningRates
from refragkit.training.workers import Workers
from refragkit.training.workers_memory import (
    SharedMemory,
    fill_skeleton,
    named_tensors,
    share_tensors,
    skeleton,
)
from refragkit.training.workers_process import Job

VOCAB = 96
IDS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
EXAMPLES = [Rendered(row, [False, *[True] * (len(row) - 1)]) for row in IDS.tolist()]


def adapted(quantize: str | None = "int8", **changes: Any) -> HybridLM:
    node = {"_target_": "refragkit.models.build.rwkv_qwen", "size": "tiny", **changes}
    model = build_model(node, vocab_size=VOCAB, seed=2, quantize=quantize)
    assert isinstance(model, HybridLM)
    LoRA(rank=4, alpha=8).apply(model, seed=1)
    return model


@pytest.mark.parametrize("quantize", ["int8", "bf16", None])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_goes_to_shared_memory_and_its_skeleton_finds_it_there(
    quantize: str | None, tied: bool
) -> None:
    model = adapted(quantize, tie_embeddings=tied).eval()
    before = model(IDS).logits
    identities = {name: id(tensor) for name, tensor in named_tensors(model).items()}
    shared = share_tensors(named_tensors(model), "test")
    assert torch.equal(model(IDS).logits, before)
    assert {name: id(tensor) for name, tensor in named_tensors(model).items()} == identities
    start = min(tensor.data_ptr() for tensor in shared.tensors.values())
    assert all(start <= t.data_ptr() < start + shared.size for t in named_tensors(model).values())

    other = skeleton(model)
    assert {tensor.device.type for tensor in named_tensors(other).values()} == {"meta"}
    other = cast(HybridLM, pickle.loads(pickle.dumps(other)))
    fill_skeleton(other, shared.tensors)
    assert torch.equal(other(IDS).logits, before)
    assert (other.head_weight is other.get_submodule("embed_tokens").weight) == tied
    for name, tensor in named_tensors(model).items():
        mirrored = named_tensors(other)[name]
        assert mirrored.data_ptr() == tensor.data_ptr() and mirrored.requires_grad == tensor.requires_grad


def test_tensors_of_every_shape_have_room() -> None:
    shapes = {"a": (torch.int8, (3, 5)), "b": (torch.float32, ()), "c": (torch.bfloat16, (0, 4))}
    shared = SharedMemory(shapes, "test")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in shared.tensors.items()} == shapes
    shared.tensors["b"].fill_(3)
    shared.tensors["a"].fill_(7)
    assert float(shared.tensors["b"]) == 3 and int(shared.tensors["a"].sum()) == 105


@pytest.fixture
def model() -> HybridLM:
    return adapted().train()


@pytest.fixture
def workers(model: HybridLM) -> Iterator[Workers]:
    job = Job(
        learning_rates=LearningRates.uniform(0.01),
        weight_decay=0.0,
        grad_clip=1.0,
        micro_batch_size=2,
        pad_id=0,
        bfloat16=False,
        threads=1,
        seed=0,
        shared_gradients=False,
    )
    started = Workers(model, 2, job)
    yield started
    started.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in started.process_ids)


def mapped(pid: int | str, label: str) -> tuple[set[str], int]:
    """Inodes of a process's mappings of a piece of shared memory, and its proportional share of them in bytes."""
    inodes, share, inside = set(), 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f"/memfd:{label}" in line
            if inside:
                inodes.add(line.split()[4])
        elif inside and line.startswith("Pss:"):
            share += 1024 * int(line.split()[1])
    return inodes, share


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_all_processes_share_one_base_and_train_adapters_of_their_own(
    model: HybridLM, workers: Workers
) -> None:
    base = {name: t.clone() for name, t in named_tensors(model).items() if "lora_" not in name}
    start = [workers.values(i)["blocks.3.mixer.q_proj.lora_B"].clone() for i in range(2)]
    for step in range(3):
        workers.order(step, 1.0, {0: EXAMPLES, 1: EXAMPLES[:1]})
    done = workers.wait(2)
    assert sorted((index, d.step) for index, d in done) == [(i, s) for i in range(2) for s in range(3)]
    for index in range(2):
        losses = [d.loss for worker, d in done if worker == index]
        assert losses[-1] < losses[0]
        assert {d.tokens for worker, d in done if worker == index} == {(22, 11)[index]}
    # Adapters moved, each its own way; the model here still has the first one, and the base is as it was
    moved = [workers.values(i)["blocks.3.mixer.q_proj.lora_B"] for i in range(2)]
    assert all(not torch.equal(a, b) for a, b in zip(moved, start, strict=True))
    assert not torch.equal(*moved)
    assert all(torch.equal(t, base[n]) for n, t in named_tensors(model).items() if n in base)
    assert not any(t.any() for n, t in named_tensors(model).items() if n.endswith("lora_B"))
    # One copy: the same memory in all three, whose proportional shares add up to it
    found = [mapped(pid, "refragkit-base") for pid in ("self", *workers.process_ids)]
    assert len(set.union(*(inodes for inodes, _ in found))) == 1
    assert all(inodes for inodes, _ in found)
    total = sum(share for _, share in found)
    assert 0.9 * workers.base.size < total < 1.1 * workers.base.size
    assert workers.base.size > 10 * 4096


def test_moments_are_forgotten_where_they_are(workers: Workers) -> None:
    workers.order(0, 1.0, {0: EXAMPLES, 1: EXAMPLES})
    workers.wait(0)
    name = "exp_avg/blocks.3.mixer.q_proj.lora_B"
    assert all(memory.tensors[name].any() for memory in workers.adapters)
    state = workers.state()
    assert set(state[0]) == set(workers.adapters[0].tensors)
    assert float(state[0]["step/blocks.3.mixer.q_proj.lora_B"]) == 1
    workers.forget_moments()
    assert not any(
        tensor.any()
        for memory in workers.adapters
        for name, tensor in memory.tensors.items()
        if not name.startswith("value/")
    )
    assert any(tensor.any() for name, tensor in state[0].items() if name.startswith("exp_avg/"))
