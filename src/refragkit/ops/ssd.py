"""Mamba-2's state space recurrence: a chunked form for training and the step-by-step form it is tested against.

Per head, with the state ``S`` in ``[P, N]``::

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T          y_t = S_t C_t

Glossary: ``P`` head dimension, ``N`` state size (``d_state``), ``G`` groups that share B and C, ``H`` heads,
``Q`` chunk length, ``cum`` the running sum of ``dt A`` inside a chunk.

Source: Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), section 6 and listing 1.
Differs: tokens with ``dt = 0`` leave the state untouched, which
is how padding is expressed; ``segment_ids`` resets the state between packed documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from refragkit.ops import cuda_kernels
from refragkit.ops.graph_break import graph_break
from refragkit.ops.precision import matmul_dtype

CHUNK_TOKENS = 64
_LOG2_E = 1.4426950408889634
#: Elements of one intermediate that the chunks in work may have: 1 MiB of float32.
_CACHE_ELEMENTS = 1 << 20


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    overwrite_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a whole sequence by matrix products, chunk by chunk.

    Args:
        x: inputs ``[batch, T, H, P]``.
        dt: step sizes ``[batch, T, H]``, after softplus (not negative); 0 makes a token a no-op for the state.
        A: decay rates ``[H]``, negative.
        B: input maps ``[batch, T, G, N]``; G divides H, consecutive heads share a group.
        C: output maps ``[batch, T, G, N]``.
        state: ``[batch, H, P, N]`` before the first token; zeros if None. Not changed.
        D: skip ``[H]``, adds ``D x_t`` to ``y_t``; None for none.
        segment_ids: integers ``[batch, T]``, constant within a packed document and different in the next one;
            the state restarts from zero where they change. ``state`` belongs to the first document.
        chunk_tokens: tokens per chunk; a matter of speed only.
        overwrite_state: write the new state into ``state`` where that saves memory traffic (one token, no gradients);
            use the one that is returned.

    Returns:
        ``y [batch, T, H, P]`` in x's dtype, and the state after the last token, float32 (float64 for float64
        inputs).

    Raises:
        ValueError: shapes that don't fit together.
    """
    _check(x, dt, A, B, C, state)
    if x.shape[1] > 1:
        return _over_chunks(x, dt, A, B, C, state, D, segment_ids, chunk_tokens)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        inputs, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
        D, state = (None if t is None else t.to(dtype) for t in (D, state))
        y, state = _step(inputs, dt, A, B, C, state, overwrite_state and not torch.is_grad_enabled())
        y = y if D is None else torch.addcmul(y, inputs, D[:, None])
    return y.to(x.dtype), state


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: slow, obvious, and what :func:`ssd` is tested against.

    Shapes as in :func:`ssd`.
    """
    _check(x, dt, A, B, C, state)
    out_dtype = x.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    batch, _, H, P = x.shape
    S = x.new_zeros(batch, H, P, B.shape[3]) if state is None else state.to(dtype)
    heads_per_group = x.shape[2] // B.shape[2]
    outputs = []
    for t in range(x.shape[1]):
        if segment_ids is not None and t > 0:
            keep = segment_ids[:, t] == segment_ids[:, t - 1]
            S = S * keep[:, None, None, None]
        B_t = B[:, t].repeat_interleave(heads_per_group, dim=1)  # [batch, H, N]
        C_t = C[:, t].repeat_interleave(heads_per_group, dim=1)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        S = S * decay + (dt[:, t, :, None] * x[:, t])[..., None] * B_t[:, :, None, :]
        outputs.append(torch.einsum("bhpn,bhn->bhp", S, C_t))
    y = torch.stack(outputs, dim=1)
    y = y if D is None else y + D.to(dtype)[:, None] * x
    return y.to(out_dtype), S


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None) -> None:
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    if T < 1:
        raise ValueError(f"ssd needs at least one token, got x of shape {tuple(x.shape)}")
    wanted = {
        "dt": (dt, (batch, T, H)),
        "A": (A, (H,)),
        "B": (B, (batch, T, G, N)),
        "C": (C, (batch, T, G, N)),
    }
    if state is not None:
        wanted["state"] = (state, (batch, H, P, N))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"ssd: {name} must have shape {shape} for x {tuple(x.shape)}, got {tuple(tensor.shape)}"
            )
    if H % G:
        raise ValueError(f"ssd: the {H} heads of x must be a multiple of the {G} groups of B and C")


def _step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, overwrite_state: bool
) -> tuple[Tensor, Tensor]:
    """One token, as in decoding: the cost is reading and writing the state, so it is touched as little as possible."""
    batch, _, H, P = x.shape
    G, N = B.shape[2:]
    if torch.compiler.is_compiling() and state is not None:  # which fuses this into one pass over the state
        heads = (batch, G, H // G, P)
        decay, write = (
            torch.exp(dt[:, 0] * A).view(*heads[:3], 1, 1),
            (dt[:, 0, :, None] * x[:, 0]).view(*heads, 1),
        )
        B, C = B.view(batch, G, 1, 1, N), C.view(batch, G, 1, 1, N)
        S = torch.addcmul(state.view(*heads, N) * decay, write, B)
        y, S = (S * C).sum(-1), S.view(batch, H, P, N)
        # Returned itself: torch 2.13 gets a view of an input wrong that it has written to, if that isn't contiguous
        return y.view(batch, 1, H, P), state.copy_(S) if overwrite_state else S
    rows = (batch, G, (H // G) * P)
    write, B, C = (dt[:, 0, :, None] * x[:, 0]).view(*rows, 1), B.view(batch, G, 1, N), C.view(batch, G, 1, N)
    if state is None:
        S = write * B
    else:
        decay = torch.exp(dt[:, 0] * A)[..., None, None]
        S = state.mul_(decay) if overwrite_state else state * decay
        S = S.view(*rows, N).addcmul_(write, B)
    y = S @ C.mT
    return y.view(batch, 1, H, P), S.view(batch, H, P, N)


@graph_break
def _over_chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    D: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    kernels = cuda_kernels.for_ssd(x, dt, A, B, C, state)
    if kernels is not None:
        return cuda_kernels.ssd(kernels, x, dt, A, B, C, state, D, segment_ids)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        dt, A = dt.to(dtype), A.to(dtype)
        D, state = (None if t is None else t.to(dtype) for t in (D, state))
        if x.dtype == dtype:
            B, C = B.to(dtype), C.to(dtype)
        keep = torch.is_grad_enabled()
        apply = _ChunkedSSD.apply
        y, state = apply(x, dt, A, B, C, state, D, segment_ids, chunk_tokens, keep)  # type: ignore[no-untyped-call]
    return y.to(x.dtype), state


class _Chunks(NamedTuple):
    """What forward and backward both need of a run of chunks; ``g`` chunks of ``Q`` tokens, ``R`` heads a group.

    Attributes:
        x: ``[batch, g, G, Q, R, P]``, a view of the input.
        dt: ``[batch, g, G, Q, R]``.
        B: ``[batch, g, G, Q, N]``.
        C: ``[batch, g, G, Q, N]``.
        decay: from token s (last dimension) to token t, 0 where t does not see s: ``[batch, g, G, R, Q, Q]``.
        scores: ``decay`` times ``C_t . B_s``.
        from_start: from the chunk's start to each token: ``[batch, g, G, Q, R]``.
        to_end: from each token to the chunk's end: ``[batch, g, G, Q, R]``.
        through: over the whole chunk: ``[batch, g, G, R]``.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    decay: Tensor
    scores: Tensor
    from_start: Tensor
    to_end: Tensor
    through: Tensor


