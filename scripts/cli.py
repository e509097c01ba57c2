"""The `replayssm` command: a group whose subcommands are imported only when they run.

The subcommand `name` is the click command `name` of the module `replayssm.scripts.name`, with hyphens as underscores.
Its line in `COMMANDS` is what `replayssm --help` prints, so that the help imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from replayssm.runtime.errors import InferenceError
from replayssm.scripts.files import FileKeyError

COMMANDS = {
    "quantize": "Quantize a Hugging Face checkpoint to NVFP4 or FP8.",
    "build": "Build an engine directory from a checkpoint.",
    "generate": "Generate text with an engine.",
    "serve": "Serve an engine over HTTP, with OpenAI's API.",
    "bench": "Measure an engine with trtllm-bench's data sets and reports.",
    "export-trtllm": "Write a checkpoint as TensorRT-LLM serves it with replay.",
    "trtllm-module": "Print the directory of the module for TensorRT-LLM.",
    "check": "Compare the plans of an engine with the torch target.",
    "calibrate": "Compare state formats on your prompts and recommend one.",
    "inspect": "Show state sizes and memory traffic of a model.",
    "doctor": "Show what this machine has and which targets work.",
}
WITHOUT_RESULT_ON_STDOUT = ("quantize", "build", "serve")
"""Commands that are of use without a standard output: they write files, or answer over a socket."""

OPTION_OF = {
    "slots": "max_batch_size",
    "max_queue": "max_queue_size",
    "swap_bytes": "swap_memory",
    "prefix_cache_bytes": "prefix_cache",
    "ranks": "tensor_parallel_size",
}
"""Parameter of the runtime -> the option that sets it, where their names differ."""

DEBUG_VARIABLE = "REPLAYSSM_DEBUG"


class LazyGroup(click.Group):
    """Imports a subcommand when it is asked for, and turns bad input into one line on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return getattr(importlib.import_module(f"replayssm.scripts.{name}"), name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            if near:
                ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        # torch's OpenMP threads spin while they wait for each other. On a machine with other work that starves the one
        # they wait for: a step of a small model then takes ten times as long. Read when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # Python code that runs a command with standalone_mode=False handles exceptions itself.
        if not standalone_mode or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            return super().main(*args, standalone_mode=standalone_mode, **extra)
        _require_stdout(args[0] if args else extra.get("args"))
        try:
            # Outside standalone mode click returns the exit code of --help and the like.
            sys.exit(super().main(*args, standalone_mode=False, **extra))
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        except click.UsageError as error:
            help_hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            _fail(error.format_message().rstrip(".") + _way_out(error) + help_hint)
        except click.ClickException as error:
            _fail(error.format_message())
        except FileKeyError as error:
            _fail(_one_line(error))
        except (ValueError, OSError, InferenceError) as error:
            _fail(_in_options(_one_line(error), self._asked(args[0] if args else extra.get("args"))))
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(130)

    def _asked(self, arguments: Sequence[str] | None) -> click.Command:
        """The command that the command line names."""
        command: click.Command = self
        for argument in sys.argv[1:] if arguments is None else arguments:
            if isinstance(command, click.Group):
                command = command.get_command(None, argument) or command
        return command


def _way_out(error: click.UsageError) -> str:
    """What click's own words leave open in commands that have commands."""
    context, parent = error.ctx, error.ctx.parent if error.ctx else None
    if context and isinstance(context.command, click.Group) and error.message.startswith("Missing command"):
        return f": give one of {', '.join(context.command.list_commands(context))}"
    if isinstance(error, click.NoSuchOption) and parent:
        for parameter in parent.command.params:
            if error.option_name in parameter.opts:
                return f": it goes before {context.info_name}"
    return ""


def _in_options(message: str, command: click.Command) -> str:
    """An error of the runtime, which names parameters, with the options that set them instead.

    A name that is a word of English too counts only at the beginning, where messages have what they are about.
    """
    options = {parameter.name: parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("--")}
    first, space, rest = message.partition(" ")
    name = first.rpartition(".")[2].rstrip(":,")  # of "ReplaySettings.max_seq_len", "readout_layers:"
    known = options.get(name) or options.get(OPTION_OF.get(name, ""))
    if known:
        first = known + first[len(first.rstrip(":,")) :]

    def option(found: re.Match) -> str:
        return options.get(found[0], found[0])

    # What an engine or a model has is no option of this command.
    return first + space + re.sub(r"(?<!engine's )(?<!model's )(?<![\w/.-])[a-z]+(_[a-z]+)+(?![\w/.])", option, rest)


def _require_stdout(arguments: Sequence[str] | None) -> None:
    """Fail where standard output is closed (`>&-`): Python would drop the result and the command would succeed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None and not (arguments and arguments[0] in WITHOUT_RESULT_ON_STDOUT):
        _fail("standard output is closed, where the result goes: redirect it to a file instead")


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(2)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # writing to an open file names none
        return f"{error.strerror} where the output goes: free some there, or write it elsewhere"
    return " ".join(str(error).split()) or type(error).__name__


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from replayssm.runtime.environment import own_version

    click.echo(f"replayssm {own_version()}")
    ctx.exit()


# TensorRT-LLM spells options with underscores (--max_batch_size); both spellings reach every subcommand.
@click.group(
    cls=LazyGroup,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Replay decoding of hybrid Mamba2 and Gated DeltaNet models on NVIDIA GPUs and CPUs.

    From a checkpoint to text: quantize, build, generate. Set REPLAYSSM_DEBUG=1 to see the traceback of an error.
    """
