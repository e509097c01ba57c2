"""Steps whose fold is exact in fp32 whatever its order, so that a kernel must store the reference's bytes."""

from __future__ import annotations

from itertools import product

import torch
from window_steps import Steps, to_device

from replayssm.plugins import reference
from replayssm.plugins.reference.formats import RandomKey, load_checkpoint, store_state
from replayssm.plugins.settings import READOUT_DTYPES, ROUNDINGS, STATE_DTYPES, ReplaySettings
from replayssm.plugins.state import LayerState

POSITION, LAYER = 1000, 3


def format_settings() -> list[dict[str, str]]:
    """All formats of a state that `ReplaySettings` takes."""
    taken = []
    for state, rounding, readout in product(STATE_DTYPES, ROUNDINGS, READOUT_DTYPES):
        formats = {"state_dtype": state, "state_rounding": rounding, "readout_dtype": readout}
        try:
            ReplaySettings(**formats)
        except ValueError:
            continue
        taken.append(formats)
    return taken


def exact_steps(steps: Steps, kernels) -> tuple[LayerState, LayerState]:
    """(the reference's state, the kernel's) after a step in which two of three rows flush.

    Log decays are zero, states and history are small multiples of powers of two (a different one per state row, from
    far below the formats' normal numbers to their largest), so S + sum of outer products is exact. One state holds a
    value that is not finite.
    """
    geometry, settings = steps.geometry, steps.settings
    heads, rows, columns = geometry.state_shape
    mamba2 = geometry.kind == "mamba2"
    state = to_device(steps.pool(), "cpu")

    def integers(*shape: int, limit: int = 8) -> torch.Tensor:
        return torch.randint(-limit, limit + 1, shape, generator=steps.generator).float()

    size = torch.exp2(torch.randint(-20, 8, (heads, rows), generator=steps.generator).float())
    if settings.state_dtype == "float32":
        size[0] = 2.0**-100  # row scales do not follow that far
    for slot in range(3):
        S = (steps.normal(heads, rows, columns) * 512).round() / 512 * size[..., None]
        store_state(state, slot, S, RandomKey(LAYER, POSITION))
    length = settings.ring_len
    keys = torch.exp2(integers(3, length, *state[("ring_B" if mamba2 else "ring_k")].shape[2:], limit=1))
    keys *= integers(*keys.shape, limit=1)
    if mamba2:
        state["ring_B"][:3] = keys.to(steps.dtype)
        # Every other token is small: S has twice the bits that fp16 keeps, so that all random bits matter.
        fine = torch.tensor([1.0, 2.0**-12]).repeat(length)[:length, None, None]
        state["ring_x"][:3] = (integers(3, length, heads, rows) / 8 * fine * size).to(steps.dtype)
        state["ring_dt"][:3] = torch.exp2(integers(3, length, heads, limit=1))
    else:
        state["ring_k"][:3] = keys.to(steps.dtype)
        planes = state["ring_u"].shape[3]
        u = integers(3, length, heads, planes, rows) / 8 * size[:, None]
        u[..., 1:, :] /= 256
        state["ring_u"][:3] = u.to(state["ring_u"].dtype)
        state["ring_g"][:3] = 0.0
    if settings.state_dtype == "float32":
        assert torch.isfinite(load_checkpoint(state, 0, torch.float32)).all()
        state["checkpoint"][1, 0, 1, 2] = torch.inf
    # Slot 2 holds no more history than it may keep.
    history = torch.tensor([settings.buffer_len, max(1, settings.buffer_len // 2), 0])
    history[1] = settings.buffer_len if settings.max_window == 1 else max(1, settings.buffer_len - 1)
    state["checkpoint_position"][:3] = (POSITION - history)[:, None, None].to(torch.int32)
    lengths = [min(2, settings.max_window)] * 3
    inputs = steps.inputs(sum(lengths))
    starts = [0, lengths[0], lengths[0] + lengths[1]]
    index = [torch.tensor(v, dtype=torch.int32) for v in ([POSITION] * 3, starts, lengths, [0, 1, 2])]
    constants = [constant.cpu().clone() for constant in steps.constants]
    if mamba2:
        constants[0].fill_(-torch.inf)
    mine = to_device(state, steps.device)
    name = f"{geometry.kind}_window"
    getattr(reference, name)(*(t.cpu() for t in inputs), *constants, state, *index, LAYER)
    moved = [[t.to(steps.device) for t in group] for group in (inputs, constants, index)]
    getattr(kernels, name)(*moved[0], *moved[1], mine, *moved[2], LAYER)
    assert int(state.error_flag) == int(mine.error_flag) == 0
    assert (state["checkpoint_position"][:2] == POSITION).all()
    return state, to_device(mine, "cpu")


def prefill_steps(steps: Steps, kernels) -> tuple[LayerState, LayerState]:
    """(what the reference stores of three prefill rows' last states, what the kernels store).

    The states are those that the kernels compute where the checkpoint is fp32: the same numbers, so every byte must be
    equal. Of the rows one is fresh, one continues a checkpoint and one a history.
    """
    geometry, settings = steps.geometry, steps.settings
    plain = {"state_dtype": "float32", "state_rounding": "nearest", "rounding_seed": 0, "readout_dtype": "same"}
    wide = ReplaySettings(**{**vars(settings), **plain, "u_source": "readout"})
    name, longest = f"{geometry.kind}_window", steps.longest_prefill

    def run(states: list[LayerState], seq_lens: list[int], lengths: list[int], slots: list[int]) -> list[torch.Tensor]:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        inputs, columns = steps.inputs(sum(lengths)), (seq_lens, starts, lengths, slots)
        index = [torch.tensor(column, dtype=torch.int32, device=steps.device) for column in columns]
        return [getattr(kernels, name)(*inputs, *steps.constants, state, *index, LAYER) for state in states]

    narrow = steps.pool()
    first = [longest // 2, longest]
    run([narrow], [0, 0], first, [1, 0])
    window = min(settings.buffer_len, settings.max_window)
    run([narrow], first[1:], [window], [0])
    parts = {name: tensor.clone() for name, tensor in narrow.tensors.items() if not name.startswith("readout")}
    parts.pop("checkpoint_scale", None)
    parts["checkpoint"] = torch.full((steps.slots, *geometry.state_shape), torch.nan, device=steps.device)
    for slot in (0, 1):
        parts["checkpoint"][slot] = load_checkpoint(narrow, slot, torch.float32)
    exact = LayerState(geometry, wide, parts, narrow.error_flag.clone())
    seq_lens, slots = [0, first[1] + window, first[0]], [2, 0, 1]
    lengths = [longest, longest - 1, settings.max_window + 1]
    outputs = run([narrow, exact], seq_lens, lengths, slots)
    assert torch.equal(*outputs)
    assert int(narrow.error_flag) == int(exact.error_flag) == 0
    mine, expected = to_device(narrow, "cpu"), to_device(narrow, "cpu")
    for seq_len, length, slot in zip(seq_lens, lengths, slots, strict=True):
        assert (mine["checkpoint_position"][slot] == seq_len + length).all()
        for part in expected.tensors:
            if part.startswith(("checkpoint", "readout")) and part != "checkpoint_position":
                expected[part][slot].view(torch.uint8).fill_(85)
        store_state(expected, slot, exact["checkpoint"][slot].cpu(), RandomKey(LAYER, seq_len + length))
    return expected, mine


def assert_same_bytes(mine: LayerState, expected: LayerState) -> None:
    """Checkpoint and readout of slots 0 to 2 are equal bit for bit; NaN equals NaN."""
    for name, value in expected.tensors.items():
        if not name.startswith(("checkpoint", "readout")):
            continue
        got, want = mine[name][:3], value[:3]
        same = got.view(torch.uint8) == want.view(torch.uint8)
        same = same.view(*want.shape, -1).all(-1)
        if want.is_floating_point():
            same |= got.float().isnan() & want.float().isnan()
        assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} differ"
