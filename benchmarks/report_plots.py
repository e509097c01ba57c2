"""Plots of docs/results.md."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLORS = {"nano4b": "#2f7ed8", "qwen4b": "#f0a202", "super120b": "#0b3d91", "qwen122b": "#b35c00"}
KINDS = {
    "ssm": "#2f7ed8",
    "conv": "#7fb2e5",
    "attention": "#f0a202",
    "matmul": "#9aa5b1",
    "elementwise": "#d5c4a1",
    "other": "#b35c00",
}
STYLE = {"svg.hashsalt": "replayssm", "font.size": 9}


def plot_batches(lines: list[dict], published: dict, names: dict[str, str], path: Path) -> None:
    """Speedup of a whole step by batch size, measured and published."""
    plt.rcParams.update(STYLE)
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for name in ("nano4b", "qwen4b"):
        points = sorted((x["batch"], x) for x in lines if x["geometry"] == name and x["variant"] == "replay")
        if points:
            batches, ours = [batch for batch, _ in points], [line for _, line in points]
            middle = [line["speedup"] for line in ours]
            below = [max(0.0, line["speedup"] - line["speedup_p10"]) for line in ours]
            above = [max(0.0, line["speedup_p90"] - line["speedup"]) for line in ours]
            label = f"{names[name]}, ours, one H200"
            axis.errorbar(batches, middle, [below, above], marker="o", capsize=2, color=COLORS[name], label=label)
        known = published[name]
        label = f"{names[name]}, published, one H100"
        axis.plot(list(known), list(known.values()), "x--", color=COLORS[name], alpha=0.6, label=label)
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 32, 128, 256, 512], ["1", "32", "128", "256", "512"])
    axis.set_xlabel("batch")
    axis.set_ylabel("speedup of a decode step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_run(lines: list[dict], path: Path) -> None:
    """One run of an end-to-end script: tokens per second of every variant, and where its step goes if that is known."""
    plt.rcParams.update(STYLE)
    size = (9.0, 1.2 + 0.4 * len(lines))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    places = range(len(lines))
    labels = [f"{x['geometry']}, batch {x['batch']}\n{x['variant']}" for x in lines]
    bars = left.barh(places, [x["tokens_per_s"] for x in lines], color="#2f7ed8")
    left.bar_label(bars, [f" {x['tokens_per_s']:,.0f} ({x['speedup']:.2f}x)" for x in lines], fontsize=8)
    left.margins(x=0.35)
    left.set_xlabel("tokens per second")
    left.set_yticks(places, labels)
    left.invert_yaxis()
    for place, line in enumerate(lines):
        start = 0.0
        for kind, color in KINDS.items():
            width = line.get("split_us", {}).get(kind, 0.0) / 1e3
            right.barh(place, width, left=start, color=color, label=kind if place == 0 else None)
            start += width
    right.set_xlabel("ms per step, kernels")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=len(KINDS), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_split(lines: list[dict], names: dict[str, str], path: Path) -> None:
    """Where the time of a step goes at batch 256, and the roofline of its matrix products."""
    plt.rcParams.update(STYLE)
    shown = [x for x in lines if x["batch"] == 256 and "split_us" in x]
    figure, axis = plt.subplots(figsize=(6.8, 0.8 + 0.42 * max(1, len(shown))), layout="constrained")
    for place, line in enumerate(shown):
        left = 0.0
        for kind, color in KINDS.items():
            width = line["split_us"].get(kind, 0.0) / 1e3
            axis.barh(place, width, left=left, color=color, label=kind if place == 0 else None)
            if kind == "matmul":
                bound = left + max(line["weights_once_us"], line["products_us"]) / 1e3
                axis.plot([bound, bound], [place - 0.4, place + 0.4], color="black", linewidth=1)
            left += width
        axis.text(left + 0.1, place, f"{line['median_us'] / 1e3:.1f} ms", va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), [step_label(line, names) for line in shown])
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.set_xlabel("ms of kernels, batch 256; mark: roofline of the products")
    axis.spines[["top", "right"]].set_visible(False)
    if shown:
        figure.legend(loc="outside upper center", ncols=len(KINDS), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def step_label(line: dict, names: dict[str, str]) -> str:
    """Model and variant in few words: "Qwen3.5-4B FP8, replay, float16 + nvfp4"."""
    shape, _, weights = line["geometry"].partition("-")
    variant, *formats = line["variant"].split("-")
    state = f", {' + '.join(formats[:2])}" if formats else ""
    return f"{names.get(shape, line['geometry'])}{' ' + weights.upper() if weights else ''}, {variant}{state}"
