"""Draw the losses of the training logs: python -m examples.plot examples/training/loss.png LOG.jsonl ..."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("logs", type=Path, nargs="+")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(args.logs), figsize=(5.5 * len(args.logs), 3.6), sharey=True, squeeze=False)
    for axis, log in zip(axes[0], args.logs, strict=True):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [line["step"] for line in lines]
        axis.plot(steps, [line["loss"] for line in lines], label="next token", linewidth=1.6)
        for depth in range(len(lines[0]["mtp_loss"])):
            values = [line["mtp_loss"][depth] for line in lines]
            axis.plot(steps, values, label=f"MTP depth {depth + 1}", linewidth=0.8, alpha=0.8)
        axis.set(title=log.stem, xlabel="step (73,728 tokens each)", yscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("cross-entropy on answer tokens")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(args.image, dpi=110)


if __name__ == "__main__":
    main()
