"""The machine a run uses: devices, strategy, precision, micro batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from refragkit.errors import ConfigError

Precision = Literal["auto", "32-true", "bf16-mixed", "bf16-true"]


class Hardware:
    """Devices, strategy and precision for Lightning's Trainer.

    Args:
        accelerator: Lightning's name, ``cpu``, ``gpu`` or ``mps``.
        devices: processes on each machine.
        num_nodes: machines.
        strategy: Lightning's name; ``auto`` for one device.
        precision: ``auto`` means bfloat16 autocast where the device computes it in hardware, else float32; float16 is
            never chosen silently.
        micro_batch_size: sequences in one forward and backward pass. It changes speed and memory, not the gradient.
        threads: CPU threads for torch; None means all.
        compile: run the model's blocks through ``torch.compile``: minutes at the start, faster steps after it.
    """

    def __init__(
        self,
        accelerator: Literal["cpu", "gpu", "mps"] = "cpu",
        devices: int = 1,
        num_nodes: int = 1,
        strategy: str = "auto",
        precision: Precision = "auto",
        micro_batch_size: int = 4,
        threads: int | None = None,
        compile: bool = False,
    ) -> None:
        for name, value in (
            ("devices", devices),
            ("num_nodes", num_nodes),
            ("micro_batch_size", micro_batch_size),
        ):
            if value < 1:
                raise ConfigError(f"hardware.{name}: expected at least 1, got {value}")
        if threads is not None and threads < 1:
            raise ConfigError(f"hardware.threads: expected null or at least 1, got {threads}")
        self.accelerator = accelerator
        self.devices = devices
        self.num_nodes = num_nodes
        self.strategy = strategy
        self.precision = precision
        self.micro_batch_size = micro_batch_size
        self.threads = threads
        self.compile = compile

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.devices * self.num_nodes

    def apply(self) -> None:
        """Set the number of CPU threads.

        Raises:
            ConfigError: the accelerator isn't there, or what ``compile`` needs isn't.
        """
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.accelerator == "gpu" and not torch.cuda.is_available():
            raise ConfigError("hardware.accelerator: no CUDA device is visible; use hardware=cpu")
        if self.accelerator == "mps" and not torch.backends.mps.is_available():
            raise ConfigError("hardware.accelerator: Apple's MPS is not available; use hardware=cpu")
        if self.compile:
            _require_compiler(self.accelerator)

    def resolved_precision(self) -> Literal["32-true", "bf16-mixed", "bf16-true"]:
        """The precision that ``auto`` stands for on this device."""
        if self.precision != "auto":
            return self.precision
        import torch

        if self.accelerator == "gpu":
            return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
        return "bf16-mixed" if self.accelerator == "cpu" and cpu_has_bf16() else "32-true"

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which matrix products run in the resolved precision, as Lightning's training steps do."""
        import torch

        if self.resolved_precision() != "bf16-mixed":
            return nullcontext()
        device = {"gpu": "cuda"}.get(self.accelerator, self.accelerator)
        # A cache of casted weights would outlive an update of these weights
        return torch.autocast(device, torch.bfloat16, cache_enabled=False)

    def gradient_accumulation(self, global_batch_size: int) -> int:
        """Micro batches in one step of one process.

        Args:
            global_batch_size: examples in one optimiser step of the whole run.

        Raises:
            ConfigError: the global batch doesn't divide among devices and micro batches.
        """
        micro_batch = min(self.micro_batch_size, max(1, global_batch_size // self.world_size))
        share = micro_batch * self.world_size
        if global_batch_size % share:
            raise ConfigError(
                f"method.global_batch_size={global_batch_size} is not divisible by hardware.micro_batch_size="
                f"{micro_batch} x devices={self.devices} x num_nodes={self.num_nodes} = {share};"
                " change one of them"
            )
        return global_batch_size // share


def _require_compiler(accelerator: str) -> None:
    if accelerator == "gpu":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "hardware.compile=true needs Triton on a GPU, and it is missing or does not support this one;"
                " pip install triton, or leave hardware.compile=false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "hardware.compile=true needs a C++ compiler (g++ or clang++) on the PATH, or named by CXX, and there is"
            " none; install one, or leave hardware.compile=false"
        ) from error


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; asks torch, which is loaded for it."""
    from refragkit.ops.precision import cpu_has_bf16 as hardware_has_it

    return hardware_has_it()
