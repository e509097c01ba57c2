"""tensorrt_llm/_torch/modules/fla/fused_sigmoid_gating_recurrent.py (1.2 and later): the per-token decode kernel.

Pool layout [slots, heads, V, K] (1.3 and later). With TRANSPOSED the stand-in keeps [slots, heads, K, V], as kernels of
this family that came before did.
"""

import torch
import torch.nn.functional as F

TRANSPOSED = False

CALLS = []


def fused_sigmoid_gating_delta_rule_update(
    A_log,
    a,
    dt_bias,
    softplus_beta,
    softplus_threshold,
    q,
    k,
    v,
    b,
    initial_state_source,
    initial_state_indices,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    output=None,
):
    """q, k [1, tokens, Hk, K]; v [1, tokens, Hv, V]; a, b [tokens, Hv]; one token a row. Returns [1, tokens, Hv, V]."""
    CALLS.append(tuple(q.shape))
    slots = initial_state_indices.long()
    S = initial_state_source[slots].float()
    S = S.transpose(-1, -2) if TRANSPOSED else S
    o, S = delta_rule_step(S, q[0], k[0], v[0], *gates(A_log, a, dt_bias, b), use_qk_l2norm_in_kernel, scale)
    S = S.transpose(-1, -2) if TRANSPOSED else S
    initial_state_source[slots] = S.to(initial_state_source.dtype)
    o = o.to(q.dtype)[None]
    return o if output is None else output.copy_(o.view(output.shape))


def gates(A_log, a, dt_bias, b):
    """(g, beta), both [tokens, Hv]."""
    return -torch.exp(A_log.float()) * F.softplus(a.float() + dt_bias.float()), torch.sigmoid(b.float())


def delta_rule_step(S, q, k, v, g, beta, normalize=True, scale=None):
    """One token of each row: S [rows, Hv, V, K]."""
    repeat = v.shape[1] // q.shape[1]
    q, k = q.float(), k.float()
    if normalize:
        q, k = (tensor / (tensor.norm(dim=-1, keepdim=True) + 1e-6) for tensor in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (tensor.repeat_interleave(repeat, 1) for tensor in (q, k))
    S = S * torch.exp(g)[..., None, None]
    u = beta[..., None] * (v.float() - (S * k[:, :, None]).sum(-1))
    S = S + u[..., None] * k[:, :, None]
    return (S * q[:, :, None]).sum(-1), S
