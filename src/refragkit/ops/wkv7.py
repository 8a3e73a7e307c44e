"""RWKV-7's generalised delta rule: a chunked form for training and the step-by-step form it is tested against.

Per head, with the state ``S`` in ``[N value, N key]``::

    S_t = S_{t-1} diag(w_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T          o_t = S_t r_t

Glossary: ``log_decay`` log w, ``cw`` its running sum inside a chunk, ``Q`` chunk length, ``u_t = S_{t-1} a_t``
what the state returns for the removal key.

Chunked form. With ``S_0`` the state before the chunk and the scaled rows ``r' = r exp(cw - mid)``,
``a' = a exp(cw_{t-1} - mid)``, ``k' = k exp(mid - cw)``, ``b' = b exp(mid - cw)``, the rows ``u`` solve a unit
triangular system, and outputs and the next state are matrix products of them::

    (I - tril(a' b'^T, -1)) U = a' diag(exp mid) S_0^T + tril(a' k'^T, -1) V

Every u is affine in S_0, so both parts are solved for all chunks at once and only ``S <- S P_c + H_c`` is left
to a short scan.

Source: Peng et al. 2025, "RWKV-7 Goose" (arXiv 2503.14456), section 4 and appendix; Yang et al. 2024,
"Parallelizing linear transformers with the delta rule" (arXiv 2406.06484) for the triangular form.
Differs: tokens with ``log_decay = k = a = 0`` leave the state untouched, which is how padding is expressed;
``segment_ids`` resets the state between packed documents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from refragkit.ops import cuda_kernels
from refragkit.ops.graph_break import graph_break

CHUNK_TOKENS = 32
# exp() of half a chunk's decay must stay far inside float32 (and its products too): e^30 ~ 1e13.
_MAX_HALF_EXPONENT = 30.0
# A channel that keeps e^-60 of itself keeps nothing, in any precision.
_STRONGEST = -60.0


def wkv7(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    least_log_decay: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a whole sequence by matrix products, chunk by chunk.

    Args:
        r: receptance (the query) ``[batch, T, H, N]``.
        log_decay: log of the per-channel decay, negative or 0, ``[batch, T, H, N]``; RWKV-7 has (-0.6065, 0),
            stronger decays work with shorter chunks, chosen here.
        k: key ``[batch, T, H, N]``.
        v: value ``[batch, T, H, N]``.
        a: removal key ``[batch, T, H, N]`` (RWKV-7: ``-kk``).
        b: replacement key ``[batch, T, H, N]`` (RWKV-7: ``kk * iclr``).
        state: ``[batch, H, N, N]`` (value, key) before the first token; zeros if None. Not changed.
        segment_ids: integers ``[batch, T]``, constant within a packed document and different in the next one;
            the state restarts from zero where they change. ``state`` belongs to the first document.
        chunk_tokens: the most tokens per chunk; a matter of speed only.
        least_log_decay: a lower bound of log_decay that the caller knows, which saves looking for it (on a GPU, a
            synchronisation). None looks.

    Returns:
        ``out [batch, T, H, N]`` in v's dtype, and the state after the last token, float32 (float64 for float64
        inputs).

    Raises:
        ValueError: shapes that don't fit together.
    """
    _check(r, log_decay, k, v, a, b, state)
    if r.shape[1] > 1:
        return _over_chunks(r, log_decay, k, v, a, b, state, segment_ids, chunk_tokens, least_log_decay)
    kernels = cuda_kernels.for_wkv7(r, log_decay, k, v, a, b, state)
    if kernels is not None:
        return cuda_kernels.wkv7(kernels, r, log_decay, k, v, a, b, state, segment_ids, least_log_decay)
    out_dtype = v.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    with torch.autocast(r.device.type, enabled=False):
        r, log_decay, k, v, a, b = (t.to(dtype) for t in (r, log_decay, k, v, a, b))
        out, state = _step(r, log_decay, k, v, a, b, None if state is None else state.to(dtype))
    return out.to(out_dtype), state


