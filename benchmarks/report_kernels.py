"""The report's tables of single kernels: the state's (`bench_*_window.py`), and products with packed weights."""

from __future__ import annotations

from operator import itemgetter

from report_lines import BUFFER_LEN, NAMES, WINDOW, Line, best_of, ratio, select, share_of, table

PRODUCT_PEERS = {
    "ours_fp8": "activations in FP8",
    "dequantize": "dequantized, cuBLAS",
    "cublas": "bf16 weights, cuBLAS",
    "dequantized_grouped_mm": "dequantized, torch._grouped_mm",
    "grouped_mm": "bf16 experts, torch._grouped_mm",
}


KERNELS = (("mamba2", "nano4b"), ("mamba2", "super120b"), ("gdn", "qwen4b"), ("gdn", "qwen122b"))
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
    form = ours["state_dtype"] + (f" and {ours['readout_dtype']} readout" if has_copy else "")
    length = "" if ours["L"] == BUFFER_LEN else f", L = {ours['L']}"
    return [
        f"{NAMES[ours['geometry']]}, {form}{length}",
        "decode" if ours["window"] == 1 else f"verify {ours['window']}",
        f"{ours['median_us']:.0f}",
        share_of(ours["gb_s"], ours["ceiling_gb_s"]),
        f"{least:.0f}",
        ratio(least, ours["median_us"]),
        f"{plain['median_us']:.0f}",
        best_of(select(beside, op="peer")),
        best_of(select(beside, op="replay_peer", fill="desync")),
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
