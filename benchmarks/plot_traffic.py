"""Draws the traffic model of the four published models: `python benchmarks/plot_traffic.py docs/traffic.svg`.

A model of bytes, not a measurement: what the recurrent layers must at least move per generated token.
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from replayssm.builders.config import PUBLISHED, published
from replayssm.builders.inspection import geometries
from replayssm.plugins.contract import ReplaySettings
from replayssm.plugins.traffic import traffic_per_token

MODELS = ("nano4b", "super120b", "qwen4b", "qwen122b")
BUFFER_LEN, DRAFT_LEN, ACCEPTANCE_LENGTH = 16, 4, 3.0
MIB = 2**20


def bars(name: str) -> dict[str, float]:
    """MiB per token of one model, by way of decoding."""
    stateful = geometries(published(name))
    replay, readout = (
        traffic_per_token(
            stateful,
            ReplaySettings(BUFFER_LEN, 1 + DRAFT_LEN, readout_dtype=dtype),
            DRAFT_LEN,
            ACCEPTANCE_LENGTH,
        )
        for dtype in ("same", "nvfp4")
    )
    moved = {
        "state rewritten every token": replay.plain,
        "replay": replay.replay,
        "replay, nvfp4 readout": readout.replay,
        "drafts, state snapshots": replay.snapshot_speculation,
        "drafts, replay": replay.replay_speculation,
        "drafts, replay, nvfp4 readout": readout.replay_speculation,
    }
    return {label: value / MIB for label, value in moved.items()}


def main(path: str) -> None:
    plt.rcParams.update({"svg.hashsalt": "replayssm", "font.size": 9})
    colors = ("#9aa5b1", "#2f7ed8", "#0b3d91", "#d5c4a1", "#f0a202", "#b35c00")
    figure, axes = plt.subplots(1, len(MODELS), figsize=(11, 3.2), layout="constrained")
    for axis, name in zip(axes, MODELS, strict=True):
        values = bars(name)
        positions = [0, 1, 2, 3.6, 4.6, 5.6]
        drawn = axis.bar(positions, list(values.values()), color=colors, label=list(values))
        axis.bar_label(drawn, fmt="%.0f", padding=1, fontsize=8)
        axis.set_title(PUBLISHED[name].split("/")[-1].removeprefix("NVIDIA-").removesuffix("-BF16"), fontsize=9)
        axis.set_xticks([1, 4.6], ["decode", "speculation"])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MiB of state per token")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
