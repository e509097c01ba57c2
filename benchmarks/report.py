"""Writes docs/results.md, the tables of docs/state_formats.md and all plots: `python benchmarks/report.py`.

Every figure of ours in the page comes from a result line; the newest line of a condition counts. Published figures are
those of the ReplaySSM experiments that this project repeats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from replayssm.builders.config import published, weight_bytes
from replayssm.builders.inspection import geometries
from replayssm.plugins.contract import ReplaySettings
from replayssm.plugins.traffic import slot_bytes, traffic_per_token

ROOT = Path(__file__).parent
NAMES = {"nano4b": "Nemotron-3-Nano-4B", "super120b": "Nemotron-3-Super-120B", "qwen4b": "Qwen3.5-4B"}
NAMES["qwen122b"] = "Qwen3.5-122B-A10B"
PUBLISHED_STEPS = {
    "nano4b": {1: 0.99, 32: 1.17, 128: 1.40, 512: 1.55},
    "qwen4b": {1: 0.99, 32: 1.08, 128: 1.21, 512: 1.31},
    "super120b": {1: 0.98, 32: 1.10, 128: 1.27, 512: 1.67},
    "qwen122b": {1: 0.98, 32: 1.07, 128: 1.14, 512: 1.20},
}
"""Whole decode steps, replay over standard; the 4B models on an H100, the others on a B300."""
PUBLISHED_SESSIONS = {"super120b": (213, 694), "qwen122b": (233, 702)}
"""Sequences that fit with four drafts: standard, replay."""
H200_BYTES, RESERVE_BYTES, HELD_TOKENS = 139 * 2**30, 6 * 2**30, 1024
WINDOW = 5
KERNEL_BENCHMARKS = ("mamba2_window", "gdn_window")

Line = dict


def read_lines(folder: Path) -> list[Line]:
    """All result lines, older ones of the same condition left out."""
    kept: dict[tuple, Line] = {}
    keys = ("benchmark", "op", "geometry", "model", "batch", "window", "state_dtype", "state_rounding", "readout_dtype")
    keys += ("L", "fill", "variant", "layers", "tier", "gpu", "engine", "draft_len", "context", "format")
    keys += ("fp8_products",)
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            key = tuple(str(line.get(name)) for name in keys)
            if key not in kept or kept[key].get("date", "") <= line.get("date", ""):
                kept[key] = line
    return list(kept.values())


def select(lines: Iterable[Line], **wanted) -> list[Line]:
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    rows = [[str(cell) for cell in row] for row in rows]
    if not rows:
        return "*Not measured.*\n"
    text = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"]
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def shape_of(line: Line) -> str:
    """The short name of a line's model, whatever format its weights have."""
    name = line["geometry"].partition("-")[0]
    return name if name in NAMES else line["geometry"]


def model_of(line: Line) -> str:
    """The model's name, the format of its weights, and how far it was truncated."""
    name = NAMES.get(shape_of(line), line["geometry"])
    if shape_of(line) != line["geometry"]:
        name += f", {line['geometry'].partition('-')[2].upper()} weights"
    if line.get("fp8_products"):
        name += " and activations" if line["geometry"].endswith("-fp8") else ", FP8 layers with FP8 activations"
    whole = line["layers"] == line["layers_total"]
    return name if whole else f"{name} ({line['layers']} of {line['layers_total']} layers)"


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}x"


def share_of(rate: float, ceiling: float) -> str:
    """In percent; a ceiling that the kernel itself exceeds was measured too low and says nothing."""
    return f"{100 * rate / ceiling:.0f} %" if rate <= ceiling else "above 100 %"


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


def best_of(lines: list[Line]) -> str:
    """Time and name of the fastest; empty without lines."""
    best = min(lines, key=lambda line: line["median_us"], default=None)
    return f"{best['median_us']:.0f} ({best['variant']})" if best else ""


def decode_lines(lines: list[Line]) -> list[Line]:
    found = select(lines, benchmark="e2e_decode_speedup")
    return sorted(found, key=lambda line: (line["geometry"], line["batch"], line["variant"]))


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


def condition(line: Line) -> dict:
    """What a decode line shares with the plain one of its run."""
    names = ("benchmark", "geometry", "batch", "window", "layers", "context", "commit", "fp8_products")
    return {name: line.get(name) for name in names}


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