def wkv7_reference(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: slow, obvious, and what :func:`wkv7` is tested against.

    Shapes as in :func:`wkv7`.
    """
    _check(r, log_decay, k, v, a, b, state)
    out_dtype = v.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    r, log_decay, k, v, a, b = (t.to(dtype) for t in (r, log_decay, k, v, a, b))
    batch, _, H, N = r.shape
    S = r.new_zeros(batch, H, N, N) if state is None else state.to(dtype)
    outputs = []
    for t in range(r.shape[1]):
        if segment_ids is not None and t > 0:
            keep = segment_ids[:, t] == segment_ids[:, t - 1]
            S = S * keep[:, None, None, None]
        u = S @ a[:, t, :, :, None]  # [batch, H, N, 1]
        S = S * log_decay[:, t, :, None, :].exp() + u * b[:, t, :, None, :]
        S = S + v[:, t, :, :, None] * k[:, t, :, None, :]
        outputs.append((S @ r[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=1).to(out_dtype), S


def _check(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None
) -> None:
    batch, T, H, N = r.shape
    if T < 1:
        raise ValueError(f"wkv7 needs at least one token, got r of shape {tuple(r.shape)}")
    wanted = {
        name: (t, (batch, T, H, N))
        for name, t in {"log_decay": log_decay, "k": k, "v": v, "a": a, "b": b}.items()
    }
    if state is not None:
        wanted["state"] = (state, (batch, H, N, N))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"wkv7: {name} must have shape {shape} for r {tuple(r.shape)}, got {tuple(tensor.shape)}"
            )


def _least(log_decay: Tensor) -> float:
    if log_decay.is_meta:
        return 0.0
    least = float(log_decay.detach().amin())
    # A run that has diverged shows it in its loss, not here
    return 0.0 if math.isnan(least) else least


def _chunk_length(least_log_decay: float, longest: int) -> int:
    """The longest chunk whose scaled rows stay far inside float32."""
    return max(1, min(longest, int(2 * _MAX_HALF_EXPONENT / max(-least_log_decay, 1e-6))))


def _step(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, as in decoding; ``vecdot`` because batched matrix-vector products are slow on a CPU."""
    r, log_decay, k, v, a, b = (t[:, 0] for t in (r, log_decay, k, v, a, b))  # [batch, H, N]
    if state is None:
        S = v[..., None] * k[..., None, :]
    else:  # in place on a fresh tensor, never on the caller's
        u = torch.linalg.vecdot(state, a[..., None, :])
        S = state * log_decay.exp()[..., None, :]
        S = S.addcmul_(u[..., None], b[..., None, :]).addcmul_(v[..., None], k[..., None, :])
    return torch.linalg.vecdot(S, r[..., None, :])[:, None], S


@graph_break
def _over_chunks(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    chunk_tokens: int,
    least_log_decay: float | None,
) -> tuple[Tensor, Tensor]:
    if least_log_decay is None:
        log_decay = log_decay.clamp(min=_STRONGEST)
    kernels = cuda_kernels.for_wkv7(r, log_decay, k, v, a, b, state)
    if kernels is not None:
        return cuda_kernels.wkv7(kernels, r, log_decay, k, v, a, b, state, segment_ids, least_log_decay)
    out_dtype = v.dtype
    dtype = torch.promote_types(out_dtype, torch.float32)
    with torch.autocast(r.device.type, enabled=False):
        r, log_decay, k, v, a, b = (t.to(dtype) for t in (r, log_decay, k, v, a, b))
        state = None if state is None else state.to(dtype)
        if least_log_decay is None:
            least_log_decay = _least(log_decay)
        Q = _chunk_length(least_log_decay, min(chunk_tokens, r.shape[1]))
        out, state = _chunked(r, log_decay, k, v, a, b, state, segment_ids, Q)
    return out.to(out_dtype), state


def _chunked(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    segment_ids: Tensor | None,
    Q: int,
) -> tuple[Tensor, Tensor]:
    batch, T, H, N = r.shape
    n = -(-T // Q)
    extra = n * Q - T
    if extra:  # tokens of zeros change nothing
        r, log_decay, k, v, a, b = (
            functional.pad(t, (0, 0, 0, 0, 0, extra)) for t in (r, log_decay, k, v, a, b)
        )
        if segment_ids is not None:
            segment_ids = torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, extra)], dim=1)
    r, log_decay, k, v, a, b = (
        t.view(batch, n, Q, H, N).transpose(2, 3) for t in (r, log_decay, k, v, a, b)
    )  # [batch, n, H, Q, N]

    cw = log_decay.cumsum(-2)
    end = cw[..., -1:, :]
    mid = end * 0.5
    grow = (mid - cw).exp()
    shrink = (cw - mid).exp()
    r_in = r * shrink
    a_in = a * (cw - log_decay - mid).exp()
    k_in = k * grow
    b_in = b * grow
    from_start = mid.exp()  # S_0's part of a row is exp(cw_t) = exp(mid) exp(cw_t - mid)
    to_end = (end - mid).exp()

    upto = torch.ones(Q, Q, dtype=torch.bool, device=r.device).tril()
    before = upto.tril(-1)
    enter = leave = None  # which tokens see the state the chunk starts with, and which ones reach its end
    if segment_ids is not None:
        ids = segment_ids.view(batch, n, Q)
        same = (ids[..., :, None] == ids[..., None, :])[:, :, None]
        upto, before = upto & same, before & same
        previous = torch.cat([ids[:, :1, :1], ids[:, :-1, -1:]], dim=1)
        enter = (ids == previous)[:, :, None, :, None]
        leave = (ids == ids[..., -1:])[:, :, None, :, None]

    # One product gives all four [Q, Q] blocks: rows (a', r') times columns (b', k')
    pairs = torch.cat([a_in, r_in], dim=-2) @ torch.cat([b_in, k_in], dim=-2).transpose(-1, -2)
    mask = torch.cat([before, upto], dim=-2)
    to_b, to_k = torch.split(pairs, Q, dim=-1)
    a_b, r_b = torch.split(to_b.masked_fill(~mask, 0), Q, dim=-2)
    a_k, r_k = torch.split(to_k.masked_fill(~mask, 0), Q, dim=-2)

    a_0 = a_in * from_start
    r_0 = r_in * from_start
    k_end = k_in * to_end
    b_end = b_in * to_end
    if enter is not None and leave is not None:
        a_0, r_0 = a_0 * enter, r_0 * enter
        k_end, b_end = k_end * leave, b_end * leave
    # u_t = W_t S_0^T + U_t
    system = torch.eye(Q, dtype=r.dtype, device=r.device) - a_b
    solved = torch.linalg.solve_triangular(
        system, torch.cat([a_0, a_k @ v], dim=-1), upper=False, unitriangular=True
    )
    W, U = solved.split(N, dim=-1)

    through = end.exp()
    if enter is not None and leave is not None:
        through = through * (enter & leave)[..., -1:, :]
    # S_end = S_0 (diag(through) + W^T b_end) + (U^T b_end + V^T k_end)
    propagate = torch.diag_embed(through.squeeze(-2)) + W.transpose(-1, -2) @ b_end
    written = torch.cat([U, v], dim=-2).transpose(-1, -2) @ torch.cat([b_end, k_end], dim=-2)

    S = r.new_zeros(batch, H, N, N) if state is None else state
    starts = []
    # unbind, not indexing: the gradient of each index would be a tensor of zeros as large as all chunks
    for added, mapped in zip(written.unbind(1), propagate.unbind(1), strict=True):
        starts.append(S)
        S = added + S @ mapped
    incoming = torch.stack(starts, dim=1)  # [batch, n, H, N, N]

    rows = r_0 + r_b @ W
    out = rows @ incoming.transpose(-1, -2) + torch.cat([r_b, r_k], dim=-1) @ torch.cat([U, v], dim=-2)
    return out.transpose(2, 3).reshape(batch, n * Q, H, N)[:, :T], S
