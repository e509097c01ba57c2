"""`replayssm calibrate`: which state format is safe for a model, measured on its user's own prompts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from replayssm.scripts.engine_options import device_option
from replayssm.scripts.format_options import name_layers


@click.command()
@click.option(
    "--engine",
    "--engine-dir",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Engine directory of target torch; its own state format does not matter.",
)
@click.option(
    "--dataset",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines: {"prompt": "..."} or {"messages": [...]}, with "answer": "..." where a right text ends in it.',
)
@click.option("--chat", is_flag=True, help="Wrap each prompt as a user's message with the checkpoint's chat template.")
@click.option("--limit", default=0, help="Problems to use; 0 means all.", show_default=True)
@click.option("--max-new-tokens", default=256, show_default=True, help="Most tokens to generate for a problem.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="FORMAT",
    help="Format to compare with float32; may be given several times: float16, float16-stochastic, float8-stochastic, "
    "float16-stochastic+float8, float16-stochastic+nvfp4 or float8-stochastic+nvfp4; + is the readout.  [default: all]",
)
@click.option(
    "--by-layer",
    is_flag=True,
    help="Also find the layers that a 4-bit readout hurts most, and compare formats with 8 bits in those. Easy "
    "prompts, whose every token is certain, cannot find them.",
)
@click.option(
    "--max-disagreement",
    default=0.01,
    show_default=True,
    help="Share of positions at which another token may be the most likely one.",
)
@click.option(
    "--tolerance", default=0.02, show_default=True, help="Loss of right answers that may not be exceeded, as a share."
)
@click.option("--slots", default=4, show_default=True, help="Problems at the same time, for every format.")
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def calibrate(
    engine: Path,
    dataset: Path,
    chat: bool,
    limit: int,
    formats: tuple[str, ...],
    by_layer: bool,
    max_disagreement: float,
    tolerance: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare state formats on your prompts and recommend one.

    Every format reads the text that the engine writes with a float32 state; it is recommended if it would hardly choose
    other tokens and, where answers are given, does not lose right ones, both with 95 % confidence.
    """
    for name, value in (("--max-disagreement", max_disagreement), ("--tolerance", tolerance)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    for name, value, least in (
        ("--limit", limit, 0),
        ("--max-new-tokens", options["max_new_tokens"], 1),
        ("--slots", options["slots"], 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.format_comparison import FORMATS, candidates, compare, read_problems
    from replayssm.runtime.format_verdict import answer_notes, recommend
    from replayssm.runtime.layer_comparison import readings, with_layers

    loaded = Engine.load(engine)
    compared = candidates(loaded, formats or tuple(FORMATS))
    if by_layer and not readings(loaded, compared):
        raise ValueError(
            "--by-layer is about 4-bit readouts, which no format here has: add --format float16-stochastic+nvfp4"
        )
    problems = read_problems(dataset, loaded.tokenizer, chat, limit)
    measured = {}
    with _progress() as stage:
        if by_layer:
            total = readings(loaded, compared) * len(problems)
            with stage("Readouts of single layers", total) as advance:
                compared, measured = with_layers(loaded, problems, compared, progress=advance, **options)
        with stage(f"float32 beside {', '.join(list(compared)[1:])}", len(problems)) as advance:
            results = compare(loaded, problems, compared, progress=advance, **options)
    chosen = recommend(results, max_disagreement, tolerance)
    refusals = {result.name: result.refusal(max_disagreement, tolerance) for result in results}
    notes = answer_notes(loaded, results, options["max_new_tokens"])
    notes += [f"{name}: {note}" for name, layers in measured.items() for note in layers.notes]
    if as_json:
        report = _to_json(loaded, len(problems), results, refusals, chosen)
        click.echo(json.dumps({**report, "by_layer": _layers_to_json(measured), "notes": notes}))
        return
    _print_table(results, refusals)
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"recommended: {chosen.name}, replayssm build {_build_options(chosen.settings)}")
    if chosen.name == results[0].name and len(problems) < 200:
        click.echo(
            f"note: {len(problems)} problems leave wide intervals; more of them may clear a smaller format",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _progress() -> Iterator[Callable]:
    """`stage(what, total)`: a context in which `advance(what runs, texts done)` draws a bar with both and the time
    left, where standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        *(BarColumn(10), MofNCompleteColumn(), TextColumn("texts,")),
        *(TimeRemainingColumn(), TextColumn("left: {task.description}")),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        @contextlib.contextmanager
        def stage(what: str, total: int) -> Iterator[Callable[[str, int], None]]:
            if console.is_terminal:
                console.print(what, style="dim")
            task = bar.add_task("", total=total)
            yield lambda runs, done: bar.update(task, advance=done, description=runs)
            bar.remove_task(task)
            bar.refresh()

        yield stage


def _build_options(settings: Any) -> str:
    """Options of `replayssm build` that are not the defaults."""
    options = {"--state-dtype": settings.state_dtype}
    if settings.state_rounding != "nearest":
        options["--state-rounding"] = settings.state_rounding
    if settings.readout_dtype != "same":
        options["--readout-dtype"] = settings.readout_dtype
    if settings.readout_layers:
        options["--readout-layers"] = name_layers(settings.readout_layers)
    return " ".join(f"{name} {value}" for name, value in options.items())


def _to_json(engine: Any, problems: int, results: list, refusals: dict[str, str], chosen: Any) -> dict[str, Any]:
    fields = (
        *("name", "state_bytes", "traffic_bytes", "tokens", "disagreement", "disagreement_bound", "kl"),
        *("accuracy", "difference", "difference_bound", "answered", "cut_off", "out_of_room"),
    )
    return {
        "model": engine.manifest.model["name"],
        "problems": problems,
        "formats": [
            {**{field: getattr(result, field) for field in fields}, "refused": refusals[result.name]}
            for result in results
        ],
        "recommended": chosen.name,
        "build_options": _build_options(chosen.settings),
    }


def _layers_to_json(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"kl": dict(found.layers), "kl_all": found.whole, "floor": found.floor, "named": found.to_widen}
        for name, found in measured.items()
    }


def _print_table(results: list, refusals: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    answered = results[0].accuracy is not None
    head = ["format", "state\nMB", "MB per\ntoken", "other\ntokens", "KL\nnats", *(["right"] if answered else [])]
    # Lines of a cell are broken here, so that the table has 70 columns and any terminal shows it whole.
    table = Table(*head, show_lines=True)
    for column in table.columns:
        column.no_wrap = True
    for result in results:
        cells = [
            result.name.replace("+", "\n+ ").replace(", ", ",\n", 1),
            f"{result.state_bytes / 1e6:.2f}",
            f"{result.traffic_bytes / 1e6:.3f}",
            f"{result.disagreement:.2%}\n< {result.disagreement_bound:.2%}",
            f"{result.kl:.1e}",
        ]
        if answered:
            cells.append(f"{result.accuracy:.1%}\n> {result.difference_bound:+.1%}")
        table.add_row(*cells)
    console = Console()
    console.print(table)
    for name, refusal in refusals.items():
        if refusal:
            click.echo(f"not {name}: {refusal}")
