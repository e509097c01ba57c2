"""The README's plot: measured times beside those of named peers."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from plot_style import save
from report_headline import BATCH, Bar, kernel_bars, step_bars
from report_lines import NAMES, Line

COLORS = {
    "peer": "#9aa5b1",
    "peer replay": "#c4ccd4",
    "plain": "#d5c4a1",
    "replay": "#2f7ed8",
    "low precision": "#0b3d91",
}


def plot_headline(lines: list[Line], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.7, 4.4), layout="constrained")
    draw(left, kernel_bars(lines), 1.0, "{:.0f}")
    left.set_title(f"State kernel of one layer, us, {BATCH} rows", fontsize=9)
    draw(right, step_bars(lines), 1e3, "{:.1f}")
    right.set_title(f"Whole decode step, ms, {BATCH} rows", fontsize=9)
    save(figure, path)


def draw(axis: plt.Axes, models: dict[str, list[Bar]], unit_us: float, number: str) -> None:
    """Bars of each model below its name; ours say how many times as fast as its first they are."""
    place, ticks = 0.0, []
    for bars in models.values():
        ticks.append(place + (len(bars) - 1) / 2)
        for bar in bars:
            axis.barh(place, bar.us / unit_us, 0.85, color=COLORS[bar.kind])
            if bar.varies:
                axis.plot([bar.low_us / unit_us, bar.high_us / unit_us], [place, place], color="black", linewidth=0.8)
            text = f"{number.format(bar.us / unit_us)}  {bar.who}"
            if bar.kind in ("replay", "low precision") and bars[0].kind == "peer":
                text += f", {bars[0].fastest_us / bar.us:.2f}x"
            axis.text(max(bar.us, bar.high_us) / unit_us, place, " " + text, va="center", fontsize=8)
            place += 1
        place += 0.8
    axis.set_yticks(ticks, [NAMES[name].replace("Nemotron-3-", "Nemotron-3\n") for name in models])
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    longest = max((bar.us for bars in models.values() for bar in bars), default=1) / unit_us
    axis.set_xlim(0, 1.75 * longest)  # room for the texts behind the bars
    axis.set_xticks([tick for tick in axis.get_xticks() if tick <= longest])
