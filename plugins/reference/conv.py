"""Depthwise causal convolution with silu over a position-addressed ring of its inputs."""

from __future__ import annotations

import torch

from replayssm.plugins.contract import ConvGeometry
from replayssm.plugins.reference.layout import require, silu
from replayssm.plugins.reference.rows import Row, interpret_rows
from replayssm.plugins.state import LayerState, torch_dtype


@torch.no_grad()
def causal_conv1d_window(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
) -> torch.Tensor:
    """silu(bias + sum_k weight[:, k] x_{p - K + 1 + k}) of packed windows; inputs before position 0 are zero.

    Args:
        x: [T, C] activations. weight: [C, K]. bias: [C] or None.
        state: LayerState of a ConvGeometry; the inputs of every window are appended to its ring.
        seq_lens, window_starts, window_lens, state_batch_indices: integer [rows], see `rows.interpret_rows`.

    Returns:
        [T, C] in x's dtype; zeros for tokens of padding and invalid rows and for tokens without a row.

    Raises:
        ValueError: the state is another operator's, or shapes or dtypes do not fit its geometry and settings.
    """
    geometry = state.expect(ConvGeometry)
    channels, kernel = geometry.conv_dim, geometry.conv_kernel
    act = torch_dtype(state.settings.activation_dtype)
    require("x", x, (x.shape[0], channels), act)
    require("weight", weight, (channels, kernel))
    if bias is not None:
        require("bias", bias, (channels,))
    rows = interpret_rows(state, x.shape[0], seq_lens, window_starts, window_lens, state_batch_indices)
    acc = torch_dtype(state.settings.scalar_dtype)
    taps = weight.to(acc).t().contiguous()
    bias = None if bias is None else bias.to(acc)
    ring = state["conv_ring"]
    out = torch.zeros(x.shape, dtype=acc)
    short = [row for row in rows if not row.prefill]
    if short:
        _replay(short, x, taps, ring, out)
    for row in rows:
        own = slice(row.start, row.start + row.length)
        if row.prefill:
            _prefill(row, x[own], taps, ring, out[own])
        if bias is not None:
            out[own] += bias
    return silu(out).to(act)


def _replay(rows: list[Row], x: torch.Tensor, taps: torch.Tensor, ring: torch.Tensor, out: torch.Tensor) -> None:
    """Append the windows, then read every tap from the ring. Sums of products round the same in any batch."""
    index = torch.tensor(
        [(row.start + i, row.slot, row.seq_len + i) for row in rows for i in range(row.length)], dtype=torch.int64
    )
    tokens, slots, positions = index.unbind(1)
    length, kernel = ring.shape[1], taps.shape[0]
    ring[slots, positions % length] = x[tokens]
    total = None
    for tap in range(kernel):
        position = positions - (kernel - 1 - tap)
        inputs = torch.where((position >= 0)[:, None], ring[slots, position % length], 0).to(taps.dtype)
        total = inputs * taps[tap] if total is None else total + inputs * taps[tap]
    out[tokens] = total


def _prefill(row: Row, x: torch.Tensor, taps: torch.Tensor, ring: torch.Tensor, out: torch.Tensor) -> None:
    """One long window; the ring then holds its last conv_kernel - 1 inputs."""
    length, kernel = ring.shape[1], taps.shape[0]
    behind = torch.arange(row.seq_len - kernel + 1, row.seq_len)
    history = torch.where((behind >= 0)[:, None], ring[row.slot, behind % length], 0)
    inputs = torch.cat((history, x)).to(taps.dtype)
    for tap in range(kernel):
        out += inputs[tap : tap + row.length] * taps[tap]
    kept = torch.arange(max(row.end - kernel + 1, row.seq_len), row.end)
    ring[row.slot, kept % length] = x[kept - row.seq_len]
