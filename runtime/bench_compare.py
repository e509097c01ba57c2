"""Two benchmark reports side by side, ours or trtllm-bench's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLOT_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Figure:
    """A line of the comparison. `more_is_better` None: a setting or a property of the data, not a result."""

    group: str
    key: str
    label: str
    more_is_better: bool | None = None
    percentile: str | None = None


FIGURES = (
    Figure("request_info", "num_requests", "requests"),
    Figure("request_info", "avg_input_length", "input tokens, mean"),
    Figure("request_info", "avg_output_length", "output tokens, mean"),
    Figure("request_info", "avg_num_concurrent_requests", "concurrent requests"),
    Figure("world_info", "max_batch_size", "batch size"),
    Figure("performance", "request_throughput_req_s", "requests/s", True),
    Figure("performance", "system_output_throughput_tok_s", "output tokens/s", True),
    Figure("performance", "system_total_throughput_tok_s", "all tokens/s", True),
    Figure("performance", "output_throughput_per_user_tok_s", "output tokens/s per user", True),
    Figure("performance", "avg_request_latency_ms", "request latency, mean ms", False),
    Figure("performance", "request_latency_percentiles_ms", "request latency, p99 ms", False, "p99"),
    Figure("streaming_metrics", "avg_ttft_ms", "time to first token, mean ms", False),
    Figure("streaming_metrics", "ttft_percentiles", "time to first token, p99 ms", False, "p99"),
    Figure("streaming_metrics", "avg_tpot_ms", "time per output token, mean ms", False),
    Figure("decoding_stats", "acceptance_length_percentiles", "acceptance length, mean", True, "average"),
)


@dataclass(frozen=True)
class Line:
    """A figure of both reports. ratio: second over first; better: whether the second is, None where neither."""

    label: str
    first: float
    second: float
    ratio: float | None
    better: bool | None


def read_report(path: Path) -> dict[str, Any]:
    """A report. Raises ValueError for a file that is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): expected what --report-json wrote") from error
    if not isinstance(report, dict) or not isinstance(report.get("performance"), dict):
        raise ValueError(f"{path} has no group 'performance': expected what --report-json wrote")
    return report


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    """The figures that both reports have."""
    lines = []
    for figure in FIGURES:
        a, b = _value(first, figure), _value(second, figure)
        if a is None or b is None:
            continue
        ratio = b / a if a else None
        better = None if figure.more_is_better is None or a == b else (b > a) == figure.more_is_better
        lines.append(Line(figure.label, a, b, ratio, better))
    return lines


def _value(report: dict[str, Any], figure: Figure) -> float | None:
    value = (report.get(figure.group) or {}).get(figure.key)
    if figure.percentile is not None and isinstance(value, dict):
        value = value.get(figure.percentile)
    return value if isinstance(value, (int, float)) else None


def plot(lines: list[Line], names: tuple[str, str], path: Path) -> None:
    """Ratios as bars, written to `path` (svg, png or pdf). Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line.better is not None and line.ratio is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.35 * len(shown)))
    colors = ["#2a7f62" if line.better else "#b5483a" for line in shown]
    bars = axes.barh([line.label for line in shown], [line.ratio for line in shown], color=colors, height=0.6)
    axes.bar_label(bars, [f"{line.ratio:.2f}" for line in shown], padding=3, fontsize=8)
    axes.margins(x=0.12)
    axes.axvline(1.0, color="#444444", linewidth=0.8)
    axes.set_xlabel(f"{names[1]} / {names[0]}  (green: better)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
