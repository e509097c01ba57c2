"""Chunked training scans of the two recurrences, and the token-by-token forms they must equal.

Rows hold several documents one after another; `segment` [batch, tokens] numbers them, and the state
restarts at zero where the number changes. Every factor that reaches back in time is multiplied by
"same segment", so a border costs nothing but a comparison.

Symbols: b batch, n chunks, c tokens of a chunk, h heads, P headdim, N dstate (Mamba2), dk, dv (GDN).
Decays and running sums are fp32 (fp64 if the inputs are); `matmul_dtype` may lower the operands of the
large products only, which still accumulate in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _pad_tokens(x: Tensor, chunk: int) -> Tensor:
    """Pad dimension 1 with zeros to a multiple of `chunk`, split it: [b, n, c, ...]."""
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _pairwise_decay(cumulative: Tensor, segment: Tensor) -> Tensor:
    """exp(G_i - G_j) for i >= j in one segment, else 0: [b, n, c, h] -> [b, n, h, c, c].

    Masked before the exponential, so the unused upper half cannot overflow.
    """
    g = cumulative.transpose(-1, -2)
    c = g.shape[-1]
    keep = torch.ones(c, c, dtype=torch.bool, device=g.device).tril()
    keep = keep & (segment[..., :, None] == segment[..., None, :])
    difference = g[..., :, None] - g[..., None, :]
    return difference.masked_fill(~keep[:, :, None], -torch.inf).exp()


def _border_masks(segment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of [b, n, c]: token continues the previous chunk's last segment, token is in its own chunk's
    last segment, chunk's last segment continues the previous chunk's."""
    last = segment[..., -1]
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    return segment == before[..., None], segment == last[..., None], last == before


