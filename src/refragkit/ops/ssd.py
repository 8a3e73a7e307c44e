"""Mamba-2's state space recurrence: a chunked form for training and the step-by-step form it is tested against.

Per head, with the state ``S`` in ``[P, N]``::

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T          y_t = S_t C_t

Glossary: ``P`` head dimension, ``N`` state size (``d_state``), ``G`` groups that share B and C, ``H`` heads,
``Q`` chunk length, ``cum`` the running sum of ``dt A`` inside a chunk.

Source: Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), section 6 and listing 1.
Differs: the skip term ``D x`` is the layer's business; tokens with ``dt = 0`` leave the state untouched, which
is how padding is expressed; ``segment_ids`` resets the state between packed documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_TOKENS = 64


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a whole sequence by matrix products, chunk by chunk.

    Args:
        x: inputs ``[batch, T, H, P]``.
        dt: step sizes ``[batch, T, H]``, after softplus (not negative); 0 makes a token a no-op for the state.
        A: decay rates ``[H]``, negative.
        B: input maps ``[batch, T, G, N]``; G divides H, consecutive heads share a group.
        C: output maps ``[batch, T, G, N]``.
        state: ``[batch, H, P, N]`` before the first token; zeros if None. Not changed.
        segment_ids: integers ``[batch, T]``, constant within a packed document and different in the next one;
            the state restarts from zero where they change. ``state`` belongs to the first document.
        chunk_tokens: tokens per chunk; a matter of speed only.

    Returns:
        ``y [batch, T, H, P]`` in x's dtype, and the state after the last token, float32 (float64 for float64
        inputs).

    Raises:
        ValueError: shapes that don't fit together.
    """
    _check(x, dt, A, B, C, state)
    out_dtype = x.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
        state = None if state is None else state.to(dtype)
        if x.shape[1] == 1:
            y, state = _step(x, dt, A, B, C, state)
        else:
            y, state = _chunked(x, dt, A, B, C, state, segment_ids, min(chunk_tokens, x.shape[1]))
    return y.to(out_dtype), state


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
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
    return torch.stack(outputs, dim=1).to(out_dtype), S


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
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, as in decoding: the cost is reading and writing the state, so it is touched as little as possible.

    Batched matrix-vector products of this shape take twice the time of ``vecdot`` on a CPU.
    """
    batch, _, H, P = x.shape
    G, N = B.shape[2:]
    rows = (batch, G, (H // G) * P)
    write, B, C = (dt[:, 0, :, None] * x[:, 0]).view(*rows, 1), B.view(batch, G, 1, N), C.view(batch, G, 1, N)
    if state is None:
        S = write * B
    else:  # in place on a fresh tensor, never on the caller's
        S = (state * torch.exp(dt[:, 0] * A)[..., None, None]).view(*rows, N).addcmul_(write, B)
    y = torch.linalg.vecdot(S, C)
    return y.view(batch, 1, H, P), S.view(batch, H, P, N)


def _chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    Q: int,
) -> tuple[Tensor, Tensor]:
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    R = H // G  # heads per group
    n = -(-T // Q)
    if n * Q != T:  # tokens with dt = 0 change nothing
        extra = n * Q - T
        x, B, C = (functional.pad(t, (0, 0, 0, 0, 0, extra)) for t in (x, B, C))
        dt = functional.pad(dt, (0, 0, 0, extra))
        if segment_ids is not None:
            segment_ids = torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, extra)], dim=1)

    xdt = (x * dt[..., None]).view(batch, n, Q, G, R * P)
    B = B.view(batch, n, Q, G, N).transpose(2, 3)  # [batch, n, G, Q, N]
    C = C.view(batch, n, Q, G, N).transpose(2, 3)
    log_decay = (dt * A).view(batch, n, Q, G, R).permute(0, 1, 3, 4, 2)  # [batch, n, G, R, Q]
    cum = log_decay.cumsum(-1)

    # Inside a chunk: y_t = sum_{s <= t} (C_t . B_s) exp(cum_t - cum_s) dt_s x_s
    allowed = torch.ones(Q, Q, dtype=torch.bool, device=x.device).tril()
    enter = leave = None  # which tokens see the state the chunk starts with, and which ones reach its end
    if segment_ids is not None:
        ids = segment_ids.view(batch, n, Q)
        allowed = allowed & (ids[..., :, None] == ids[..., None, :])[:, :, None, None]
        previous = torch.cat([ids[:, :1, :1], ids[:, :-1, -1:]], dim=1)
        enter = (ids == previous)[:, :, None, None, :]
        leave = (ids == ids[..., -1:])[:, :, None, None, :]
    scores: Tensor = _DecayedScores.apply(C @ B.transpose(-1, -2), cum, ~allowed)  # type: ignore[no-untyped-call]
    values = xdt.view(batch, n, Q, G, R, P).permute(0, 1, 3, 4, 2, 5)
    y = scores @ values  # [batch, n, G, R, Q, P]

    # What each chunk adds to the state, and how much of the incoming state survives it
    to_end = (cum[..., -1:] - cum).exp()
    through = cum[..., -1].exp()
    from_start = cum.exp()
    if enter is not None and leave is not None:
        to_end = to_end * leave
        from_start = from_start * enter
        through = through * (enter & leave)[..., -1]
    written = (values * to_end[..., None]).transpose(-1, -2).reshape(batch, n, G, R * P, Q) @ B
    written = written.view(batch, n, H, P, N)
    through = through.reshape(batch, n, H, 1, 1)

    # A short scan over chunks
    S = x.new_zeros(batch, H, P, N) if state is None else state
    starts = []
    # unbind, not indexing: the gradient of each index would be a tensor of zeros as large as all chunks
    for added, kept in zip(written.unbind(1), through.unbind(1), strict=True):
        starts.append(S)
        S = torch.addcmul(added, S, kept)
    incoming = torch.stack(starts, dim=1).view(batch, n, G, R * P, N)
    carried = (C @ incoming.transpose(-1, -2)).view(batch, n, G, Q, R, P).transpose(3, 4)
    y = torch.addcmul(y, carried, from_start[..., None])
    return y.permute(0, 1, 4, 2, 3, 5).reshape(batch, n * Q, H, P)[:, :T], S


class _DecayedScores(torch.autograd.Function):
    """``scores[t, s] = products[t, s] exp(cum[t] - cum[s])`` where allowed, else 0: ``[batch, n, G, R, Q, Q]``.

    These are the largest tensors of the operator, and what it costs beside matrix products is passing over them:
    forward works in place on one, backward reads each once.
    """

    @staticmethod
    def forward(ctx: Any, products: Tensor, cum: Tensor, forbidden: Tensor) -> Tensor:
        decay = (cum[..., :, None] - cum[..., None, :]).masked_fill_(forbidden, -torch.inf).exp_()
        scores = decay * products[:, :, :, None]
        ctx.save_for_backward(decay, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        decay, scores = ctx.saved_tensors
        grad_products = (grad * decay).sum(3) if ctx.needs_input_grad[0] else None
        grad_cum = None
        if ctx.needs_input_grad[1]:
            weighted = grad * scores
            grad_cum = weighted.sum(-1).sub_(weighted.sum(-2))
        return grad_products, grad_cum, None
