"""Decode, verify and flush of one layer over batch sizes and fill levels: our kernels, our plain baseline, peers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import native_peers
import peers
import replay_peers
import torch
from harness import Results, Timing, ceilings, time_graph
from window_layers import GEOMETRIES, POSITION, Layer, check, fill_cycle, measure, read_bytes

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import Mamba2Geometry, ReplaySettings

PEER_ERROR = 1e-2
"""Of a peer's outputs, relative to ours: peers round operands and outputs to bf16 (2^-9 each)."""
PEER_STATE_ERROR = 2e-3
"""Of the states that a peer stores, relative to ours: our normalised keys of Gated DeltaNet are bf16 (2^-9)."""


def measure_peers(
    results: Results, name: str, batch: int, window: int, ceiling: dict[str, float], only: set[str] | None = None
) -> set[str]:
    """The fastest configuration (or those in `only`) of every importable project, checked against our baseline.

    Returns their names.
    """
    geometry = GEOMETRIES[name]
    layer = Layer(geometry, ReplaySettings(buffer_len=0, max_window=window), batch, window)
    find = peers.mamba2_peers if isinstance(geometry, Mamba2Geometry) else peers.gdn_peers
    best: dict[str, tuple[Timing, str]] = {}
    for variant, call in find(layer).items():
        if only is not None and variant not in only:
            continue
        try:
            kept = layer.state["checkpoint"][:batch].clone()
            value = call(layer.slots[0]).double()
            layer.state["checkpoint"][:batch].copy_(kept)
            layer.launches([0])[0]()
            error = float((value - layer.out.double()).norm() / layer.out.double().norm())
            timing = time_graph([lambda slots=slots, call=call: call(slots) for slots in layer.slots])
        except Exception as problem:  # a peer that does not run here must not hide the others
            print(f"peer {name} {variant}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        print(
            f"peer {name} B={batch} W={window} {variant}: {timing.median_us:.1f} us, differs by {error:.1e}", flush=True
        )
        if not error < PEER_ERROR:  # no measurement of this operator
            continue
        project = variant.split()[0]
        if project not in best or timing.median_us < best[project][0].median_us:
            best[project] = (timing, variant)
    for timing, variant in best.values():
        _add_peer(results, layer, timing, ceiling, geometry=name, batch=batch, variant=variant)
    return {variant for _, variant in best.values()}


def _add_peer(results: Results, layer: Layer, timing: Timing, ceiling: dict[str, float], **fields: Any) -> None:
    """The line of a peer that rewrites fp32 states, checked in this run."""
    results.add(
        timing,
        layer.step_bytes(torch.zeros(1)),
        ceiling["rmw"],
        op="peer",
        window=layer.window,
        state_dtype="float32",
        readout_dtype="same",
        L=0,
        fill="flush",
        correct=True,
        **fields,
    )


def measure_native_peers(
    results: Results, name: str, batch: int, window: int, ceiling: dict[str, float], only: set[str] | None = None
) -> set[str]:
    """The fastest configuration and the usual one (or those in `only`) of every importable native verification.

    Outputs and states are checked against those of our plain kernel. Returns the names.
    """
    layer = Layer(GEOMETRIES[name], ReplaySettings(buffer_len=0, max_window=window), batch, window)
    layer.launches([0])[0]()
    outputs, states = layer.out.clone(), layer.state["snapshots"][:batch].clone()
    found = []
    for one in native_peers.native_peers(layer):
        if only is not None and one.name not in only:
            continue
        try:
            error, state_error = _native_errors(one, outputs, states)
            timing = time_graph(one.launches)
        except Exception as problem:  # as above
            print(f"peer {name} {one.name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        print(
            f"peer {name} B={batch} W={window} {one.name}: {timing.median_us:.1f} us, differs by {error:.1e}, "
            f"its states by {state_error:.1e}",
            flush=True,
        )
        if error < PEER_ERROR and state_error < PEER_STATE_ERROR:
            found.append((timing, one))
    kept = native_peers.kept(found)
    for timing, one in kept:
        own = one.is_own_choice
        _add_peer(results, layer, timing, ceiling, geometry=name, batch=batch, variant=one.name, is_own_choice=own)
    return {one.name for _, one in kept}


