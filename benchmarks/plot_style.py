"""What all plots share."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

# A fixed salt: the same figures give the same file.
plt.rcParams.update({"svg.hashsalt": "replayssm", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
COLORS = {"nano4b": "#2f7ed8", "super120b": "#0b3d91", "qwen4b": "#f0a202", "qwen122b": "#b35c00"}


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
