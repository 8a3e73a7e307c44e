"""Which floating-point type matrix products run in."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX); emulation is slower than float32."""
    # Private, and not in every build of torch
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, check, lambda: False)()) for check in checks)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The type for products whose operands come from ``x``: bfloat16 where ``x`` is and it pays, else float32 or more.

    float16 is not used: states and scores leave its range.
    """
    if x.dtype == torch.bfloat16 and (x.device.type != "cpu" or cpu_has_bf16()):
        return torch.bfloat16
    return torch.promote_types(x.dtype, torch.float32)
