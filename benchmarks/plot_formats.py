"""Draws the two studies of state formats from their result files, and prints the tables of docs/state_formats.md.

* `python benchmarks/plot_formats.py error RESULTS.jsonl docs/state_error.svg`
* `python benchmarks/plot_formats.py accuracy RESULTS.jsonl... docs/format_accuracy.svg`
* `python benchmarks/plot_formats.py tables RESULTS.jsonl...`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Formats that are drawn, in this order: colour, line.
STYLES = {
    "float16": ("#4477aa", ":"),
    "float16, stochastic": ("#4477aa", "-"),
    "float8": ("#cc6677", ":"),
    "float8, stochastic": ("#cc6677", "-"),
    "nvfp4": ("#999933", ":"),
    "float16, stochastic, float8 readout": ("#44aa99", "-"),
    "float16, stochastic, nvfp4 readout": ("#117733", "-"),
    "float16, stochastic, nvfp4 readout, u from checkpoint": ("#117733", "--"),
    "float8, stochastic, nvfp4 readout": ("#882255", "-"),
    "float8, stochastic, nvfp4 readout, u from checkpoint": ("#882255", "--"),
}


def read(paths: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]


def draw_error(lines: list[dict[str, Any]], output: str) -> None:
    """A column per source of inputs; above the checkpoint's error, below that of outputs."""
    sources = list(dict.fromkeys(line["geometry"] for line in lines))
    figure, axes = plt.subplots(2, len(sources), figsize=(2.6 * len(sources), 5.6), sharex=True, sharey="row")
    for column, source in enumerate(sources):
        own = {line["format"]: line for line in lines if line["geometry"] == source}
        axes[0, column].set_title(f"{source}\n({next(iter(own.values()))['inputs']} inputs)", fontsize=9)
        for name, (colour, dash) in STYLES.items():
            if name not in own:
                continue
            for row, field in enumerate(("state_error", "output_error")):
                style = {"color": colour, "linestyle": dash, "linewidth": 1.2, "label": name}
                axes[row, column].semilogy(own[name]["tokens"], own[name][field], **style)
        axes[1, column].set_xlabel("decoded tokens", fontsize=8)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    axes[0, 0].set_ylabel("checkpoint, relative error", fontsize=8)
    axes[1, 0].set_ylabel("outputs, relative error", fontsize=8)
    # A GDN source has every format.
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes.flat), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(output, metadata={"Date": None})


def draw_accuracy(lines: list[dict[str, Any]], output: str) -> None:
    """Change against float32 in points with its interval: a panel per model, a row per format, a mark per tier."""
    models = list(dict.fromkeys(line["model"] for line in lines))
    formats = [name for name in STYLES if any(line["format"] == name for line in lines)]
    tiers = list(dict.fromkeys(line["tier"] for line in lines))
    size = (4.6 * len(models), 1 + 0.55 * len(formats))
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
            label = f"{tier} ({base:.1%} with float32)"
            axis.errorbar(points, heights, xerr=ends, fmt="o", markersize=3, linewidth=1, label=label)
        axis.axvline(0, color="#888888", linewidth=0.8)
        axis.axvspan(-2, 0, color="#888888", alpha=0.12, linewidth=0)
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("change of exact answers, points (95 %)", fontsize=8)
        axis.set_yticks([-row for row in range(len(formats))], formats, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    figure.savefig(output, metadata={"Date": None})


def tables(lines: list[dict[str, Any]]) -> str:
    """Errors by format and source, then changes of accuracy by format, model and tier, as Markdown."""
    errors = [line for line in lines if line["benchmark"] == "state_error"]
    accuracy = [line for line in lines if line["benchmark"] == "format_accuracy"]
    sources = list(dict.fromkeys(line["geometry"] for line in errors))
    text = [f"| format | {' | '.join(sources)} |", "|---" * (1 + len(sources)) + "|"]
    for name in ("float32", *STYLES):
        own = {line["geometry"]: line for line in errors if line["format"] == name}
        if own:
            cells = [f"{own[s]['state_error'][-1]:.1e} / {own[s]['value']:.1e}" if s in own else "" for s in sources]
            text.append(f"| {name} | {' | '.join(cells)} |")
    columns = list(dict.fromkeys((line["model"], line["tier"]) for line in accuracy))
    bases = {(line["model"], line["tier"]): line for line in accuracy if line["format"] == "float32"}
    titles = [f"{model}, {tier}: {bases[model, tier]['value']:.1%}" for model, tier in columns]
    text += ["", f"| format | {' | '.join(titles)} |", "|---" * (1 + len(columns)) + "|"]
    for name in STYLES:
        own = {(line["model"], line["tier"]): line for line in accuracy if line["format"] == name}
        if own:
            text.append(f"| {name} | {' | '.join(_change(own.get(column)) for column in columns)} |")
    return "\n".join(text)


def _change(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    low, high = (100 * bound for bound in line["difference_interval_95"])
    return f"{100 * line['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def main(arguments: list[str]) -> None:
    if len(arguments) < 2 or arguments[0] not in ("error", "accuracy", "tables"):
        sys.exit(__doc__)
    if arguments[0] == "tables":
        print(tables(read(arguments[1:])))
        return
    matplotlib.rcParams["svg.hashsalt"] = "replayssm"
    draw = draw_error if arguments[0] == "error" else draw_accuracy
    draw(read(arguments[1:-1]), arguments[-1])


if __name__ == "__main__":
    main(sys.argv[1:])
