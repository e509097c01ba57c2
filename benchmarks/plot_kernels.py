"""Draws the kernels' newest figures: `python benchmarks/plot_kernels.py docs/kernels.svg`.

Left: decode and verify of replay, desynchronised, against the fastest kernel that rewrites the state (a peer's, or our
plain one), over batch sizes. Right: share of the memory ceiling that the same run measured: of reads at 8 tokens of
history, of reads and writes where every row flushes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
COLORS = {"nano4b": "#2f7ed8", "super120b": "#0b3d91", "qwen4b": "#f0a202", "qwen122b": "#b35c00"}
CEILING_NOISE = 1.01
"""By how much a kernel may exceed a measured ceiling, whose repeats differ by some tenths of a percent. A ceiling that
a kernel exceeds by more was measured too low and says nothing."""
STYLES = {1: ("-", "o", "decode"), 5: ("--", "s", "verify of 5")}


def lines() -> list[dict]:
    """Result lines of fp32 states, the newest of each condition."""
    kept = {}
    for path in sorted(RESULTS.glob("*_window-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["state_dtype"] == "float32" and line["correct"]:
                key = tuple(line[name] for name in ("geometry", "batch", "window", "fill", "variant"))
                if key not in kept or kept[key]["date"] <= line["date"]:
                    kept[key] = line
    return list(kept.values())


def ratios(found: list[dict]) -> dict[int, float]:
    """batch -> time of the fastest kernel that rewrites the state over replay's."""
    own = {one["batch"]: one["median_us"] for one in found if one["variant"] == "ours" and one["fill"] == "desync"}
    others: dict[int, float] = {}
    for one in found:
        if one["variant"] == "plain" or one["op"] == "peer":
            others[one["batch"]] = min(others.get(one["batch"], float("inf")), one["median_us"])
    return {batch: others[batch] / own[batch] for batch in sorted(own) if batch in others}


def shares(found: list[dict], fill: str | int) -> dict[int, float]:
    """batch -> percent of the run's ceiling that replay reaches."""
    own = [one for one in found if one["variant"] == "ours" and one["fill"] == fill]
    found = {one["batch"]: one["gb_s"] / one["ceiling_gb_s"] for one in sorted(own, key=lambda one: one["batch"])}
    return {batch: 100 * share for batch, share in found.items() if share <= CEILING_NOISE}


def main(path: str) -> None:
    plt.rcParams.update({"svg.hashsalt": "replayssm", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    all_lines = lines()
    for geometry, color in COLORS.items():
        for window, (style, marker, label) in STYLES.items():
            found = [one for one in all_lines if (one["geometry"], one["window"]) == (geometry, window)]
            speedups = ratios(found)
            left.plot(list(speedups), list(speedups.values()), style, marker=marker, ms=4, color=color)
            name = f"{geometry}, {label}"
            reads, writes = shares(found, 8), shares(found, "flush")
            right.plot(list(reads), list(reads.values()), style, marker=marker, ms=4, color=color, label=name)
            if window == 1:
                flush = f"{geometry}, flush"
                right.plot(list(writes), list(writes.values()), ":", marker="^", ms=4, color=color, label=flush)
    left.axhline(1, color="#9aa5b1", lw=0.8)
    left.set_ylabel("times faster than rewriting the state")
    right.set_ylabel("% of the memory ceiling")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda batch, _: f"{batch:g}")
        axis.set_xlabel("batch")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
