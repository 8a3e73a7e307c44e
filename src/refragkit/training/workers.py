"""Processes that train an adapter each beside one frozen base, from the side of the process that leads them.

The base lies in shared memory once. So do the adapter and the optimiser's moments of every worker, which the leader
reads and replaces while a worker waits for its next order: nothing of that is sent, and a worker that is killed takes
nothing with it but the step it was in.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from refragkit.adapters.lora import lora_layers
from refragkit.data.conversation import Rendered
from refragkit.errors import RefragError
from refragkit.models.base import SequenceModel
from refragkit.training.workers_memory import ReadOnly, SharedMemory, named_tensors, share_tensors, skeleton
from refragkit.training.workers_process import Done, Failed, Gradient, Job, Order, values_of, work

log = logging.getLogger("refragkit")

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SECONDS_TO_END = 5.0


class Workers:
    """Started workers.

    Args:
        model: adapted; its base moves to shared memory, in place.
        count: of workers.
        job: what each does.
        first_step: that they will take.
        start: values and moments to begin with, by worker, as `state` gives them; None: the model's values.

    Attributes:
        alive: the workers that still work.
        lost: why each of the others does not.
    """

    def __init__(
        self,
        model: SequenceModel,
        count: int,
        job: Job,
        first_step: int = 0,
        start: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        adapter = adapter_parameters(model)
        frozen = {name: t for name, t in named_tensors(model).items() if name not in adapter}
        self.base = share_tensors(frozen, "refragkit-base")
        self.adapters = [_own_memory(adapter, job.shared_gradients) for _ in range(count)]
        if start is not None:
            for memory, tensors in zip(self.adapters, start, strict=True):
                for name, tensor in tensors.items():
                    memory.tensors[name].copy_(tensor)
        self.alive = list(range(count))
        self.lost: dict[int, str] = {}
        self._steps = [first_step - 1] * count
        self._done: list[tuple[int, Done]] = []
        self._gradients: dict[int, Gradient] = {}
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        atexit.register(self.close)  # before multiprocessing's own: it asks with SIGTERM, and waits
        context = _context()
        frame = skeleton(model)
        for index in range(count):
            ours, theirs = context.Pipe()
            arguments = (index, theirs, job, frame, ReadOnly(self.base), self.adapters[index])
            process = context.Process(target=work, args=arguments, name=f"worker-{index}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    @property
    def process_ids(self) -> list[int]:
        """Of every worker, the lost ones too."""
        return [process.pid or 0 for process in self._processes]

    def order(self, step: int, factor: float, shares: Mapping[int, Sequence[Rendered]]) -> None:
        """Let living workers take a step, when they have taken those before.

        Args:
            step: from 0.
            factor: on the learning rates.
            shares: the examples of each.
        """
        for index in list(self.alive):
            self._send(index, Order(step, factor, shares[index]))

    def wait(self, step: int) -> list[tuple[int, Done]]:
        """Wait until every living worker has taken ``step``; returns what was done since the last call, by worker.

        Raises:
            RefragError: no worker is left.
        """
        while self.alive and any(self._steps[index] < step for index in self.alive):
            connections = {self._connections[i]: i for i in self.alive}
            sentinels = {self._processes[i].sentinel: i for i in self.alive}
            ready = wait([*connections, *sentinels])
            # What a worker had to say before it ended comes first
            for connection, index in connections.items():
                if connection in ready:
                    self._receive(index)
            for sentinel, index in sentinels.items():
                if sentinel in ready and index in self.alive and not self._connections[index].poll():
                    self._lose(index)
        if not self.alive:
            reasons = "; ".join(f"worker {index} {reason}" for index, reason in sorted(self.lost.items()))
            raise RefragError(f"no worker is left: {reasons}")
        done, self._done = self._done, []
        return done

    def values(self, index: int) -> dict[str, Tensor]:
        """A worker's adapter by the names of the model's parameters: the shared tensors themselves."""
        return values_of(self.adapters[index].tensors)

    def forget_moments(self) -> None:
        """Let the optimisers of all workers, which must be waiting, start anew."""
        for memory in self.adapters:
            for name, tensor in memory.tensors.items():
                if not name.startswith(("value/", "grad/")):
                    tensor.zero_()

    def state(self) -> list[dict[str, Tensor]]:
        """Values and moments of every worker, copied; they must be waiting. A lost one's are those of a living one."""
        sources = [index if index in self.alive else self.alive[0] for index in range(len(self.adapters))]
        return [
            {n: t.clone() for n, t in self.adapters[i].tensors.items() if not n.startswith("grad/")}
            for i in sources
        ]

    def close(self, ended_well: bool = False) -> None:
        """End the workers, whatever they are doing; after ``ended_well`` they are given time to end by themselves."""
        for index in list(self.alive):
            self._send(index, None)
        for process in self._processes:
            process.join(_SECONDS_TO_END if ended_well else 0)
        for process in self._processes:
            if process.is_alive():
                process.kill()  # it has nothing to lose: what it holds is in our memory too
                process.join()
        for connection in self._connections:
            connection.close()
        self.alive = []
        atexit.unregister(self.close)

    def _send(self, index: int, message: Order | int | None) -> None:
        try:
            self._connections[index].send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._lose(index)

    def _receive(self, index: int) -> None:
        try:
            message = self._connections[index].recv()
        except (EOFError, ConnectionResetError):
            self._lose(index)
            return
        if isinstance(message, Failed):
            self._lose(index, message.reason)
        elif isinstance(message, Gradient):
            self._gradients[index] = message
            self._average_gradients()
        else:
            self._steps[index] = message.step
            self._done.append((index, message))

    def _average_gradients(self) -> None:
        """When those of all living workers are there: replace each by their average over tokens."""
        if not self.alive or not all(index in self._gradients for index in self.alive):
            return
        tokens = {index: self._gradients[index].tokens for index in self.alive}
        total = sum(tokens.values())
        owns = [self.adapters[index].tensors for index in self.alive]
        for name in (name for name in owns[0] if name.startswith("grad/")):
            mean = torch.zeros_like(owns[0][name])
            for index, own in zip(self.alive, owns, strict=True):
                mean.add_(own[name], alpha=tokens[index] / max(total, 1))
            for own in owns:
                own[name].copy_(mean)
        self._gradients = {}
        for index in list(self.alive):
            self._send(index, total)

    def _lose(self, index: int, reason: str | None = None) -> None:
        if index not in self.alive:
            return
        self.alive.remove(index)
        self._gradients.pop(index, None)
        self._processes[index].join(_SECONDS_TO_END)
        reason = reason or _ending(self._processes[index].exitcode)
        self.lost[index] = f"{reason} (after step {self._steps[index] + 1})"
        log.error("worker %d %s; %d others go on", index, self.lost[index], len(self.alive))
        self._average_gradients()


