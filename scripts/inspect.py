"""`replayssm inspect`: state sizes and memory traffic of a model or an engine, from its config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from replayssm.plugins.manifest import MANIFEST_NAME, is_engine_directory, read_manifest
from replayssm.plugins.settings import ReplaySettings
from replayssm.scripts.format_options import format_options, name_layers
from replayssm.scripts.number_types import Size

if TYPE_CHECKING:
    from replayssm.builders.inspection import Inspection


@click.command()
@click.argument("model")
@click.option("--buffer-len", default=16, show_default=True, help="L, tokens between two rewrites of the state.")
@click.option("--max-draft-len", default=4, show_default=True, help="Drafts verified by one call.")
@click.option(
    "--acceptance-length",
    type=float,
    help="Mean tokens that one verify call yields, bonus token included.  [default: half of the drafts accepted]",
)
@format_options
@click.option(
    "--weights",
    type=click.Choice(["checkpoint", "bf16", "nvfp4", "nvfp4-w4a16", "fp8"]),
    default="checkpoint",
    show_default=True,
    help="Format of the projections: what the checkpoint declares, or as if all were stored so.",
)
@click.option(
    "--max-seq-len", default=4096, show_default=True, help="Tokens held per sequence, for the batch that fits."
)
@click.option(
    "--memory", type=Size(), default="139GiB", show_default=True, help="Memory of the GPU, for the batch that fits."
)
@click.option("--reserve", type=Size(), default="6GiB", show_default=True, help="Memory kept back for everything else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def inspect(model: str, as_json: bool, **options: Any) -> None:
    """Show state sizes, memory traffic per token and the batch that fits.

    MODEL is a checkpoint directory, a config.json, an engine directory (shown as it was built), or one of the published
    models whose configs ship with replayssm: nano4b, super120b, super120b-nvfp4, qwen4b, qwen122b, qwen122b-nvfp4, or
    their Hugging Face names.
    """
    path = Path(model)
    path = path.parent if path.name == MANIFEST_NAME else path
    report = _inspect_engine(path, **options) if is_engine_directory(path) else _inspect(model, **options)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        _print_tables(report)


def _inspect_engine(
    directory: Path, acceptance_length: float | None, memory: int, reserve: int, **built: Any
) -> Inspection:
    from replayssm.builders.inspection import inspect_engine
    from replayssm.runtime.engine import read_networks

    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in built and context.get_parameter_source(parameter.name) != ParameterSource.DEFAULT:
            option = parameter.opts[0]
            raise ValueError(
                f"{directory} is an engine, whose {option} was chosen when it was built: leave out {option}, or "
                "inspect the checkpoint"
            )
    manifest = read_manifest(directory)
    return inspect_engine(
        manifest,
        read_networks(directory / manifest.networks)["main"],
        acceptance_length=acceptance_length,
        memory_bytes=memory,
        reserve_bytes=reserve,
    )


def _inspect(
    model: str,
    buffer_len: int,
    max_draft_len: int,
    acceptance_length: float | None,
    weights: str,
    max_seq_len: int,
    memory: int,
    reserve: int,
    u_format: str | None,
    **formats: Any,
) -> Inspection:
    from replayssm.builders.config import PUBLISHED, published, read_config
    from replayssm.builders.inspection import inspect_model

    known = model in PUBLISHED or model in PUBLISHED.values()
    if not known and not Path(model).exists():
        raise ValueError(
            f"{model!r} is neither a path nor a published model; expected a checkpoint directory, a config.json, an "
            f"engine directory or one of {', '.join(PUBLISHED)}"
        )
    if max_draft_len < 0:
        raise ValueError(f"--max-draft-len must be >= 0, got {max_draft_len}")
    return inspect_model(
        published(model) if known else read_config(model),
        ReplaySettings(buffer_len, 1 + max_draft_len, max_seq_len, **formats).with_u_format(u_format),
        name=PUBLISHED.get(model, model),
        weights=weights,
        acceptance_length=acceptance_length,
        memory_bytes=memory,
        reserve_bytes=reserve,
    )


def _print_tables(report: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings, slot = report.settings, report.slot
    layers = ", ".join(f"{count} {kind}" for kind, count in report.layers.items())
    console.print(f"[bold]{report.model}[/bold]: {layers}; weights {_readable(report.weights['total'])}")

    memory = Table("One sequence holds", "bytes", "", title="Memory", title_justify="left")
    ring = f"ring of {settings.ring_len} tokens (L {settings.buffer_len}, window {settings.max_window})"
    rows = {f"recurrent state ({settings.state_dtype})": slot.state, ring: slot.ring, "convolution ring": slot.conv}
    if slot.readout:
        layers = f"; {name_layers(settings.readout_layers)}" if settings.readout_layers else ""
        rows[f"readout copy ({settings.readout_dtype}{layers})"] = slot.readout
    if slot.snapshots:
        rows["state snapshots of one verify window"] = slot.snapshots
    rows["attention cache, per token"] = slot.kv_per_token
    rows[f"all, at {settings.max_seq_len:,} tokens"] = slot.total(settings.max_seq_len)
    for name, count in rows.items():
        memory.add_row(name, f"{count:,}", _readable(count))
    for column in memory.columns[1:]:
        column.justify = "right"
    console.print(memory)

    traffic = Table(
        "Recurrent state moved per token",
        "before",
        "replay",
        "ratio",
        title="Traffic",
        title_justify="left",
    )
    drafts = f"{report.draft_len} drafts, {report.acceptance_length:g} tokens a call; before: snapshots"
    ways = [("decoding; before: rewritten every token", report.traffic.plain, report.traffic.replay)]
    if report.draft_len:
        ways.append((drafts, report.traffic.snapshot_speculation, report.traffic.replay_speculation))
    for name, before, after in ways:
        traffic.add_row(name, _readable(before), _readable(after), f"{before / after:.2f}x")
    for column in traffic.columns[1:]:
        column.justify = "right"
    console.print(traffic)
    if not report.max_batch:
        console.print(
            f"A GPU of {_readable(report.memory_bytes)}, {_readable(report.reserve_bytes)} kept back, does not hold "
            "the weights and one such sequence: quantize (see --weights), shorten --max-seq-len or use more GPUs."
        )
        return
    console.print(
        f"A GPU of {_readable(report.memory_bytes)}, {_readable(report.reserve_bytes)} kept back, holds "
        f"[bold]{report.max_batch:,}[/bold] sequences of {settings.max_seq_len:,} tokens beside the weights."
    )
    if report.batch_limit is not None and report.batch_limit < report.max_batch:
        console.print(f"The engine runs at most {report.batch_limit:,} of them at a time, its --max-batch-size.")
    for warning in settings.warnings:
        console.print(f"[yellow]note:[/yellow] {warning}")


def _readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
