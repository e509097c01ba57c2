"""`replayssm export-trtllm`: a checkpoint directory, a configuration and commands for TensorRT-LLM."""

from __future__ import annotations

from pathlib import Path

import click

from replayssm.plugins.geometry import MAX_HISTORY
from replayssm.scripts.number_types import Size


@click.command("export-trtllm")
@click.option(
    "--checkpoint",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint directory.",
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory to make.")
@click.option(
    "--trtllm-version",
    "version",
    type=click.Choice(["1.2", "1.3", "1.4"]),
    default="1.3",
    show_default=True,
    help="Version of TensorRT-LLM that will serve it.",
)
@click.option("--max-batch-size", default=256, show_default=True, help="Sequences at the same time.")
@click.option("--max-seq-len", type=int, help="Prompt and output of a sequence.  [default: the model's, up to 4096]")
@click.option("--tp-size", default=1, show_default=True, help="GPUs that share each layer.")
@click.option(
    "--buffer-len",
    type=click.IntRange(1, MAX_HISTORY),
    default=16,
    show_default=True,
    help="L, tokens between two rewrites of the state.",
)
@click.option(
    "--state-dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Format of the state pool.  [default: what the model's config says, else float32]",
)
@click.option("--memory", type=Size(), default="139GiB", show_default=True, help="Memory of one GPU.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export wrote at the output.")
def export_trtllm(checkpoint: Path, output: Path, memory: int, **options) -> None:
    """Write a checkpoint as TensorRT-LLM loads it, and how to serve it with replay.

    Takes what `replayssm quantize` or modelopt wrote, or unquantized weights. Shards become hard links where possible.
    """
    from replayssm.builders.export_trtllm import CONFIG_NAME, GUIDE_NAME, ExportOptions, export_trtllm

    made = export_trtllm(checkpoint, output, ExportOptions(memory_bytes=memory, **options))
    traffic, step = made.inspection.traffic, made.step
    click.echo(f"{made.directory}: checkpoint, {CONFIG_NAME} and {GUIDE_NAME}, which says the following.")
    for warning in made.warnings:
        click.echo(f"note: {warning}")
    for name, command in made.commands.items():
        click.echo(f"\n{name}:\n  {command}")
    click.echo(
        f"\nState moved per decoded token of a sequence: {traffic.plain:,.0f} bytes without replay, "
        f"{traffic.replay:,.0f} with it ({traffic.plain / traffic.replay:.2f} times less).\n"
        f"A step at batch {options['max_batch_size']} with {made.inspection.settings.max_seq_len // 2:,} tokens a "
        f"sequence moves "
        f"{step.plain / 2**30:.2f} GiB, {step.replay / 2**30:.2f} GiB with replay: at most {step.speedup:.2f} times "
        f"faster (an estimate from sizes alone).\nRings take {made.ring_bytes / 2**30:.2f} GiB of each GPU."
    )
