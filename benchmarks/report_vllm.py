"""The report's table of whole decode steps beside vLLM's (`e2e_vllm.py`, `e2e_decode_speedup.py`)."""

from __future__ import annotations

from datetime import datetime
from operator import itemgetter

from report_headline import Bar, peer_name
from report_lines import Line, model_of, ratio, select, table


def vllm_table(lines: list[Line]) -> str:
    """Our steps of the same shape, batch and state format, of the same run, beside every variant of vLLM."""
    found = select(lines, benchmark="e2e_decode_speedup")
    rows = []
    for line in sorted(found, key=itemgetter("geometry", "batch", "variant")):
        if not line["variant"].startswith("vllm"):
            continue
        same = {name: line[name] for name in ("geometry", "batch", "window", "state_dtype", "readout_dtype", "layers")}
        ours = [nearest(select(found, **same, variant=variant), line) for variant in ("plain", "replay")]
        theirs = Bar.of(line, peer_name(line), "peer")
        spread = f" ({theirs.low_us / 1e3:.2f} to {theirs.high_us / 1e3:.2f})" if theirs.varies else ""
        rows.append(
            [
                f"{model_of(line)}, batch {line['batch']}",
                line["variant"],
                f"{line['median_us'] / 1e3:.2f}{spread}",
                f"{line['tokens_per_s']:,.0f}",
                *(f"{one['median_us'] / 1e3:.2f}" if one else "" for one in ours),
                f"{ours[1]['tokens_per_s']:,.0f}" if ours[1] else "",
                f"**{ratio(theirs.fastest_us, ours[1]['median_us'])}**" if ours[1] else "",
            ]
        )
    head = ["model", "vLLM", "its step ms", "its tokens/s", "our plain step ms", "our replay step ms"]
    return table([*head, "our replay tokens/s", "over vLLM's fastest"], rows)


def nearest(lines: list[Line], other: Line) -> Line | None:
    """The one measured next to another, which is of its run if there is one."""
    moment = datetime.fromisoformat(other["date"])
    return min(lines, key=lambda line: abs(datetime.fromisoformat(line["date"]) - moment), default=None)


def over_vllm(ours: list[Line]) -> str:
    """Our replay step beside vLLM's of its shape: its fastest variant, and of that the fastest repeat."""
    replay = select(ours, variant="replay")
    theirs = [line for line in ours if line["variant"].startswith("vllm")]
    if not replay or not theirs:
        return ""
    best = min((Bar.of(line, peer_name(line), "peer") for line in theirs), key=lambda bar: bar.fastest_us)
    return f"**{best.fastest_us / replay[0]['median_us']:.2f}x** ({best.who})"
