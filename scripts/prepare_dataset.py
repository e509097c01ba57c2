"""`replayssm bench prepare-dataset`: data sets of random tokens or of text, for one engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from replayssm.scripts.files import read_text, require_new, write_lines
from replayssm.scripts.help_groups import OrderedGroup
from replayssm.scripts.number_types import FiniteRange

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
ENGINE = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group("prepare-dataset", cls=OrderedGroup, short_help="Write a data set of random tokens or text.")
@click.option("--engine", "--engine-dir", type=ENGINE, help="Whose vocabulary or tokenizer to use.  [required]")
@click.option("--output", type=NEW_FILE, help="File to write.  [required]")
@click.option("--overwrite", is_flag=True, help="Replace a file that exists at the output.")
@click.option("--random-seed", default=420, show_default=True, help="Seed of random lengths and tokens.")
@click.pass_context
def prepare_dataset(context: click.Context, **options: Any) -> None:
    """Write a data set: random tokens with normal or uniform lengths, or text.

    The options below come before the kind of data set: prepare-dataset --engine DIR --output FILE token-norm-dist ...
    """
    context.obj = options


def _target(options: dict[str, Any]) -> dict[str, Any]:
    """The group's options, checked here so that --help of a kind of data set works without them."""
    for name in ("engine", "output"):
        if options[name] is None:
            raise click.UsageError(
                f"Missing option '--{name}', before the kind of data set", click.get_current_context()
            )
    if not options["overwrite"]:
        require_new(options["output"], "--overwrite before the kind of data set")
    return options


_COUNT = click.option("--num-requests", required=True, type=click.IntRange(1), help="Requests to write.")


def _lengths(kind: type, **helps: str) -> Callable[[Callable], Callable]:
    """Options --input-NAME and --output-NAME, tokens. kind: of their range; a stdev is 0 unless it is given."""

    def add(command: Callable) -> Callable:
        for side, what in (("output", "tokens to generate"), ("input", "tokens of a prompt")):
            for name, text in reversed(helps.items()):
                more = {"default": 0.0, "show_default": True} if name == "stdev" else {"required": True}
                least = kind(0 if name == "stdev" else 1)
                command = click.option(f"--{side}-{name}", type=least, help=f"{text} {what}.", **more)(command)
        return command

    return add


@prepare_dataset.command("token-norm-dist")
@_COUNT
@_lengths(FiniteRange, mean="Mean of the", stdev="Standard deviation of the")
@click.pass_obj
def token_norm_dist(options: dict[str, Any], num_requests: int, **lengths: float) -> None:
    """Random tokens, lengths from normal distributions."""
    _target(options)
    choose = random.Random(options["random_seed"])
    inputs, outputs = (
        [choose.gauss(lengths[f"{name}_mean"], lengths[f"{name}_stdev"]) for _ in range(num_requests)]
        for name in ("input", "output")
    )
    _write_random(options, inputs, outputs)


@prepare_dataset.command("token-unif-dist")
@_COUNT
@_lengths(click.IntRange, min="Fewest", max="Most")
@click.pass_obj
def token_unif_dist(options: dict[str, Any], num_requests: int, **lengths: int) -> None:
    """Random tokens, lengths from uniform distributions."""
    _target(options)
    choose, drawn = random.Random(options["random_seed"]), []
    for name in ("input", "output"):
        low, high = lengths[f"{name}_min"], lengths[f"{name}_max"]
        if low > high:
            raise ValueError(f"--{name}-min {low} is above --{name}-max {high}")
        drawn.append([choose.randint(low, high) for _ in range(num_requests)])
    _write_random(options, *drawn)


@prepare_dataset.command("text")
@click.option("--input", "path", required=True, type=FILE, help="One prompt a line.")
@click.option("--output-tokens", required=True, type=click.IntRange(1), help="Tokens to generate for each.")
@click.option("--chat", is_flag=True, help="Wrap each prompt as a user's message with the checkpoint's chat template.")
@click.pass_obj
def text(options: dict[str, Any], path: Path, output_tokens: int, chat: bool) -> None:
    """Prompts of a text file, tokenised."""
    from replayssm.runtime.bench_data import Sample
    from replayssm.runtime.engine import Engine
    from replayssm.scripts.generate import encode

    tokenizer = Engine.load(_target(options)["engine"]).tokenizer
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts: expected one a line")
    samples = (
        Sample(task_id, encode(tokenizer, prompt, chat), output_tokens) for task_id, prompt in enumerate(prompts)
    )
    _write_samples(options, samples)


def _write_random(options: dict[str, Any], inputs: list[float], outputs: list[float]) -> None:
    from replayssm.plugins.manifest import read_manifest
    from replayssm.runtime.bench_data import random_samples

    model = read_manifest(options["engine"]).model
    _write_samples(
        options,
        random_samples(inputs, outputs, model["vocab_size"], model["eos_token_ids"], options["random_seed"]),
    )


def _write_samples(options: dict[str, Any], samples: Iterator[Any]) -> None:
    """The file appears only if the engine has room for every sample."""
    from replayssm.plugins.manifest import read_manifest

    limit = read_manifest(options["engine"]).replay.max_seq_len

    def line(sample: Any) -> str:
        if len(sample.input_ids) + sample.output_tokens > limit:
            raise ValueError(
                f"task {sample.task_id} would have {len(sample.input_ids)} + {sample.output_tokens} tokens, but a "
                f"sequence of this engine has at most {limit}: ask for shorter prompts or outputs, or build the engine "
                "with a larger --max-seq-len"
            )
        return sample.to_line()

    count = write_lines(options["output"], map(line, samples))
    click.echo(f"{options['output']}: {count} requests")