_Run = tuple[int, int, int]
"""First token, number of chunks, tokens of each."""


class _ChunkedSSD(torch.autograd.Function):
    """The chunked form with a backward of its own.

    On a CPU most of what it costs beside matrix products is passing over large intermediates. So a few chunks are
    carried through all steps while they are in the cache, backward computes decays and scores again instead of
    storing them, states are kept as ``[N, heads x P]``, and powers of two replace ``exp``, which MKL takes five times
    as long for, thirty times where results are tiny.

    Matrix products over tokens run in the inputs' bfloat16 where the hardware has it, as in the released kernels;
    decays, scores before rounding, and the state are float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor | None,
        D: Tensor | None,
        segment_ids: Tensor | None,
        chunk_tokens: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        batch, _, H, P = x.shape
        G, N = B.shape[2:]
        low = matmul_dtype(x)
        by_head = partial(_split_last, P)
        S = (
            x.new_zeros(batch, G, N, H // G * P, dtype=dt.dtype)
            if state is None
            else _state_to_rows(state, G)
        )
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        carried_all, starts_all = [], []
        for run in _runs(x, chunk_tokens):
            c = _chunks(x, dt, A, B, C, segment_ids, run)
            inputs = _times(c.x, c.dt[..., None], dt.dtype)
            inner = c.scores.to(low) @ _laid_out(inputs.transpose(3, 4), low)
            written = c.B.to(dt.dtype).mT @ (inputs * c.to_end[..., None]).flatten(-2)
            starts = S.new_empty(batch, run[1] + 1, *S.shape[1:])
            starts[:, 0] = S
            for i in range(run[1]):  # a short scan over chunks
                torch.addcmul(
                    by_head(written[:, i]),
                    by_head(starts[:, i]),
                    c.through[:, i, :, None, :, None],
                    out=by_head(starts[:, i + 1]),
                )
            S, starts = starts[:, -1], starts[:, :-1]
            carried = by_head(c.C.to(low) @ starts.to(low))
            out = torch.addcmul(
                inner.transpose(3, 4).to(dt.dtype), carried.to(dt.dtype), c.from_start[..., None]
            )
            if D is not None:
                out.addcmul_(c.x.to(dt.dtype), D.view(G, 1, -1, 1))
            _by_chunk(y, run, G).copy_(out)
            if keep:
                carried_all.append(carried)
                starts_all.append(starts)
        ctx.save_for_backward(x, dt, A, B, C, D, segment_ids, *carried_all, *starts_all)
        ctx.chunk_tokens = chunk_tokens
        ctx.has_state = state is not None
        # A copy: a view would keep the states of all chunks alive for as long as this one
        return y, by_head(S).permute(0, 1, 3, 4, 2).reshape(batch, H, P, N).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, segment_ids, *kept = ctx.saved_tensors
        P, G = x.shape[3], B.shape[2]
        low, precise = matmul_dtype(x), dt.dtype
        by_head = partial(_split_last, P)
        runs = list(_runs(x, ctx.chunk_tokens))
        grad_x, grad_B, grad_C = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, B, C)
        )
        grad_dt = torch.empty_like(dt, memory_format=torch.contiguous_format)
        grad_A = torch.zeros_like(A)
        grad_D = None if D is None else torch.zeros_like(D)
        dS = _state_to_rows(grad_state, G)
        for run, carried, starts in reversed(
            list(zip(runs, kept[: len(runs)], kept[len(runs) :], strict=True))
        ):
            c = _chunks(x, dt, A, B, C, segment_ids, run)
            dy = _by_chunk(grad_y, run, G)
            inputs = _times(c.x, c.dt[..., None], precise)

            # Inside a chunk
            dy_heads = _laid_out(dy.transpose(3, 4), low)
            d_scores = (dy_heads @ _laid_out(inputs.transpose(3, 4), low).mT).to(precise)
            d_inputs = (c.scores.to(low).mT @ dy_heads).transpose(3, 4)
            d_products = (d_scores * c.decay).sum(3)
            weighted = d_scores.mul_(c.scores)
            d_cum = (weighted.sum(-1) - weighted.sum(-2)).transpose(-1, -2)  # [batch, g, G, Q, R]

            # Outputs that read the state a chunk starts with
            d_carried = _times(dy, c.from_start[..., None], precise)
            d_cum += torch.linalg.vecdot(d_carried, carried.to(precise))
            d_carried = d_carried.flatten(-2).to(low)
            d_C = d_products @ c.B.to(precise)
            d_C += d_carried @ starts.to(low).mT
            d_starts = (c.C.to(low).mT @ d_carried).to(precise)

            # The scan, backwards
            d_written = torch.empty_like(d_starts)
            d_through = torch.empty_like(c.through)
            for i in range(len(d_starts[0]) - 1, -1, -1):
                d_written[:, i] = dS
                d_through[:, i] = torch.linalg.vecdot(by_head(dS), by_head(starts[:, i])).sum(2)
                dS = (
                    by_head(d_starts[:, i])
                    .addcmul(by_head(dS), c.through[:, i, :, None, :, None])
                    .flatten(-2)
                )
            d_cum[..., -1, :] += d_through * c.through

            # What a chunk adds to the state
            d_written = d_written.to(low)
            kept_inputs = inputs * c.to_end[..., None]
            d_B = d_products.mT @ c.C.to(precise)
            d_B += kept_inputs.flatten(-2).to(low) @ d_written.mT
            d_kept = by_head(c.B.to(low) @ d_written).to(precise)
            d_to_end = torch.linalg.vecdot(d_kept, kept_inputs)
            d_cum -= d_to_end
            d_cum[..., -1, :] += d_to_end.sum(-2)

            d_inputs = torch.addcmul(d_inputs.to(precise), d_kept, c.to_end[..., None])
            d_log_decay = d_cum.flip(3).cumsum(3).flip(3)
            x_run = c.x.to(precise)
            d_dt = torch.linalg.vecdot(d_inputs, x_run).addcmul_(d_log_decay, A.view(G, 1, -1))
            grad_A += (d_log_decay * c.dt).sum((0, 1, 3)).flatten()
            d_x = d_inputs.mul_(c.dt[..., None])
            if D is not None and grad_D is not None:
                d_x.addcmul_(dy.to(precise), D.view(G, 1, -1, 1))
                grad_D += torch.linalg.vecdot(dy.to(precise), x_run).sum((0, 1, 3)).flatten()
            _by_chunk(grad_x, run, G).copy_(d_x)
            _by_chunk(grad_dt[..., None], run, G).copy_(d_dt[..., None])
            _by_chunk(grad_B, run, G).copy_(d_B[:, :, :, :, None])
            _by_chunk(grad_C, run, G).copy_(d_C[:, :, :, :, None])
        grad_before = by_head(dS).permute(0, 1, 3, 4, 2).flatten(1, 2) if ctx.has_state else None
        return grad_x, grad_dt, grad_A, grad_B, grad_C, grad_before, grad_D, None, None, None


def _runs(x: Tensor, Q: int) -> Iterator[_Run]:
    """(first token, chunks, tokens a chunk): as many chunks at a time as fit in the cache; the rest of T alone."""
    batch, T, H, P = x.shape
    full = T // Q
    at_once = full if x.device.type != "cpu" else max(1, _CACHE_ELEMENTS // (batch * Q * H * max(P, Q)))
    for first in range(0, full, max(at_once, 1)):
        yield first * Q, min(at_once, full - first), Q
    if T % Q:
        yield full * Q, 1, T % Q


def _by_chunk(t: Tensor, run: _Run, G: int) -> Tensor:
    """A view ``[batch, g, G, Q, heads / G, width]`` of ``[batch, T, heads, width]``."""
    first, g, Q = run
    chunks = torch.unflatten(t[:, first : first + g * Q], 1, (g, Q))
    return torch.unflatten(chunks, 3, (G, -1)).transpose(2, 3)


def _times(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a * b``, contiguous, whatever the operands' layout."""
    return torch.mul(a, b, out=torch.empty(a.shape, dtype=dtype, device=a.device))


