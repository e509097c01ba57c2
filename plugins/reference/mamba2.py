"""Mamba2 over a replayed history (design section 1), the CPU implementation and the reference of every kernel.

Per head, with S the [headdim, dstate] state at position c and G_p the sum of A dt over c..p:

    y_p = e^{G_p} S C_p + sum_{j=c..p} e^{G_p - G_j} dt_j (B_j . C_p) x_j + D x_p

Shapes below: H heads, G groups, P headdim, N dstate, w window tokens, m = history + window tokens.
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
from replayssm.plugins.reference.rows import Row, interpret_rows
from replayssm.plugins.state import LayerState, torch_dtype

PREFILL_CHUNK = 64
"""Tokens that a prefill row computes at once; the state between chunks stays in the accumulation dtype."""


@torch.no_grad()
def mamba2_window(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
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
        x: [T, H, P] activations. dt: [T, H] raw, before bias and softplus. B, C: [T, G, N] activations.
        A_log, D, dt_bias: [H].
        state: LayerState of a Mamba2Geometry; its settings select replay, baseline or serial-exact.
        seq_lens, window_starts, window_lens, state_batch_indices: integer [rows], see `rows.interpret_rows`.
        layer: number of the layer, which keys random bits where rounding is stochastic; not used yet.

    Returns:
        y [T, H, P] in x's dtype; zeros for tokens of padding and invalid rows and for tokens without a row.

    Raises:
        ValueError: shapes or dtypes do not fit the state's geometry and settings.
    """
    geometry, settings = state.geometry, state.settings
    heads, headdim, dstate = geometry.state_shape
    tokens, groups, act = x.shape[0], geometry.ngroups, torch_dtype(settings.activation_dtype)
    require_supported("mamba2_window", settings.readout_dtype)
    require("x", x, (tokens, heads, headdim), act)
    require("dt", dt, (tokens, heads))
    require("B", B, (tokens, groups, dstate), act)
    require("C", C, (tokens, groups, dstate), act)
    for name, tensor in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        require(name, tensor, (heads,))
    rows = interpret_rows(state, tokens, seq_lens, window_starts, window_lens, state_batch_indices)
    acc = torch_dtype(settings.scalar_dtype)
    bias = dt_bias.double()
    call = _Call(
        x=x,
        dt=per_token(lambda raw: F.softplus(raw + bias), dt, acc),
        B=B,
        C=C,
        A=-torch.exp(A_log.to(acc)),
        D=D.to(acc)[:, None],
        state=state,
        y=torch.zeros(x.shape, dtype=acc),
    )
    short = [row for row in rows if not row.prefill]
    if short:
        call.replay(short)
    for row in rows:
        if row.prefill:
            call.prefill(row)
    return call.y.to(act)


class _Call:
    """Prepared inputs of one call: dt [T, H], A [H] and D [H, 1] in the accumulation dtype; y accumulates."""

    def __init__(self, x, dt, B, C, A, D, state, y) -> None:
        self.x, self.dt, self.B, self.C, self.A, self.D = x, dt, B, C, A, D
        self.state, self.y = state, y
        self.acc = y.dtype
        self.boundary = tokens_per_boundary(x.shape[1] * x.shape[2], B.shape[1] * B.shape[2])

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
        windows.write_ring(state["ring_x"], self.x)
        windows.write_ring(state["ring_B"], self.B)
        windows.write_ring(state["ring_dt"], self.dt)
        live = Spans(rows, with_history=True, boundary=self.boundary)
        x, B, dt = self.read_ring(live)
        log_decay, xdt = dt * self.A, x * dt[..., None]
        C = self.C[windows.tokens].to(self.acc)
        self.y[windows.tokens] = self.D * self.x[windows.tokens]
        for row, begin, window in zip(rows, live.starts, windows.starts, strict=True):
            end = begin + row.history + row.length
            y = window_output(
                self.read_checkpoint(row),
                decays(log_decay[begin:end], row.length),
                xdt[begin:end],
                B[begin:end],
                C[window : window + row.length],
            )
            self.y[row.start : row.start + row.length] += y.transpose(0, 1)

    def prefill(self, row: Row) -> None:
        """Rule 5: fold history and window into the checkpoint, append nothing."""
        S = self.fold_history(row) if row.history else self.read_checkpoint(row)
        for start in range(row.start, row.start + row.length, PREFILL_CHUNK):
            chunk = slice(start, min(start + PREFILL_CHUNK, row.start + row.length))
            x, dt = self.x[chunk].to(self.acc), self.dt[chunk]
            B, C = (tensor[chunk].to(self.acc, copy=True) for tensor in (self.B, self.C))
            xdt, decay = x * dt[..., None], decays(dt * self.A, x.shape[0])
            self.y[chunk] = self.D * x + window_output(S, decay, xdt, B, C).transpose(0, 1)
            S = fold(S, decay[:, -1], xdt, B)
        self.checkpoint(row).copy_(S)
        store_checkpoint_positions(self.state["checkpoint_position"], {row.slot: row.end})

    def checkpoint(self, row: Row) -> torch.Tensor:
        return self.state["checkpoint"][row.slot]

    def read_checkpoint(self, row: Row) -> torch.Tensor | None:
        """S in the accumulation dtype, None for zero: a slot at c == 0 may hold anything."""
        return aligned(self.checkpoint(row).to(self.acc)) if row.checkpoint_position else None

    def read_ring(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, B and dt of ring rows in the accumulation dtype."""
        x, B, dt = (spans.gather_ring(self.state[part]) for part in ("ring_x", "ring_B", "ring_dt"))
        return x.to(self.acc), B.to(self.acc), dt

    def fold_history(self, row: Row) -> torch.Tensor:
        """State at seq_len, in the accumulation dtype."""
        x, B, dt = (part[: row.history] for part in self.read_ring(Spans([row._replace(length=0)], with_history=True)))
        return fold(self.read_checkpoint(row), decays(dt * self.A, 1)[:, 0], x * dt[..., None], B)


def window_output(
    S: torch.Tensor | None, decay: torch.Tensor, xdt: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """y without its D term, [H, w, P].

    S [H, P, N] or None for zero; decay [H, w, 1 + m] of `layout.decays`; xdt = x dt [m, H, P]; B [m, G, N];
    C [w, G, N].
    """
    heads, window, _ = decay.shape
    groups, dstate = B.shape[1:]
    scores = C.transpose(0, 1) @ B.permute(1, 2, 0)
    weights = decay[:, :, 1:].unflatten(0, (groups, -1)) * scores[:, None]
    y = weights.flatten(0, 1) @ xdt.transpose(0, 1)
    if S is not None:
        read = S.view(groups, -1, dstate) @ C.permute(1, 2, 0)
        y += read.view(heads, -1, window).transpose(1, 2) * decay[:, :, :1]
    return y


def fold(S: torch.Tensor | None, decay: torch.Tensor, xdt: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """State after the tokens of xdt [m, H, P], B [m, G, N]; decay [H, 1 + m] towards the last of them."""
    tokens, heads, headdim = xdt.shape
    groups, dstate = B.shape[1:]
    weighted = xdt.permute(1, 2, 0) * decay[:, None, 1:]
    update = (weighted.reshape(groups, -1, tokens) @ B.transpose(0, 1)).view(heads, headdim, dstate)
    return update if S is None else S * decay[:, :1, None] + update
