"""The report's table of whole decode steps beside vLLM's (`e2e_vllm.py`, `e2e_decode_speedup.py`)."""

from __future__ import annotations

from report import Line, model_of, ratio, select, table


def vllm_table(lines: list[Line]) -> str:
    """Our newest steps of the same shape, batch and state format beside every variant of vLLM."""
    found = select(lines, benchmark="e2e_decode_speedup")
    rows = []
    for line in sorted(found, key=lambda line: (line["geometry"], line["batch"], line["variant"])):
        if not line["variant"].startswith("vllm"):
            continue
        same = {name: line[name] for name in ("geometry", "batch", "window", "state_dtype", "readout_dtype", "layers")}
        ours = [newest(select(found, **same, variant=variant)) for variant in ("plain", "replay")]
        rows.append(
            [
                f"{model_of(line)}, batch {line['batch']}",
                line["variant"],
                f"{line['median_us'] / 1e3:.2f}",
                f"{line['tokens_per_s']:,.0f}",
                *(f"{one['median_us'] / 1e3:.2f}" if one else "" for one in ours),
                f"{ours[1]['tokens_per_s']:,.0f}" if ours[1] else "",
                f"**{ratio(ours[1]['tokens_per_s'], line['tokens_per_s'])}**" if ours[1] else "",
            ]
        )
    head = ["model", "vLLM", "its step ms", "its tokens/s", "our plain step ms", "our replay step ms"]
    return table([*head, "our replay tokens/s", "over vLLM's"], rows)


def newest(lines: list[Line]) -> Line | None:
    return max(lines, key=lambda line: line["date"], default=None)
