"""Rows of a step that fold their histories first, before the others.

A fold takes several times as long as another row's work, and thread blocks begin in the order of the rows: a fold that
begins last is waited for alone. Operators find everything of a row by its slot and its window's start, so the caller
may give rows in any order and outputs stay where they were. All layers of a model fold the same rows in a step, so
one look at a layer's checkpoint positions orders the rows for all of them.

H200, batch 256, fp16 stochastic with nvfp4 readout, a cycle of steps with rows at random fill, in their own order and
in this one: windows of five of qwen4b 114.5 and 102.2 us, qwen122b 210.0 and 194.1, nano4b 170.1 and 152.8, super120b
174.5 and 159.2; decode 60.7 and 51.8, 101.9 and 96.0, 90.6 and 79.7, 89.1 and 81.9. Attention, which then finds a
token's row at its second look, takes 414 instead of 408 us for windows of five behind 1,000 tokens.
"""

from __future__ import annotations

import torch

from replayssm.plugins.elementwise import Launch
from replayssm.plugins.geometry import KernelConfig
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""seq_lens, window_starts, window_lens, state_batch_indices: int32 [rows] each."""

ORDERED_ROWS = 16
"""Fewest rows of a step that are worth it. H200, windows of five over 16 rows: qwen4b 17.2 and 14.9 us, qwen122b 26.3
and 21.1; decode of 16 qwen122b 15.0 and 14.5, of 32 24.6 and 21.4."""
THREADS = 512


def folding_first(rows: Rows, state: LayerState) -> Rows:
    """The rows, those first that fold in this step; otherwise they keep their order.

    state: of any layer that folds as the others do.
    """
    seq_lens, _, window_lens, slots = rows
    if seq_lens.is_cuda:
        ordered = torch.empty(4, len(seq_lens), dtype=torch.int32, device=seq_lens.device)
        plan(rows, state, ordered).run(seq_lens.device)
        return tuple(ordered)
    position = state["checkpoint_position"]
    has_slot = (slots >= 0) & (slots < len(position)) & (seq_lens > 0)
    history = torch.where(has_slot, seq_lens - position[slots.clamp(0, len(position) - 1).to(torch.int64), 0, 0], 0)
    order = order_of(folds(history, window_lens, state.settings.buffer_len))
    return tuple(values[order] for values in rows)


def folds(histories: torch.Tensor, windows: torch.Tensor | int, buffer_len: int) -> torch.Tensor:
    """bool, of the same shape: which histories a window of so many tokens folds."""
    return (histories > 0) & (histories + windows > buffer_len)


def order_of(folding: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: those that fold (bool [rows]), then the others, each in their order."""
    return torch.cat([folding.nonzero().flatten(), (~folding).nonzero().flatten()])


def plan(rows: Rows, state: LayerState, ordered: torch.Tensor) -> Launch:
    """The launch of `folding_first` that writes int32 [4, rows]."""
    defines = {"BULK_COPY": 0, "BUFFER_LEN": state.settings.buffer_len, "THREADS": THREADS}
    position, count = state["checkpoint_position"], len(rows[0])
    config = KernelConfig("order_rows", tuple(sorted(defines.items())), 1, THREADS, -(-count // 32) * 4)
    return Launch(config, [*rows, position, position.stride(0), len(position), count, ordered], 1)


def gains(settings: ReplaySettings) -> bool:
    """Whether many rows of a layer take less time in this order: where a fold moves much more than another row's read.

    That is so beside a readout (float8: windows of five of qwen4b 150.1 and 142.2 us, H200) and with an fp8
    checkpoint (153.2 and 135.8). With fp32 states it costs: decode of qwen4b 147.8 and 152.6, nano4b 260.5 and 265.6.
    """
    return settings.readout_dtype != "same" or settings.state_dtype == "float8"


def orderable(states: dict[str, LayerState]) -> LayerState | None:
    """A state by whose positions a network's rows are ordered; None where that gains nothing."""
    folding = (state for state in states.values() if "checkpoint_position" in state.tensors)
    return next((state for state in folding if gains(state.settings)), None)
