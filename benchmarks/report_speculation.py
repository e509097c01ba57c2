"""The report's tables of speculation (`e2e_spec_decode_throughput.py`)."""

from __future__ import annotations

from report_lines import Line, model_of, ratio, select, table
from report_steps import step_share


def speculation_table(lines: list[Line]) -> str:
    found = [line for line in select(lines, benchmark="e2e_spec_decode_throughput") if line["fill"] != "natural"]
    rows = []
    for line in sorted(found, key=lambda line: (line["geometry"], model_of(line), line["batch"])):
        over, snapshots = line.get("speedup_over_snapshots"), None
        if line["variant"].startswith("replay-speculation"):
            same = ("geometry", "layers", "batch", "fp8_experts", "vocabulary", "ranks")
            snapshots = select(found, variant="snapshots", **{name: line.get(name) for name in same})
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
