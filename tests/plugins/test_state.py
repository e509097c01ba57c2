"""Allocation of slots and the functions that move state between them."""

from __future__ import annotations

import pytest
import torch

from replayssm.plugins.contract import (
    AttentionGeometry,
    ConvGeometry,
    ErrorBit,
    GdnGeometry,
    Mamba2Geometry,
    ReplaySettings,
    state_parts,
)
from replayssm.plugins.state import (
    LayerState,
    allocate_state,
    copy_slot,
    raise_on_error,
    set_checkpoint_position,
    torch_dtype,
)

GEOMETRIES = [Mamba2Geometry(3, 4, 32, 1), GdnGeometry(1, 3, 32, 4), ConvGeometry(9, 4), AttentionGeometry(2, 8)]
SETTINGS = ReplaySettings(buffer_len=4, max_window=2, max_seq_len=10, readout_dtype="nvfp4")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_allocation_is_exactly_the_parts(geometry):
    state = allocate_state(geometry, SETTINGS, 5)
    parts = state_parts(geometry, SETTINGS)
    assert list(state.tensors) == [part.name for part in parts]
    for part in parts:
        assert state[part.name].shape == (5, *part.shape)
        assert state[part.name].dtype == torch_dtype(part.dtype)
    assert state.slots == 5
    assert state.nbytes == 5 * sum(part.nbytes for part in parts)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_flat_form_round_trip(geometry):
    """spec, tensors and flag make the same state again, over the same memory."""
    state = allocate_state(geometry, SETTINGS, 2)
    again = LayerState.from_flat(state.spec, state.flat(), state.error_flag)
    assert (again.geometry, again.settings, again.spec) == (geometry, SETTINGS, state.spec)
    assert all(again[name] is tensor for name, tensor in state.tensors.items())
    assert again.error_flag is state.error_flag
    with pytest.raises(ValueError, match="argument"):
        LayerState.from_flat(state.spec, state.flat()[1:], state.error_flag)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_copy_slot_copies_everything_and_nothing_else(geometry):
    state = allocate_state(geometry, SETTINGS, 4)
    for index, tensor in enumerate(state.tensors.values()):
        tensor.view(torch.uint8).copy_(torch.arange(tensor.view(torch.uint8).numel()).view_as(tensor.view(torch.uint8)))
        tensor.view(torch.uint8)[:] += index
    before = {name: tensor.clone().view(torch.uint8) for name, tensor in state.tensors.items()}
    copy_slot(state, 1, 3)
    for name, tensor in state.tensors.items():
        assert torch.equal(tensor.view(torch.uint8)[3], before[name][1])
        assert torch.equal(tensor.view(torch.uint8)[:3], before[name][:3])
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 4\), got \[1, 4\]"):
        copy_slot(state, 1, 4)
    with pytest.raises(ValueError, match=r"got \[-1, 0\]"):
        copy_slot(state, -1, 0)


def test_set_checkpoint_position_reaches_every_tile():
    geometry = Mamba2Geometry(nheads=2, headdim=8, dstate=2048, ngroups=1)
    state = allocate_state(geometry, ReplaySettings(), 3)
    set_checkpoint_position(state, torch.tensor([2, 0]), torch.tensor([7, 2**30]))
    assert state["checkpoint_position"].shape[2] > 1
    assert [state["checkpoint_position"][slot].unique().tolist() for slot in range(3)] == [[2**30], [0], [7]]
    with pytest.raises(ValueError, match="slots must lie in"):
        set_checkpoint_position(state, [3], [1])
    for other in (allocate_state(g, ReplaySettings(buffer_len=0), 1) for g in (geometry, *GEOMETRIES[2:])):
        before = [tensor.clone() for tensor in other.flat()]
        set_checkpoint_position(other, [0], [5])
        assert all(torch.equal(a, b) for a, b in zip(before, other.flat(), strict=True))


def test_shared_error_flag_is_raised_once():
    flag = torch.zeros(1, dtype=torch.int32)
    first, second = (allocate_state(geometry, SETTINGS, 1, error_flag=flag) for geometry in GEOMETRIES[:2])
    assert first.error_flag is second.error_flag is flag
    raise_on_error(flag)
    flag |= ErrorBit.SLOT_OUT_OF_RANGE | ErrorBit.POSITION_PAST_LIMIT
    with pytest.raises(RuntimeError, match=r"outside the pool; .* past max_seq_len"):
        raise_on_error(flag)
    raise_on_error(flag)


def test_unknown_dtype_is_refused():
    for name in ("bf16", "Tensor", "float31"):
        with pytest.raises(ValueError, match="is not a torch dtype"):
            torch_dtype(name)
