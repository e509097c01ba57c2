"""`replayssm quantize`: a checkpoint directory to a quantized checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import click

RECIPES = ("nvfp4", "nvfp4-w4a16", "fp8")


# The second spellings are those of modelopt's and TensorRT-LLM's own scripts.
@click.command()
@click.option(
    "--checkpoint",
    "--model-dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face checkpoint directory with unquantized safetensors.",
)
@click.option(
    "--output",
    "--output-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory to make.",
)
@click.option(
    "--recipe",
    "--qformat",
    type=click.Choice(RECIPES),
    default="nvfp4",
    show_default=True,
    help="nvfp4 and fp8 quantize weights and activations, nvfp4-w4a16 weights only.",
)
@click.option(
    "--calibration",
    "--calib-dataset",
    type=click.Path(path_type=Path),
    help=".txt, or .jsonl with text, messages or token_ids per line.  [default: a short built-in text]",
)
@click.option(
    "--calibration-samples",
    "--calib-size",
    default=64,
    show_default=True,
    help="Sequences to measure activations with, at most.",
)
@click.option(
    "--calibration-length",
    "--calib-max-seq-length",
    default=256,
    show_default=True,
    help="Tokens of one sequence, at most.",
)
@click.option("--overwrite", is_flag=True, help="Replace what an earlier quantize wrote at the output.")
@click.option("--verbose", is_flag=True, help="Show what modelopt and transformers print.")
def quantize(checkpoint: Path, output: Path, verbose: bool, **options) -> None:
    """Quantize a checkpoint to NVFP4 or FP8 with NVIDIA's modelopt.

    Linear layers are quantized; convolutions, norms, routers, embeddings, lm_head and the draft head are not. The
    output is a unified Hugging Face checkpoint, which other engines read too. It appears when it is complete; an
    interrupted run leaves nothing behind.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from replayssm.builders.quantize import QuantizeOptions, quantize_checkpoint

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=verbose or not console.is_terminal) as bar:
        task = bar.add_task("Starting", total=None)
        report = quantize_checkpoint(
            checkpoint,
            output,
            QuantizeOptions(verbose=verbose, **options),
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    modules = ", ".join(f"{count} modules {name}" for name, count in report.modules.items())
    calibrated = f", {report.calibration_tokens} calibration tokens" if report.calibration_tokens else ""
    click.echo(
        f"{output}: {modules}, {report.source_bytes / 1e6:,.1f} MB to {report.output_bytes / 1e6:,.1f} MB"
        f"{calibrated}, {report.seconds:.0f} s"
    )
