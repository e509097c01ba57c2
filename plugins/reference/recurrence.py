"""The recurrences of design section 1, token by token in fp64: the final judge of every other implementation.

One sequence, no slots, no ring, no windows. Everything is computed in fp64 whatever the inputs are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def mamba2_recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = a_t S_{t-1} + dt_t x_t B_t^T; y_t = S_t C_t + D x_t.

    x [T, H, P]; dt [T, H] raw; B, C [T, G, N]; A_log, D, dt_bias [H]; initial_state [H, P, N] or None for zero.
    Returns (y [T, H, P], states [T, H, P, N] after each token).
    """
    x, dt, B, C, A_log, D, dt_bias = (tensor.double() for tensor in (x, dt, B, C, A_log, D, dt_bias))
    heads = x.shape[1]
    B, C = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (B, C))
    dt = F.softplus(dt + dt_bias)
    a = torch.exp(-torch.exp(A_log) * dt)
    S = x.new_zeros(heads, x.shape[2], B.shape[2]) if initial_state is None else initial_state.double()
    y, states = torch.empty_like(x), x.new_empty(x.shape[0], *S.shape)
    for t in range(x.shape[0]):
        S = a[t, :, None, None] * S + dt[t, :, None, None] * x[t, :, :, None] * B[t, :, None, :]
        y[t] = torch.einsum("hpn,hn->hp", S, C[t]) + D[:, None] * x[t]
        states[t] = S
    return y, states


def gdn_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    normalized_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """u_t = beta_t (v_t - alpha_t S_{t-1} k_t); S_t = alpha_t S_{t-1} + u_t k_t^T; o_t = S_t q_t.

    q, k [T, Hk, dk] raw; v [T, Hv, dv]; a, b [T, Hv] raw; A_log, dt_bias [Hv]; initial_state [Hv, dv, dk] or None for
    zero. normalized_dtype: format to which q and k are rounded once they are normalised (q before its scale dk^-1/2).
    Returns (o [T, Hv, dv], states [T, Hv, dv, dk] after each token).
    """
    heads = v.shape[1]
    q, k = (tensor.double() for tensor in (q, k))
    q, k = (tensor / torch.sqrt(tensor.square().sum(-1, keepdim=True) + 1e-6) for tensor in (q, k))
    q, k = (tensor.to(normalized_dtype).double().repeat_interleave(heads // q.shape[1], dim=1) for tensor in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, a, b, A_log, dt_bias = (tensor.double() for tensor in (v, a, b, A_log, dt_bias))
    alpha = torch.exp(-torch.exp(A_log) * F.softplus(a + dt_bias))
    beta = torch.sigmoid(b)
    S = v.new_zeros(heads, v.shape[2], k.shape[2]) if initial_state is None else initial_state.double()
    o, states = torch.empty_like(v), v.new_empty(v.shape[0], *S.shape)
    for t in range(v.shape[0]):
        S = alpha[t, :, None, None] * S
        u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + u[:, :, None] * k[t, :, None, :]
        o[t] = torch.einsum("hvk,hk->hv", S, q[t])
        states[t] = S
    return o, states


def causal_conv1d_recurrence(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, history: torch.Tensor | None = None
) -> torch.Tensor:
    """silu of the depthwise causal convolution: x [T, C], weight [C, K], bias [C] or None; returns [T, C].

    history [K - 1, C]: the inputs before the first token; None for a sequence that starts here (zeros).
    """
    kernel = weight.shape[1]
    before = x.new_zeros(kernel - 1, x.shape[1]) if history is None else history
    inputs = torch.cat((before, x)).double()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(x.shape[0]):
        out[t] = (inputs[t : t + kernel] * weight.double().t()).sum(0)
    if bias is not None:
        out = out + bias.double()
    return out * torch.sigmoid(out)
