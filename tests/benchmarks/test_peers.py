"""How other projects' kernels are called, with stand-ins that compute what those projects document, in float64."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import peers
import replay_peers

from replayssm.plugins import reference
from replayssm.plugins.contract import Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state

POSITION, BATCH = 100, 3
GEOMETRY = Mamba2Geometry(4, 16, 8, 2)
SLOTS = torch.tensor([3, 0, 5], dtype=torch.int32)


def recurrence(state, x, dt, A, B, C, D) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row: (y, state), dt after bias and softplus."""
    heads = state.shape[1] // B.shape[1]
    B, C = (tensor.double().repeat_interleave(heads, 1)[:, :, None] for tensor in (B, C))
    state = state * torch.exp(dt * A)[..., None, None] + (dt[..., None] * x.double())[..., None] * B
    return (state * C).sum(-1) + D[:, None] * x.double(), state


def selective_state_update(
    state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, null_block_id, out
) -> None:
    assert (dt_softplus, null_block_id) == (True, -1), "slot 0 is a slot"
    step = torch.nn.functional.softplus(dt[..., 0].double() + dt_bias[:, 0])
    y, new = recurrence(state[state_batch_indices].double(), x, step, A[:, 0, 0].double(), B, C, D[:, 0].double())
    state[state_batch_indices] = new.to(state.dtype)
    out.copy_(y)


def replayed(
    state, x, dt, A, B, C, D, dt_bias, dt_softplus, x_cache, dt_cache, B_cache, bc_pre, write_pos, is_flush,
    max_cache_len, state_batch_indices, null_block_id, out,
) -> torch.Tensor:  # fmt: skip
    """Replays every row's ring, then its token; keeps the state where the row folds, else appends to the ring."""
    assert module().get_replayssm_config("mamba2_output_only", dstate=8) in replay_peers.VLLM_CONFIGS
    assert x_cache.shape[2] == max_cache_len
    assert bc_pre.shape == (BATCH, GEOMETRY.ngroups, max_cache_len)
    decay, skip = A[:, 0, 0].double(), D[:, 0].double()
    for row, slot in enumerate(state_batch_indices.tolist()):
        kept, one = state[slot : slot + 1].double(), slice(row, row + 1)
        for i in range(int(write_pos[row])):
            past = x_cache[slot, :, i], dt_cache[slot, :, i].double(), B_cache[slot, :, i]
            _, kept = recurrence(kept, past[0][None], past[1][None], decay, past[2][None], C[one], skip)
        step = torch.nn.functional.softplus(dt[one, :, 0].double() + dt_bias[:, 0])
        y, kept = recurrence(kept, x[one], step, decay, B[one], C[one], skip)
        out[one] = y
        if is_flush[row]:
            state[slot] = kept[0].to(state.dtype)
    return out


def module():
    return sys.modules["vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only"]


@pytest.fixture
def layer(monkeypatch):
    """make(settings) -> what the peers use of a layer, on the CPU, beside modules that stand for vLLM's."""
    names = ["vllm", "model_executor", "layers", "mamba", "ops"]
    parts = [".".join(names[: i + 1]) for i in range(len(names))]
    leaves = {
        "mamba_ssm": {
            "selective_state_update": selective_state_update,
            "override_ssm_config": nullcontext,
        },
        "selective_state_update_replayssm_output_only": {
            "selective_state_update_replayssm_output_only": replayed,
            "get_replayssm_config": lambda *_, **__: None,
        },
    }
    for name in [*parts, *(f"{parts[-1]}.{leaf}" for leaf in leaves)]:
        made = ModuleType(name)
        made.__path__ = []
        vars(made).update(leaves.get(name.split(".")[-1], {}))
        monkeypatch.setitem(sys.modules, name, made)
        if "." in name:
            monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], name.split(".")[-1], made, raising=False)

    def make(settings: ReplaySettings) -> SimpleNamespace:
        torch.manual_seed(0)
        state = allocate_state(GEOMETRY, settings, 2 * BATCH, "cpu")
        for name, tensor in state.tensors.items():
            if name != "checkpoint_position":
                tensor.uniform_(0.0, 0.1) if name == "ring_dt" else tensor.normal_()
        H, P, N = GEOMETRY.state_shape
        inputs = [torch.randn(BATCH, *shape).bfloat16() for shape in ((H, P), (H,), (2, N), (2, N))]
        constants = [torch.rand(H), torch.randn(H), torch.rand(H) - 4]
        return SimpleNamespace(
            geometry=GEOMETRY, settings=settings, batch=BATCH, window=1, state=state, inputs=inputs, constants=constants
        )

    return make


def expected(layer, history: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the reference at this history of every row: (y, checkpoints); the layer's state stays as it is."""
    tensors = {name: tensor.clone() for name, tensor in layer.state.tensors.items()}
    state = LayerState(GEOMETRY, layer.settings, tensors, torch.zeros(1, dtype=torch.int32))
    if "checkpoint_position" in tensors:
        tensors["checkpoint_position"].fill_(POSITION - history)
    rows = torch.full((BATCH,), POSITION), torch.arange(BATCH), torch.ones(BATCH), SLOTS
    y = reference.mamba2_window(*layer.inputs, *layer.constants, state, *(r.to(torch.int32) for r in rows), 0)
    return y.double(), tensors["checkpoint"]


# Both round the same sums to bf16, of which a few fall on the other side: 2^-8 of one output, far less of all.
TOLERANCE = 2**-9


def test_vllms_standard_update_gets_the_layers_operands(layer) -> None:
    one = layer(ReplaySettings(buffer_len=0, max_window=1))
    y, checkpoints = expected(one, 0)
    before = one.state["checkpoint"].clone()
    calls = peers.mamba2_peers(one)
    assert len(calls) == 1 + len(peers.MAMBA_CONFIGS)
    for call in calls.values():
        one.state["checkpoint"].copy_(before)
        assert (call(SLOTS).double() - y).norm() < TOLERANCE * y.norm()
        torch.testing.assert_close(one.state["checkpoint"], checkpoints, rtol=1e-5, atol=1e-5)  # fp32 sums of 1e1


@pytest.mark.parametrize("history", [0, 5, 15])
def test_vllms_replay_gets_our_rings(layer, history: int) -> None:
    one = layer(ReplaySettings(buffer_len=16, max_window=1))
    (peer,) = replay_peers.replay_peers(one)
    y, _ = expected(one, history)
    before = one.state["checkpoint"].clone()
    peer.copy_rings(POSITION, history)
    counts = torch.full((one.state.slots,), history, dtype=torch.int32)
    steps = peer.steps()
    assert steps, "no configuration fits"
    out = next(iter(steps.values()))(SLOTS, counts)().double()
    assert (out - y).norm() < TOLERANCE * y.norm()
    assert torch.equal(one.state["checkpoint"], before) == (history < peer.flushing_history)


def test_without_other_projects_there_are_no_peers(layer, monkeypatch) -> None:
    one = layer(ReplaySettings(buffer_len=16, max_window=1))
    for name in [name for name in sys.modules if name.startswith("vllm")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert list(replay_peers.replay_peers(one)) == []
    assert not [name for name in peers.mamba2_peers(one) if name.startswith("vllm")]
