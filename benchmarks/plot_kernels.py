"""Plot of the kernels' newest figures by batch size.

Left: decode and verify of replay, rows flushing as they come, against the fastest kernel that rewrites the state (a
peer's, or our plain one). Right: share of the memory ceiling that the same run measured: of reads at 8 tokens of
history, of reads and writes where every row flushes.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

from matplotlib import pyplot as plt
from plot_style import COLORS, save
from report_lines import KERNEL_BENCHMARKS, NAMES, WINDOW, Line, select, usual

CEILING_NOISE = 1.01
"""By how much a kernel may exceed a measured ceiling, whose repeats differ by some tenths of a percent. A ceiling that
a kernel exceeds by more was measured too low and says nothing."""
STYLES = {1: ("-", "o", "decode"), WINDOW: ("--", "s", f"verify of {WINDOW}")}


def ratios(found: list[Line]) -> dict[int, float]:
    """batch -> time of the fastest kernel that rewrites the state over replay's."""
    own = {one["batch"]: one["median_us"] for one in select(found, variant="ours", fill="desync")}
    others: dict[int, float] = {}
    for one in found:
        if one["variant"] == "plain" or one["op"] == "peer":
            others[one["batch"]] = min(others.get(one["batch"], float("inf")), one["median_us"])
    return {batch: others[batch] / own[batch] for batch in sorted(own) if batch in others}


def shares(found: list[Line], fill: str | int) -> dict[int, float]:
    """batch -> percent of the run's ceiling that replay reaches."""
    own = sorted(select(found, variant="ours", fill=fill), key=itemgetter("batch"))
    reached = {one["batch"]: one["gb_s"] / one["ceiling_gb_s"] for one in own}
    return {batch: 100 * share for batch, share in reached.items() if share <= CEILING_NOISE}


def plot_kernels(lines: list[Line], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.7, 3.9), layout="constrained")
    kernels = [one for one in usual(lines) if one["benchmark"] in KERNEL_BENCHMARKS]
    for geometry, color in COLORS.items():
        for window, (style, marker, step) in STYLES.items():
            same = {"geometry": geometry, "window": window, "state_dtype": "float32", "readout_dtype": "same"}
            found = select(kernels, **same, correct=True)
            drawn = [(left, ratios(found), style, marker, None)]
            drawn.append((right, shares(found, 8), style, marker, f"{NAMES[geometry]}, {step}"))
            if window == 1:
                drawn.append((right, shares(found, "flush"), ":", "^", f"{NAMES[geometry]}, every row flushes"))
            for axis, points, line, mark, label in drawn:
                axis.plot(list(points), list(points.values()), line, marker=mark, ms=4, color=color, label=label)
    left.axhline(1, color="#9aa5b1", lw=0.8)
    left.set_ylabel("times as fast as rewriting the state")
    right.set_ylabel("% of the memory ceiling")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.set_xlabel("batch")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, path)
