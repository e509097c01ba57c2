"""Allocation of slots and the functions that move state between them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import launch
from replayssm.plugins.contract import (
    AttentionGeometry,
    ConvGeometry,
    ErrorBit,
    GdnGeometry,
    Mamba2Geometry,
    state_parts,
)
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import (
    LayerState,
    allocate_state,
    commit,
    copy_slot,
    raise_on_error,
    set_checkpoint_position,
    torch_dtype,
)

sys.path.append(str(Path(__file__).parent / "emulation"))
from emulate import Emulated

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


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
@pytest.mark.parametrize("chunks", [1, 300, 9000])
def test_the_kernel_copies_rows_and_no_others(monkeypatch, chunks):
    """As `commit` calls it: rows in any order, 16-byte chunks of which a block takes more than it has threads."""
    monkeypatch.setattr(launch, "launch", lambda config, values, device, rows: Emulated()._call(config, values, rows))
    source, target = (torch.randint(2**31, (6, chunks * 4), dtype=torch.int32) for _ in range(2))
    before, sources, targets = target.clone(), torch.tensor([5, 0, 3]), torch.tensor([1, 4, 2])
    assert launch.copy_rows(source, sources.int(), targets.int(), target)
    before[targets] = source[sources]
    assert torch.equal(target, before)
    assert not launch.copy_rows(source[:, :-1], sources.int(), targets.int(), target)
    assert not launch.copy_rows(source[:, :3].contiguous(), sources.int(), targets.int(), target)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_commit_on_a_gpu_equals_that_on_the_cpu():
    settings = ReplaySettings(buffer_len=0, max_window=5)
    states = [allocate_state(Mamba2Geometry(8, 16, 32, 2), settings, 9, device) for device in ("cpu", "cuda")]
    for part in ("checkpoint", "snapshots"):
        states[0][part].normal_()
        states[1][part].copy_(states[0][part])
    for state in states:
        commit(state, [7, 0, 3, 4], [5, 1, 0, 2])
    assert torch.equal(states[0]["checkpoint"], states[1]["checkpoint"].cpu())


def test_settings_of_an_engine_are_no_layers():
    settings = ReplaySettings(readout_layers=((0, "float8"),))
    with pytest.raises(ValueError, match="readout_layers are for an engine"):
        allocate_state(GEOMETRIES[0], settings, 1)
