"""Drives captured steps for the end-to-end benchmarks: prompts, desynchronised rings, timing, and where the time goes.

A run holds one session. Its steps follow each other on the device without the host: a decode graph feeds itself, and a
verify graph gets its windows and the number of accepted tokens from tables. Timings are between CUDA events, one pair
per flush cycle of L steps; rows start at different fill levels, so every cycle holds every kind of step.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from e2e_model import Model

from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.session import Row, Session

PREFILL_TOKENS = 8192
"""Tokens of one prefill step of the prompts."""

KERNEL_CLASSES = (
    ("collective", ("nccl", "one_shot_all_reduce")),
    ("ssm", ("mamba2_", "gdn_")),
    ("conv", ("causal_conv1d",)),
    ("routing", ("route_tokens", "route_experts", "count_experts", "place_pairs", "combine_experts")),
    ("attention", ("attention", "flash", "fmha")),
    (
        "matmul",
        (
            "gemm",
            "nvjet",
            "cutlass",
            "cublas",
            "xmma",
            "splitk",
            "gemv",
            "dot_kernel",
            "dequantize_weights",
            "sum_splits",
        ),
    ),
    ("elementwise", ("rms_norm", "norm_rope", "activation", "quantize_")),
    ("copy", ("memcpy", "memset")),
)
"""Class of a kernel by parts of its name, the first that fits; the rest is "other" (sampling, gathers, casts)."""


class Run:
    """One variant of decoding: a session of `batch` rows after a prompt, ready to be stepped.

    settings: a buffer_len of 0 is the plain state update. prompts: [batch][tokens], of equal lengths. accepted: int32
    [steps, batch], tokens that stand per verify step; None decodes token by token.
    """

    def __init__(
        self,
        model: Model,
        settings: ReplaySettings,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        accepted: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        self.settings, self.batch, self.device = settings, len(prompts), device
        self.window = settings.max_window
        self.session = Session(model.engine(settings, self.batch), device=device, graphs=True)
        self.graph = self.session.step_graph(self.batch, self.window)
        self._generator = torch.Generator().manual_seed(seed)
        self._prefill(prompts)
        inputs = self.graph.device_inputs
        inputs["state_batch_indices"].copy_(torch.arange(self.batch, dtype=torch.int32))
        inputs["seq_lens"].fill_(len(prompts[0]))
        inputs["window_lens"].fill_(self.window)
        self._accepted = None if accepted is None else accepted.to(device)
        self._windows = self._random_tokens(model.vocab_size, 16)
        self.steps = 0
        self.clocks: list[tuple[int, float]] = []

    def _random_tokens(self, vocab_size: int, count: int) -> torch.Tensor:
        shape = (count, self.batch * self.window)
        return torch.randint(vocab_size, shape, generator=self._generator).to(self.device)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        length = len(prompts[0])
        if length <= self.window:
            raise ValueError(f"prompts must be longer than a window of {self.window} tokens, got {length} tokens")
        together = max(1, PREFILL_TOKENS // length)
        rows = [Row(self.session.allocate(), prompt, "none") for prompt in prompts]
        for start in range(0, len(rows), together):
            self.session.step(rows[start : start + together])

    def force(self, tokens: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
        """One step with these token ids [batch * window]; returns a copy of its logits.

        active: [batch] booleans, the rows that take part.
        """
        inputs = self.graph.device_inputs
        inputs["token_ids"].copy_(tokens)
        inputs["window_lens"].fill_(self.window)
        if active is not None:
            inputs["window_lens"].mul_(active.to(self.device))
        before = inputs["seq_lens"].clone()
        self.graph.launch()
        inputs["seq_lens"].copy_(before + inputs["window_lens"].clamp(max=1))
        inputs["window_lens"].fill_(self.window)
        return self.graph.logits.clone()

    def desynchronise(self, vocab_size: int, period: int) -> None:
        """Row b takes 1 + b mod `period` steps, so that the rows' rings fill up and flush at different steps."""
        phase = 1 + torch.arange(self.batch) % period
        windows = torch.randint(
            vocab_size, (period, self.batch * self.window), generator=torch.Generator().manual_seed(1)
        )
        for step in range(period):
            self.force(windows[step], (phase > step).to(torch.int32))

    def step(self) -> None:
        """Launch one step; nothing is waited for."""
        inputs = self.graph.device_inputs
        if self._accepted is not None:
            inputs["token_ids"].copy_(self._windows[self.steps % len(self._windows)])
        self.graph.launch()
        if self._accepted is not None:
            inputs["seq_lens"].add_(self._accepted[self.steps])
        self.steps += 1

    def time(self, steps: int, cycle: int) -> list[float]:
        """Seconds per step of `steps` steps, one number for each `cycle` of them."""
        marks = [self._mark()]
        for index in range(steps):
            self.step()
            if (index + 1) % cycle == 0:
                marks.append(self._mark())
        self._watch(marks[-2:][0])
        self._synchronize()
        return [_seconds(*pair) / cycle for pair in itertools.pairwise(marks)]

    def _watch(self, mark) -> None:
        """Add the clock of the multiprocessors (MHz) and the power (W) at `mark`, while steps behind it run."""
        if self.device.type != "cuda":
            return
        mark.synchronize()
        with contextlib.suppress(ModuleNotFoundError, RuntimeError):  # NVML is absent or does not say
            self.clocks.append((torch.cuda.clock_rate(self.device), torch.cuda.power_draw(self.device) / 1e3))

    def clock_fields(self) -> dict:
        """Medians over the pieces that were timed."""
        if not self.clocks:
            return {}
        clocks, power = zip(*self.clocks, strict=True)
        return {"sm_clock_mhz": round(percentile(clocks, 0.5)), "power_w": round(percentile(power, 0.5))}

    def check(self) -> None:
        """RuntimeError if the device refused a row or logits were not finite."""
        chosen, flag = self.graph.wait()
        if flag or not all(chosen.finite):
            raise RuntimeError(f"error flag {flag}, {chosen.finite.count(False)} tokens without finite logits")

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Give the memory back."""
        del self.session, self.graph
        free_memory(self.device)


def _seconds(begin, end) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Split:
    """Microseconds per step by kernel class, kernels per step, and the time between kernels of a step.

    gap_us, largest_gap_us: within a graph, all of a step's and the largest. idle_us: of a step, the device did nothing,
    between graphs too. wide_gaps: the widest of each pair of neighbours, "before -> after", widest first. top:
    microseconds per step by kernel name.
    """

    classes: dict[str, float]
    kernels: int
    gap_us: float
    largest_gap_us: float
    idle_us: float
    wide_gaps: dict[str, float]
    top: dict[str, float]

    @property
    def rest_us(self) -> float:
        """Everything but the state kernels."""
        return sum(self.classes.values()) - self.classes.get("ssm", 0.0)


def split_time(run: Run, steps: int) -> Split | None:
    """Where the time of `steps` steps goes; None without a GPU."""
    return profiled_split(run.step, steps, run.device)


def profiled_split(step: Callable[[], object], steps: int, device: torch.device) -> Split | None:
    """`Split` of `steps` calls of `step`, from the kernel records of torch.profiler; None without a GPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return kernel_split(events, steps)


