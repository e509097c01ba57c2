"""tensorrt_llm/_torch/modules/fla/chunk.py (1.3 and later): prompts, and all rows of a mixed batch, on the pool."""

from itertools import pairwise

import torch

from . import fused_sigmoid_gating_recurrent as recurrent

CALLS = []
"""Rows of every call."""


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, initial_state_indices, inplace_indexed_state_update, cu_seqlens, output=None
):
    """q, k [1, tokens, Hk, K]; v [1, tokens, Hv, V]. Rows start from their slots of `initial_state` and update them."""
    starts = cu_seqlens.tolist()
    CALLS.append(len(starts) - 1)
    out = torch.empty_like(v) if output is None else output
    for row, (begin, end) in enumerate(pairwise(starts)):
        slot = int(initial_state_indices[row])
        S = initial_state[slot][None].float()
        S = S.transpose(-1, -2) if recurrent.TRANSPOSED else S
        for t in range(begin, end):
            o, S = recurrent.delta_rule_step(S, q[0, t : t + 1], k[0, t : t + 1], v[0, t : t + 1], g[t : t + 1],
                                             beta[t : t + 1])  # fmt: skip
            out[0, t] = o[0].to(out.dtype)
        S = S.transpose(-1, -2) if recurrent.TRANSPOSED else S
        initial_state[slot] = S[0].to(initial_state.dtype)
    return out
