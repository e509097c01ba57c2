"""What each row of a call has to do, derived on the host from the call's integers.

All operators share `interpret_rows`, so that they agree on which rows are padding, invalid, fresh, flushing or prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from replayssm.plugins.contract import PAD_SLOT_ID, ErrorBit
from replayssm.plugins.state import LayerState


class Row(NamedTuple):
    """One valid row. The window is the packed tokens [start, start + length) at positions seq_len onwards.

    checkpoint_position: c. 0 means that the checkpoint is zero and must not be read. Layers that keep no position
        (baseline, convolution, attention) have their checkpoint at seq_len.
    prefill: the window is longer than max_window: committed by definition, folded, not appended to the ring.
    flush: the history is folded into the checkpoint before the window is computed.
    """

    start: int
    length: int
    slot: int
    seq_len: int
    checkpoint_position: int
    prefill: bool
    flush: bool

    @property
    def history(self) -> int:
        """Committed tokens since the checkpoint."""
        return self.seq_len - self.checkpoint_position

    @property
    def end(self) -> int:
        """Position behind the window."""
        return self.seq_len + self.length


def interpret_rows(
    state: LayerState,
    num_tokens: int,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
) -> list[Row]:
    """The rows that have work, in order. Padding rows are left out silently, invalid rows raise `ErrorBit`s.

    All index tensors are integer [rows]. Raises ValueError if their shapes differ.
    """
    columns = (seq_lens, window_starts, window_lens, state_batch_indices)
    if seq_lens.dim() != 1 or any(column.shape != seq_lens.shape for column in columns):
        shapes = ", ".join(str(tuple(column.shape)) for column in columns)
        raise ValueError(
            "seq_lens, window_starts, window_lens and state_batch_indices must be one-dimensional and equally long, "
            f"got shapes {shapes}"
        )
    settings = state.settings
    positions = state.tensors.get("checkpoint_position")
    # Every tile holds the same c between launches; the reference reads the first and writes all.
    checkpoints = None if positions is None else positions[:, 0, 0].tolist()
    slots = state.slots
    longest_history = max(settings.buffer_len, settings.max_window)
    rows, flag = [], 0
    for seq_len, start, length, slot in zip(*(column.tolist() for column in columns), strict=True):
        if slot == PAD_SLOT_ID or length == 0:
            continue
        error = 0
        checkpoint = seq_len
        if not 0 <= slot < slots:
            error |= ErrorBit.SLOT_OUT_OF_RANGE
        elif checkpoints is not None:
            checkpoint = checkpoints[slot] if seq_len else 0
        if seq_len < checkpoint or seq_len < 0:
            error |= ErrorBit.SEQ_LEN_BELOW_CHECKPOINT
        if seq_len - checkpoint > longest_history:
            error |= ErrorBit.HISTORY_OUT_OF_RANGE
        if length < 0 or start < 0 or start + length > num_tokens:
            error |= ErrorBit.WINDOW_OUT_OF_RANGE
        if seq_len + length > settings.max_seq_len:
            error |= ErrorBit.POSITION_PAST_LIMIT
        flag |= error
        if not error:
            history = seq_len - checkpoint
            prefill = length > settings.max_window
            flush = history > 0 and not prefill and history + length > settings.buffer_len
            rows.append(Row(start, length, slot, seq_len, checkpoint, prefill, flush))
    if flag:
        state.error_flag.bitwise_or_(flag)
    return rows
