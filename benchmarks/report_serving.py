"""The table of serving with prompt-lookup drafts in docs/results.md, from the lines of `serve_ngram.py`."""

from __future__ import annotations

from report_lines import Line, model_of, select, table


def serving_table(lines: list[Line]) -> str:
    rows = [
        [
            f"{model_of(line)}, batch {line['batch']}",
            line["variant"],
            f"{line['tokens_per_s']:,.0f}",
            over_plain(line),
            "" if line["speedup_over_snapshots"] is None else f"{line['speedup_over_snapshots']:.2f}x",
            f"{line['acceptance_length']:.2f}",
            *device_shares(line),
            f"{100 * line['same_tokens']:.0f} %" if line["correct"] else f"**{100 * line['same_tokens']:.0f} %**",
        ]
        for line in select(lines, benchmark="serve_ngram", op="serve")
    ]
    head = ["model", "variant", "tokens/s", "over plain", "over snapshots", "tokens a row and step"]
    return table([*head, "device at prompts", "copies or idle", "like the first's text up to"], rows)


def over_plain(line: Line) -> str:
    """Nothing where the run had no plain variant, and the line is its own measure."""
    return "" if line["speedup"] == 1.0 and line["variant"] != "plain" else f"{line['speedup']:.2f}x"


def device_shares(line: Line) -> list[str]:
    """Of the elapsed time: the device at captured prompt steps, and at none (snapshots are copied outside of them)."""
    if "device_decode_share" not in line:
        return ["", ""]
    prompts = line.get("device_prompt_share", 0.0)
    return [f"{100 * prompts:.0f} %", f"{max(0.0, 100 * (1 - prompts - line['device_decode_share'])):.0f} %"]
