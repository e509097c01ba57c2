"""Gated DeltaNet over a replayed history (design section 1), the CPU implementation and the reference of every kernel.

Per value head, with S the [dv, dk] state at position c and G_t the sum of g over c..t:

    u_t = beta_t (v_t - e^{G_t} S k_t - sum_{j<t} e^{G_t - G_j} (k_j . k_t) u_j)
    o_t = e^{G_t} S q_t + sum_{j<=t} e^{G_t - G_j} (k_j . q_t) u_j

u of the history comes from the ring; within a window the u solve one unit lower triangular system.
Shapes below: Hv value heads, Hk key heads, w window tokens, n history tokens, m = n + w.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.plugins.reference.layout import (
    Spans,
    aligned,
    decays,
    per_token,
    require,
    require_supported,
    store_checkpoint_positions,
    tokens_per_boundary,
)
from replayssm.plugins.reference.mamba2 import PREFILL_CHUNK
from replayssm.plugins.reference.rows import Row, interpret_rows
from replayssm.plugins.state import LayerState, torch_dtype

L2_NORM_EPS = 1e-6


@torch.no_grad()
def gdn_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Outputs of packed windows, updating `state` in place.

    Args:
        q, k: [T, Hk, dk] activations, raw: L2-normalised and scaled inside. v: [T, Hv, dv] activations.
        a, b: [T, Hv] raw gates. A_log, dt_bias: [Hv].
        state: LayerState of a GdnGeometry; its settings select replay, baseline or serial-exact.
        seq_lens, window_starts, window_lens, state_batch_indices: integer [rows], see `rows.interpret_rows`.
        layer: number of the layer, which keys random bits where rounding is stochastic; not used yet.

    Returns:
        o [T, Hv, dv] in v's dtype; zeros for tokens of padding and invalid rows and for tokens without a row.

    Raises:
        ValueError: shapes or dtypes do not fit the state's geometry and settings.
    """
    geometry, settings = state.geometry, state.settings
    tokens, act = v.shape[0], torch_dtype(settings.activation_dtype)
    require_supported("gdn_window", settings.readout_dtype)
    for name, tensor in (("q", q), ("k", k)):
        require(name, tensor, (tokens, geometry.num_k_heads, geometry.head_k_dim), act)
    require("v", v, (tokens, geometry.num_v_heads, geometry.head_v_dim), act)
    for name, tensor in (("a", a), ("b", b)):
        require(name, tensor, (tokens, geometry.num_v_heads))
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        require(name, tensor, (geometry.num_v_heads,))
    rows = interpret_rows(state, tokens, seq_lens, window_starts, window_lens, state_batch_indices)
    acc = torch_dtype(settings.scalar_dtype)
    A, bias = -torch.exp(A_log.double()), dt_bias.double()
    call = _Call(
        q=l2_normalize(q, acc).to(acc) * geometry.head_k_dim**-0.5,
        k=l2_normalize(k, acc),
        v=v,
        g=per_token(lambda raw: A * F.softplus(raw + bias), a, acc),
        beta=per_token(torch.sigmoid, b, acc),
        state=state,
        o=torch.zeros(v.shape, dtype=acc),
    )
    short = [row for row in rows if not row.prefill]
    if short:
        call.replay(short)
    for row in rows:
        if row.prefill:
            call.prefill(row)
    return call.o.to(act)


def l2_normalize(tensor: torch.Tensor, acc: torch.dtype) -> torch.Tensor:
    """tensor / sqrt(sum of squares over the last dimension + 1e-6), computed in `acc`, rounded to its own dtype."""
    wide = tensor.to(acc, memory_format=torch.contiguous_format)
    norm = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + L2_NORM_EPS)
    return (wide * norm).to(tensor.dtype)


def split_u(u: torch.Tensor, planes: int, dtype: torch.dtype) -> torch.Tensor:
    """u [..., dv] as `planes` numbers of `dtype` whose sum it is, as nearly as they can: [..., planes, dv]."""
    high = u.to(dtype)
    if planes == 1:
        return high[..., None, :]
    return torch.stack((high, (u - high.to(u.dtype)).to(dtype)), dim=-2)


def join_u(planes: torch.Tensor, acc: torch.dtype) -> torch.Tensor:
    """Inverse of `split_u`: the sum of the planes, in `acc`."""
    wide = planes.to(acc)
    return wide[..., 0, :] if wide.shape[-2] == 1 else wide[..., 0, :] + wide[..., 1, :]