def mamba2_chunked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    segment: Tensor,
    chunk: int = 128,
    matmul_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [b,T,h,P], dt [b,T,h] (after softplus), a [h] = -exp(A_log), b and c [b,T,g,N], d [h]."""
    with torch.autocast(x.device.type, enabled=False):
        return _mamba2_chunked(x, dt, a, b, c, d, segment, chunk, matmul_dtype)


def _mamba2_chunked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    segment: Tensor,
    chunk: int,
    matmul_dtype: torch.dtype | None,
) -> Tensor:
    tokens, heads = x.shape[1], x.shape[2]
    groups = b.shape[2]
    work = matmul_dtype or dt.dtype
    seg = _pad_tokens(segment, chunk)
    from_before, to_end, continues = _border_masks(seg)
    xs = _pad_tokens(x * dt[..., None].to(x.dtype), chunk).to(work)
    bs, cs = _pad_tokens(b, chunk).to(work), _pad_tokens(c, chunk).to(work)
    total = _pad_tokens(dt * a, chunk).cumsum(2)

    scores = torch.einsum("bnigs,bnjgs->bngij", cs, bs)
    decay = _pairwise_decay(total, seg)
    mixed = scores.repeat_interleave(heads // groups, 2) * decay
    y = torch.einsum("bnhij,bnjhp->bnihp", mixed.to(work), xs)

    to_border = (total[:, :, -1:] - total).exp() * to_end[..., None]
    xe = (xs * to_border[..., None]).to(work)
    xe = xe.unflatten(3, (groups, -1))
    ends = torch.einsum("bncgrp,bncgs->bngrps", xe, bs)
    states = _carry(ends.flatten(2, 3).to(dt.dtype), total[:, :, -1], continues)

    inter = torch.einsum("bncgs,bngrps->bncgrp", cs, states.unflatten(2, (groups, -1)).to(work))
    reach = total.exp() * from_before[..., None]
    y = y + inter.flatten(3, 4) * reach[..., None]
    y = y.flatten(1, 2)[:, :tokens]
    return y + d[:, None] * x


def _carry(ends: Tensor, chunk_decay: Tensor, continues: Tensor) -> Tensor:
    """State before each chunk from what each chunk adds to it.

    ends [b,n,h,P,N], chunk_decay [b,n,h] (log), continues [b,n] -> [b,n,h,P,N].
    """
    n = ends.shape[1]
    run = chunk_decay.cumsum(1)
    breaks = (~continues).cumsum(1)
    # Chunk z adds to the state before chunk m iff no border lies in chunks z+1..m-1.
    before = F.pad(run[:, :-1], (0, 0, 1, 0))
    broken = F.pad(breaks[:, :-1], (1, 0))
    keep = torch.ones(n, n, dtype=torch.bool, device=ends.device).tril(-1)
    keep = keep & (broken[:, :, None] == breaks[:, None, :])
    weight = (before[:, :, None] - run[:, None, :]).masked_fill(~keep[..., None], -torch.inf).exp()
    return torch.einsum("bmzh,bzhps->bmhps", weight, ends)


def mamba2_sequential(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, segment: Tensor) -> Tensor:
    """S_t = exp(a dt_t) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t, one token at a time."""
    rows, tokens, heads, p = x.shape
    repeat = heads // b.shape[2]
    state = x.new_zeros(rows, heads, p, b.shape[-1])
    out = []
    for t in range(tokens):
        if t:
            state = state * (segment[:, t] == segment[:, t - 1])[:, None, None, None]
        bt, ct = (v[:, t].repeat_interleave(repeat, 1) for v in (b, c))
        decay = (a * dt[:, t]).exp()[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * bt[:, :, None]
        out.append((state * ct[:, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(out, 1)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [..., c, c]; the gradient is two products."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(
            eye + lower, eye.expand_as(lower).contiguous(), upper=False, unitriangular=True
        )
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            turned = inverse.transpose(-1, -2)
            return -(turned @ grad @ turned).tril(-1)


@torch.library.custom_op("replayssm_examples::chunk_states", mutates_args=())
def chunk_states(transition: Tensor, added: Tensor) -> Tensor:
    """S_{m+1} = transition_m S_m + added_m, S_0 = 0; returns S_0..S_{n-1}, all [n, batch, ...]."""
    states = torch.zeros_like(added)
    for m in range(added.shape[0] - 1):
        torch.baddbmm(added[m], transition[m], states[m], out=states[m + 1])
    return states


@chunk_states.register_fake
def _(transition: Tensor, added: Tensor) -> Tensor:
    return torch.empty_like(added)


@torch.library.custom_op("replayssm_examples::chunk_states_backward", mutates_args=())
def chunk_states_backward(grad: Tensor, transition: Tensor) -> Tensor:
    """Gradient of `added` in chunk_states: l_m = grad_{m+1} + transition_{m+1}^T l_{m+1}."""
    out = torch.zeros_like(grad)
    n = grad.shape[0]
    for m in range(n - 2, -1, -1):
        if m == n - 2:
            out[m] = grad[m + 1]
        else:
            torch.baddbmm(grad[m + 1], transition[m + 1].transpose(-1, -2), out[m + 1], out=out[m])
    return out


@chunk_states_backward.register_fake
def _(grad: Tensor, transition: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _chunk_states_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _chunk_states_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    transition, states = ctx.saved_tensors
    with torch.autocast(grad.device.type, enabled=False):
        added = chunk_states_backward(grad.contiguous(), transition)
        return added @ states.transpose(-1, -2), added


chunk_states.register_autograd(_chunk_states_grad, setup_context=_chunk_states_setup)


def l2_normalize(x: Tensor) -> Tensor:
    """Last dimension to unit length, eps 1e-6 inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gdn_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment: Tensor, chunk: int = 64) -> Tensor:
    """q, k [b,T,hk,dk] raw, v [b,T,h,dv], g (log decay) and beta [b,T,h] -> [b,T,h,dv].

    WY form: with D the pairwise decay and L = strict_lower(beta k k^T D), the corrected values of a
    chunk are u = (I+L)^-1 beta (v - e^G k S), so all chunks prepare in parallel and only the
    state's n products of [dk,dk] by [dk,dv] run one after another.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _gdn_chunked(q, k, v, g, beta, segment, chunk)


def _gdn_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment: Tensor, chunk: int) -> Tensor:
    tokens, heads = v.shape[1], v.shape[2]
    repeat = heads // q.shape[2]
    seg = _pad_tokens(segment, chunk)
    from_before, to_end, continues = _border_masks(seg)

    def heads_first(t: Tensor) -> Tensor:
        return _pad_tokens(t, chunk).to(g.dtype).transpose(2, 3)

    qs = heads_first(l2_normalize(q.to(g.dtype)) * q.shape[-1] ** -0.5)
    ks = heads_first(l2_normalize(k.to(g.dtype)))
    vs = heads_first(v)
    total = _pad_tokens(g, chunk).cumsum(2)
    decay = _pairwise_decay(total, seg)
    bs = _pad_tokens(beta, chunk).transpose(2, 3)[..., None]
    gs = total.transpose(2, 3)[..., None]
    reach = gs.exp() * from_before[:, :, None, :, None]

    kk = (ks @ ks.transpose(-1, -2)).repeat_interleave(repeat, 2)
    qk = (qs @ ks.transpose(-1, -2)).repeat_interleave(repeat, 2) * decay
    qs, ks = (t.repeat_interleave(repeat, 2) for t in (qs, ks))
    inverse = _UnitLowerInverse.apply((kk * decay * bs).tril(-1))
    values = inverse @ (vs * bs)
    keys = inverse @ (ks * (bs * reach))

    to_border = (gs[:, :, :, -1:] - gs).exp() * to_end[:, :, None, :, None]
    outgoing = (ks * to_border).transpose(-1, -2)
    kept = gs[:, :, :, -1:].exp() * continues[:, :, None, None, None]
    eye = torch.eye(ks.shape[-1], dtype=g.dtype, device=g.device)
    transition = kept * eye - outgoing @ keys
    states = chunk_states(
        transition.transpose(0, 1).flatten(1, 2).contiguous(),
        (outgoing @ values).transpose(0, 1).flatten(1, 2).contiguous(),
    )
    states = states.unflatten(1, (q.shape[0], heads)).transpose(0, 1)

    u = values - keys @ states
    out = (qs * reach) @ states + qk @ u
    return out.transpose(2, 3).flatten(1, 2)[:, :tokens]


def gdn_sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment: Tensor) -> Tensor:
    """u = beta (v - e^g S k), S = e^g S + u k^T, o = S q, one token at a time (S [dv, dk])."""
    repeat = v.shape[2] // q.shape[2]
    q = (l2_normalize(q) * q.shape[-1] ** -0.5).repeat_interleave(repeat, 2)
    k = l2_normalize(k).repeat_interleave(repeat, 2)
    state = v.new_zeros(*v.shape[:1], *v.shape[2:], q.shape[-1])
    out = []
    for t in range(v.shape[1]):
        if t:
            state = state * (segment[:, t] == segment[:, t - 1])[:, None, None, None]
        state = state * g[:, t].exp()[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, None]).sum(-1))
        state = state + u[..., None] * k[:, t, :, None]
        out.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(out, 1)
