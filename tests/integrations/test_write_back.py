"""`write_back`: the pool holds the state behind the history, whatever else the ring and the pool hold."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import torch_ops
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.reference.recurrence import gdn_recurrence, mamba2_recurrence
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state

SLOTS, LENGTH = 11, 5
GEOMETRY = {"mamba2": Mamba2Geometry(4, 8, 16, 2), "gdn": GdnGeometry(2, 4, 16, 8)}

# Without the package around it, which registers with TensorRT-LLM when it is imported.
_path = Path(__file__).resolve().parents[2] / "integrations" / "replayssm_trtllm" / "write_back.py"
_spec = importlib.util.spec_from_file_location("replayssm_trtllm_write_back", _path)
module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = module
_spec.loader.exec_module(module)


def tokens(kind: str, count: int) -> list[torch.Tensor]:
    """Inputs of one sequence in the operator's order."""
    if kind == "mamba2":
        shapes = [(count, 4, 8), (count, 4), (count, 2, 16), (count, 2, 16)]
    else:
        shapes = [(count, 2, 16), (count, 2, 16), (count, 4, 8), (count, 4), (count, 4)]
    return [torch.randn(shape) for shape in shapes]


def constants(kind: str) -> list[torch.Tensor]:
    weights = [torch.rand(4), torch.rand(4), torch.rand(4) - 1]
    return weights if kind == "mamba2" else weights[::2]


@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_state_behind_the_history(kind, state_dtype):
    """Histories of every length, from any position, in a ring that is otherwise NaN."""
    geometry, settings = GEOMETRY[kind], ReplaySettings(LENGTH, 1, 2**20, state_dtype, activation_dtype="float32")
    state, weights = allocate_state(geometry, settings, SLOTS), constants(kind)
    starts = torch.randint(1, 1000, (SLOTS,), dtype=torch.int32)
    state["checkpoint"].copy_(torch.randn(state["checkpoint"].shape))
    state["checkpoint_position"].copy_(starts[:, None, None].expand_as(state["checkpoint_position"]))
    for name, tensor in state.tensors.items():
        if name.startswith("ring"):
            tensor.fill_(torch.nan)
    operator = torch_ops.mamba2_window if kind == "mamba2" else torch_ops.gdn_window
    recurrence = mamba2_recurrence if kind == "mamba2" else gdn_recurrence
    expected, ends = [], starts.clone()
    for slot in range(SLOTS):
        count = slot % (LENGTH + 1)
        inputs, before = tokens(kind, count), state["checkpoint"][slot].double()
        for token in range(count):
            rows = [torch.tensor([value], dtype=torch.int32) for value in (int(starts[slot]) + token, 0, 1, slot)]
            operator(*(part[token : token + 1] for part in inputs), *weights, state, *rows, 0)
        ends[slot] += count
        expected.append(recurrence(*inputs, *weights, before)[1][-1] if count else before)
    pool = state["checkpoint"].clone()
    module.write_back(state, torch.arange(SLOTS), ends, weights[0])
    # fp32: a handful of terms. 16 bit: one rounding. u of a GDN token is held as two bf16 numbers, 2^-17.
    tolerance = {"float32": 2e-5, "float16": 2**-10, "bfloat16": 2**-7}[state_dtype]
    for slot in range(SLOTS):
        torch.testing.assert_close(state["checkpoint"][slot].double(), expected[slot], rtol=tolerance, atol=tolerance)
        if ends[slot] == starts[slot]:
            assert torch.equal(state["checkpoint"][slot], pool[slot])
    assert torch.equal(state["checkpoint_position"][:, 0, 0], ends)
    assert (state["checkpoint_position"] == ends[:, None, None]).all()
    # Again: nothing is left to fold.
    pool = state["checkpoint"].clone()
    module.write_back(state, torch.arange(SLOTS), ends, weights[0])
    assert torch.equal(state["checkpoint"], pool)


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
@pytest.mark.parametrize("distance", [0, -1, -100, LENGTH + 1, 500])
def test_slots_without_a_history_keep_every_bit(kind, distance):
    """Ends before the checkpoint or further away than a ring reaches belong to no history. NaN may be anywhere."""
    state = allocate_state(GEOMETRY[kind], ReplaySettings(LENGTH, 1, 2**20, activation_dtype="float32"), 3)
    for tensor in state.tensors.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 40)
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    module.write_back(state, torch.tensor([2, 0]), torch.tensor([40 + distance] * 2, dtype=torch.int32), torch.rand(4))
    for name, tensor in state.tensors.items():
        assert torch.equal(tensor.view(torch.int8), before[name].view(torch.int8)), name
