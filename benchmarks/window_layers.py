"""One replay layer: its launches at given fill levels, a figure of them, and a check against the reference."""

from __future__ import annotations

import torch
from harness import Results, slot_sets, time_graph

from replayssm.builders.inspection import recurrent_geometry
from replayssm.plugins import geometry as geo
from replayssm.plugins import launch, reference
from replayssm.plugins.contract import (
    Geometry,
    Mamba2Geometry,
    ReplaySettings,
    checkpoint_parts,
    readout_parts,
)
from replayssm.plugins.geometry import KernelConfig
from replayssm.plugins.reference.formats import RandomKey, load_checkpoint, store_state
from replayssm.plugins.row_order import ORDERED_ROWS, folds, gains, order_of
from replayssm.plugins.state import LayerState, allocate_state, torch_dtype

POSITION = 1000
"""seq_len of every row in the first step; history lies behind it."""

GEOMETRIES = {name: recurrent_geometry(name) for name in ("nano4b", "super120b", "qwen4b", "qwen122b")}


class Layer:
    """A layer's state, random inputs of a batch, and launches at given histories."""

    def __init__(
        self,
        geometry: Geometry,
        settings: ReplaySettings,
        batch: int,
        window: int,
        cta_rows: int | None = None,
        ahead_rows: int | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        self.geometry, self.settings, self.batch, self.window = geometry, settings, batch, window
        self.sets = slot_sets(read_bytes(geometry, settings) * batch)
        self.state = allocate_state(geometry, settings, batch * self.sets, "cuda")
        self._fill()
        act, tokens = torch_dtype(settings.activation_dtype), batch * window
        heads = geometry.state_shape[0]
        g = geometry
        if isinstance(g, Mamba2Geometry):
            shapes = [(g.nheads, g.headdim), (g.nheads,), (g.ngroups, g.dstate), (g.ngroups, g.dstate)]
        else:
            keys = (g.num_k_heads, g.head_k_dim)
            shapes = [keys, keys, (g.num_v_heads, g.head_v_dim), (g.num_v_heads,), (g.num_v_heads,)]
        self.inputs = [torch.randn(tokens, *shape, device="cuda").to(act) for shape in shapes]
        A_log, D, bias = torch.rand(heads), torch.randn(heads), torch.rand(heads) - 4
        constants = (A_log, D, bias) if isinstance(g, Mamba2Geometry) else (A_log, bias)
        self.constants = [constant.cuda() for constant in constants]
        self.out = torch.empty(tokens, *g.state_shape[:2], device="cuda", dtype=act)
        arch = launch.device_arch(torch.device("cuda", 0))
        self.config = config or geo.window_config(geometry, settings, arch, cta_rows=cta_rows, ahead_rows=ahead_rows)
        self.starts = torch.arange(batch, device="cuda", dtype=torch.int32) * window
        self.lens = torch.full((batch,), window, device="cuda", dtype=torch.int32)
        self.slots = [(torch.arange(batch, device="cuda") + i * batch).to(torch.int32) for i in range(self.sets)]

        self.first_slot = {slots.data_ptr(): i * batch for i, slots in enumerate(self.slots)}

    def _fill(self) -> None:
        """Random states and rings; a few states, repeated, because encoding all would take long."""
        tensors, kinds = self.state.tensors, min(4, self.batch)
        for slot in range(kinds):
            store_state(self.state, slot, torch.randn(self.geometry.state_shape, device="cuda"), RandomKey(0, POSITION))
        for name, tensor in tensors.items():
            if name.startswith("snapshots"):
                tensor.view(torch.uint8).zero_()
            elif name.startswith(("checkpoint", "readout")) and name != "checkpoint_position":
                octets = tensor.view(torch.uint8)
                for first in range(kinds, tensor.shape[0], kinds):
                    octets[first : first + kinds] = octets[: min(kinds, tensor.shape[0] - first)]
            elif name.startswith("ring"):
                tensor.normal_()
        for name, sign in (("ring_dt", 1.0), ("ring_g", -1.0)):
            if name in tensors:
                tensors[name].uniform_(0.0, 0.05).mul_(sign)

    def launches(self, offsets: list[int], histories: torch.Tensor | None = None):
        """One launch per (offset, slot set) at seq_len POSITION + offset.

        histories: of the rows at every offset [steps, rows or 1]; with them rows come as in a captured step, in the
        order of `row_order` where that orders them.
        """
        function = launch.mamba2_window if isinstance(self.geometry, Mamba2Geometry) else launch.gdn_window
        calls = []
        for step, offset in enumerate(offsets):
            order = torch.arange(self.batch)
            if histories is not None and gains(self.settings) and self.batch >= ORDERED_ROWS:
                history = histories[step].expand(self.batch)
                order = order_of(folds(history, self.window, self.settings.buffer_len))
            starts = self.starts[order.cuda()]
            seq_lens = torch.full((self.batch,), POSITION + offset, device="cuda", dtype=torch.int32)
            for slots in (slots[order.cuda()] for slots in self.slots):
                calls.append(
                    lambda seq_lens=seq_lens, starts=starts, slots=slots: function(
                        *self.inputs,
                        *self.constants,
                        self.state,
                        seq_lens,
                        starts,
                        self.lens,
                        slots,
                        0,
                        out=self.out,
                        config=self.config,
                    )
                )
        return calls

    def set_history(self, history: torch.Tensor) -> None:
        """history [batch] or scalar tensor: committed tokens behind POSITION, the same in every slot set."""
        if "checkpoint_position" in self.state.tensors:
            positions = (POSITION - history.expand(self.batch)).to(torch.int32).repeat(self.sets)
            self.state["checkpoint_position"].copy_(positions.cuda()[:, None, None])

    def step_bytes(self, histories: torch.Tensor) -> float:
        """Mean least bytes of a step whose rows have these histories before it (any shape)."""
        state = self.state
        slot = {name: tensor.nbytes / tensor.shape[0] for name, tensor in state.tensors.items()}
        fixed = sum(tensor.nbytes for tensor in self.inputs) + self.out.nbytes
        if self.settings.is_baseline:
            writes = (
                slot["checkpoint"] if self.window == 1 else slot["snapshots"] / self.settings.max_window * self.window
            )
            return fixed + self.batch * (slot["checkpoint"] + writes)
        entry = sum(size for name, size in slot.items() if name.startswith("ring")) / self.settings.ring_len
        flushes = folds(histories, self.window, self.settings.buffer_len).double().mean()
        checkpoint = sum(slot.get(name, 0.0) for name in ("checkpoint", "checkpoint_scale"))
        readout = sum(size for name, size in slot.items() if name.startswith("readout"))
        # A flush reads the checkpoint, and writes it and the readout; other rows read the readout if there is one.
        state = readout + flushes * 2 * checkpoint if readout else checkpoint * (1 + flushes)
        return float(fixed + self.batch * (state + entry * (histories.double().mean() + self.window)))


def read_bytes(geometry: Geometry, settings: ReplaySettings) -> int:
    """Bytes of one slot's state that a step without a flush reads."""
    parts = readout_parts(geometry, settings.readout_dtype) or checkpoint_parts(geometry, settings)
    return sum(part.nbytes for part in parts)


def histories_of_cycle(start: torch.Tensor, steps: int, window: int, advance: int, buffer_len: int) -> torch.Tensor:
    """History of every row before each step: [steps, rows]."""
    history, out = start.clone(), []
    for _ in range(steps):
        out.append(history.clone())
        history = torch.where(folds(history, window, buffer_len), 0, history) + advance
    return torch.stack(out)


def fill_cycle(
    settings: ReplaySettings, batch: int, window: int, fill: str | int, advance: int
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """(history before the first step, positions of the steps, histories [steps, rows]) of a fill as in `measure`."""
    L = settings.buffer_len
    if fill == "desync":
        # Fill levels that a row meets right before a step, once every row has flushed.
        levels = list(range(advance, L - window + advance + 1, advance))
        history = torch.tensor(levels)[torch.randint(len(levels), (batch,))]
        steps = len(levels) * max(1, 16 // len(levels))
        return history, [advance * i for i in range(steps)], histories_of_cycle(history, steps, window, advance, L)
    history = torch.tensor([0 if settings.is_baseline else L - window + 1 if fill == "flush" else fill])
    return history, [0], history[None]


def measure(
    results: Results,
    name: str,
    settings: ReplaySettings,
    batch: int,
    window: int,
    fill,
    advance: int,
    ceiling: dict[str, float],
    correct: bool,
    cta_rows=None,
    variant: str = "ours",
) -> dict:
    """One figure. fill: "desync" (a cycle of steps, rows at random fill), "flush" or a history length."""
    layer = Layer(GEOMETRIES[name], settings, batch, window, cta_rows)
    L = settings.buffer_len
    history, offsets, cycle = fill_cycle(settings, batch, window, fill, advance)
    timing = time_graph(layer.launches(offsets, cycle), lambda: layer.set_history(history))
    assert int(layer.state.error_flag) == 0, "the kernel met an invalid row"
    kind = "rmw" if settings.is_baseline or fill == "flush" else "read"
    return results.add(
        timing,
        layer.step_bytes(cycle),
        ceiling[kind],
        op=f"{layer.geometry.kind}_window",
        rmw_ceiling_gb_s=round(ceiling["rmw"], 1),
        geometry=name,
        batch=batch,
        window=window,
        state_dtype=settings.state_dtype,
        state_rounding=settings.state_rounding,
        readout_dtype=settings.readout_dtype,
        u_format=settings.u_format,
        L=L,
        fill=fill,
        variant=variant,
        cta_rows=dict(layer.config.defines)["CTA_ROWS"],
        correct=correct,
    )


def check(name: str, settings: ReplaySettings, window: int, cta_rows: int | None = None) -> bool:
    """One mixed step (plain, flushing, fresh) against the reference at the real geometry."""
    layer = Layer(GEOMETRIES[name], settings, 3, window, cta_rows)
    state = LayerState(
        layer.geometry, settings, {k: v[:3].clone() for k, v in layer.state.tensors.items()}, layer.state.error_flag
    )
    L = settings.buffer_len
    if "checkpoint_position" in state.tensors:
        behind = torch.tensor([max(1, L - window + 1), 3, L // 2], device="cuda", dtype=torch.int32)
        state["checkpoint_position"].copy_((POSITION - behind)[:, None, None])
    index = [
        torch.tensor(v, device="cuda", dtype=torch.int32)
        for v in ([POSITION, POSITION, 0], [0, window, 2 * window], [window] * 3, [2, 0, 1])
    ]

    def reference_step() -> tuple[torch.Tensor, LayerState]:
        """Outputs of the reference and its state, from what the kernel's state holds now."""
        tensors, flag = {k: v.cpu().clone() for k, v in state.tensors.items()}, torch.zeros(1, dtype=torch.int32)
        host = LayerState(layer.geometry, settings, tensors, flag)
        moved = [[t.cpu() for t in group] for group in (layer.inputs, layer.constants, index)]
        return plain(*moved[0], *moved[1], host, *moved[2], 0).double(), host

    mamba = isinstance(layer.geometry, Mamba2Geometry)
    function, plain = (
        (launch.mamba2_window, reference.mamba2_window) if mamba else (launch.gdn_window, reference.gdn_window)
    )
    expected, host = reference_step()
    out = function(*layer.inputs, *layer.constants, state, *index, 0, config=layer.config).cpu().double()
    if settings.readout_dtype != "same":
        # The same window again reads what the kernel stored: elements that rounded the other way are no error.
        expected, _ = reference_step()
    error = float((out - expected).norm() / expected.norm())
    kept, expected_state = (
        torch.stack([load_checkpoint(one, slot, torch.float32).cpu() for slot in range(3)]) for one in (state, host)
    )
    state_error = float((kept - expected_state).double().norm() / expected_state.double().norm())
    # bf16 outputs agree but for roundings that fall differently (1 ulp is 2^-8); fp32 states to a few ulp. The last
    # bits of a fold, 2^-17 of a term, move a few of 10^6 e2m1 codes by a step, a quarter of their value: 5e-4 of all
    # outputs before they are rounded.
    limit = {"float32": 1e-5, "float8": 1e-2}.get(settings.state_dtype, 1e-3)
    ok = error < (3e-3 if settings.readout_dtype == "nvfp4" else 1e-3) and state_error < limit
    errors = f"out {error:.1e} state {state_error:.1e}"
    print(f"check {name} W={window} {settings.state_dtype} L={L}: {errors} {'ok' if ok else 'WRONG'}", flush=True)
    return ok