def kernel_split(events: Sequence[dict], steps: int) -> Split:
    """`Split` of a Chrome trace with the records of `steps` equal steps."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    records = [e for e in events if e.get("cat") in kinds]
    if not records:
        raise RuntimeError("the profiler recorded no kernels")
    classes: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    launches: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for event in records:
        name = event["name"][:80]
        classes[kernel_class(event["name"])] += event["dur"] / steps
        names[name] += event["dur"] / steps
        span = (event["ts"], event["ts"] + event["dur"], name)
        # The kernels of a graph carry the number of its launch.
        launches[event.get("args", {}).get("correlation")].append(span)
    gaps: dict[str, float] = {}
    total = 0.0
    for spans in launches.values():
        spans.sort()
        _, end, before = spans[0]
        for begin, stop, name in spans[1:]:
            gap, pair = max(0.0, begin - end), f"{before} -> {name}"
            total += gap
            if gap > 0:
                gaps[pair] = max(gaps.get(pair, 0.0), gap)
            if stop > end:
                end, before = stop, name
    return Split(
        dict(classes),
        round(len(records) / steps),
        total / steps,
        max(gaps.values(), default=0.0),
        _idle(records) / steps,
        _widest(gaps, 6),
        _widest(names, 25),
    )


def _idle(records: Sequence[dict]) -> float:
    """Microseconds that no record covers."""
    idle, end = 0.0, None
    for begin, duration in sorted((event["ts"], event["dur"]) for event in records):
        idle += 0.0 if end is None else max(0.0, begin - end)
        end = begin + duration if end is None else max(end, begin + duration)
    return idle


def _widest(values: dict[str, float], count: int) -> dict[str, float]:
    return {name: round(value, 2) for name, value in sorted(values.items(), key=lambda item: -item[1])[:count]}


def kernel_class(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, parts in KERNEL_CLASSES if any(part in lowered for part in parts)), "other")


def percentile(values: Sequence[float], share: float) -> float:
    """The value at that share, between neighbours in proportion: the median of an even number is their middle."""
    return float(numpy.quantile(values, share))


def interleaved(runs: dict[str, Run], steps: int, cycle: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of every run, in turns: `rounds` pieces of `steps` steps each, the order turning around."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    piece = max(cycle, steps // rounds // cycle * cycle)
    order: list[str] = list(runs)
    for _ in range(rounds):
        for name in order:
            times[name] += runs[name].time(piece, cycle)
        order.reverse()
    return times
