"""Folding a slot's history into the pool, in torch operations: for whoever reads the pool and expects it to be current.

The kernels fold only when the ring is full. Here the caller decides, per slot, without a synchronisation with the
device, so this runs inside a captured graph too. The formulas are those of the flush (design section 2, rule 4):

    S_end = e^{sum of all g} S_c + sum_j e^{sum of g behind j} value_j key_j^T
"""

from __future__ import annotations

import torch

from replayssm.plugins.state import LayerState

SLOTS_AT_ONCE = 8
"""Slots whose states are held in fp32 at the same time: bounds the memory that a write-back takes."""


def write_back(state: LayerState, slots: torch.Tensor, ends: torch.Tensor, A_log: torch.Tensor | None = None) -> None:
    """Make the checkpoints of `slots` hold the state before position `ends`, and set their positions to it.

    Args:
        state: replay state of one mixer.
        slots: int64 [n], within the pool. A slot that appears twice must have the same end both times.
        ends: int32 [n], committed tokens. Slots whose history is empty (end at or below the checkpoint's position, or
            further past it than a ring holds, which is no history of this slot) keep their checkpoint.
        A_log: fp32 [heads], for Mamba2.
    """
    for start in range(0, slots.shape[0], SLOTS_AT_ONCE):
        part = slice(start, start + SLOTS_AT_ONCE)
        _write_back(state, slots[part], ends[part], A_log)


def _write_back(state: LayerState, slots: torch.Tensor, ends: torch.Tensor, A_log: torch.Tensor | None) -> None:
    longest = max(state.settings.buffer_len, state.settings.max_window)
    positions, pool = state["checkpoint_position"], state["checkpoint"]
    first = positions[slots][:, 0, 0].long()
    held = ends.long() - first
    held = torch.where((held > 0) & (held <= longest), held, 0)
    offsets = torch.arange(longest, device=slots.device)
    live = offsets < held[:, None]
    # Entries behind the history are masked after they are read: they may hold NaN.
    rows = (first[:, None] + offsets) % state.settings.ring_len
    log_decay, values, keys = _history(state, slots[:, None], rows, A_log)
    log_decay = log_decay.masked_fill(~live[..., None], 0.0)
    values = values.masked_fill(~live[..., None, None], 0.0)
    keys = keys.masked_fill(~live[..., None, None], 0.0)
    # Behind token j: sums over their own terms, because differences of one running sum would cancel.
    behind = (offsets[:, None] < offsets[None, :]).to(log_decay.dtype)
    decay = torch.exp(torch.einsum("jk,nkh->njh", behind, log_decay).clamp_(max=0))
    total = torch.exp(log_decay.sum(1).clamp_(max=0))
    keys = keys.repeat_interleave(values.shape[2] // keys.shape[2], dim=2)
    old = pool[slots]
    new = old.float() * total[:, :, None, None]
    new += torch.einsum("bjhp,bjhn->bhpn", values * decay[..., None], keys)
    folded = held > 0
    pool[slots] = torch.where(folded[:, None, None, None], new.to(pool.dtype), old)
    moved = torch.where(folded, ends.to(positions.dtype), first.to(positions.dtype))
    positions[slots] = moved[:, None, None].expand(-1, *positions.shape[1:])


def _history(
    state: LayerState, slots: torch.Tensor, rows: torch.Tensor, A_log: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log decay [n, tokens, heads], values [n, tokens, heads, rows], keys [n, tokens, groups, columns]) in fp32."""
    if state.geometry.kind == "gdn":
        u = state["ring_u"][slots, rows].float().sum(-2)
        return state["ring_g"][slots, rows], u, state["ring_k"][slots, rows].float()
    dt = state["ring_dt"][slots, rows]
    x = state["ring_x"][slots, rows].float()
    return dt * -torch.exp(A_log.float()), x * dt[..., None], state["ring_B"][slots, rows].float()