def speculation_table(lines: list[Line]) -> str:
    found = [line for line in select(lines, benchmark="e2e_spec_decode_throughput") if line["fill"] != "natural"]
    rows = []
    for line in sorted(found, key=lambda line: (line["geometry"], line["batch"])):
        over, snapshots = line.get("speedup_over_snapshots"), None
        if line["variant"].startswith("replay-speculation"):
            same = ("geometry", "layers", "batch")
            snapshots = select(found, variant="snapshots", **{name: line[name] for name in same})
        rows.append(
            [
                f"{model_of(line)}, batch {line['batch']}, {line['variant']}",
                f"{line['median_us'] / 1e3:.2f}",
                f"{line['acceptance_length']:.2f}",
                f"{line['tokens_per_s']:,.0f}",
                f"{line['speedup']:.2f}x",
                f"**{over:.2f}x**" if over and snapshots else "",
                products_alone(line, snapshots[0]) if snapshots else "",
                f"{line['split_us']['ssm'] / 1e3:.2f}" if "split_us" in line else "",
                f"{line['predicted_recurrent_us'] / 1e3:.2f}" if line.get("predicted_recurrent_us") else "",
                step_share(line, max(line["products_us"], line["weights_once_us"])) if "products_us" in line else "",
                f"{line['gpu_memory_bytes'] / 2**30:.0f}",
                "yes" if line["correct"] else "**no**",
            ]
        )
    head = ["variant", "step ms", "tokens a row and step", "tokens/s", "over plain", "over snapshots"]
    head += ["the same beside products alone", "state kernels ms"]
    head += ["traffic model ms", "state and products at the ceilings"]
    return table([*head, "GiB in use", "logits agree"], rows)


def products_alone(line: Line, snapshots: Line) -> str:
    """The speedup if a step were its state kernels and its matrix products at the measured rate, and nothing else."""
    if "split_us" not in line or "split_us" not in snapshots:
        return ""
    times = [one["split_us"]["ssm"] + max(one["products_us"], one["weights_once_us"]) for one in (snapshots, line)]
    return ratio(*times)


def natural_table(lines: list[Line]) -> str:
    """Whole generations with a drafter, on the example models."""
    rows = [
        [
            f"{line['geometry']}, batch {line['batch']}, {line['variant']}",
            line["drafts"] or "",
            f"{line['acceptance_length']:.2f}",
            f"{line['tokens_per_s']:,.0f}" if "tokens_per_s" in line else "",
            f"{100 * line['same_tokens']:.0f} %",
        ]
        for line in select(lines, benchmark="e2e_spec_decode_throughput", fill="natural")
    ]
    head = ["model and variant", "drafts", "tokens a row and step", "tokens/s", "like plain's text up to"]
    return table(head, rows)


PRODUCT_PEERS = {
    "dequantize": "dequantized, cuBLAS",
    "cublas": "bf16 weights, cuBLAS",
    "dequantized_grouped_mm": "dequantized, torch._grouped_mm",
    "grouped_mm": "bf16 experts, torch._grouped_mm",
}


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


