"""What a worker does: steps of an adapter on a frozen base that others read as well.

A worker knows of no data, no tokenizer and no tracking store: examples come through its pipe, rendered, and figures go
back. Its adapter and the moments of its optimiser lie in shared memory, where the parent reads and replaces them while
the worker waits.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from refragkit.data.collate import IGNORED, collate, micro_batch_indices
from refragkit.data.conversation import Rendered
from refragkit.errors import RefragError
from refragkit.models.base import SequenceModel
from refragkit.models.quantize import return_freed_memory
from refragkit.ops.cross_entropy import weighted_linear_cross_entropy
from refragkit.seeding import derive_seed
from refragkit.training.optim import LearningRates, build_adamw, clip_gradients, set_learning_rates
from refragkit.training.workers_memory import SharedMemory, fill_skeleton


@dataclass(frozen=True)
class Job:
    """What every worker is to do.

    Attributes:
        learning_rates: peaks.
        weight_decay: AdamW's.
        grad_clip: largest gradient norm; 0 switches clipping off.
        micro_batch_size: sequences in one forward and backward pass.
        pad_id: of padding.
        bfloat16: whether matrix products run in bfloat16.
        threads: of the worker.
        seed: of the run, for dropout.
        shared_gradients: whether the parent averages the gradients of all workers before each update.
    """

    learning_rates: LearningRates
    weight_decay: float
    grad_clip: float
    micro_batch_size: int
    pad_id: int
    bfloat16: bool
    threads: int
    seed: int
    shared_gradients: bool


@dataclass(frozen=True)
class Order:
    """Parent to worker: take a step.

    Attributes:
        step: from 0.
        factor: on the learning rates.
        examples: the worker's share of the batch.
    """

    step: int
    factor: float
    examples: Sequence[Rendered]


@dataclass(frozen=True)
class Gradient:
    """Worker to parent: the gradient of its share is in shared memory; waits for the number of tokens of all.

    Attributes:
        step: from 0.
        tokens: that the share's mean is over.
    """

    step: int
    tokens: int


@dataclass(frozen=True)
class Done:
    """Worker to parent: a step is taken.

    Attributes:
        step: from 0.
        tokens: learnt.
        read: tokens, learnt or not.
        loss: mean over the learnt ones, before the update; 0 where there are none.
        grad_norm: before clipping.
        seconds: the step took.
    """

    step: int
    tokens: int
    read: int
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Worker to parent: it ends.

    Attributes:
        reason: for the user.
    """

    reason: str


def work(
    index: int,
    connection: Connection,
    job: Job,
    model: SequenceModel,
    base: SharedMemory,
    adapter: SharedMemory,
) -> None:
    """Take steps until told to stop, or until the parent is gone.

    Args:
        index: of the worker.
        connection: to the parent.
        job: what to do.
        model: the skeleton of the adapted model.
        base: its frozen tensors, read-only.
        adapter: values, moments and gradients of the worker's own adapter.
    """
    # Ctrl-C reaches every process of the terminal, and a scheduler's SIGTERM every one of the job. The parent ends its
    # workers, behind a checkpoint that needs them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(job.threads)
    return_freed_memory()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            worker = _Worker(index, connection, job, model, base, adapter)
            while (order := connection.recv()) is not None:
                connection.send(worker.step(order))
        except RefragError as error:
            connection.send(Failed(str(error)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            connection.send(Failed(f"{type(error).__name__}: {error}"))


class _Worker:
    def __init__(
        self,
        index: int,
        connection: Connection,
        job: Job,
        model: SequenceModel,
        base: SharedMemory,
        adapter: SharedMemory,
    ) -> None:
        self.index = index
        self.connection = connection
        self.job = job
        self.model = model
        own = adapter.tensors
        fill_skeleton(self.model, {**base.tensors, **values_of(own)})
        self.model.train()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.optimizer = build_adamw(self.model, job.learning_rates, weight_decay=job.weight_decay)
        for name, parameter in trained.items():
            self.optimizer.state[parameter] = {
                key: own[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }
            if job.shared_gradients:
                parameter.grad = own[f"grad/{name}"]

    def step(self, order: Order) -> Done:
        started = time.perf_counter()
        torch.manual_seed(derive_seed(self.job.seed, order.step, self.index, "dropout"))
        set_learning_rates(self.optimizer, order.factor)
        self.optimizer.zero_grad(set_to_none=not self.job.shared_gradients)
        tokens = sum(example.supervised_tokens for example in order.examples)
        loss = self._accumulate(order.examples, tokens)
        learnt = tokens
        if self.job.shared_gradients:
            self.connection.send(Gradient(order.step, tokens))
            learnt = self.connection.recv()
        norm = 0.0
        if learnt:
            norm = clip_gradients(self.parameters, self.job.grad_clip)
            self.optimizer.step()
        read = sum(map(len, order.examples))
        return Done(order.step, tokens, read, loss, norm, time.perf_counter() - started)

    def _accumulate(self, examples: Sequence[Rendered], tokens: int) -> float:
        """Add up the gradient of the mean loss over the examples' tokens, and return that loss."""
        total = 0.0
        for group in micro_batch_indices([len(e) for e in examples], self.job.micro_batch_size):
            batch = collate([examples[i] for i in group], self.job.pad_id)
            # As Lightning does it; a cache of casted weights would outlive their update
            with torch.autocast("cpu", torch.bfloat16, enabled=self.job.bfloat16, cache_enabled=False):
                hidden, _ = self.model.hidden_states(batch.input_ids, attention_mask=batch.attention_mask)
                learnt = batch.labels != IGNORED
                targets = batch.labels[learnt]
                loss, losses = weighted_linear_cross_entropy(
                    hidden[learnt],
                    self.model.head_weight,
                    targets,
                    torch.full(targets.shape, 1 / tokens),
                    self.model.head_scale,
                )
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(losses.sum())
        return total / tokens if tokens else 0.0


def values_of(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of an adapter by the names of the model's parameters, out of a worker's tensors."""
    prefix = "value/"
    return {name.removeprefix(prefix): own[name] for name in own if name.startswith(prefix)}
