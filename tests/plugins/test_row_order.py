"""Rows that fold first: the kernel, emulated on the host or on a GPU, against PyTorch and the rule itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import row_order
from replayssm.plugins.contract import ConvGeometry, GdnGeometry, ReplaySettings
from replayssm.plugins.state import allocate_state

sys.path.append(str(Path(__file__).parent / "emulation"))
from launches import devices, emulated_launches  # noqa: F401

SETTINGS = ReplaySettings(buffer_len=16, max_window=5)


def random_rows(count: int) -> tuple[torch.Tensor, ...]:
    """Rows of all slots in random order; some have no slot, one that does not exist, no history or a short window."""
    slots = torch.randperm(count, dtype=torch.int32)
    seq_lens = torch.randint(0, 400, (count,), dtype=torch.int32)
    lengths = torch.randint(0, 6, (count,), dtype=torch.int32)
    state = allocate_state(GdnGeometry(1, 2, 32, 16), SETTINGS, count)
    history = torch.randint(0, 16, (count,), dtype=torch.int32).minimum(seq_lens)
    state["checkpoint_position"][slots.to(torch.int64)] = (seq_lens - history)[:, None, None]
    seq_lens[::7] = 0
    slots[::5] = -1
    slots[1::11] = count
    return (seq_lens, torch.arange(count, dtype=torch.int32) * 5, lengths, slots), state


@devices
@pytest.mark.parametrize("count", [1, 64, 1100])
def test_rows_that_fold_come_first(count: int, device: str) -> None:
    torch.manual_seed(count)
    rows, state = random_rows(count)
    position = state["checkpoint_position"][:, 0, 0].tolist()
    folds = [
        0 <= slot < count and seq_len > max(0, position[slot]) and seq_len - position[slot] + length > 16
        for seq_len, _, length, slot in zip(*(values.tolist() for values in rows), strict=True)
    ]
    order = [row for row in range(count) if folds[row]] + [row for row in range(count) if not folds[row]]
    assert count == 1 or 0 < sum(folds) < count
    for mine, given in zip(row_order.folding_first(rows, state), rows, strict=True):
        assert mine.tolist() == given[order].tolist()
    state.tensors["checkpoint_position"] = state["checkpoint_position"].to(device)
    moved, ordered = [values.to(device) for values in rows], torch.full((4, count), -9, dtype=torch.int32).to(device)
    row_order.plan(moved, state, ordered).run(ordered.device)
    assert torch.equal(ordered.cpu(), torch.stack(rows)[:, order])


@pytest.mark.parametrize("formats", [("float16", "nvfp4"), ("float32", "float8"), ("float8", "same")])
def test_what_orders_rows(formats: tuple[str, str]) -> None:
    """Of a network's states the first that folds and of which outputs read little; without one rows stay."""
    conv, gdn = ConvGeometry(64, 4), GdnGeometry(1, 2, 32, 16)
    little = ReplaySettings(state_dtype=formats[0], readout_dtype=formats[1])
    states = [allocate_state(geometry, little, 1) for geometry in (conv, gdn, gdn)]
    assert row_order.orderable(dict(zip("abc", states, strict=True))) is states[1]
    for settings in (ReplaySettings(buffer_len=0), SETTINGS, ReplaySettings(state_dtype="float16")):
        assert row_order.orderable({"conv": states[0], "layer": allocate_state(gdn, settings, 1)}) is None