class _Call:
    """Prepared inputs of one call: q [T, Hk, dk] scaled, g, beta [T, Hv] in the accumulation dtype; k normalised."""

    def __init__(self, q, k, v, g, beta, state, o) -> None:
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.state, self.o = state, o
        self.acc = o.dtype
        self.boundary = tokens_per_boundary(k.shape[1] * k.shape[2], v.shape[1] * v.shape[2])

    def replay(self, rows: list[Row]) -> None:
        """Rules 1 to 6: fold where due, append every window to the ring, compute from checkpoint and ring."""
        state = self.state
        updates = {row.slot: 0 for row in rows if row.seq_len == 0}
        for index, row in enumerate(rows):
            if row.flush:
                self.checkpoint(row).copy_(self.fold_history(row))
                updates[row.slot] = row.seq_len
                rows[index] = row._replace(checkpoint_position=row.seq_len, flush=False)
        store_checkpoint_positions(state["checkpoint_position"], updates)
        windows = Spans(rows, with_history=False, boundary=self.boundary)
        windows.write_ring(state["ring_k"], self.k)
        windows.write_ring(state["ring_g"], self.g)
        live = Spans(rows, with_history=True, boundary=self.boundary)
        k, u, g = self.read_ring(live)
        q, v, beta = (part[windows.tokens].to(self.acc) for part in (self.q, self.v, self.beta))
        new_u = torch.zeros_like(self.o)
        for row, begin, start in zip(rows, live.starts, windows.starts, strict=True):
            end, own = begin + row.history + row.length, slice(row.start, row.start + row.length)
            window = slice(start, start + row.length)
            self.o[own], new_u[own] = window_output(
                self.read_checkpoint(row),
                decays(g[begin:end], row.length),
                q[window],
                k[begin:end],
                u[begin : begin + row.history],
                v[window],
                beta[window],
            )
        ring_u = state["ring_u"]
        windows.write_ring(ring_u, split_u(new_u, ring_u.shape[-2], ring_u.dtype))

    def prefill(self, row: Row) -> None:
        """Rule 5: fold history and window into the checkpoint, append nothing."""
        S = self.fold_history(row) if row.history else self.read_checkpoint(row)
        for start in range(row.start, row.start + row.length, PREFILL_CHUNK):
            chunk = slice(start, min(start + PREFILL_CHUNK, row.start + row.length))
            q, k, v, beta = (part[chunk].to(self.acc, copy=True) for part in (self.q, self.k, self.v, self.beta))
            decay = decays(self.g[chunk], v.shape[0])
            self.o[chunk], u = window_output(S, decay, q, k, v[:0], v, beta)
            S = fold(S, decay[:, -1], u, k)
        self.checkpoint(row).copy_(S)
        store_checkpoint_positions(self.state["checkpoint_position"], {row.slot: row.end})

    def checkpoint(self, row: Row) -> torch.Tensor:
        return self.state["checkpoint"][row.slot]

    def read_checkpoint(self, row: Row) -> torch.Tensor | None:
        """S in the accumulation dtype, None for zero: a slot at c == 0 may hold anything."""
        return aligned(self.checkpoint(row).to(self.acc)) if row.checkpoint_position else None

    def read_ring(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k, u and g of ring rows in the accumulation dtype; u of a window's own rows is meaningless."""
        k, u, g = (spans.gather_ring(self.state[part]) for part in ("ring_k", "ring_u", "ring_g"))
        return k.to(self.acc), join_u(u, self.acc), g

    def fold_history(self, row: Row) -> torch.Tensor:
        """State at seq_len, in the accumulation dtype."""
        k, u, g = (part[: row.history] for part in self.read_ring(Spans([row._replace(length=0)], with_history=True)))
        return fold(self.read_checkpoint(row), decays(g, 1)[:, 0], u, k)


def window_output(
    S: torch.Tensor | None,
    decay: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, u) of a window, both [w, Hv, dv].

    S [Hv, dv, dk] or None for zero; decay [Hv, w, 1 + m] of `layout.decays`; q [w, Hk, dk]; k [m, Hk, dk] of history
    and window; u [n, Hv, dv] of the history; v [w, Hv, dv]; beta [w, Hv].
    """
    heads, window, _ = decay.shape
    history, k_heads, head_k_dim = u.shape[0], *k.shape[1:]
    # Rows 0..w-1 of every product belong to the window's k (what S forgets), rows w..2w-1 to its q (what it outputs).
    probes = torch.cat((k[history:], q)).transpose(0, 1)
    weights = (probes @ k.permute(1, 2, 0)).view(k_heads, 1, 2, window, -1)
    weights = (weights * decay[:, None, :, 1:].unflatten(0, (k_heads, -1))).flatten(0, 1)
    read = weights[..., :history].flatten(1, 2) @ u.transpose(0, 1)
    if S is not None:
        at_probes = (S.view(k_heads, -1, head_k_dim) @ probes.transpose(1, 2)).view(heads, -1, 2 * window)
        read += at_probes.transpose(1, 2) * decay[:, :, :1].repeat(1, 2, 1)
    beta = beta.t()[..., None]
    new_u = beta * (v.transpose(0, 1) - read[:, :window])
    if window > 1:
        # Only the strict lower triangle is referenced; the diagonal counts as one.
        lower = beta * weights[:, 0, :, history:]
        new_u = torch.linalg.solve_triangular(lower, new_u, upper=False, unitriangular=True)
    o = read[:, window:] + weights[:, 1, :, history:] @ new_u
    return o.transpose(0, 1), new_u.transpose(0, 1)


def fold(S: torch.Tensor | None, decay: torch.Tensor, u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """State after the tokens of u [m, Hv, dv], k [m, Hk, dk]; decay [Hv, 1 + m] towards the last of them."""
    tokens, heads, head_v_dim = u.shape
    k_heads, head_k_dim = k.shape[1:]
    weighted = u.permute(1, 2, 0) * decay[:, None, 1:]
    update = (weighted.reshape(k_heads, -1, tokens) @ k.transpose(0, 1)).view(heads, head_v_dim, head_k_dim)
    return update if S is None else S * decay[:, :1, None] + update