def sessions_table() -> str:
    """Computed, not measured: whole slots of the published shapes beside their weights."""
    rows = []
    for name, (standard, replay) in PUBLISHED_SESSIONS.items():
        config = published(f"{name}-nvfp4")
        free = H200_BYTES - RESERVE_BYTES - weight_bytes(config, mtp=False)["total"]
        sizes = [
            slot_bytes(geometries(config), ReplaySettings(length, WINDOW)).total(HELD_TOKENS) for length in (0, 16)
        ]
        ours = [free // size for size in sizes]
        rows.append(
            [
                NAMES[name],
                f"{standard} to {replay} ({replay / standard:.2f}x)",
                f"{ours[0]} to {ours[1]} ({ours[1] / ours[0]:.2f}x)",
                *(f"{size / 2**20:.0f}" for size in sizes),
            ]
        )
    head = [
        "model, NVFP4 weights, four drafts",
        "published, one B300",
        "ours, one H200",
        "MiB each: snapshots",
        "replay",
    ]
    return table(head, rows)


def traffic_table() -> str:
    rows = []
    for name in ("nano4b", "super120b", "qwen4b", "qwen122b"):
        stateful = geometries(published(name))
        plain, low = (
            traffic_per_token(stateful, ReplaySettings(16, WINDOW, state_dtype=state, readout_dtype=readout), 4, 3.0)
            for state, readout in (("float32", "same"), ("float16", "nvfp4"))
        )
        mib = [plain.plain, plain.replay, low.replay, plain.snapshot_speculation, plain.replay_speculation]
        rows.append([NAMES[name], *(f"{value / 2**20:.1f}" for value in mib)])
    head = [
        "MiB of state per token",
        "plain",
        "replay",
        "replay, fp16 and nvfp4",
        "snapshots, 4 drafts",
        "replay, 4 drafts",
    ]
    return table(head, rows)


def precision_table(lines: list[Line]) -> str:
    """Right answers with float32 and what other formats change, of the formats that the published experiment had."""
    readouts = ("float16, stochastic, nvfp4", "float8, stochastic, nvfp4", "float16, stochastic, float8")
    names = ("float32", "nvfp4", *(f"{name} readout" for name in readouts))
    found = select(lines, benchmark="format_accuracy")
    rows = []
    for model, tier in sorted({(line["model"], line["tier"]) for line in found}):
        own = {line["format"]: line for line in select(found, model=model, tier=tier)}
        if names[0] in own and len(own) > 1:
            cells = [f"{100 * own[name]['difference']:+.1f}" if name in own else "" for name in names[1:]]
            rows.append([model, tier, own[names[0]]["count"], f"{100 * own[names[0]]['value']:.1f} %", *cells])
    head = ["model", "problems", "of them", "right with float32", "one nvfp4 copy", "fp16 and nvfp4 readout"]
    return table([*head, "fp8 and nvfp4 readout", "fp16 and fp8 readout"], rows)


def longest_contexts(lines: Iterable[Line]) -> list[Line]:
    """One line for each model, batch and variant: that of the longest run."""
    kept: dict[tuple, Line] = {}
    for line in lines:
        key = (line["geometry"], line["layers"], line["batch"], line["variant"])
        if key not in kept or kept[key]["context"][1] < line["context"][1]:
            kept[key] = line
    return list(kept.values())


def provenance(lines: list[Line]) -> str:
    rows = {}
    for line in lines:
        if line["benchmark"].startswith("e2e_") or line["benchmark"] in ("weight_only", *KERNEL_BENCHMARKS):
            rows.setdefault((line["benchmark"], line["gpu"], line["commit"]), []).append(line["date"][:16])
    return table(
        ["benchmark", "GPU", "commit", "lines", "newest"],
        [[*key, len(dates), max(dates)] for key, dates in sorted(rows.items())],
    )


def render(lines: list[Line]) -> str:
    # Here, because they are made of what this module has.
    from report_parallel import parallel_table
    from report_serving import serving_table
    from report_vllm import vllm_table

    page = (ROOT / "report.md").read_text(encoding="utf-8")
    parts = {
        "kernels": kernel_table(lines),
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
    for name, text in parts.items():
        mark = f"<!-- {name} -->\n"
        if page.count(mark) != 1:
            raise ValueError(f"benchmarks/report.md must hold the mark {mark.strip()!r} once")
        page = page.replace(mark, text)
    return page


def main(results: Path = ROOT / "results", docs: Path = ROOT.parent / "docs") -> None:
    # Here, because the page itself needs no matplotlib.
    import plot_formats
    import plot_kernels
    import plot_traffic
    from report_plots import plot_batches, plot_split

    lines = read_lines(results)
    decode = [line for line in decode_lines(lines) if line["layers"] == line["layers_total"]]
    plot_batches(longest_contexts(decode), PUBLISHED_STEPS, NAMES, docs / "decode_speedup.svg")
    profiled = longest_contexts(line for line in decode if "split_us" in line)
    plot_split(profiled, NAMES, docs / "decode_split.svg")
    plot_kernels.main(str(docs / "kernels.svg"))
    plot_traffic.main(str(docs / "traffic.svg"))
    plot_formats.main(lines, docs)
    (docs / "results.md").write_text(render(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
