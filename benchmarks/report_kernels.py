"""The report's tables of single kernels: the state's (`bench_*_window.py`), and products with packed weights."""

from __future__ import annotations

from operator import itemgetter

from report_headline import peer_name
from report_lines import (
    BUFFER_LEN,
    NAMES,
    WINDOW,
    Line,
    best_of,
    native_peers,
    ratio,
    select,
    share_of,
    table,
    usual,
)

PRODUCT_PEERS = {
    "ours_fp8": "activations in FP8",
    "dequantize": "dequantized, cuBLAS",
    "cublas": "bf16 weights, cuBLAS",
    "dequantized_grouped_mm": "dequantized, torch._grouped_mm",
    "grouped_mm": "bf16 experts, torch._grouped_mm",
}


KERNELS = (("mamba2", "nano4b"), ("mamba2", "super120b"), ("gdn", "qwen4b"), ("gdn", "qwen122b"))
STILL = 8
"""Tokens of history behind which no row of a window flushes."""
FORMATS = (("float32", "same"), ("float16", "same"), ("float16", "nvfp4"))


def kernel_table(lines: list[Line]) -> str:
    """Decode and verify of one layer at batch 256, beside the least time that rewriting the state can take."""
    rows = []
    for op, name in KERNELS:
        found = select(lines, benchmark=f"{op}_window", geometry=name, batch=256, correct=True)
        for state, readout in FORMATS:
            for window in (1, WINDOW):
                same = {"window": window, "state_dtype": state, "readout_dtype": readout}
                ours = select(found, variant="ours", fill="desync", **same)
                # Others have no copy of the state that outputs read: beside ours stand those with fp32.
                other = state if readout == "same" else "float32"
                beside = select(found, window=window, state_dtype=other, readout_dtype="same")
                rows += [kernel_row(one, beside) for one in sorted(ours, key=itemgetter("L"))]
    head = ["layer", "step", "replay us", "of the read ceiling", "rewriting at the ceiling us", "over that"]
    head += ["our plain kernel us", "best peer us", "best peer with replay us"]
    return table(head, [row for row in rows if row])


def kernel_row(ours: Line, beside: list[Line]) -> list[str]:
    """One of our lines among others of its step; nothing where its run had no plain kernel or no ceiling."""
    has_copy = ours["readout_dtype"] != "same"
    plain = next(iter(select(beside, variant="plain")), None)
    ceiling = (plain if has_copy else ours) or {}
    if plain is None or not ceiling.get("rmw_ceiling_gb_s"):
        return []
    least = plain["bytes"] / ceiling["rmw_ceiling_gb_s"] / 1e3
    length = "" if ours["L"] == BUFFER_LEN else f", L = {ours['L']}"
    return [
        layer_and_formats(ours) + length,
        "decode" if ours["window"] == 1 else f"verify {ours['window']}",
        f"{ours['median_us']:.0f}",
        share_of(ours["gb_s"], ours["ceiling_gb_s"]),
        f"{least:.0f}",
        ratio(least, ours["median_us"]),
        f"{plain['median_us']:.0f}",
        best_of(select(beside, op="peer")),
        best_of(select(beside, op="replay_peer", fill="desync")),
    ]


def layer_and_formats(line: Line) -> str:
    readout = "" if line["readout_dtype"] == "same" else f" and {line['readout_dtype']} readout"
    return f"{NAMES[line['geometry']]}, {line['state_dtype']}{readout}"


def native_table(lines: list[Line]) -> str:
    """Windows of drafts beside other projects' verification, which stores the fp32 state after each token."""
    rows = []
    for op, name in KERNELS:
        found = select(usual(lines), benchmark=f"{op}_window", geometry=name, batch=256, window=WINDOW, correct=True)
        for state, readout in FORMATS:
            for ours in select(found, variant="ours", fill="desync", state_dtype=state, readout_dtype=readout):
                peers = native_peers(found, ours)
                if peers:
                    formats = {"state_dtype": state, "readout_dtype": readout, "date": ours["date"]}
                    still = select(found, variant="ours", fill=STILL, **formats)
                    rows.append(native_row(ours, still, peers))
    head = ["layer", "replay, 3 of 5 accepted, us", "without a flush us", "fastest native us", "over it"]
    return table([*head, "without a flush", "native ones as their projects launch them, us"], rows)


def native_row(ours: Line, still: list[Line], peers: list[Line]) -> list[str]:
    """still: our line of the same run whose rows do not flush, if it was measured. peers: the fastest first."""
    best, launched = peers[0], {}
    for line in select(peers, is_own_choice=True):
        launched.setdefault(peer_name(line), line["median_us"])
    return [
        layer_and_formats(ours),
        f"{ours['median_us']:.1f}",
        f"{still[0]['median_us']:.1f}" if still else "",
        f"{best['median_us']:.0f} ({best['variant']})",
        f"**{ratio(best['median_us'], ours['median_us'])}**",
        f"**{ratio(best['median_us'], still[0]['median_us'])}**" if still else "",
        ", ".join(f"{us:.0f} ({name})" for name, us in launched.items()),
    ]


def product_table(lines: list[Line]) -> str:
    """Ours of each condition beside what else multiplies the same."""
    rows = []
    order = lambda line: (line["op"], NAMES.get(line["geometry"], line["geometry"]), line["batch"])  # noqa: E731
    for line in sorted(select(lines, benchmark="weight_only", variant="ours"), key=order):
        same = {name: line[name] for name in ("benchmark", "op", "geometry", "batch")}
        others = [select(lines, **same, variant=variant) for variant in PRODUCT_PEERS]
        rows.append(
            [
                f"{NAMES.get(line['geometry'], line['geometry'])}, {line['format']}, {line['batch']} tokens",
                f"{line['median_us']:.0f}",
                f"{100 * line['gb_s'] / line['ceiling_gb_s']:.0f} %",
                f"{line['tflop_s']:.0f} ({100 * line['tflop_s'] / line['ceiling_tflop_s']:.0f} %)",
                *(f"{found[0]['median_us']:.0f}" if found else "" for found in others),
            ]
        )
    head = ["product", "us", "of reading the packed weights once", "TFLOP/s (of a large bf16 product's)"]
    return table([*head, *(f"{name}, us" for name in PRODUCT_PEERS.values())], rows)
