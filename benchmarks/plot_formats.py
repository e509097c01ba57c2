"""Plots and tables of the two studies of state formats; `benchmarks/report.py` calls this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PROBLEMS = 1024
TIERS = ("easy", "long", "track", "gsm", "recall", "tangle")

# Formats that are drawn, in this order: colour, line.
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
    "float16, stochastic, nvfp4 readout, u from checkpoint": ("#117733", "--"),
    "float8, stochastic, nvfp4 readout": ("#882255", "-"),
    "float8, stochastic, nvfp4 readout, u from checkpoint": ("#882255", "--"),
    "float32, nvfp4 readout": ("#000000", ":"),
}


def draw_error(lines: list[dict[str, Any]], output: Path) -> None:
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


def draw_accuracy(lines: list[dict[str, Any]], output: Path) -> None:
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
            label = f"{tier} {base:.1%}"
            axis.errorbar(points, heights, xerr=ends, fmt="o", markersize=3, linewidth=1, label=label)
        axis.axvline(0, color="#888888", linewidth=0.8)
        axis.axvspan(-2, 0, color="#888888", alpha=0.12, linewidth=0)
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("change of exact answers, points (95 %)", fontsize=8)
        axis.set_yticks([-row for row in range(len(formats))], formats, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(axis="x", alpha=0.3)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
        axis.legend(fontsize=7, ncols=3, frameon=False, title="right with float32", title_fontsize=7, **place)
    figure.savefig(output, metadata={"Date": None})


def error_table(lines: list[dict[str, Any]]) -> str:
    """Errors of state and outputs by format and source, as Markdown."""
    errors = [line for line in lines if line["benchmark"] == "state_error"]
    sources = list(dict.fromkeys(line["geometry"] for line in errors))
    text = [f"| format | {' | '.join(sources)} |", "|---" * (1 + len(sources)) + "|"]
    for name in ("float32", *STYLES):
        own = {line["geometry"]: line for line in errors if line["format"] == name}
        if own:
            cells = [f"{own[s]['state_error'][-1]:.1e} / {own[s]['value']:.1e}" if s in own else "" for s in sources]
            text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def accuracy_table(lines: list[dict[str, Any]]) -> str:
    """Change of right answers as Markdown: a table for each model, of formats by tiers."""
    text = []
    for model in sorted({line["model"] for line in lines}):
        own = [line for line in lines if line["model"] == model]
        tiers = [tier for tier in TIERS if any(line["tier"] == tier for line in own)]
        bases = {line["tier"]: line["value"] for line in own if line["format"] == "float32"}
        titles = [f"{tier}: {bases[tier]:.1%}" for tier in tiers]
        text += [f"| {model} | {' | '.join(titles)} |", "|---" * (1 + len(tiers)) + "|"]
        for name in STYLES:
            found = {line["tier"]: line for line in own if line["format"] == name}
            if found:
                simulated = " (simulated)" if all("simulated" in line["variant"] for line in found.values()) else ""
                cells = [_change(found[tier], not simulated) if tier in found else "" for tier in tiers]
                text.append(f"| {name}{simulated} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _change(line: dict[str, Any], marked: bool) -> str:
    """marked: say of a simulated line that it is one. Numbers of problems stand where they are not the usual one."""
    low, high = (100 * bound for bound in line["difference_interval_95"])
    simulated = ", simulated" if marked and "simulated" in line["variant"] else ""
    problems = "" if line["count"] == PROBLEMS else f"; {line['count']:,} problems"
    return f"{100 * line['difference']:+.1f} ({low:+.1f} to {high:+.1f}{simulated}{problems})"


def main(lines: list[dict[str, Any]], docs: Path) -> None:
    """Draw both studies and write their tables into docs/state_formats.md."""
    matplotlib.rcParams["svg.hashsalt"] = "replayssm"
    errors = [line for line in lines if line["benchmark"] == "state_error"]
    accuracy = [line for line in lines if line["benchmark"] == "format_accuracy"]
    draw_error(errors, docs / "state_error.svg")
    draw_accuracy(accuracy, docs / "format_accuracy.svg")
    page = docs / "state_formats.md"
    text = page.read_text(encoding="utf-8")
    for name, table in (("accuracy", accuracy_table(accuracy)), ("errors", error_table(errors))):
        begin, end = f"<!-- {name} begins -->\n", f"<!-- {name} ends -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page} must hold the marks {begin.strip()!r} and {end.strip()!r} once")
        before, rest = text.split(begin)
        text = before + begin + "\n" + table + "\n" + end + rest.split(end)[1]
    page.write_text(text, encoding="utf-8")
