"""The report's tables of whole decode steps (`e2e_decode_speedup.py`)."""

from __future__ import annotations

from report_lines import (
    KERNEL_BENCHMARKS,
    NAMES,
    Line,
    condition,
    decode_lines,
    longest_contexts,
    model_of,
    ratio,
    select,
    shape_of,
    table,
)

from replayssm.builders.config import published
from replayssm.builders.inspection import geometries

PUBLISHED_STEPS = {
    "nano4b": {1: 0.99, 32: 1.17, 128: 1.40, 512: 1.55},
    "qwen4b": {1: 0.99, 32: 1.08, 128: 1.21, 512: 1.31},
    "super120b": {1: 0.98, 32: 1.10, 128: 1.27, 512: 1.67},
    "qwen122b": {1: 0.98, 32: 1.07, 128: 1.14, 512: 1.20},
}
"""Whole decode steps, replay over standard; the 4B models on an H100, the others on a B300."""


def step_table(lines: list[Line]) -> str:
    rows = []
    for line in decode_lines(lines):
        if not line["variant"].startswith("replay"):
            continue
        plain = select(lines, **{**condition(line), "variant": "plain"})
        if not plain:
            continue
        published = PUBLISHED_STEPS.get(shape_of(line), {}).get(line["batch"], "")
        is_standard = line["variant"] == "replay"
        rows.append(
            [
                f"{model_of(line)}, batch {line['batch']}, context {line['context'][0]} to {line['context'][1]}",
                "fp32" if is_standard else line["variant"].removeprefix("replay-").replace("-", ", "),
                f"{plain[0]['median_us'] / 1e3:.2f}",
                f"{line['median_us'] / 1e3:.2f}",
                f"**{line['speedup']:.2f}x** ({line['speedup_p10']:.2f} to {line['speedup_p90']:.2f})",
                ratio(kernel_us(plain[0]), kernel_us(line)) if "split_us" in line else "",
                beside_peer(lines, plain[0], line),
                f"{line['predicted_speedup']:.2f}x" if "predicted_speedup" in line else "",
                f"{published:.2f}x" if published and is_standard else "",
                f"{line['tokens_per_s']:,.0f}",
                "yes" if line["correct"] else f"**no** ({line['logits_distance']:.3f})",
            ]
        )
    head = ["model", "state", "plain ms", "replay ms", "speedup (p10 to p90)", "by kernel times"]
    head += ["beside the best peer's kernel", "traffic model", "published"]
    return table([*head, "replay tokens/s", "logits agree"], rows)


def beside_peer(lines: list[Line], plain: Line, replay: Line) -> str:
    """The speedup if the plain step took the time of the fastest peer's kernel for its state, where that is less."""
    found = [
        line["median_us"]
        for line in select(lines, geometry=shape_of(plain), batch=plain["batch"], window=1, state_dtype="float32")
        if line["benchmark"] in KERNEL_BENCHMARKS and line["op"] == "peer"
    ]
    if not found or "ssm_us" not in plain or plain["layers"] != plain["layers_total"]:
        return ""
    layers = sum(geometry.kind in ("mamba2", "gdn") for geometry in geometries(published(shape_of(plain))))
    saved = max(0.0, plain["ssm_us"] - layers * min(found))
    return ratio(plain["median_us"] - saved, replay["median_us"])


def batch_table(lines: list[Line]) -> str:
    """Published speedups of a whole step by batch, and ours."""
    found = [line for line in longest_contexts(decode_lines(lines)) if line["variant"] == "replay"]
    rows = []
    for name, known in PUBLISHED_STEPS.items():
        own = [line for line in found if shape_of(line) == name]
        for title in sorted({model_of(line) for line in own}) or [NAMES[name]]:
            ours = {line["batch"]: f"{line['speedup']:.2f}" for line in own if model_of(line) == title}
            rows.append([title, *(f"{known[batch]:.2f}, {ours.get(batch, 'not run')}" for batch in known)])
    return table(["published, ours", *(f"batch {batch}" for batch in PUBLISHED_STEPS["nano4b"])], rows)


def kernel_us(line: Line) -> float:
    """Time of a step's kernels and of the gaps between them, without what the host or other processes add."""
    return sum(line["split_us"].values()) + line["gap_us"]


def split_table(lines: list[Line]) -> str:
    kinds = ("ssm", "conv", "attention", "matmul", "routing", "elementwise", "other", "copy")
    rows = []
    for line in decode_lines(lines):
        if line["batch"] != 256 or "split_us" not in line:
            continue
        bound = max(line["weights_once_us"], line["products_us"])
        rows.append(
            [
                f"{model_of(line)}, {line['variant']}, context to {line['context'][1]}",
                *(f"{line['split_us'].get(kind, 0):.0f}" for kind in kinds),
                f"{line['gap_us']:.0f} ({line['largest_gap_us']:.1f})",
                f"{line['rest_us']:.0f}",
                f"{line['weights_once_us']:.0f}, {line['products_us']:.0f}",
                f"{line['rest_us'] / bound:.2f}",
                step_share(line, bound),
                f"{line['gpu_memory_bytes'] / 2**30:.0f}",
                f"{line['sm_clock_mhz']}, {line['power_w']}" if "power_w" in line else "",
            ]
        )
    head = ["us per step at batch 256", *("state kernels" if kind == "ssm" else kind for kind in kinds)]
    head += [
        "gaps (largest)",
        "all but state",
        "weights once, products",
        "rest over its roofline",
        "state and products at the ceilings",
        "GiB in use",
        "MHz, W",
    ]
    return table(head, rows)


def step_share(line: Line, products_us: float) -> str:
    """Least time of a step's state, moved at the read bandwidth, and of its products, as a share of the step's time."""
    if "predicted_recurrent_us" not in line:
        return ""
    return f"{100 * (line['predicted_recurrent_us'] + products_us) / line['median_us']:.0f} %"