def _split_last(width: int, t: Tensor) -> Tensor:
    return torch.unflatten(t, -1, (-1, width))


def _laid_out(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy, converted in the same pass."""
    return torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t)


def _state_to_rows(state: Tensor, G: int) -> Tensor:
    """``[batch, H, P, N]`` as ``[batch, G, N, H / G * P]``."""
    return torch.unflatten(state, 1, (G, -1)).permute(0, 1, 4, 2, 3).flatten(3).contiguous()


def _chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    segment_ids: Tensor | None,
    run: _Run,
) -> _Chunks:
    G = B.shape[2]
    first, g, Q = run
    x = _by_chunk(x, run, G)
    steps = _by_chunk(dt[..., None], run, G)[..., 0]
    B, C = (_by_chunk(t, run, G)[..., 0, :] for t in (B, C))
    cum = (steps * (A * _LOG2_E).view(G, 1, -1)).cumsum(3)  # in powers of two
    cum_by_head = cum.mT
    # Added to the exponents: a boolean mask costs more than the rest of the decays together
    unseen = torch.full((Q, Q), -torch.inf, dtype=dt.dtype, device=x.device).triu(1)
    enter = leave = None  # which tokens see the state the chunk starts with, and which ones reach its end
    if segment_ids is not None:
        ids = torch.unflatten(segment_ids[:, first : first + g * Q], 1, (g, Q))
        other = ids[..., :, None] != ids[..., None, :]
        unseen = unseen.masked_fill(other, -torch.inf)[:, :, None, None]
        before = segment_ids[:, max(first - 1, 0) : max(first - 1, 0) + 1]
        previous = torch.cat([before, ids[:, :-1, -1]], dim=1)[..., None]
        enter = (ids == previous)[:, :, None, :, None]
        leave = (ids == ids[..., -1:])[:, :, None, :, None]
    decay = (cum_by_head[..., :, None] - cum_by_head[..., None, :]).add_(unseen).exp2_()
    products = C.to(dt.dtype) @ B.to(dt.dtype).mT
    from_start, to_end, through = cum.exp2(), (cum[..., -1:, :] - cum).exp2(), cum[..., -1, :].exp2()
    if enter is not None and leave is not None:
        from_start, to_end = from_start * enter, to_end * leave
        through = through * (enter & leave)[..., -1, :]
    return _Chunks(x, steps, B, C, decay, decay * products[:, :, :, None], from_start, to_end, through)