def _context() -> ForkServerContext | SpawnContext:
    """How workers are started.

    Where forks are safe they come from a small server that has imported what they need and nothing else: they start at
    once and share the memory of these imports. A fork of this process would inherit its threads' locks.
    """
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["refragkit.training.workers_process"])
    return context


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        why = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was ended by {name}{why}"
    return f"ended with code {code}"


def adapter_parameters(model: SequenceModel) -> dict[str, Tensor]:
    """The factors of the model's adapter by the names of its parameters."""
    return {
        f"{path}.{name}": getattr(layer, name)
        for path, layer in lora_layers(model)
        for name in ("lora_A", "lora_B")
    }


def _own_memory(adapter: Mapping[str, Tensor], gradients: bool) -> SharedMemory:
    """What one worker changes: values as they are now, moments of zero, and a gradient where it is shared."""
    shapes = {}
    for name, tensor in adapter.items():
        for kind in ("value", *_MOMENTS, *(["grad"] if gradients else [])):
            shapes[f"{kind}/{name}"] = torch.float32, tuple(tensor.shape)
        shapes[f"step/{name}"] = torch.float32, ()
    memory = SharedMemory(shapes, "refragkit-adapter")
    for name, tensor in adapter.items():
        memory.tensors[f"value/{name}"].copy_(tensor.detach())
    return memory
