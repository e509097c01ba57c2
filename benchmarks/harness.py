"""Shared by the kernel benchmarks: timing by CUDA-graph replay, memory ceilings, and result lines.

Method. A figure is the median over replays of one captured graph, divided by the launches in it. Launches rotate over
slot sets until the state they touch exceeds `COLD_BYTES` (several times any L2), so each finds its state in memory, not
in the cache; inputs and outputs are small and reused, as activations are. There are `MIN_LAUNCHES` sets at least: to
start a graph takes 3 to 5 us, which a model's step of many layers pays once. The ring advances: the graph holds a whole
flush cycle with the positions of every step, and what a replay changes (checkpoint positions) is put back between
replays, outside the timed region. Bytes are the least that a step must move, from the real tensors' element sizes. The
ceiling is the best of several plain read (and read-modify-write) kernels on the same amount of memory in the same run,
in several places: one and the same kernel reads 3,970 GB/s in one allocation of an H200 and 4,620 in the next.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from commit import current_commit

from replayssm.plugins import launch
from replayssm.plugins.geometry import KernelConfig, compile_target
from replayssm.plugins.nvrtc import compile_kernel

COLD_BYTES = 512 << 20
MIN_LAUNCHES, MAX_SETS = 4, 64
PLACES = 3
RESULTS = Path(os.environ.get("REPLAYSSM_RESULTS_DIR") or Path(__file__).parent / "results")


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch."""

    median_us: float
    p10_us: float
    p90_us: float


def slot_sets(nbytes: int) -> int:
    """Slot sets that launches rotate over, each of which touches `nbytes`."""
    return max(MIN_LAUNCHES, min(MAX_SETS, -(-COLD_BYTES // nbytes)))


def time_graph(
    launches: list[Callable[[], None]],
    restore: Callable[[], None] = lambda: None,
    min_ms: float = 20.0,
    min_replays: int = 7,
) -> Timing:
    """Time per launch of a graph of `launches`; `restore` runs before each replay and is not timed."""
    restore()
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in launches:
            one()

    def replay() -> float:
        restore()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / len(launches)

    first = max(replay(), 1e-3)
    count = max(min_replays, min(60, int(min_ms * 1e3 / (first * len(launches)))))
    times = sorted(replay() for _ in range(count))
    return Timing(times[count // 2], times[count // 10], times[count - 1 - count // 10])


class _Ceiling:
    """One plain memory kernel, loaded."""

    def __init__(self, threads: int, unroll: int, write: bool) -> None:
        self.block_bytes = threads * unroll * 16
        defines = {"THREADS": threads, "UNROLL": unroll, "WRITE": int(write)}
        self.config = KernelConfig("memory_ceiling", tuple(defines.items()), 0, threads, 0)
        target = compile_target(launch.device_arch(torch.device("cuda", 0)))
        compiled = compile_kernel("memory_ceiling", defines, target, source_dir=Path(__file__).parent)
        self.kernel = launch.LoadedKernel(self.config, compiled.image)

    def __call__(self, data: torch.Tensor) -> None:
        blocks = data.numel() * data.element_size() // self.block_bytes
        self.kernel([data, data], 1, 1, torch.cuda.current_stream().cuda_stream, blocks_x=blocks)


@cache
def _ceiling_kernels(write: bool) -> list[_Ceiling]:
    return [_Ceiling(threads, unroll, write) for threads, unroll in ((512, 4), (128, 16), (256, 8), (128, 4))]


def ceilings(nbytes: int, pool: torch.Tensor) -> dict[str, float]:
    """GB/s over `nbytes` of `pool` or of fresh memory, the best place: {"read": ..., "rmw": bytes read and written}."""
    unit = 128 << 10
    size = max(unit, nbytes // unit * unit)
    flat = pool.view(torch.uint8).flatten()
    wanted = slot_sets(size)
    sets = max(1, min(flat.numel() // size, wanted))  # more than a cache holds, so that they may be read again
    places = [flat, *(torch.empty(sets * size, dtype=torch.uint8, device=flat.device) for _ in range(PLACES - 1))]
    result = {}
    for kind, write in (("read", False), ("rmw", True)):
        best = min(
            time_graph([partial(kernel, place[i % sets * size :][:size]) for i in range(wanted)], min_ms=4).median_us
            for place in places
            for kernel in _ceiling_kernels(write)
        )
        result[kind] = size * (2 if write else 1) / best / 1e3
    return result


@cache
def environment() -> dict[str, str]:
    """GPU, commit ($REPLAYSSM_COMMIT where there is no git) and date of a result line."""
    return {
        "gpu": torch.cuda.get_device_name(0),
        "commit": current_commit() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


class Results:
    """Appends one JSON object per figure to results/<benchmark>-<gpu>-<date>.jsonl and prints a short line."""

    def __init__(self, benchmark: str, directory: Path | None = None) -> None:
        self.benchmark = benchmark
        gpu = environment()["gpu"].lower().replace(" ", "-")
        self.path = (directory or RESULTS) / f"{benchmark}-{gpu}-{environment()['date'][:10]}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, timing: Timing, nbytes: float, ceiling_gb_s: float, **fields) -> dict:
        gb_s = nbytes / timing.median_us / 1e3
        line = {
            "benchmark": self.benchmark,
            **fields,
            "median_us": round(timing.median_us, 3),
            "p10_us": round(timing.p10_us, 3),
            "p90_us": round(timing.p90_us, 3),
            "bytes": int(nbytes),
            "gb_s": round(gb_s, 1),
            "ceiling_gb_s": round(ceiling_gb_s, 1),
            **environment(),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        format = fields.get("state_dtype", fields.get("format", ""))
        print(
            f"{fields['geometry']:9s} {fields['variant']:12s} B={fields['batch']:4d} W={fields['window']} "
            f"{format:8s} fill={fields.get('fill')!s:6s} {timing.median_us:8.1f} us {gb_s:6.0f} GB/s "
            f"{100 * gb_s / ceiling_gb_s:5.1f} %",
            flush=True,
        )
        return line
