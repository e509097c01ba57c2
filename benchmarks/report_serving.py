"""The table of serving with prompt-lookup drafts in docs/results.md, from the lines of `serve_ngram.py`."""

from __future__ import annotations

from report import Line, model_of, select, table


def serving_table(lines: list[Line]) -> str:
    rows = [
        [
            f"{model_of(line)}, batch {line['batch']}",
            line["variant"],
            f"{line['tokens_per_s']:,.0f}",
            over_plain(line),
            "" if line["speedup_over_snapshots"] is None else f"{line['speedup_over_snapshots']:.2f}x",
            f"{line['acceptance_length']:.2f}",
            f"{100 * line['mixed_steps'] / line['steps']:.0f} %",
            idle_share(line),
            f"{100 * line['same_tokens']:.0f} %" if line["correct"] else f"**{100 * line['same_tokens']:.0f} %**",
        ]
        for line in select(lines, benchmark="serve_ngram", op="serve")
    ]
    head = ["model", "variant", "tokens/s", "over plain", "over snapshots", "tokens a row and step"]
    return table([*head, "steps with prompts", "idle in the others", "like plain's text up to"], rows)


def over_plain(line: Line) -> str:
    """Nothing where the run had no plain variant, and the line is its own measure."""
    return "" if line["speedup"] == 1.0 and line["variant"] != "plain" else f"{line['speedup']:.2f}x"


def idle_share(line: Line) -> str:
    """Of the profiled steps, which have no prompts."""
    busy = sum(line.get("split_us", {}).values())
    return f"{100 * line['idle_us'] / (line['idle_us'] + busy):.0f} %" if busy else ""
