"""Gated DeltaNet over a replayed history (design section 1), the CPU implementation and the reference of every kernel.

Per value head, with S the [dv, dk] state at position c and G_t the sum of g over c..t:

    u_t = beta_t (v_t - e^{G_t} S k_t - sum_{j<t} e^{G_t - G_j} (k_j . k_t) u_j)
    o_t = e^{G_t} S q_t + sum_{j<=t} e^{G_t - G_j} (k_j . q_t) u_j

u of the history comes from the ring; within a window the u solve one unit lower triangular system.
Shapes below: Hv value heads, Hk key heads, w window tokens, n history tokens, m = n + w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayssm.plugins.contract import GdnGeometry
from replayssm.plugins.reference.layout import (
    Spans,
    decays,
    require,
    sigmoid,
    softplus,
)
from replayssm.plugins.reference.recurrent import RecurrentCall, add_outer, apply_state, step_outer
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
        layer: number of the layer, which keys random bits where rounding is stochastic.

    Returns:
        o [T, Hv, dv] in v's dtype; zeros for tokens of padding and invalid rows and for tokens without a row.

    Raises:
        ValueError: the state is another operator's, or shapes or dtypes do not fit its geometry and settings.
    """
    geometry, settings = state.expect(GdnGeometry), state.settings
    tokens, act = v.shape[0], torch_dtype(settings.activation_dtype)
    for name, tensor in (("q", q), ("k", k)):
        require(name, tensor, (tokens, geometry.num_k_heads, geometry.head_k_dim), act)
    require("v", v, (tokens, geometry.num_v_heads, geometry.head_v_dim), act)
    for name, tensor in (("a", a), ("b", b)):
        require(name, tensor, (tokens, geometry.num_v_heads))
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        require(name, tensor, (geometry.num_v_heads,))
    rows = interpret_rows(state, tokens, seq_lens, window_starts, window_lens, state_batch_indices)
    acc = torch_dtype(settings.scalar_dtype)
    call = _GdnCall(
        state=state,
        layer=layer,
        out=torch.zeros(v.shape, dtype=acc),
        q=l2_normalize(q, acc).to(acc) * geometry.head_k_dim**-0.5,
        k=l2_normalize(k, acc),
        v=v,
        # Scalars of a head and token are cheap: fp64, rounded once.
        g=(softplus(a.double() + dt_bias.double()) * -torch.exp(A_log.double())).to(acc),
        beta=sigmoid(b.double()).to(acc),
        new_u=torch.zeros(v.shape, dtype=acc),
    )
    call.run(rows)
    return call.out.to(act)


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


def join_u(planes: torch.Tensor) -> torch.Tensor:
    """Inverse of `split_u`: the sum of the planes [..., planes, dv]."""
    return planes[..., 0, :] if planes.shape[-2] == 1 else planes[..., 0, :] + planes[..., 1, :]


@dataclass
class _GdnCall(RecurrentCall):
    """k [T, Hk, dk] normalised and v [T, Hv, dv] in their own dtype; q [T, Hk, dk] normalised and scaled, g and beta
    [T, Hv] in the accumulation dtype, as is new_u [T, Hv, dv], the u of the windows' tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    new_u: torch.Tensor

    def ring_inputs(self) -> dict[str, torch.Tensor]:
        return {"ring_k": self.k, "ring_g": self.g}

    def ring_results(self) -> dict[str, torch.Tensor]:
        u = self.state["ring_u"]
        return {"ring_u": split_u(self.new_u, u.shape[-2], u.dtype)}

    def read(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(g, u, k) of ring rows in the accumulation dtype; u means nothing where it has not been computed yet."""
        k, u, g = (spans.gather_ring(self.state[part]).to(self.acc) for part in ("ring_k", "ring_u", "ring_g"))
        return g, join_u(u), k

    def history(self, row: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.read(Spans.of_history(row))

    def replay(self, rows: Sequence[Row], windows: Spans) -> None:
        live = Spans(rows, with_history=True, boundary=self.boundary)
        g, u, k = self.read(live)
        q, v, beta = (part[windows.tokens].to(self.acc) for part in (self.q, self.v, self.beta))
        for row, begin, start in zip(rows, live.starts, windows.starts, strict=True):
            window, own = slice(start, start + row.length), slice(row.start, row.start + row.length)
            now, end = begin + row.history, begin + row.history + row.length
            S, decay = self.read_readout(row), decays(g[begin:end], row.length)
            S_k = self.read_checkpoint(row) if self.state.settings.u_source == "checkpoint" else S
            self.out[own], self.new_u[own] = window_output(
                S, decay, q[window], k[begin:end], u[begin:now], v[window], beta[window], S_k
            )

    def chunk(self, S: torch.Tensor | None, tokens: slice) -> torch.Tensor:
        q, k, v, beta = (part[tokens].to(self.acc, copy=True) for part in (self.q, self.k, self.v, self.beta))
        decay = decays(self.g[tokens], v.shape[0])
        self.out[tokens], u = window_output(S, decay, q, k, v[:0], v, beta)
        return add_outer(S, decay[:, -1], u, k)

    def step(self, S: torch.Tensor, token: int) -> torch.Tensor:
        q, k, v = (part[token].to(self.acc, copy=True)[..., None] for part in (self.q, self.k, self.v))
        alpha, beta = torch.exp(self.g[token]), self.beta[token]
        u = beta[:, None] * (v - alpha[:, None, None] * apply_state(S, k))[..., 0]
        self.new_u[token] = u
        S = step_outer(S, alpha, u, k[..., 0])
        self.out[token] = apply_state(S, q)[..., 0]
        return S


def window_output(
    S: torch.Tensor | None,
    decay: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    S_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, u) of a window, both [w, Hv, dv].

    S [Hv, dv, dk] or None for zero; S_k the state that the window's k reads, S if it is not given; decay
    [Hv, w, 1 + m] of `layout.decays`; q [w, Hk, dk]; k [m, Hk, dk] of history and window; u [n, Hv, dv] of the history;
    v [w, Hv, dv]; beta [w, Hv].
    """
    window, history, k_heads = q.shape[0], u.shape[0], k.shape[1]
    # Entries 0..w-1 of every product belong to the window's k (what S forgets), w..2w-1 to its q (what it outputs).
    probes = torch.cat((k[history:], q)).transpose(0, 1)
    weights = torch.bmm(probes, k.permute(1, 2, 0)).view(k_heads, 1, 2, window, -1)
    weights = (weights * decay[:, None, :, 1:].unflatten(0, (k_heads, -1))).flatten(0, 1)
    read = torch.bmm(weights[..., :history].flatten(1, 2), u.transpose(0, 1)).unflatten(1, (2, window))
    if S is not None:
        vectors = probes.transpose(1, 2)
        at_probes = apply_state(S, vectors).transpose(1, 2).unflatten(1, (2, window))
        if S_k is not None and S_k is not S:
            at_probes[:, 0] = apply_state(S_k, vectors).transpose(1, 2)[:, :window]
        read += at_probes * decay[:, None, :, :1]
    beta = beta.t()[..., None]
    new_u = beta * (v.transpose(0, 1) - read[:, 0])
    if window > 1:
        # Only the strict lower triangle is referenced; the diagonal counts as one.
        lower = beta * weights[:, 0, :, history:]
        new_u = torch.linalg.solve_triangular(lower, new_u, upper=False, unitriangular=True)
    o = torch.baddbmm(read[:, 1], weights[:, 1, :, history:], new_u)
    return o.transpose(0, 1), new_u.transpose(0, 1)
