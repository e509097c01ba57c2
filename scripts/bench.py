"""`replayssm bench`: throughput and latency of an engine, with trtllm-bench's data sets, options and reports."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from replayssm.scripts.config_file import apply_config
from replayssm.scripts.draft_options import DRAFT_NAMES, scheduled_draft_options
from replayssm.scripts.engine_options import as_asked, device_option, fp8_activations_option, tensor_parallel_option
from replayssm.scripts.files import check_writable, read_text, write_lines
from replayssm.scripts.help_groups import GroupedCommand, OrderedGroup
from replayssm.scripts.number_types import FiniteRange
from replayssm.scripts.prepare_dataset import ENGINE, FILE, NEW_FILE, prepare_dataset

_COMMON = (
    click.option(
        "--engine", "--engine-dir", required=True, type=ENGINE, help="Engine directory made by `replayssm build`."
    ),
    click.option("--dataset", required=True, type=FILE, help="JSON lines, as `bench prepare-dataset` writes them."),
    device_option,
    tensor_parallel_option,
    fp8_activations_option,
    click.option("--config", "--extra-llm-api-options", type=FILE, help="YAML with trtllm-bench's keys; goes first."),
    click.option(
        "--num-requests",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Requests of the data set to run; 0: all.",
    ),
    click.option(
        "--warmup", default=2, show_default=True, type=click.IntRange(0), help="Requests to run before, unmeasured."
    ),
    click.option(
        "--max-num-tokens",
        type=int,
        help="Tokens of one step.  [default: 8192, or what one chunk beside all slots takes]",
    ),
    click.option("--max-seq-len", type=int, help="Tokens of a sequence, prompt and output.  [default: the engine's]"),
    click.option(
        "--prefill-chunk",
        default=256,
        show_default=True,
        type=click.IntRange(1),
        help="Prompt tokens of a request in one step.",
    ),
    click.option("--eos-id", default=-1, show_default=True, help="Token that ends an output; -1: none does."),
    scheduled_draft_options,
    click.option("--sampler-options", type=FILE, help="YAML or JSON with temperature, top_k, top_p, min_p, seed."),
    click.option("--report-json", type=NEW_FILE, help="Write the report here, for `bench compare`."),
    click.option("--output-json", type=NEW_FILE, help="Write every request's tokens here."),
    click.option("--request-json", type=NEW_FILE, help="Write every request's times here."),
    click.option("--iteration-log", type=NEW_FILE, help="Write a JSON line per step here."),
)
_MEMORY = click.option(
    "--kv-cache-free-gpu-mem-fraction",
    "free_gpu_memory_fraction",
    default=0.9,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Share of the device's free memory that state and attention cache may take.",
)


GROUPS = {
    "Engine and device": ("engine", "config", "device", "tensor_parallel_size", "fp8_activations"),
    "Requests": ("dataset", "num_requests", "warmup", "concurrency", "eos_id", "sampler_options"),
    "Batch and memory": (
        "max_batch_size",
        "max_seq_len",
        "max_num_tokens",
        "prefill_chunk",
        "free_gpu_memory_fraction",
    ),
    "Drafts": DRAFT_NAMES,
    "Output": ("streaming", "report_json", "output_json", "request_json", "iteration_log"),
}


def _common(command: Callable) -> Callable:
    for option in reversed(_COMMON):
        command = option(command)
    return command


@click.group(cls=OrderedGroup)
def bench() -> None:
    """Measure an engine with trtllm-bench's data sets and reports."""


@bench.command(cls=GroupedCommand, groups=GROUPS)
@_common
@click.option("--max-batch-size", type=int, help="Sequences at the same time.  [default: what the memory holds]")
@click.option("--concurrency", default=-1, show_default=True, help="Requests in flight; -1: all at once.")
@click.option("--streaming", is_flag=True, help="Report times of first and later tokens too.")
@_MEMORY
def throughput(**options: Any) -> None:
    """Run a data set as fast as possible."""
    _run(**options)


@bench.command(cls=GroupedCommand, groups=GROUPS)
@_common
@_MEMORY
def latency(**options: Any) -> None:
    """Run a data set one request at a time."""
    _run(**options, fixed={"max_batch_size": 1, "concurrency": 1, "streaming": True})


