"""Writes docs/results.md, the tables of docs/state_formats.md and all plots: `python benchmarks/report.py`.

Every figure of ours in the page comes from a result line; the newest line of a condition counts. Published figures are
those of the ReplaySSM experiments that this project repeats.
"""

from __future__ import annotations

import sys
from pathlib import Path

from report_formats import precision_table, write_tables
from report_kernels import kernel_table, native_table, product_table
from report_lines import KERNEL_BENCHMARKS, RESULTS, Line, decode_lines, longest_contexts, read_lines, table
from report_memory import sessions_table, traffic_table
from report_parallel import parallel_table
from report_serving import serving_table
from report_speculation import natural_table, speculation_table
from report_steps import batch_table, split_table, step_table
from report_summary import kernel_summary, step_summary
from report_vllm import vllm_table

TEXT = Path(__file__).parent / "report.md"
DOCS = Path(__file__).parents[1] / "docs"


def provenance(lines: list[Line]) -> str:
    rows = {}
    for line in lines:
        if line["benchmark"].startswith("e2e_") or line["benchmark"] in ("weight_only", *KERNEL_BENCHMARKS):
            rows.setdefault((line["benchmark"], line["gpu"], line["commit"]), []).append(line["date"][:16])
    return table(
        ["benchmark", "GPU", "commit", "lines", "newest"],
        [[*key, len(dates), max(dates)] for key, dates in sorted(rows.items())],
    )


def render(lines: list[Line], text: Path = TEXT) -> str:
    """The page: its text with a table in the place of every mark."""
    page = text.read_text(encoding="utf-8")
    parts = {
        "kernel summary": kernel_summary(lines),
        "step summary": step_summary(lines),
        "kernels": kernel_table(lines),
        "native": native_table(lines),
        "steps": step_table(lines),
        "batches": batch_table(lines),
        "split": split_table(lines),
        "vllm": vllm_table(lines),
        "parallel": parallel_table(lines),
        "speculation": speculation_table(lines),
        "natural": natural_table(lines),
        "serving": serving_table(lines),
        "products": product_table(lines),
        "sessions": sessions_table(),
        "traffic": traffic_table(),
        "precision": precision_table(lines),
        "provenance": provenance(lines),
    }
    for name, part in parts.items():
        mark = f"<!-- {name} -->\n"
        if page.count(mark) != 1:
            raise ValueError(f"{text} must hold the mark {mark.strip()!r} once")
        page = page.replace(mark, part)
    return page


def main(results: Path = RESULTS, docs: Path = DOCS) -> None:
    # Here, because the page itself needs no matplotlib.
    import plot_formats
    from plot_headline import plot_headline
    from plot_kernels import plot_kernels
    from plot_steps import plot_batches, plot_split
    from plot_traffic import plot_traffic

    lines = read_lines(results)
    whole = [line for line in decode_lines(lines) if line["layers"] == line["layers_total"]]
    plot_headline(lines, docs / "headline.svg")
    plot_batches(longest_contexts(whole), docs / "decode_speedup.svg")
    plot_split(longest_contexts(line for line in whole if "split_us" in line), docs / "decode_split.svg")
    plot_kernels(lines, docs / "kernels.svg")
    plot_traffic(docs / "traffic.svg")
    plot_formats.main(lines, docs)
    write_tables(lines, docs / "state_formats.md")
    (docs / "results.md").write_text(render(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
