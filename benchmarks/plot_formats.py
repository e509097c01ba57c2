"""Plots of the two studies of state formats (`state_error.py`, `format_accuracy.py`)."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from plot_style import save
from report_formats import FORMATS
from report_lines import NAMES, Line, select

STYLES = {
    "bfloat16": ("#bbbbbb", ":"),
    "bfloat16, stochastic": ("#bbbbbb", "-"),
    "float16": ("#4477aa", ":"),
    "float16, stochastic": ("#4477aa", "-"),
    "float8": ("#cc6677", ":"),
    "float8, stochastic": ("#cc6677", "-"),
    "nvfp4": ("#999933", ":"),
    "float16, stochastic, float8 readout": ("#44aa99", "-"),
    "float16, stochastic, nvfp4 readout": ("#117733", "-"),
    "float16, stochastic, nvfp4 readout, float8 in layer 0": ("#117733", "-."),
    "float16, stochastic, nvfp4 readout, u from checkpoint": ("#117733", "--"),
    "float8, stochastic, nvfp4 readout": ("#882255", "-"),
    "float8, stochastic, nvfp4 readout, u from checkpoint": ("#882255", "--"),
    "float32, nvfp4 readout": ("#000000", ":"),
}


# Drawn over time; sources of the 120B shapes look like those of the 4B ones and stand in the table.
SOURCES = ("nemotron-h-tiny", "qwen3.5-tiny", "nano4b", "qwen4b")


def draw_error(lines: list[Line], path: Path) -> None:
    """A column per source of inputs; above the checkpoint's error, below that of outputs."""
    figure, axes = plt.subplots(2, len(SOURCES), figsize=(8.7, 5.2), sharex=True, sharey="row", layout="constrained")
    for column, source in zip(axes.T, SOURCES, strict=True):
        own = {line["format"]: line for line in select(lines, geometry=source)}
        inputs = next(iter(own.values()))["inputs"]
        column[0].set_title(f"{NAMES.get(source, source)}\n{inputs} inputs", fontsize=9)
        for name in (name for name in FORMATS if name in own):
            color, dash = STYLES[name]
            for axis, field in zip(column, ("state_error", "output_error"), strict=True):
                axis.semilogy(own[name]["tokens"], own[name][field], dash, color=color, linewidth=1.2, label=name)
        column[1].set_xlabel("decoded tokens")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_xticks([0, 2000, 4000], ["0", "2,000", "4,000"])
    axes[0, 0].set_ylabel("checkpoint, relative error")
    axes[1, 0].set_ylabel("outputs, relative error")
    # A GDN source has every format.
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes.flat), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save(figure, path)


def draw_accuracy(lines: list[Line], path: Path) -> None:
    """Change against float32 in points with its interval: a panel per model, a row per format, a mark per tier."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    formats = [name for name in FORMATS if any(line["format"] == name for line in lines)]
    tiers = list(dict.fromkeys(line["tier"] for line in lines))
    size = (8.7, 1.2 + 0.5 * len(formats))
    figure, axes = plt.subplots(1, len(models), figsize=size, sharey=True, layout="constrained")
    for axis, model in zip(axes, models, strict=True):
        for index, tier in enumerate(tiers):
            own = {line["format"]: line for line in lines if (line["model"], line["tier"]) == (model, tier)}
            base = own["float32"]["value"]
            found = [(row, own[name]) for row, name in enumerate(formats) if name in own]
            points = [100 * line["difference"] for _, line in found]
            bounds = [[100 * bound for bound in line["difference_interval_95"]] for _, line in found]
            ends = [[p - low for p, (low, _) in zip(points, bounds, strict=True)]]
            ends.append([high - p for p, (_, high) in zip(points, bounds, strict=True)])
            heights = [-row + 0.3 - 0.6 * index / max(len(tiers) - 1, 1) for row, _ in found]
            label = f"{tier} {base:.1%}"
            axis.errorbar(points, heights, xerr=ends, fmt="o", markersize=3, linewidth=1, label=label)
        axis.axvline(0, color="#888888", linewidth=0.8)
        axis.axvspan(-2, 0, color="#888888", alpha=0.12, linewidth=0)
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("change of right answers, points (95 %)", fontsize=8)
        axis.set_yticks([-row for row in range(len(formats))], formats, fontsize=8)
        axis.grid(axis="x", alpha=0.3)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
        axis.legend(fontsize=7.5, ncols=2, frameon=False, title="right with float32", title_fontsize=7.5, **place)
    save(figure, path)


def main(lines: list[Line], docs: Path) -> None:
    draw_error(select(lines, benchmark="state_error"), docs / "state_error.svg")
    draw_accuracy(select(lines, benchmark="format_accuracy"), docs / "format_accuracy.svg")
