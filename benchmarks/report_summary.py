"""What stands first in docs/results.md: one row a model."""

from __future__ import annotations

from report_headline import BATCH, LOW_PRECISION, kernel_bars, peer_name
from report_lines import (
    KERNEL_BENCHMARKS,
    NAMES,
    WINDOW,
    Line,
    decode_lines,
    longest_contexts,
    model_of,
    native_peers,
    select,
    shape_of,
    table,
    usual,
)
from report_vllm import over_vllm

LOW = "float16-nvfp4-stochastic"
"""Of variants: an fp16 checkpoint and a 4-bit copy."""


def kernel_summary(lines: list[Line]) -> str:
    """How many times as fast a layer's replay is as others."""
    rows = []
    for name, bars in kernel_bars(lines).items():
        times = {bar.kind: bar for bar in bars}
        ours = times["replay"]
        others = [times.get(kind) for kind in ("peer", "peer replay")]
        low = times.get("low precision")
        rows.append(
            [
                NAMES[name],
                f"{ours.us:.0f} us",
                *(f"**{bar.fastest_us / ours.us:.2f}x** ({bar.who})" if bar else "" for bar in others),
                f"{times['peer'].fastest_us / low.us:.2f}x" if low and "peer" in times else "",
                over_native(lines, name, {"state_dtype": "float32", "readout_dtype": "same"}),
                over_native(lines, name, LOW_PRECISION),
            ]
        )
    head = ["state kernel", "decode", "over the fastest peer that rewrites fp32", "over the fastest other replay"]
    head += ["fp16 and 4-bit copy, over that peer", f"windows of {WINDOW}, over the fastest that stores every state"]
    return table([*head, "the same, fp16 and 4-bit copy"], rows)


def over_native(lines: list[Line], name: str, formats: dict[str, str]) -> str:
    """Windows of drafts beside the fastest other verification of the same run, which stores all fp32 states."""
    kernels = [line for line in usual(lines) if line["benchmark"] in KERNEL_BENCHMARKS]
    found = select(kernels, geometry=name, batch=BATCH, window=WINDOW, correct=True)
    for ours in select(found, variant="ours", fill="desync", **formats):
        for peer in native_peers(found, ours)[:1]:
            return f"**{peer['median_us'] / ours['median_us']:.1f}x** ({peer_name(peer)})"
    return ""


def step_summary(lines: list[Line]) -> str:
    """How many times as fast whole steps are as others; at another batch than the usual one where that was not run."""
    lines = usual(lines)
    steps = longest_contexts(decode_lines(lines))
    drafts = select(lines, benchmark="e2e_spec_decode_throughput", fill="desync")
    divided = select(lines, benchmark="e2e_tensor_parallel", variant="2 gpus", batch=BATCH)
    rows = []
    for title in dict.fromkeys(model_of(line) for line in [*steps, *drafts] if shape_of(line) in NAMES):
        own, spec, two = ([line for line in each if model_of(line) == title] for each in (steps, drafts, divided))
        # Decoding stands in both benchmarks; that of its own has more steps.
        values = [
            speedup(own, "replay") or speedup(spec, "replay"),
            over_vllm(select(own, batch=BATCH)),
            speedup(own, f"replay-{LOW}") or speedup(spec, f"replay-{LOW}"),
            with_drafts(spec, "speedup_over_snapshots"),
            with_drafts(spec, "speedup"),
            speedup(two, "2 gpus"),
        ]
        if any(values):
            rows.append([title, *values])
    head = ["whole step", "over our plain step", "over vLLM's engine at its fastest"]
    head += ["fp16 and 4-bit copy, over plain fp32"]
    head += [f"4 drafts, over {others} (with that copy)" for others in ("snapshots", "plain")]
    return table([*head, "two GPUs, over one"], rows)


def with_drafts(lines: list[Line], field: str) -> str:
    """Of fp32 states, and behind it of fp16 ones with a 4-bit copy, at the same batch."""
    ours = best_batch(lines, "replay-speculation", field)
    if ours is None:
        return ""
    low = best_batch(select(lines, batch=ours["batch"]), f"replay-speculation-{LOW}", field)
    return speedup([ours], ours["variant"], field) + (f" ({low[field]:.2f}x)" if low else "")


def speedup(lines: list[Line], variant: str, field: str = "speedup") -> str:
    line = best_batch(lines, variant, field)
    if line is None:
        return ""
    return f"**{line[field]:.2f}x**" + ("" if line["batch"] == BATCH else f", batch {line['batch']}")


def best_batch(lines: list[Line], variant: str, field: str) -> Line | None:
    """The line of the usual batch, or else of the largest; None without lines."""
    found = [line for line in select(lines, variant=variant) if line["correct"] and line.get(field)]
    return max(found, key=lambda line: (line["batch"] == BATCH, line["batch"]), default=None)
