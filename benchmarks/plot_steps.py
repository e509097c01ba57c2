"""Plots of whole steps."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

from matplotlib import pyplot as plt
from plot_style import COLORS, save
from report_lines import NAMES, Line, select, shape_of
from report_steps import PUBLISHED_STEPS

KINDS = {
    "ssm": ("state kernels", "#2f7ed8"),
    "conv": ("convolution", "#7fb2e5"),
    "attention": ("attention", "#f0a202"),
    "matmul": ("products", "#9aa5b1"),
    "elementwise": ("elementwise", "#d5c4a1"),
    "other": ("other", "#b35c00"),
}


def plot_batches(lines: list[Line], path: Path) -> None:
    """Speedup of a whole step by batch size, measured and published."""
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for name in ("nano4b", "qwen4b"):
        ours = sorted(select(lines, geometry=name, variant="replay"), key=itemgetter("batch"))
        if ours:
            middle = [line["speedup"] for line in ours]
            below = [max(0.0, line["speedup"] - line["speedup_p10"]) for line in ours]
            above = [max(0.0, line["speedup_p90"] - line["speedup"]) for line in ours]
            style = {"marker": "o", "capsize": 2, "color": COLORS[name], "label": f"{NAMES[name]}, ours, one H200"}
            axis.errorbar([line["batch"] for line in ours], middle, [below, above], **style)
        known = PUBLISHED_STEPS[name]
        label = f"{NAMES[name]}, published, one H100"
        axis.plot(list(known), list(known.values()), "x--", color=COLORS[name], alpha=0.6, label=label)
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 32, 128, 256, 512], ["1", "32", "128", "256", "512"])
    axis.set_xlabel("batch")
    axis.set_ylabel("plain step time over replay's")
    axis.legend(frameon=False)
    save(figure, path)


def plot_run(lines: list[Line], path: Path) -> None:
    """One run of an end-to-end script: tokens per second of every variant, and where its step goes if that is known."""
    size = (9.0, 1.2 + 0.4 * len(lines))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    places = range(len(lines))
    labels = [f"{line['geometry']}, batch {line['batch']}\n{line['variant']}" for line in lines]
    bars = left.barh(places, [line["tokens_per_s"] for line in lines], color="#2f7ed8")
    left.bar_label(bars, [f" {line['tokens_per_s']:,.0f} ({line['speedup']:.2f}x)" for line in lines], fontsize=8)
    left.margins(x=0.35)
    left.set_xlabel("tokens per second")
    left.set_yticks(places, labels)
    left.invert_yaxis()
    for place, line in enumerate(lines):
        draw_split(right, place, line)
    right.set_xlabel("ms per step, kernels")
    figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=len(KINDS), frameon=False)
    save(figure, path)


def plot_split(lines: list[Line], path: Path) -> None:
    """Where the time of a step goes at batch 256, and the roofline of its matrix products."""
    shown = [line for line in select(lines, batch=256) if "split_us" in line]
    figure, axis = plt.subplots(figsize=(6.8, 0.8 + 0.42 * max(1, len(shown))), layout="constrained")
    for place, line in enumerate(shown):
        starts = draw_split(axis, place, line)
        bound = starts["matmul"] + max(line["weights_once_us"], line["products_us"]) / 1e3
        axis.plot([bound, bound], [place - 0.4, place + 0.4], color="black", linewidth=1)
        axis.text(starts["end"] + 0.1, place, f"{line['median_us'] / 1e3:.1f} ms", va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), [step_label(line) for line in shown])
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.set_xlabel("ms of kernels, batch 256; mark: roofline of the products")
    if shown:
        figure.legend(loc="outside upper center", ncols=len(KINDS), frameon=False)
    save(figure, path)


def draw_split(axis: plt.Axes, place: int, line: Line) -> dict[str, float]:
    """A bar of the kinds of kernels at `place`; returns where each begins, and the bar's end, in ms."""
    starts, start = {}, 0.0
    for kind, (label, color) in KINDS.items():
        starts[kind] = start
        width = line.get("split_us", {}).get(kind, 0.0) / 1e3
        axis.barh(place, width, left=start, color=color, label=label if place == 0 else None)
        start += width
    return {**starts, "end": start}


def step_label(line: Line) -> str:
    """Model and variant in few words: "Qwen3.5-4B FP8, replay, float16 + nvfp4"."""
    weights = line["geometry"].partition("-")[2]
    variant, *formats = line["variant"].split("-")
    state = f", {' + '.join(formats[:2])}" if formats else ""
    name = NAMES.get(shape_of(line), line["geometry"])
    return f"{name}{' ' + weights.upper() if weights else ''}, {variant}{state}"
