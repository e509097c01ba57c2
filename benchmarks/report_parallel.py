"""The report's table of models that are divided over several GPUs."""

from __future__ import annotations

from report_lines import Line, condition, model_of, select, table


def parallel_table(lines: list[Line]) -> str:
    """Steps of a divided model, beside the whole one of the same run."""
    found = select(lines, benchmark="e2e_tensor_parallel")
    rows = []
    for line in sorted(found, key=lambda line: (line["geometry"], -line["batch"])):
        whole = select(found, **{**condition(line), "variant": "1 gpu"})
        if line["variant"] == "1 gpu" or not whole:
            continue
        memory = [each["gpu_memory_bytes"] / 2**30 for each in (whole[0], line)]
        rows.append(
            [
                f"{model_of(line)}, batch {line['batch']}",
                line["variant"].replace(" gpus", ""),
                f"{whole[0]['median_us'] / 1e3:.2f}",
                f"{line['median_us'] / 1e3:.2f}",
                f"**{line['speedup']:.2f}x** ({line['speedup_p10']:.2f} to {line['speedup_p90']:.2f})",
                f"{line['split_us'].get('collective', 0):.0f}" if "split_us" in line else "",
                f"{line['tokens_per_s']:,.0f}",
                f"{memory[0]:.1f}, {memory[1]:.1f}",
                f"{line['logits_distance']:.3f}, {line['logits_distance_without_context']:.2f}",
                "yes" if line["correct"] else "**no**",
            ]
        )
    head = ["model", "GPUs", "one GPU ms", "divided ms", "speedup (p10 to p90)", "collectives us", "tokens/s"]
    head += ["GiB of a GPU: whole, divided", "logits' distance: from one GPU's, without context", "logits agree"]
    return table(head, rows)
