"""Random steps of the stateful operators, for kernels under emulation and on a GPU alike.

`Steps` draws calls with mixed rows: decode, verify, prefill, padding, idle, invalid and fresh ones, at random slots and
with random acceptance, over a pool that starts as NaN. `compare` runs the reference and an implementation side by side
from equal states; `judge` lets one implementation run freely and compares it with the fp64 recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from replayssm.plugins import reference
from replayssm.plugins.contract import Geometry
from replayssm.plugins.reference import recurrence
from replayssm.plugins.reference.formats import decode_checkpoint, decode_readout
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state, commit, torch_dtype

OPERATORS = {
    "mamba2": "mamba2_window",
    "gdn": "gdn_window",
    "conv": "causal_conv1d_window",
    "attention": "attention_window",
}

BF16_OUTPUT_ERROR = 2.5e-3
"""Relative error of bf16 outputs against the fp64 recurrence: one rounding is 2^-9 of the norm at most, the rest that
of the numbers they are made of."""


@dataclass
class Call:
    """One operator call: packed inputs, constants, int32 rows, and how many tokens of each row will be kept."""

    inputs: list[torch.Tensor]
    rows: list[torch.Tensor]
    slots: list[int]
    lengths: list[int]
    starts: list[int]
    accepted: list[int]


class Steps:
    """A pool of slots and the positions of their sequences. `rows` rows a call, `strided` inputs are slices.

    longest_prefill: tokens that a prefill row may have beyond a window.
    """

    def __init__(
        self,
        geometry: Geometry,
        settings: ReplaySettings,
        slots: int = 6,
        rows: int = 4,
        seed: int = 0,
        device="cpu",
        longest_prefill: int = 20,
    ) -> None:
        self.geometry, self.settings, self.slots, self.rows = geometry, settings, slots, rows
        self.longest_prefill = longest_prefill
        self.device = torch.device(device)
        self.dtype = torch_dtype(settings.activation_dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.positions = [0] * slots
        self.count = 0
        kind = geometry.kind
        if kind == "attention":
            self.constants = []
        elif kind == "conv":
            self.constants = [self.normal(geometry.conv_dim, geometry.conv_kernel).to(self.dtype), None]
            self.constants[1] = self.normal(geometry.conv_dim).to(self.dtype)
        else:
            heads = geometry.state_shape[0]
            constants = [self.normal(heads) * 0.5, self.normal(heads), self.normal(heads) * 0.5 - 3]
            self.constants = constants if kind == "mamba2" else [constants[0], constants[2]]
        self.constants = [constant.to(self.device) for constant in self.constants]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def pool(self) -> LayerState:
        """Slots that hold NaN and nonsense positions, as reused memory may."""
        state = allocate_state(self.geometry, self.settings, self.slots, self.device)
        for tensor in state.tensors.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else 12345)
        return state

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """Random packed inputs: slices of one projection's output, so tokens are strided."""
        g = self.geometry
        if g.kind == "mamba2":
            shapes = [(g.nheads, g.headdim), (g.nheads,), (g.ngroups, g.dstate), (g.ngroups, g.dstate)]
        elif g.kind == "gdn":
            keys = (g.num_k_heads, g.head_k_dim)
            shapes = [keys, keys, (g.num_v_heads, g.head_v_dim), (g.num_v_heads,), (g.num_v_heads,)]
        elif g.kind == "attention":
            keys = (g.num_kv_heads, g.head_dim)
            shapes = [(self.query_heads, g.head_dim), keys, keys]
        else:
            shapes = [(g.conv_dim,)]
        sizes = [-(-torch.Size(shape).numel() // 8) * 8 for shape in shapes]
        packed = self.normal(tokens, sum(sizes) + 8).to(self.device, self.dtype)
        slices, begin = [], 8
        for shape, size in zip(shapes, sizes, strict=True):
            slices.append(packed[:, begin : begin + torch.Size(shape).numel()].unflatten(1, shape))
            begin += size
        return slices

    def next_call(self, odd_rows: bool = True, prefill: bool = True) -> Call:
        """Draw one call. Every few calls one row is padding, idle, invalid, a prefill or a fresh sequence."""
        number, limit = self.count, self.settings.max_window
        self.count += 1
        slots = torch.randperm(self.slots, generator=self.generator)[: self.rows].tolist()
        lengths = [self.integer(1, limit) for _ in slots]
        if prefill and number % 5 == 3:
            lengths[0] = limit + self.integer(1, self.longest_prefill)
        if odd_rows and self.rows > 2:
            if number % 4 == 2:
                slots[1] = -1
            if number % 7 == 5:
                lengths[2] = 0
        if number % 9 == 8:
            self.positions[slots[-1]] = 0
        seq_lens = [self.positions[slot] if slot >= 0 else 7 for slot in slots]
        lengths = [
            length if seq_len + length <= self.settings.max_seq_len else 0
            for seq_len, length in zip(seq_lens, lengths, strict=True)
        ]
        accepted = [length if length > limit else self.integer(0, length) for length in lengths]
        if self.settings.is_baseline:
            accepted = [length if length <= 1 else count for length, count in zip(lengths, accepted, strict=True)]
        starts, total = [], 1
        for length in lengths:
            starts.append(total)
            total += length
        if odd_rows and self.rows > 2 and number % 11 == 10:
            slots[0], accepted[0] = self.slots + 3, 0
        for slot, length, count in zip(slots, lengths, accepted, strict=True):
            if 0 <= slot < self.slots and length:
                self.positions[slot] += count
        rows = [torch.tensor(v, dtype=torch.int32, device=self.device) for v in (seq_lens, starts, lengths, slots)]
        return Call(self.inputs(total + 1), rows, slots, lengths, starts, accepted)

    def run(self, implementation, state: LayerState, call: Call) -> torch.Tensor:
        """The operator of `implementation` (a module with the reference's names) on `call`."""
        function = getattr(implementation, OPERATORS[self.geometry.kind])
        tail = {"conv": (), "attention": (0.125,)}.get(self.geometry.kind, (0,))
        return function(*call.inputs, *self.constants, state, *call.rows, *tail)

    @property
    def query_heads(self) -> int:
        """Of attention: three per KV head, or 17 where there is a single one."""
        heads = self.geometry.num_kv_heads
        return 3 * heads if heads > 1 else 17

    def commit(self, state: LayerState, call: Call) -> None:
        """Keep the accepted tokens, which only the baseline must be told."""
        kept = [
            (slot, count)
            for slot, length, count in zip(call.slots, call.lengths, call.accepted, strict=True)
            if 0 <= slot < self.slots and 1 < length <= self.settings.max_window
        ]
        if kept:
            commit(state, [slot for slot, _ in kept], [count for _, count in kept])


def to_device(state: LayerState, device) -> LayerState:
    """A copy of `state` on `device`."""
    tensors = {name: tensor.detach().clone().to(device) for name, tensor in state.tensors.items()}
    return LayerState(state.geometry, state.settings, tensors, state.error_flag.clone().to(device))


def call_on(call: Call, device) -> Call:
    inputs = [tensor.to(device) for tensor in call.inputs]
    return Call(inputs, [row.to(device) for row in call.rows], call.slots, call.lengths, call.starts, call.accepted)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """||value - expected|| / ||expected||; NaN where exactly one of both is NaN, or both are anywhere."""
    value, expected = value.double(), expected.double()
    norm = float(expected.norm())
    return float((value - expected).norm()) / norm if norm else float(value.norm())


def decoded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State parts with scaled formats replaced by the numbers that they stand for."""
    plain = {name: part for name, part in tensors.items() if not name.startswith("readout") and "_scale" not in name}
    if "checkpoint_scale" in tensors:
        parts = {name: tensors[name] for name in ("checkpoint", "checkpoint_scale")}
        plain["checkpoint"] = decode_checkpoint(parts, torch.float32)
    readout = {name: part for name, part in tensors.items() if name.startswith("readout")}
    if readout:
        plain["readout"] = decode_readout(readout, torch.float32)
    return plain


def part_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of a state part whose dead entries are NaN in both; infinite where only one is NaN."""
    value, expected = value.double(), expected.double()
    dead = value.isnan()
    if not torch.equal(dead, expected.isnan()):
        return float("inf")
    return relative_error(value[~dead], expected[~dead])


def assert_close(worst: dict[str, float], steps: Steps) -> None:
    """Assert that `compare`'s errors are those of two correct computations that round differently.

    "element": outputs are 16-bit; no element may be off by more than one rounding and 2e-3 of the outputs' size, which
    is what a flipped rounding of a 16-bit state amounts to; four times that for GDN, where a normalised q or k that
    rounds the other way (2^-8 of one of dk terms, the largest of which are some 16 times their mean) moves a whole
    output. "out": all outputs together; few elements lie on a rounding boundary. fp32 states agree to a few ulp, or
    after a chunked prefill to the 16 bits of mantissa that its matrix products keep of each term (2^-17 each); but a
    GDN prefill folds k, and few of its elements round the other way (2^-9 each); 16-bit states and rings differ by one
    ulp in few elements. A readout's element rounds the other way where S lies within its own error of a boundary: an
    error of 2^-17 of a term (16 bits of mantissa, see above) and steps of some 1/4 (nvfp4) or 2^-4 (fp8) of an element
    are one in 2^15 or 2^13 of them, 1.4e-3 or 7e-4 of the whole; a single one of a small state may be thrice that.
    So may one of an fp8 checkpoint, thrice the mean and moved by 2^-3 of itself.
    """
    exact = steps.settings.state_dtype == "float32"
    gdn = steps.geometry.kind == "gdn"
    limits = {"element": 4.0 if gdn else 1.0, "out": 5e-4}
    limits |= {"ring_k": 1e-3, "ring_u": 1e-3, "ring_dt": 2e-7, "ring_g": 2e-7}
    limits["readout"] = 5e-3 if steps.settings.readout_dtype == "nvfp4" else 2e-3
    for part in ("checkpoint", "snapshots"):
        limits[part] = 5e-4 if not exact else 1e-4 if gdn else 1e-5
    if steps.settings.state_dtype == "float8":
        elements = steps.slots * math.prod(steps.geometry.state_shape)
        limits["checkpoint"] = max(limits["checkpoint"], 0.375 / elements**0.5)
    for name, error in worst.items():
        assert error <= limits.get(name, 0.0), f"{name}: {error:.2e}, limit {limits.get(name, 0.0):.0e}"


def assert_nan_stays_in_its_row(steps: Steps, kernels) -> None:
    """NaN in all inputs of one row of a call: that row's outputs are NaN, all others as they are without it."""
    state = steps.pool()
    steps.positions = [0] * steps.slots
    call = steps.next_call(odd_rows=False, prefill=False)
    clean = steps.run(kernels, to_device(state, steps.device), call)
    own = slice(call.starts[1], call.starts[1] + call.lengths[1])
    for tensor in call.inputs:
        tensor[own] = torch.nan
    dirty = steps.run(kernels, state, call)
    assert dirty[own].isnan().all()
    dirty[own] = clean[own]
    assert torch.equal(dirty, clean)


def _element_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of an element, in units of one rounding of its dtype plus 2e-3 of the root mean square."""
    ulp = 2.0**-7 if value.dtype == torch.bfloat16 else 2.0**-10
    value, expected = value.double(), expected.double()
    size = expected.square().mean().sqrt()
    return float(((value - expected).abs() / (expected.abs() * ulp + 2e-3 * size + 1e-30)).max())


def _expect_from_stored(steps: Steps, call: Call, state: LayerState, mine: LayerState, expected: torch.Tensor) -> None:
    """Replace the expected outputs of windows that flushed and stored another low-precision state than the reference.

    Few elements lie so close to a boundary that they round the other way, but an output that reads one is then off by a
    step of it. Outputs are computed from what is stored (design rule 4), so they must be those that the reference
    computes from what the implementation stored. Both states are as they are after the call.
    """
    settings = steps.settings
    low = settings.state_dtype == "float8" if settings.readout_dtype == "same" else True
    if not low or settings.is_baseline:
        return
    prefix = "checkpoint" if settings.readout_dtype == "same" else "readout"
    parts = [name for name in state.tensors if name.startswith(prefix) and name != "checkpoint_position"]
    lengths = call.rows[2].clone().zero_()
    for row, (slot, length) in enumerate(zip(call.slots, call.lengths, strict=True)):
        if not 0 <= slot < steps.slots or not 0 < length <= settings.max_window:
            continue
        flushed = int(mine["checkpoint_position"][slot, 0, 0]) == int(call.rows[0][row]) > 0
        if flushed and any(_octets(state[name][slot]).ne(_octets(mine[name][slot])).any() for name in parts):
            lengths[row] = length
    if lengths.any():
        again = Call(call.inputs, [*call.rows[:2], lengths, call.rows[3]], *([None] * 4))
        outputs = steps.run(reference, mine, again)
        for start, length in zip(call.starts, lengths.tolist(), strict=True):
            expected[start : start + length] = outputs[start : start + length]


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def compare(steps: Steps, implementation, count: int, prefill: bool = True) -> dict[str, float]:
    """Errors over `count` calls: relative of all outputs together ("out"), of their worst element ("element", see
    `assert_close`), and the largest relative one of each state part.

    The reference runs on the CPU, and what it gives is compared on the implementation's device; after each call the
    implementation's state is set to the reference's, so errors do not add up. Raises AssertionError if error flags or
    integer parts differ, or if a token without work is not zero.
    """
    device = steps.device
    state = to_device(steps.pool(), "cpu")
    worst: dict[str, float] = {"out": 0.0, "element": 0.0}
    difference = size = 0.0
    on_cpu = Steps(steps.geometry, steps.settings, steps.slots, steps.rows)
    on_cpu.constants = [constant.cpu() for constant in steps.constants]
    mine = to_device(state, device)
    for number in range(count):
        call = steps.next_call(prefill=prefill)
        expected = on_cpu.run(reference, state, call_on(call, "cpu")).to(device)
        value = steps.run(implementation, mine, call)
        where = f"call {number}: slots {call.slots}, lengths {call.lengths}"
        assert int(state.error_flag) == int(mine.error_flag), where
        assert torch.isfinite(value).all(), f"{where}: outputs are not finite"
        for start, length, slot in zip(call.starts, call.lengths, call.slots, strict=True):
            if not 0 <= slot < steps.slots:
                assert not value[start : start + length].any(), where
        _expect_from_stored(on_cpu, call_on(call, "cpu"), state, to_device(mine, "cpu"), expected)
        difference += float((value.double() - expected.double()).square().sum())
        size += float(expected.double().square().sum())
        worst["element"] = max(worst["element"], _element_error(value, expected))
        others, moved = decoded(mine.tensors), {name: tensor.to(device) for name, tensor in state.tensors.items()}
        for name, tensor in decoded(moved).items():
            other = others[name]
            if tensor.is_floating_point():
                worst[name] = max(worst.get(name, 0.0), part_error(other, tensor))
            else:
                assert torch.equal(tensor, other), f"{where}: {name}"
        on_cpu.commit(state, call)
        for name, tensor in state.tensors.items():
            mine.tensors[name].copy_(tensor)
        state.error_flag.zero_()
        mine.error_flag.zero_()
    worst["out"] = (difference / size) ** 0.5
    return worst


def judge(steps: Steps, implementation, count: int, prefill: bool = True) -> float:
    """Largest relative error of any sequence's outputs against its fp64 recurrence, over `count` free-running calls."""
    state = steps.pool()
    kept_inputs: list[list[list[torch.Tensor]]] = [[] for _ in range(steps.slots)]
    kept_outputs: list[list[torch.Tensor]] = [[] for _ in range(steps.slots)]
    worst = 0.0
    for _ in range(count):
        before = list(steps.positions)
        call = steps.next_call(odd_rows=False, prefill=prefill)
        value = steps.run(implementation, state, call)
        steps.commit(state, call)
        for slot, start, accepted in zip(call.slots, call.starts, call.accepted, strict=True):
            if steps.positions[slot] < before[slot] + accepted:  # the slot was given to a fresh sequence
                worst = max(worst, _sequence_error(steps, kept_inputs[slot], kept_outputs[slot]))
                kept_inputs[slot], kept_outputs[slot] = [], []
            own = slice(start, start + accepted)
            kept_inputs[slot].append([tensor[own].clone() for tensor in call.inputs])
            kept_outputs[slot].append(value[own].clone())
    assert int(state.error_flag) == 0
    for inputs, outputs in zip(kept_inputs, kept_outputs, strict=True):
        worst = max(worst, _sequence_error(steps, inputs, outputs))
    return worst


def _sequence_error(steps: Steps, inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> float:
    if not inputs or not sum(part.shape[0] for part in outputs):
        return 0.0
    packed = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    constants, value = steps.constants, torch.cat(outputs)
    if steps.geometry.kind == "mamba2":
        expected, _ = recurrence.mamba2_recurrence(*packed, *constants)
    elif steps.geometry.kind == "gdn":
        expected, _ = recurrence.gdn_recurrence(*packed, *constants, None, steps.dtype)
    else:
        expected = recurrence.causal_conv1d_recurrence(*packed, *constants)
    return relative_error(value, expected)
