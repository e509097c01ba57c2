"""The main job on the example checkpoints, step by step, with the commands a user would type.

Run through `bash scripts/quickstart.sh`. Everything it makes lies in `.quickstart/` and is reused by the next run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from replayssm.builders.config import read_config
from replayssm.builders.inspection import inspect_model
from replayssm.plugins.settings import ReplaySettings
from replayssm.scripts.cli import main as replayssm

EXAMPLES = Path("examples")
WORK = Path(".quickstart")
BUFFER_LEN, DRAFT_LEN, MAX_SEQ_LEN = 16, 4, 2048


@dataclass(frozen=True)
class Variant:
    """One way of running a model. `draft` is the kind of drafts, `buffer_len` 0 rewrites the state every token."""

    label: str
    quantized: bool
    buffer_len: int
    draft: str = "none"


VARIANTS = (
    Variant("bf16, plain", quantized=False, buffer_len=0),
    Variant("NVFP4, plain", quantized=True, buffer_len=0),
    Variant("NVFP4, replay", quantized=True, buffer_len=BUFFER_LEN),
    Variant("NVFP4, replay, MTP", quantized=True, buffer_len=BUFFER_LEN, draft="mtp"),
)


class Commands:
    """Runs `replayssm` commands in this process and shows each as a user would type it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.made: set[Path] = set()

    def make(self, source: Path, output: Path, *arguments: str) -> Path:
        """Run a command that makes `output` from `source`, unless an earlier run did since `source` changed."""
        if output in self.made:
            return output
        self.made.add(output)
        if output.exists() and output.stat().st_mtime >= max(path.stat().st_mtime for path in source.iterdir()):
            self.console.print(f"[dim]{output} is there from an earlier run[/dim]", highlight=False, soft_wrap=True)
            return output
        arguments = (arguments[0], "--checkpoint", str(source), "--output", str(output), *arguments[1:])
        if output.exists():
            arguments += ("--overwrite",)
        self.console.print(f"[dim]$ replayssm {' '.join(arguments)}[/dim]", highlight=False, soft_wrap=True)
        replayssm.main(list(arguments), prog_name="replayssm", standalone_mode=False)
        return output


def quantize(commands: Commands, name: str) -> Path:
    """NVFP4 checkpoint of an example."""
    return commands.make(EXAMPLES / name, WORK / f"{name}-nvfp4", "quantize", "--recipe", "nvfp4")


def build(commands: Commands, checkpoint: Path, buffer_len: int) -> Path:
    """Engine of a checkpoint; the baseline needs no drafts."""
    output = WORK / "engines" / f"{checkpoint.name}-L{buffer_len}"
    drafts = ("--max-draft-len", str(DRAFT_LEN)) if buffer_len else ()
    options = ("--buffer-len", str(buffer_len), *drafts, "--max-seq-len", str(MAX_SEQ_LEN))
    return commands.make(checkpoint, output, "build", *options)


def ask(engine: Path, question: str, draft: str) -> Any:
    """The engine's greedy answer to one question."""
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.generation import generate
    from replayssm.runtime.serving import make_drafter
    from replayssm.runtime.session import Session
    from replayssm.runtime.text import encode_chat

    loaded = Engine.load(engine)
    session = Session(loaded, slots=1)
    session.warm_up()
    prompt = encode_chat(loaded.tokenizer, [{"role": "user", "content": question}])
    drafter = make_drafter(draft, session)
    return generate(session, [prompt], 1024, drafter=drafter, tokenizer=loaded.tokenizer)[0]


def demonstrate(commands: Commands, name: str, question: str, answer: str) -> None:
    """Quantize, build, ask and compare one example model."""
    console = commands.console
    console.rule(f"[bold]{name}")
    quantized = quantize(commands, name)
    results = {}
    for variant in VARIANTS:
        engine = build(commands, quantized if variant.quantized else EXAMPLES / name, variant.buffer_len)
        results[variant] = ask(engine, question, variant.draft)

    replayed = results[VARIANTS[2]]
    console.print(f"\n[bold]Question[/bold]  {question}", highlight=False)
    console.print(f"[bold]Answer[/bold]    {replayed.text.strip()}\n", highlight=False)
    table = Table("", "right", "same text", "tokens/s here", "tokens per call")
    for variant, result in results.items():
        right = result.text.strip().endswith(answer)
        table.add_row(
            variant.label,
            "[green]yes[/green]" if right else f"[red]no[/red]: expected {answer}",
            "yes" if result.token_ids == replayed.token_ids else "no",
            f"{result.timing['tokens_per_s']:.0f}",
            f"{result.acceptance_length:.2f}",
        )
    console.print(table)
    console.print(
        "plain: the state is rewritten for every token. replay: every 16 tokens. MTP: drafts of the MTP head.",
        highlight=False,
    )
    show_traffic(console, quantized)


def show_traffic(console: Console, checkpoint: Path) -> None:
    """Bytes of state per sequence and per token, with and without replay."""
    settings = ReplaySettings(BUFFER_LEN, 1 + DRAFT_LEN, MAX_SEQ_LEN)
    report = inspect_model(read_config(checkpoint), settings, name=checkpoint.name, memory_bytes=0)
    traffic = report.traffic
    console.print(
        f"State of one sequence: {report.slot.state:,} bytes, and {report.slot.ring:,} bytes of ring.\n"
        f"State moved per decoded token: {traffic.plain:,.0f} bytes rewriting it, {traffic.replay:,.0f} with replay "
        f"({traffic.plain / traffic.replay:.2f} times less).",
        highlight=False,
    )


@click.command()
@click.option("--clean", is_flag=True, help="Start over: remove what earlier runs made.")
def main(clean: bool) -> None:
    """Quantize, build and run the example models, and show what replay changes."""
    console = Console()
    if clean:
        shutil.rmtree(WORK, ignore_errors=True)
    questions = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    for name, entry in questions.items():
        try:
            demonstrate(Commands(console), name, entry["question"], entry["answer"])
        except ValueError as error:
            hint = "start over with: bash scripts/quickstart.sh --clean"
            raise click.ClickException(f"{error}\nIf {WORK} is damaged or from another version, {hint}") from error
    console.print(
        "\nTokens/s are of this machine at this moment. The models are tiny, and a CPU spends its time elsewhere than "
        "in the state: what replay saves shows on a GPU. What must hold anywhere is that the text stays the same."
        "\nYour own model: [bold]replayssm quantize[/bold], [bold]replayssm build[/bold], "
        "[bold]replayssm generate[/bold]; [bold]replayssm inspect[/bold] says what replay saves on it."
    )


if __name__ == "__main__":
    main()
