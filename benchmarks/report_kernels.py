"""The report's tables of single kernels: the state's (`bench_*_window.py`), and products with packed weights."""

from __future__ import annotations

from report_lines import NAMES, WINDOW, Line, best_of, ratio, select, share_of, table

PRODUCT_PEERS = {
    "dequantize": "dequantized, cuBLAS",
    "cublas": "bf16 weights, cuBLAS",
    "dequantized_grouped_mm": "dequantized, torch._grouped_mm",
    "grouped_mm": "bf16 experts, torch._grouped_mm",
}


def kernel_table(lines: list[Line]) -> str:
    """Decode and verify of one layer at batch 256, beside the least time that rewriting the state can take."""
    rows = []
    for op, name in (("mamba2", "nano4b"), ("mamba2", "super120b"), ("gdn", "qwen4b"), ("gdn", "qwen122b")):
        found = select(lines, benchmark=f"{op}_window", geometry=name, batch=256, correct=True)
        for state, readout in (("float32", "same"), ("float16", "same"), ("float16", "nvfp4")):
            for window in (1, WINDOW):
                kind = {"state_dtype": state, "readout_dtype": readout}
                ours = select(found, window=window, variant="ours", fill="desync", **kind)
                # Others have no copy of the state that outputs read: beside ours stand those with fp32.
                other = state if readout == "same" else "float32"
                here = select(found, window=window, state_dtype=other, readout_dtype="same")
                plain = select(here, variant="plain")
                peers, replay_peers = select(here, op="peer"), select(here, op="replay_peer", fill="desync")
                ceiling = (ours if readout == "same" else plain)[:1]
                if not ours or not plain or not ceiling[0].get("rmw_ceiling_gb_s"):
                    continue
                one = ours[0]
                least = plain[0]["bytes"] / ceiling[0]["rmw_ceiling_gb_s"] / 1e3
                rows.append(
                    [
                        f"{NAMES[name]}, {state}" + ("" if readout == "same" else f" and {readout} readout"),
                        "decode" if window == 1 else f"verify {window}",
                        f"{one['median_us']:.0f}",
                        share_of(one["gb_s"], one["ceiling_gb_s"]),
                        f"{least:.0f}",
                        ratio(least, one["median_us"]),
                        f"{plain[0]['median_us']:.0f}",
                        best_of(peers),
                        best_of(replay_peers),
                    ]
                )
    head = ["layer", "step", "replay us", "of the read ceiling", "rewriting at the ceiling us", "over that"]
    return table([*head, "our plain kernel us", "best peer us", "best peer with replay us"], rows)


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