def _native_errors(one: native_peers.Verification, outputs: torch.Tensor, states: torch.Tensor) -> tuple[float, float]:
    """Of the first launch's outputs, and of the states after every token (the largest), relative to ours."""
    one.states.fill_(torch.nan)
    one.prepare()
    value, wanted = one.launches[0]().double(), one.expected(outputs).double()
    # Token by token: all states of a batch are gigabytes.
    state_errors = [
        float((one.states[:, i] - states[:, i]).norm() / states[:, i].norm()) for i in range(states.shape[1])
    ]
    # Not max(): a NaN must not be passed over.
    return float((value - wanted).norm() / wanted.norm()), float(torch.tensor(state_errors).max())


def measure_replay_peers(
    results: Results,
    name: str,
    settings: ReplaySettings,
    batch: int,
    window: int,
    advance: int,
    ceiling: dict[str, float],
    only: set[str] | None = None,
) -> set[str]:
    """The fastest configuration over a desynchronised cycle (or those in `only`) of every importable replay kernel.

    At the same fills as ours and checked against ours. Returns their names.
    """
    layer = Layer(GEOMETRIES[name], settings, batch, window)
    best = {}
    for peer in replay_peers.replay_peers(layer):
        for variant, step in peer.steps().items():
            if only is not None and variant not in only:
                continue
            try:
                error = max(
                    _replay_error(layer, peer, step, h) for h in (settings.buffer_len // 2, peer.flushing_history)
                )
                timings = {
                    fill: _replay_timing(layer, peer, step, fill_cycle(settings, batch, window, fill, advance)[2])
                    for fill in ("desync", "flush")
                }
            except Exception as problem:  # as above
                print(f"peer {name} {variant}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                continue
            times = ", ".join(f"{fill} {timing.median_us:.1f} us" for fill, (timing, _) in timings.items())
            print(f"peer {name} B={batch} W={window} {variant}: {times}, differs by {error:.1e}", flush=True)
            project = variant.split()[0]
            if error < PEER_ERROR and (
                project not in best or timings["desync"][0].median_us < best[project][1]["desync"][0].median_us
            ):
                best[project] = (variant, timings)
    for variant, timings in best.values():
        for fill, (timing, nbytes) in timings.items():
            results.add(
                timing,
                nbytes,
                ceiling["rmw" if fill == "flush" else "read"],
                op="replay_peer",
                geometry=name,
                batch=batch,
                window=window,
                state_dtype=settings.state_dtype,
                readout_dtype="same",
                L=settings.buffer_len,
                fill=fill,
                variant=variant,
                correct=True,
            )
    return {variant for variant, _ in best.values()}


def _replay_timing(
    layer: Layer, peer: replay_peers.ReplayPeer, step: replay_peers.Step, cycle: torch.Tensor
) -> tuple[Timing, float]:
    """Time and least bytes of a peer's steps with our histories [steps, rows], shifted so that the same rows fold."""
    later = layer.settings.buffer_len - layer.window + 1 - peer.flushing_history
    counts = [(row - later).expand(layer.batch).to("cuda", torch.int32).repeat(layer.sets) for row in cycle]
    return time_graph([step(slots, count) for count in counts for slots in layer.slots]), layer.step_bytes(cycle)


def _replay_error(layer: Layer, peer: replay_peers.ReplayPeer, step: replay_peers.Step, history: int) -> float:
    """Of a replay peer's outputs at this history of every row, relative to ours; the checkpoint is put back."""
    layer.set_history(torch.tensor([history]))
    peer.copy_rings(POSITION, history)
    kept = layer.state["checkpoint"][: layer.batch].clone()
    counts = torch.full((layer.state.slots,), history, device="cuda", dtype=torch.int32)
    value = step(layer.slots[0], counts)().double()
    layer.state["checkpoint"][: layer.batch].copy_(kept)
    layer.launches([0])[0]()
    layer.state["checkpoint"][: layer.batch].copy_(kept)
    return float((value - layer.out.double()).norm() / layer.out.double().norm())


def tuned_rows(results: Results, name: str, settings: ReplaySettings, batch: int, window: int, ceiling: dict) -> int:
    """Rows per block that are fastest over a desynchronised cycle; `geometry.TABLE` is chosen from these."""
    rows, tiles, times = GEOMETRIES[name].state_shape[1], GEOMETRIES[name].row_tiles, {}
    for count in geo.row_candidates(rows, tiles):
        line = measure(
            results, name, settings, batch, window, "desync", 1 if window == 1 else 3, ceiling, False, count, "tuning"
        )
        times[line["median_us"]] = count
    return times[min(times)]


def run(
    benchmark: str,
    names: list[str],
    batches: list[int],
    windows: list[int],
    formats: list[str],
    tune: bool = False,
    directory: Path | None = None,
    with_peers: bool = True,
) -> None:
    """All figures of some geometries, each variant checked first.

    tune: try all rows per block at the first batch size and use the fastest, rather than those of the launch tables.
    formats: state_dtype, or state_dtype:state_rounding:readout_dtype. With a readout, ceilings are those of its size;
    the plain baseline and peers keep fp32, with ceilings of that size.
    with_peers: False where this process has measured them for other formats of ours.
    """
    results = Results(benchmark, directory)
    pool = torch.randn(544 << 20, device="cuda")
    for chosen in formats:
        state_dtype, rounding, readout = (*chosen.split(":"), "nearest", "same")[:3]
        has_copy = readout != "same"
        for name in names:
            slot = read_bytes(GEOMETRIES[name], ReplaySettings(state_dtype=state_dtype, readout_dtype=readout))
            limits = {batch: ceilings(batch * slot, pool) for batch in batches}
            plain_limits = limits
            if has_copy:
                plain_slot = read_bytes(GEOMETRIES[name], ReplaySettings())
                plain_limits = {batch: ceilings(batch * plain_slot, pool) for batch in batches}
            for window in windows:
                settings = ReplaySettings(
                    buffer_len=16,
                    max_window=window,
                    state_dtype=state_dtype,
                    state_rounding=rounding,
                    readout_dtype=readout,
                ).with_u_format()
                plain = ReplaySettings(
                    buffer_len=0, max_window=window, state_dtype="float32" if has_copy else state_dtype
                )
                rows = tuned_rows(results, name, settings, batches[0], window, limits[batches[0]]) if tune else None
                ours_ok = check(name, settings, window, rows)
                plain_ok = check(name, plain, window)
                known, known_replay = None, None
                for batch in batches:
                    advance, limit, plain_limit = 1 if window == 1 else 3, limits[batch], plain_limits[batch]
                    for fill in (8, "desync", "flush"):  # steps that keep the GPU busiest slow down what follows
                        measure(results, name, settings, batch, window, fill, advance, limit, ours_ok, rows)
                    measure(
                        results, name, plain, batch, window, "flush", advance, plain_limit, plain_ok, variant="plain"
                    )
                    if with_peers and (state_dtype == "float32" or has_copy):
                        native = measure_peers if window == 1 else measure_native_peers
                        known = native(results, name, batch, window, plain_limit, known)
                        if isinstance(GEOMETRIES[name], Mamba2Geometry) and not has_copy:
                            known_replay = measure_replay_peers(
                                results, name, settings, batch, window, advance, limit, known_replay
                            )


def main(benchmark: str, geometries: str, description: str | None) -> None:
    """The command line of a benchmark; `geometries` is the default of its option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", default=geometries)
    parser.add_argument("--batches", default="256,64,1,16,512")
    parser.add_argument("--windows", default="1,5")
    parser.add_argument(
        "--formats",
        default="float32,float16,float16:stochastic:nvfp4",
        help="state_dtype, or state_dtype:state_rounding:readout_dtype",
    )
    parser.add_argument("--tune", action="store_true", help="try all rows per block, to choose the launch tables")
    arguments = parser.parse_args()
    batches, windows = ([int(value) for value in text.split(",")] for text in (arguments.batches, arguments.windows))
    run(benchmark, arguments.geometries.split(","), batches, windows, arguments.formats.split(","), arguments.tune)
