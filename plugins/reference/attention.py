"""Causal grouped-query attention over a KV cache that is addressed by absolute position."""

from __future__ import annotations

import torch

from replayssm.plugins.contract import AttentionGeometry
from replayssm.plugins.reference.layout import require
from replayssm.plugins.reference.rows import Row, interpret_rows
from replayssm.plugins.state import LayerState, torch_dtype

QUERY_BLOCK = 128
"""Window tokens whose scores are in memory at once."""


@torch.no_grad()
def attention_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale q k^T) v of packed windows over all positions up to each token's own.

    Args:
        q: [T, Hq, hd] activations, Hq a multiple of Hkv. k, v: [T, Hkv, hd] activations.
        state: LayerState of an AttentionGeometry; k and v of every window are stored at their positions.
        seq_lens, window_starts, window_lens, state_batch_indices: integer [rows], see `rows.interpret_rows`.
        scale: factor of the scores, usually hd^-1/2.

    Returns:
        [T, Hq, hd] in q's dtype; zeros for tokens of padding and invalid rows and for tokens without a row.

    Raises:
        ValueError: the state is another operator's, or shapes or dtypes do not fit its geometry and settings.
    """
    geometry, act = state.expect(AttentionGeometry), torch_dtype(state.settings.activation_dtype)
    tokens, heads = q.shape[0], geometry.num_kv_heads
    if q.dim() != 3 or q.shape[1] % heads:
        raise ValueError(f"q must be [T, a multiple of {heads} heads, {geometry.head_dim}], got {list(q.shape)}")
    require("q", q, (tokens, q.shape[1], geometry.head_dim), act)
    for name, tensor in (("k", k), ("v", v)):
        require(name, tensor, (tokens, heads, geometry.head_dim), act)
    rows = interpret_rows(state, tokens, seq_lens, window_starts, window_lens, state_batch_indices)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    acc = torch_dtype(state.settings.scalar_dtype)
    for row in rows:
        own, span = slice(row.start, row.start + row.length), slice(row.seq_len, row.end)
        state["k_cache"][row.slot, span] = k[own]
        state["v_cache"][row.slot, span] = v[own]
        _attend(row, q[own], state, scale, acc, out[own])
    return out


def _attend(row: Row, q: torch.Tensor, state: LayerState, scale: float, acc: torch.dtype, out: torch.Tensor) -> None:
    """Fill out [w, Hq, hd] of one row, a block of queries at a time."""
    keys = state["k_cache"][row.slot, : row.end].to(acc, copy=True).permute(1, 2, 0)
    values = state["v_cache"][row.slot, : row.end].to(acc, copy=True).transpose(0, 1)
    heads = keys.shape[0]
    for begin in range(0, row.length, QUERY_BLOCK):
        block = q[begin : begin + QUERY_BLOCK].to(acc) * scale
        window, end = block.shape[0], row.seq_len + begin + block.shape[0]
        queries = block.transpose(0, 1).reshape(heads, -1, block.shape[-1])
        scores = (queries @ keys[..., :end]).view(heads, -1, window, end)
        if window > 1:
            future = torch.ones(window, window, dtype=torch.bool).triu_(1)
            scores[..., end - window :].masked_fill_(future, -torch.inf)
        mixed = scores.softmax(-1).view(heads, -1, end) @ values[:, :end]
        out[begin : begin + window] = mixed.view(-1, window, block.shape[-1]).transpose(0, 1)