def _run(
    engine: Path,
    dataset: Path,
    report_json: Path | None,
    config: Path | None,
    fixed: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from replayssm.runtime import serving
    from replayssm.runtime.bench_data import read_dataset
    from replayssm.runtime.bench_report import make_report, request_json, text_report
    from replayssm.runtime.bench_run import check_samples, run_samples
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.parallel_session import open_session
    from replayssm.runtime.scheduler import Scheduler, SchedulerOptions

    options |= fixed or {}
    options = options if config is None else {**apply_config(config, options), **(fixed or {})}
    if options["concurrency"] == 0 or options["concurrency"] < -1:
        raise ValueError(f"concurrency must be positive, or -1 for all at once, got {options['concurrency']}")
    drafts = (options[name] for name in ("draft", "draft_len", "adaptive_drafts", "draft_sampling"))
    serving.check_draft_options(*drafts)
    loaded = as_asked(
        Engine.load(engine), options["device"], options["tensor_parallel_size"], options["fp8_activations"]
    )
    loaded = serving.with_max_seq_len(loaded, options["max_seq_len"])
    if not -1 <= options["eos_id"] < loaded.vocab_size:
        raise ValueError(
            f"eos_id must be a token id below the engine's {loaded.vocab_size}, or -1, got {options['eos_id']}"
        )
    check_writable(report_json, *(options[name] for name in ("output_json", "request_json", "iteration_log")))
    samples = read_dataset(dataset, _LazyTokenizer(loaded), options["num_requests"])
    if len(samples) < options["num_requests"]:
        click.echo(
            f"note: {dataset} holds {len(samples)} of the {options['num_requests']} requests of --num-requests, "
            "which run once each",
            err=True,
        )
    params = _sampling(options["sampler_options"])
    directory = options["draft_engine"]
    draft_engine = None if directory is None else Engine.load(directory)
    memory = serving.usable_bytes(loaded, options["device"], options["free_gpu_memory_fraction"], draft_engine)
    slots = serving.slots_that_fit(loaded, memory, options["max_batch_size"], draft_engine)
    session = open_session(loaded, slots, options["device"], options["prefill_chunk"])
    drafter = serving.make_drafter(options["draft"], session, draft_engine)
    scheduling = SchedulerOptions(
        options["max_num_tokens"], draft_len=options["draft_len"], draft_sampling=options["draft_sampling"]
    )
    end_tokens = () if options["eos_id"] < 0 else (options["eos_id"],)
    warm = Scheduler(session, drafter, scheduling)
    check_samples(samples, session)
    # What is refused has been refused; memory is what the rest may still lack.
    for line in serving.describe_memory(loaded, memory, slots, draft_engine):
        click.echo(line, err=True)
    session.warm_up()
    run_samples(warm, samples[: options["warmup"]], 1, params, end_tokens)
    if options["adaptive_drafts"]:
        scheduling = serving.with_draft_costs(session, drafter, scheduling)
    scheduler = Scheduler(session, drafter, scheduling)
    serving.settle_heap()

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Requests", total=len(samples))
        log = None if options["iteration_log"] is None else io.StringIO()
        records = run_samples(
            scheduler, samples, options["concurrency"], params, end_tokens, lambda _: bar.advance(task), log
        )
    report = make_report(
        scheduler,
        records,
        draft=options["draft"],
        streaming=options["streaming"],
        dataset=dataset,
        memory_fraction=options["free_gpu_memory_fraction"],
    )
    session.close()
    click.echo(text_report(report))
    texts = [
        (report_json, _json(report)),
        (options["request_json"], _json([request_json(record) for record in records])),
        (options["output_json"], _json([{"id": record.task_id, "output_ids": record.tokens} for record in records])),
        (options["iteration_log"], "" if log is None else log.getvalue()),
    ]
    _write_all(texts)


class _LazyTokenizer:
    """Loads the engine's tokenizer only if a data set has text."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, text: str) -> Any:
        return self._engine.tokenizer(text)


def _sampling(path: Path | None) -> Any:
    from replayssm.runtime.sampling import SamplingParams

    if path is None:
        return SamplingParams()
    import yaml

    known = [field.name for field in fields(SamplingParams)]
    expected = f"expected a mapping of {', '.join(known)} to numbers"
    try:
        values = yaml.safe_load(read_text(path)) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({error}): {expected}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {expected}, got {str(values)[:40]!r}")
    for name, value in values.items():
        if name not in known or not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{path}: {expected}, got {name}: {value!r}")
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _write_all(texts: Sequence[tuple[Path | None, str]]) -> None:
    """Write each text to its file, also where another cannot be written: they took a run to get. Then ValueError."""
    errors = []
    for path, text in texts:
        if path is not None:
            try:
                write_lines(path, text.splitlines())
            except ValueError as error:
                errors.append(str(error))
    if errors:
        raise ValueError("; ".join(errors))


bench.add_command(prepare_dataset)


@bench.command()
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@click.option("--plot", "plot_file", type=NEW_FILE, help="Draw the ratios here (svg, png or pdf).")
def compare(first: Path, second: Path, plot_file: Path | None) -> None:
    """Lay two reports side by side, ours or trtllm-bench's."""
    from rich.console import Console
    from rich.table import Table

    from replayssm.runtime import bench_compare

    if plot_file is not None and plot_file.suffix.lower() not in bench_compare.PLOT_SUFFIXES:
        raise ValueError(
            f"--plot expects a name that ends in {', '.join(bench_compare.PLOT_SUFFIXES)}, got {plot_file.name!r}"
        )
    lines = bench_compare.compare(bench_compare.read_report(first), bench_compare.read_report(second))
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    table = Table("", *names, "second / first" if first.stem == second.stem else f"{second.stem} / {first.stem}")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
        colour = {True: "green", False: "red", None: "default"}[line.better]
        table.add_row(line.label, f"{line.first:,.2f}", f"{line.second:,.2f}", f"[{colour}]{ratio}[/{colour}]")
    Console().print(table)
    if plot_file is not None:
        try:
            bench_compare.plot(lines, names, plot_file)
        except ModuleNotFoundError as error:
            raise ValueError(f"--plot needs {error.name}: pip install '.[bench]' in the project's folder") from error
