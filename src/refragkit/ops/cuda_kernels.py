"""flash-linear-attention's Triton kernels behind :func:`wkv7` and :func:`ssd` on a GPU, where the package is installed.

Glossary: fla calls the key or state dimension ``K``, the value or head dimension ``V``, and keeps states as
``[sequences, H, K, V]``. RWKV-7: ``w`` is log_decay; r, k, v, a and b keep their names. Mamba-2 is its "simple GLA"
(one scalar decay a head) with ``q = C``, ``k = B``, ``v = dt x`` and ``g = dt A``. Packed documents are sequences of
one row of ``batch x T`` tokens, cut at ``cu_seqlens``.

Which kernel runs where:

====================================  =========================  ===========================================
wanted                                RWKV-7                     Mamba-2
====================================  =========================  ===========================================
bfloat16, gradients or long           ``chunk_rwkv7``            ``chunk_simple_gla``
short, no gradients, any type but     ``fused_recurrent_rwkv7``  as the other rows say
float64
one token                             as above                   our own step, which overwrites its state
the rest                              our own form               our own form
====================================  =========================  ===========================================

The chunk kernels are left alone in float32, which they multiply in TF32, and in float16, in which they keep the
states between chunks: our own form keeps float32's precision and range there.

Source: https://github.com/fla-org/flash-linear-attention, 0.6.0. An initial state is passed to its kernels: fla #351,
"wrong with an initial state", compared states of the other layout, and fla tests values and gradients with states.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

log = logging.getLogger("refragkit")

Kernel = Callable[..., tuple[Tensor, Tensor]]

_SHARED = {"scale", "initial_state", "output_final_state", "cu_seqlens"}
#: The arguments that are passed to each kernel.
ARGUMENTS = {
    "chunk_rwkv7": {"r", "w", "k", "v", "a", "b", "lower_bound", *_SHARED},
    "fused_recurrent_rwkv7": {"r", "w", "k", "v", "a", "b", *_SHARED},
    "chunk_simple_gla": {"q", "k", "v", "g", "state_v_first", *_SHARED},
}
# Below, a chunk is mostly padding; fla's own layer draws the line here too.
_LEAST_CHUNKED = 64
# The widest RWKV-7 head whose state fits the kernel.
_WIDEST_HEAD = 256


class Kernels(NamedTuple):
    """Functions of flash-linear-attention.

    Attributes:
        chunk_rwkv7: forward and backward.
        fused_recurrent_rwkv7: token by token in float32, forward only.
        chunk_simple_gla: forward and backward.
        ssd_trains: whether chunk_simple_gla's backward is right on this GPU.
    """

    chunk_rwkv7: Kernel
    fused_recurrent_rwkv7: Kernel
    chunk_simple_gla: Kernel
    ssd_trains: bool


@cache
def available() -> Kernels | None:
    """The kernels, or None where the package is missing or another version; the first call logs which ones are used.

    Raises:
        ImportError: the package is installed but can't be imported.
    """
    if importlib.util.find_spec("fla") is None:
        log.info(
            "GPU kernels: PyTorch's own (flash-linear-attention is not installed; pip install refragkit[cuda])"
        )
        return None
    rwkv7 = importlib.import_module("fla.ops.rwkv7")
    simple_gla = importlib.import_module("fla.ops.simple_gla")
    version = getattr(importlib.import_module("fla"), "__version__", "of unknown version")
    functions: dict[str, Kernel] = {
        "chunk_rwkv7": rwkv7.chunk_rwkv7,
        "fused_recurrent_rwkv7": rwkv7.fused_recurrent_rwkv7,
        "chunk_simple_gla": simple_gla.chunk_simple_gla,
    }
    for name, function in functions.items():
        # Some take **kwargs and would silently ignore what they don't know
        unknown = ARGUMENTS[name] - set(inspect.signature(function).parameters)
        if unknown:
            log.warning(
                "GPU kernels: PyTorch's own. flash-linear-attention %s has a %s without %s; 0.6 is needed "
                "(pip install refragkit[cuda])",
                version,
                name,
                ", ".join(sorted(unknown)),
            )
            return None
    ssd_trains = not _miscompiles_simple_gla()
    log.info(
        "GPU kernels: flash-linear-attention %s%s",
        version,
        "" if ssd_trains else "; PyTorch's own to train Mamba-2, until Triton is 3.7.1 or newer (fla #640)",
    )
    return Kernels(**functions, ssd_trains=ssd_trains)


def _miscompiles_simple_gla() -> bool:
    """Whether Triton gets the backward of simple GLA wrong here; fla refuses to run it then."""
    hopper = torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
    triton = TorchVersion(importlib.import_module("triton").__version__)
    return hopper and bool(triton >= "3.4.0") and bool(triton < "3.7.1")


def for_wkv7(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None
) -> Kernels | None:
    """The kernels if they take these arguments of :func:`refragkit.ops.wkv7.wkv7`, else None."""
    _, T, _, N = v.shape
    if not v.is_cuda or v.dtype == torch.float64 or N % 16 or N > _WIDEST_HEAD:
        return None
    if _needs_chunks(r, log_decay, k, v, a, b, state):
        if v.dtype != torch.bfloat16 or T == 1:
            return None
    elif torch.compiler.is_compiling():  # a few tokens are fused anyway, without a break in the graph
        return None
    return available()


def for_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> Kernels | None:
    """The kernels if they take these arguments of :func:`refragkit.ops.ssd.ssd`, else None."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.shape[1] == 1 or x.shape[3] % 16 or B.shape[3] % 16:
        return None
    kernels = available()
    if kernels is not None and not kernels.ssd_trains and _wants_gradients(x, dt, A, B, C, state):
        return None
    return kernels


