"""What the README shows first: our times beside those of named peers, at batch 256."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from report_lines import KERNEL_BENCHMARKS, NAMES, Line, decode_lines, longest_contexts, select, usual

BATCH = 256
PEERS = {
    "vllm": "vLLM",
    "mamba-ssm": "mamba-ssm",
    "fla": "flash-linear-attention",
    "flashinfer": "flashinfer",
    "sglang": "SGLang",
}
LOW_PRECISION = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}
SPREAD = 0.05
"""Share of a time by which its repeats must lie apart to be shown and not summed up by their median."""


@dataclass(frozen=True)
class Bar:
    """One time of a model, in microseconds, with the range that its repeats gave."""

    who: str
    kind: Literal["peer", "peer replay", "plain", "replay", "low precision"]
    us: float
    low_us: float
    high_us: float

    @property
    def varies(self) -> bool:
        return self.high_us - self.low_us > SPREAD * self.us

    @property
    def fastest_us(self) -> float:
        """What others are compared with: the time, or the fastest of repeats that lie far apart."""
        return self.low_us if self.varies else self.us

    @classmethod
    def of(cls, line: Line, who: str, kind: str) -> Bar:
        return cls(who, kind, *(line[name] for name in ("median_us", "p10_us", "p90_us")))


def kernel_bars(lines: list[Line]) -> dict[str, list[Bar]]:
    """Model -> decode of one recurrent layer: the fastest peers, and ours."""
    kernels = [line for line in usual(lines) if line["benchmark"] in KERNEL_BENCHMARKS and line["correct"]]
    bars = {}
    for name in NAMES:
        found = select(kernels, geometry=name, batch=BATCH, window=1)
        standard = select(found, state_dtype="float32", readout_dtype="same")
        ours = select(standard, variant="ours", fill="desync")
        if ours:
            peers = {"peer": select(standard, op="peer"), "peer replay": select(standard, op="replay_peer")}
            bars[name] = [
                Bar.of(best, peer_name(best), kind)
                for kind, each in peers.items()
                if (best := min(each, key=itemgetter("median_us"), default=None))
            ]
            bars[name].append(Bar.of(ours[0], "ours", "replay"))
            low = select(found, variant="ours", fill="desync", **LOW_PRECISION)
            bars[name] += [Bar.of(line, "ours, fp16 + 4-bit copy", "low precision") for line in low]
    return bars


def step_bars(lines: list[Line]) -> dict[str, list[Bar]]:
    """Model -> whole decode steps of all its layers: vLLM's engine, and ours. Models without a peer are left out."""
    whole = [line for line in decode_lines(usual(lines)) if line["layers"] == line["layers_total"] and line["correct"]]
    bars = {}
    for name in NAMES:
        found = select(whole, geometry=name, batch=BATCH)
        peers = [line for line in found if line["variant"].startswith("vllm")]
        if peers:
            bars[name] = [
                Bar.of(line, peer_name(line), "peer replay" if line["variant"].endswith("replay") else "peer")
                for line in peers
            ]
            titles = {
                "plain": ("ours, plain", "plain"),
                "replay": ("ours", "replay"),
                "replay-float16-nvfp4-stochastic": ("ours, fp16 + 4-bit copy", "low precision"),
            }
            own = {line["variant"]: line for line in longest_contexts(found)}
            bars[name] += [Bar.of(own[variant], *title) for variant, title in titles.items() if variant in own]
    return bars


def peer_name(line: Line) -> str:
    """Its name as its authors write it, its version, and whether it replays: "vLLM 0.33.0, its replay"."""
    package, version = line["variant"].split()[:2]
    replay = ", its replay" if line["op"] == "replay_peer" or line["variant"].endswith("replay") else ""
    return f"{PEERS.get(package, package)} {version.removesuffix('.post1')}{replay}"
