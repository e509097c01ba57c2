"""`replayssm doctor`: what this machine has, and what works here."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def doctor(as_json: bool) -> None:
    """Show GPU, driver and packages, which targets work, and what to install for the rest."""
    from replayssm.runtime.environment import examine

    environment = examine()
    if as_json:
        click.echo(json.dumps(environment.to_json()))
        return
    _print_tables(environment)


def _print_tables(environment) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    machine = Table(title="This machine", show_header=False, title_justify="left")
    machine.add_row("Python", environment.python)
    for gpu in environment.gpu:
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        machine.add_row("GPU", f"{gpu.name}, compute capability {gpu.compute_capability}, {memory}")
    if not environment.gpu:
        machine.add_row("GPU", "[dim]none that torch can use[/dim]")
    machine.add_row("NVIDIA driver", environment.driver or "[dim]none[/dim]")
    machine.add_row("CUDA of torch", environment.cuda or "[dim]none (CPU build)[/dim]")
    for name, version in environment.packages.items():
        machine.add_row(name, version or "[dim]not installed[/dim]")
    console.print(machine)
    targets = Table(title="What works here", title_justify="left")
    for heading in ("What", "Works", "Detail", "To change that"):
        targets.add_column(heading, overflow="fold")
    rows = {"quantize": environment.quantization} | {
        f"target {name}": status for name, status in environment.targets.items()
    }
    for name, status in rows.items():
        mark = "[green]yes[/green]" if status.works else "[red]no[/red]"
        # An extra such as [tensorrt] would be read as markup.
        targets.add_row(name, mark, status.detail, status.next_step.replace("[", r"\["))
    console.print(targets)