def wkv7(
    kernels: Kernels,
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    least_log_decay: float | None,
) -> tuple[Tensor, Tensor]:
    """:func:`refragkit.ops.wkv7.wkv7` by ``kernels``; same shapes, and the state is a transposed view of theirs."""
    options: dict[str, Any] = {}
    if _needs_chunks(r, log_decay, k, v, a, b, state):
        kernel = kernels.chunk_rwkv7
        r, k, a, b = (t.to(v.dtype) for t in (r, k, a, b))  # its matrix products mix no types
        # A known bound lets it use longer chunks and tensor cores
        options["lower_bound"] = (
            least_log_decay if least_log_decay is not None and least_log_decay < 0 else None
        )
    else:
        kernel = kernels.fused_recurrent_rwkv7
    precise = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        tokens = {"r": r, "w": log_decay.to(precise), "k": k, "v": v, "a": a, "b": b}
        # [value, key] to [key, value]; free if the state came from here
        state = None if state is None else state.to(precise).mT
        out, state = _run(kernel, tokens, state, segment_ids, **options)
    return out, state.mT


def ssd(
    kernels: Kernels,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    D: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`refragkit.ops.ssd.ssd` by ``kernels``; same shapes."""
    H = x.shape[2]
    precise = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        dt, A = dt.to(precise), A.to(precise)
        tokens = {
            "q": _by_head(C.to(x.dtype), H),
            "k": _by_head(B.to(x.dtype), H),
            "v": (x * dt[..., None]).to(x.dtype),
            "g": dt * A,
        }
        state = None if state is None else state.to(precise)
        y, state = _run(kernels.chunk_simple_gla, tokens, state, segment_ids, state_v_first=True)
        if D is not None:
            y = torch.addcmul(y.to(precise), x.to(precise), D.to(precise)[:, None]).to(x.dtype)
    return y, state


def _run(
    kernel: Kernel,
    tokens: dict[str, Tensor],
    state: Tensor | None,
    segment_ids: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call a kernel with ``tokens`` of ``[batch, T, ...]`` and the states of rows."""
    options |= {"scale": 1.0, "output_final_state": True}
    if segment_ids is None:
        return kernel(**tokens, initial_state=state, cu_seqlens=None, **options)
    batch, T = segment_ids.shape
    cu_seqlens, first, last = _documents(segment_ids)
    if state is not None:  # of the first document of each row; the others start from zeros
        empty = state.new_zeros(cu_seqlens.shape[0] - 1, *state.shape[1:])
        state = empty.index_copy(0, first, state)
    flat = {name: t.reshape(1, batch * T, *t.shape[2:]) for name, t in tokens.items()}
    out, states = kernel(**flat, initial_state=state, cu_seqlens=cu_seqlens, **options)
    return out.view(batch, T, *out.shape[2:]), states.index_select(0, last)


def _documents(segment_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where documents begin in all rows laid end to end, with the end of the last; each row's first and last one.

    int64 ``[documents + 1]``, ``[batch]``, ``[batch]``.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    cu_seqlens = functional.pad(begins.flatten().nonzero().squeeze(1), (0, 1), value=segment_ids.numel())
    in_row = begins.sum(1)
    last = in_row.cumsum(0) - 1
    return cu_seqlens, last - in_row + 1, last


def _by_head(t: Tensor, H: int) -> Tensor:
    """``[batch, T, G, N]`` repeated for the heads of each group: ``[batch, T, H, N]``."""
    batch, T, G, N = t.shape
    return t[:, :, :, None].expand(batch, T, G, H // G, N).reshape(batch, T, H, N)


def _needs_chunks(*tensors: Tensor | None) -> bool:
    """Whether RWKV-7's recurrent kernel won't do: it has no backward, and walks through T one by one."""
    r = tensors[0]
    return _wants_gradients(*tensors) or (r is not None and r.shape[1] >= _LEAST_CHUNKED)


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
