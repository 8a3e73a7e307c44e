"""Run flash-linear-attention's Triton kernels on a CPU, in Triton's interpreter, against our step-by-step forms.

``python tests/ops/interpreted_kernels.py`` with flash-linear-attention, einops and triton installed and no GPU. It
shows that what goes in and comes out is right (layouts, signs, states, packing, gradients); not that a GPU's compiler
does the same, nor that tuning does. float16 stands for bfloat16, which the interpreter multiplies wrongly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from test_cuda_kernels import (
    LEAST_LOG_DECAY,
    largest_error,
    ssd_inputs,
    values_and_gradients,
    wkv7_inputs,
)
from torch import Tensor
from triton.runtime import autotuner

from refragkit.ops import cuda_kernels
from refragkit.ops.ssd import ssd_reference
from refragkit.ops.wkv7 import wkv7_reference


class Index(int):
    """A loop variable in a kernel, which the interpreter leaves a plain int."""

    def to(self, _dtype: object) -> Index:
        return self


def indices(*bounds: object) -> Iterator[Index]:
    plain = (int(bound.handle.data.item()) if hasattr(bound, "handle") else int(bound) for bound in bounds)
    return map(Index, range(*plain))


def prepare() -> cuda_kernels.Kernels:
    """Import the kernels with what the interpreter lacks: a clock to tune with, tensors as indices, gather."""
    made = autotuner.Autotuner.__init__

    def untuned(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.configs = self.configs[:1]

    autotuner.Autotuner.__init__ = untuned
    if hasattr(triton.language, "gather"):
        del triton.language.gather
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    kernels = cuda_kernels.available()
    assert kernels is not None, "flash-linear-attention is not installed, or another version"
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = indices
    return kernels


def errors(
    kernels: cuda_kernels.Kernels, dtype: torch.dtype, T: int, packed: bool
) -> Iterator[tuple[str, float]]:
    ids = torch.tensor([[1] * 10 + [2] * (T - 17) + [0] * 7, [3] * T]) if packed else None

    def rounded(inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [t.detach().to(dtype).float() for t in inputs]
        return [t.clone().requires_grad_() for t in inputs], [t.double().requires_grad_() for t in inputs]

    def ssd(x, dt, A, B, C, D, state=None):
        return cuda_kernels.ssd(kernels, x.to(dtype), dt, A, B.to(dtype), C.to(dtype), state, D, ids)

    def slow_ssd(x, dt, A, B, C, D, state=None):
        return ssd_reference(x, dt, A, B, C, state, D=D, segment_ids=ids)

    def slow_wkv7(r, w, k, v, a, b, state=None):
        return wkv7_reference(r, w, k, v, a, b, state, segment_ids=ids)

    for with_state in (False, True):
        narrow, wide = rounded(ssd_inputs(T, with_state=with_state, batch=2, H=2, P=16, G=1, N=16))
        got, wanted = values_and_gradients(ssd, narrow), values_and_gradients(slow_ssd, wide)
        yield f"ssd, state {with_state}", largest_error(got, wanted)
        narrow, wide = rounded(wkv7_inputs(T, with_state=with_state, batch=2, N=16))
        wanted = values_and_gradients(slow_wkv7, wide)
        for bound in (None, LEAST_LOG_DECAY):

            def wkv7(r, w, k, v, a, b, state=None, bound=bound):
                return cuda_kernels.wkv7(kernels, r.to(dtype), w, k, v.to(dtype), a, b, state, ids, bound)

            got = values_and_gradients(wkv7, narrow)
            yield f"chunk wkv7, state {with_state}, bound {bound}", largest_error(got, wanted)
        with torch.no_grad():
            got = list(wkv7(*narrow))
        yield f"recurrent wkv7, state {with_state}", largest_error(got, wanted[:2])


def main() -> None:
    torch.set_num_threads(1)
    kernels = prepare()
    failed = False
    for T, packed in ((20, False), (37, True)):
        for dtype, tolerance in ((torch.float32, 2e-4), (torch.float16, 2e-3)):
            for name, error in errors(kernels, dtype, T, packed):
                failed |= not error < tolerance
                print(f"{name}, {T} tokens, packed {packed}, {dtype}: {error:.1e}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
