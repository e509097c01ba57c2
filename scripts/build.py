"""`replayssm build`: a checkpoint directory to an engine directory."""

from __future__ import annotations

from pathlib import Path

import click

from replayssm.plugins.settings import ACTIVATION_DTYPES, ReplaySettings
from replayssm.scripts.format_options import format_options, name_layers


@click.command()
@click.option(
    "--checkpoint",
    "--checkpoint-dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face checkpoint directory, quantized or not.",
)
@click.option(
    "--output",
    "--output-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Engine directory to make.",
)
@click.option(
    "--target",
    type=click.Choice(["torch", "tensorrt", "tensorrt-rtx"]),
    default="torch",
    show_default=True,
    help="What will run the engine: PyTorch, or plans of TensorRT (on its GPU) or TensorRT-RTX (on any machine).",
)
@click.option("--max-batch-size", default=8, show_default=True, help="Sequences at the same time.")
@click.option("--max-seq-len", type=int, help="Prompt and output of a sequence.  [default: the model's, up to 4096]")
@click.option("--max-draft-len", default=0, show_default=True, help="Draft tokens that one call can verify.")
@click.option(
    "--buffer-len",
    default=16,
    show_default=True,
    help="L, tokens between two rewrites of the state. 0 rewrites it for every token.",
)
@format_options
@click.option(
    "--dtype",
    type=click.Choice(["auto", *ACTIVATION_DTYPES]),
    default="auto",
    show_default=True,
    help="Activations and unquantized weights; auto takes the checkpoint's.",
)
@click.option(
    "--alias",
    type=click.Choice(["declared", "bound"]),
    default="declared",
    show_default=True,
    help="Target tensorrt: tell it that kernels update state in place, or only bind both names to one address.",
)
@click.option(
    "--prefill-plan",
    is_flag=True,
    help="Target tensorrt: a second plan runs prompts, faster, and holds the weights once more.",
)
@click.option("--overwrite", is_flag=True, help="Replace an engine that exists at the output.")
def build(checkpoint: Path, output: Path, overwrite: bool, **options) -> None:
    """Build an engine directory from a checkpoint.

    The directory appears when it is complete; an interrupted build leaves nothing behind.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from replayssm.builders.engine import BuildOptions, build_engine

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Writing weights", total=None)
        manifest = build_engine(
            checkpoint,
            output,
            BuildOptions(**options),
            overwrite=overwrite,
            progress=lambda done, total, name: bar.update(task, completed=done, total=total),
        )
    for warning in manifest.replay.warnings:
        click.echo(f"warning: {warning}", err=True)
    size = sum(entry.size for entry in manifest.files)
    click.echo(
        f"{output}: {manifest.model['name']}, {size / 1e6:,.1f} MB, batch {manifest.limits.max_batch_size}, "
        f"{manifest.limits.max_seq_len} tokens, up to {manifest.limits.max_draft_len} drafts, "
        f"buffer_len {manifest.replay.buffer_len}{_formats(manifest.replay)}"
    )


def _formats(replay: ReplaySettings) -> str:
    """How the state is kept, as far as not by default."""
    found = ""
    if replay.state_dtype != "float32":
        found += f", state {replay.state_dtype}"
        found += f" ({replay.state_rounding})" if replay.state_rounding != "nearest" else ""
    if replay.readout_dtype != "same" or replay.readout_layers:
        found += f", readout {replay.readout_dtype}"
        found += f" ({name_layers(replay.readout_layers)})" if replay.readout_layers else ""
    return found
