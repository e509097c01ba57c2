"""Mamba2 over a replayed history (design section 1), the CPU implementation and the reference of every kernel.

Per head, with S the [headdim, dstate] state at position c and G_p the sum of A dt over c..p:

    y_p = e^{G_p} S C_p + sum_{j=c..p} e^{G_p - G_j} dt_j (B_j . C_p) x_j + D x_p

Shapes below: H heads, G groups, P headdim, N dstate, w window tokens, m = history + window tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayssm.plugins.contract import Mamba2Geometry
from replayssm.plugins.reference.layout import (
    Spans,
    decays,
    require,
    softplus,
)
from replayssm.plugins.reference.recurrent import RecurrentCall, add_outer, apply_state, step_outer
from replayssm.plugins.reference.rows import Row, interpret_rows
from replayssm.plugins.state import LayerState, torch_dtype


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
        layer: number of the layer, which keys random bits where rounding is stochastic.

    Returns:
        y [T, H, P] in x's dtype; zeros for tokens of padding and invalid rows and for tokens without a row.

    Raises:
        ValueError: the state is another operator's, or shapes or dtypes do not fit its geometry and settings.
    """
    geometry, settings = state.expect(Mamba2Geometry), state.settings
    heads, headdim, dstate = geometry.state_shape
    tokens, groups, act = x.shape[0], geometry.ngroups, torch_dtype(settings.activation_dtype)
    require("x", x, (tokens, heads, headdim), act)
    require("dt", dt, (tokens, heads))
    require("B", B, (tokens, groups, dstate), act)
    require("C", C, (tokens, groups, dstate), act)
    for name, tensor in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        require(name, tensor, (heads,))
    rows = interpret_rows(state, tokens, seq_lens, window_starts, window_lens, state_batch_indices)
    acc = torch_dtype(settings.scalar_dtype)
    call = _Mamba2Call(
        state=state,
        layer=layer,
        out=torch.zeros(x.shape, dtype=acc),
        x=x,
        # Scalars of a head and token are cheap: fp64, rounded once.
        dt=softplus(dt.double() + dt_bias.double()).to(acc),
        B=B,
        C=C,
        A=-torch.exp(A_log.to(acc)),
        D=D.to(acc)[:, None],
    )
    call.run(rows)
    return call.out.to(act)


@dataclass
class _Mamba2Call(RecurrentCall):
    """x [T, H, P], B, C [T, G, N] as given; dt [T, H], A [H] and D [H, 1] in the accumulation dtype."""

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor

    def ring_inputs(self) -> dict[str, torch.Tensor]:
        return {"ring_x": self.x, "ring_B": self.B, "ring_dt": self.dt}

    def read(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log decay, x dt, B) of ring rows in the accumulation dtype."""
        x, B, dt = (spans.gather_ring(self.state[part]).to(self.acc) for part in ("ring_x", "ring_B", "ring_dt"))
        return dt * self.A, x * dt[..., None], B

    def history(self, row: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.read(Spans.of_history(row))

    def replay(self, rows: Sequence[Row], windows: Spans) -> None:
        live = Spans(rows, with_history=True, boundary=self.boundary)
        log_decay, xdt, B = self.read(live)
        C = self.C[windows.tokens].to(self.acc)
        self.out[windows.tokens] = self.D * self.x[windows.tokens]
        for row, begin, window in zip(rows, live.starts, windows.starts, strict=True):
            own = slice(begin, begin + row.history + row.length)
            y = window_output(
                self.read_readout(row),
                decays(log_decay[own], row.length),
                xdt[own],
                B[own],
                C[window : window + row.length],
            )
            self.out[row.start : row.start + row.length] += y.transpose(0, 1)

    def chunk(self, S: torch.Tensor | None, tokens: slice) -> torch.Tensor:
        x, dt = self.x[tokens].to(self.acc), self.dt[tokens]
        B, C = (part[tokens].to(self.acc, copy=True) for part in (self.B, self.C))
        xdt, decay = x * dt[..., None], decays(dt * self.A, dt.shape[0])
        self.out[tokens] = self.D * x + window_output(S, decay, xdt, B, C).transpose(0, 1)
        return add_outer(S, decay[:, -1], xdt, B)

    def step(self, S: torch.Tensor, token: int) -> torch.Tensor:
        x, dt = self.x[token].to(self.acc), self.dt[token]
        B, C = (part[token].to(self.acc, copy=True) for part in (self.B, self.C))
        S = step_outer(S, torch.exp(dt * self.A), x * dt[:, None], B)
        self.out[token] = apply_state(S, C[..., None])[..., 0] + self.D * x
        return S


def window_output(
    S: torch.Tensor | None, decay: torch.Tensor, xdt: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """y without its D term, [H, w, P].

    S [H, P, N] or None for zero; decay [H, w, 1 + m] of `layout.decays`; xdt = x dt [m, H, P]; B [m, G, N];
    C [w, G, N].
    """
    scores = torch.bmm(C.transpose(0, 1), B.permute(1, 2, 0))
    weights = decay[:, :, 1:].unflatten(0, (B.shape[1], -1)) * scores[:, None]
    y = torch.bmm(weights.flatten(0, 1), xdt.transpose(0, 1))
    if S is not None:
        y += apply_state(S, C.permute(1, 2, 0)).transpose(1, 2) * decay[:, :, :1]
    return y
