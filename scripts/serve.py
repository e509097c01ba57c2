"""`replayssm serve`: an OpenAI-compatible server over an engine."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from replayssm.runtime.logs import LEVELS
from replayssm.scripts.config_file import apply_config
from replayssm.scripts.draft_options import DRAFT_NAMES, scheduled_draft_options
from replayssm.scripts.engine_options import as_asked, device_option, fp8_activations_option, tensor_parallel_option
from replayssm.scripts.files import read_text
from replayssm.scripts.help_groups import GroupedCommand
from replayssm.scripts.number_types import FiniteRange

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
AT_LEAST_0, AT_LEAST_1 = click.IntRange(0), click.IntRange(1)
MIB = 1 << 20
CACHED_BATCH_SIZE = 256


GROUPS = {
    "Engine and device": ("checkpoint", "config", "device", "tensor_parallel_size", "fp8_activations", "cuda_graphs"),
    "Batch and memory": (
        *("max_batch_size", "max_seq_len", "max_num_tokens", "prefill_chunk", "free_gpu_memory_fraction"),
        *("prefix_cache", "max_queue_size", "time_slice", "swap_memory"),
    ),
    "Drafts": DRAFT_NAMES,
    "Chat": ("chat_template", "tool_parser", "reasoning_parser"),
    "Server": (
        *("host", "port", "served_model_name", "api_key", "request_timeout", "max_request_bytes", "shutdown_timeout"),
        *("metrics_prefix", "log_level", "log_format"),
    ),
}


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("engine", required=False, type=DIRECTORY)
@click.option(
    "--checkpoint",
    type=DIRECTORY,
    help="In place of ENGINE: a checkpoint, whose engine is built once and kept in ~/.cache/replayssm.",
)
@click.option(
    "--config",
    "--extra-llm-api-options",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML with trtllm-serve's keys; it goes before the command line.",
)
@click.option("--host", default="localhost", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@device_option
@tensor_parallel_option
@fp8_activations_option
@click.option(
    "--cuda-graphs/--no-cuda-graphs", default=None, help="Run steps as captured CUDA graphs.  [default: on CUDA]"
)
@click.option("--served-model-name", help="Name that clients use.  [default: the model's]")
@click.option("--max-batch-size", type=int, help="Sequences at the same time.  [default: what the memory holds]")
@click.option(
    "--max-num-tokens", type=int, help="Tokens of one step.  [default: 8192, or what one chunk beside all slots takes]"
)
@click.option("--max-seq-len", type=int, help="Tokens of a sequence, prompt and output.  [default: the engine's]")
@click.option(
    "--free-gpu-memory-fraction",
    "--kv-cache-free-gpu-memory-fraction",
    default=0.9,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Share of the device's free memory that state and attention cache may take.",
)
@scheduled_draft_options
@click.option(
    "--prefill-chunk", default=256, show_default=True, type=AT_LEAST_1, help="Prompt tokens of a request in one step."
)
@click.option(
    "--max-queue-size", default=256, show_default=True, type=AT_LEAST_1, help="Requests that wait; more get status 429."
)
@click.option(
    "--time-slice",
    type=AT_LEAST_1,
    help="Steps after which a request makes way for a waiting one.  [default: none does]",
)
@click.option(
    "--swap-memory",
    default=1024,
    show_default=True,
    type=AT_LEAST_0,
    help="MiB of host memory for the state of requests that made way.",
)
@click.option(
    "--prefix-cache",
    default=256,
    show_default=True,
    type=AT_LEAST_0,
    help="MiB of host memory for beginnings of prompts that come again; 0 keeps none.",
)
@click.option(
    "--request-timeout",
    type=FiniteRange(0, min_open=True),
    help="Seconds for a request, waiting included.  [default: no limit]",
)
@click.option(
    "--max-request-bytes", default=8 * MIB, show_default=True, type=AT_LEAST_1, help="Bytes of a request's body."
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Jinja file.  [default: the checkpoint's]",
)
@click.option(
    "--tool-parser", help="How the model writes tool calls: qwen3, qwen3_coder, or auto.  [default: unparsed]"
)
@click.option(
    "--reasoning-parser",
    help="How it writes reasoning: qwen3, qwen3_5, deepseek-r1, nano-v3, or auto.  [default: unparsed]",
)
@click.option(
    "--api-key",
    envvar="REPLAYSSM_API_KEY",
    help="Bearer token that /v1 wants; better set by $REPLAYSSM_API_KEY.  [default: none is wanted]",
)
@click.option(
    "--metrics-prefix",
    default="replayssm_",
    show_default=True,
    help="Of the names at /metrics; 'vllm:' or 'trtllm_' for dashboards made for those.",
)
@click.option(
    "--shutdown-timeout",
    default=30,
    show_default=True,
    type=AT_LEAST_0,
    help="Seconds for running requests to finish after SIGTERM or Ctrl-C; a second one ends them at once.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(LEVELS),
    help="Least level of lines on standard error.",
)
@click.option(
    "--log-format",
    default="text",
    show_default=True,
    type=click.Choice(["text", "json"]),
    help="json: one object a line, with the numbers of each request.",
)
def serve(
    engine: Path | None,
    checkpoint: Path | None,
    config: Path | None,
    log_level: str,
    log_format: str,
    **options: Any,
) -> None:
    """Serve ENGINE, a directory made by `replayssm build`, over HTTP: OpenAI's completions and chat, /health, /metrics,
    and a live page at /.

    Options carry trtllm-serve's names where the meaning is the same, and --config takes its YAML keys. docs/serving.md
    says which parameters of a call mean what.
    """
    if (engine is None) == (checkpoint is None):
        raise click.UsageError("give an engine directory, or --checkpoint, and not both")
    try:
        from replayssm.runtime.api import create_app
        from replayssm.runtime.http_server import HttpServer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serving needs the package {error.name!r}: pip install '.[serve]' in the project's folder"
        ) from error
    from replayssm.runtime import logs
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.serving import check_draft_options, settle_heap

    logs.set_up(log_level, log_format == "json")
    options = options if config is None else apply_config(config, options)
    _check_address(options["host"], options["port"])
    check_draft_options(options["draft"], options["draft_len"], options["adaptive_drafts"], options["draft_sampling"])
    if engine is not None and _is_checkpoint(engine):
        raise ValueError(f"{engine} is a checkpoint: serve it with --checkpoint, or build an engine of it")
    loaded = Engine.load(engine or _cached_engine(checkpoint, options["max_batch_size"], options["max_seq_len"]))
    server_options = _server_options(loaded, **options)
    loop = _loop(loaded, **options)
    app = create_app(loop, server_options)
    server = HttpServer(app, loop, options["host"], options["port"], options["shutdown_timeout"])
    settle_heap()
    try:
        server.run()
    finally:  # however it ended: a thread that computes must not outlive Python
        loop.stop()
        loop.scheduler.session.close()
    raise click.exceptions.Exit(server.exit_code)


def _is_checkpoint(directory: Path) -> bool:
    """Whether a directory is one of Hugging Face and no engine."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _check_address(host: str, port: int) -> None:
    """ValueError if the server could not listen there, before anything is loaded."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}; change --host or --port") from error


def _loop(engine: Any, **options: Any) -> Any:
    import logging

    from replayssm.runtime import serving
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.scheduler import SchedulerOptions

    engine = as_asked(engine, options["device"], options["tensor_parallel_size"], options["fp8_activations"])
    engine = serving.with_max_seq_len(engine, options["max_seq_len"])
    directory = options["draft_engine"]
    draft_engine = None if directory is None else Engine.load(directory)
    memory = serving.usable_bytes(engine, options["device"], options["free_gpu_memory_fraction"], draft_engine)
    slots = serving.slots_that_fit(engine, memory, options["max_batch_size"], draft_engine)
    scheduling = SchedulerOptions(
        max_num_tokens=options["max_num_tokens"],
        max_queue=options["max_queue_size"],
        time_slice=options["time_slice"],
        swap_bytes=options["swap_memory"] * MIB,
        prefix_cache_bytes=options["prefix_cache"] * MIB,
        draft_len=options["draft_len"],
        draft_sampling=options["draft_sampling"],
    )
    loop = serving.make_loop(
        engine,
        slots,
        scheduling,
        options["draft"],
        options["prefill_chunk"],
        options["device"],
        draft_engine,
        options["adaptive_drafts"],
        options["cuda_graphs"],
    )
    for line in serving.describe_memory(engine, memory, slots, draft_engine):
        logging.getLogger("replayssm.server").info(line)
    return loop


def _server_options(engine: Any, **options: Any) -> Any:
    from replayssm.runtime.api import ServerOptions
    from replayssm.runtime.chat_format import check_parsers
    from replayssm.runtime.metrics import check_prefix

    check_prefix(options["metrics_prefix"])
    check_parsers(engine.tokenizer, options["tool_parser"], options["reasoning_parser"])
    if options["api_key"] == "":
        raise ValueError("the API key is empty: leave --api-key out to serve without one")
    template = options["chat_template"]
    template = None if template is None else read_text(template)
    if template is not None and not template.strip():
        raise ValueError(f"{options['chat_template']} is empty: expected a chat template in Jinja")
    return ServerOptions(
        model=options["served_model_name"] or engine.manifest.model["name"],
        api_key=options["api_key"],
        timeout_s=options["request_timeout"],
        max_body_bytes=options["max_request_bytes"],
        metrics_prefix=options["metrics_prefix"],
        chat_template=template,
        tool_parser=options["tool_parser"],
        reasoning_parser=options["reasoning_parser"],
    )


def _cached_engine(checkpoint: Path, max_batch_size: int | None, max_seq_len: int | None) -> Path:
    """The engine of a checkpoint for these limits, built where it is missing. An interrupted build leaves nothing."""
    import hashlib
    import os

    from replayssm.builders.checkpoint import Checkpoint
    from replayssm.builders.engine import BuildOptions, build_engine

    # Slots are made when the server starts, so a high limit costs nothing: memory decides, or --max-batch-size.
    build = BuildOptions(max_draft_len=3, max_batch_size=max(CACHED_BATCH_SIZE, max_batch_size or 0))
    if max_seq_len is not None:
        build = replace(build, max_seq_len=max_seq_len)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replayssm" / "engines"
    # The identity covers shapes and configuration; sizes and times of files say when weights changed under them.
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(checkpoint.iterdir())]
    key = hashlib.sha256(f"{Checkpoint.open(checkpoint).identity} {stats} {build}".encode()).hexdigest()[:16]
    output = cache / f"{checkpoint.resolve().name}-{key}"
    if not output.exists():
        click.echo(f"building {output}", err=True)
        cache.mkdir(parents=True, exist_ok=True)
        build_engine(checkpoint, output, build)
    return output
