"""Plot of the traffic model of the four published models.

A model of bytes, not a measurement: what the recurrent layers must at least move per generated token.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from plot_style import save
from report_lines import NAMES
from report_memory import traffic

COLORS = ("#9aa5b1", "#2f7ed8", "#0b3d91", "#d5c4a1", "#f0a202", "#b35c00")


def plot_traffic(path: Path) -> None:
    figure, axes = plt.subplots(1, len(NAMES), figsize=(8.7, 3.0), layout="constrained")
    for axis, (name, title) in zip(axes, NAMES.items(), strict=True):
        values = traffic(name)
        drawn = axis.bar([0, 1, 2, 3.6, 4.6, 5.6], list(values.values()), color=COLORS, label=list(values))
        axis.bar_label(drawn, fmt="%.0f", padding=1, fontsize=8)
        axis.margins(y=0.09)
        axis.set_title(title, fontsize=9)
        axis.set_xticks([1, 4.6], ["decode", "speculation"])
    axes[0].set_ylabel("MiB of state per token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)
