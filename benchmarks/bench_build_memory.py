"""How much memory do the offline steps take, against the size of the checkpoint's largest shard?

A checkpoint of a few GB with the widths of a published model, in several shards, is made in a temporary directory,
every step runs in a process of its own, and its peaks are sampled from /proc: anonymous memory (what a machine must
have) and resident memory (with file pages, which the kernel may drop at any time). One JSON line per figure.

    python benchmarks/bench_build_memory.py --model nano --step build
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from commit import current_commit

ALLOWANCE_BYTES = 2 * 10**9
"""Peak memory must stay below the largest shard plus this."""

STEPS = ("quantize nvfp4", "quantize nvfp4-w4a16", "quantize fp8", "build")
SAMPLE_SECONDS = 0.005
COMMAND = [sys.executable, "-c", "from replayssm.scripts.cli import main; main()"]

# Widths of the published models; fewer layers (and experts, vocabulary) make it a few GB.
CHANGES = {
    "nano": ("nano4b", {"hybrid_override_pattern": "M-M*-M-", "num_hidden_layers": 7}),
    "super": (
        "super120b",
        {
            "hybrid_override_pattern": "ME*E",
            "num_hidden_layers": 4,
            "n_routed_experts": 96,
            "vocab_size": 32768,
            "num_nextn_predict_layers": 0,
        },
    ),
}


@dataclass(frozen=True)
class Peak:
    """Highest values during a command, in bytes, and its duration."""

    anonymous: int
    resident: int
    seconds: float


def measure(command: list[str]) -> Peak:
    """Run a command and sample its memory (of the process itself; it must not do its work in children)."""
    started = time.monotonic()
    anonymous = resident = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for name, value in _status(process.pid):
                if name == "RssAnon":
                    anonymous = max(anonymous, value)
                elif name == "VmHWM":
                    resident = max(resident, value)
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return Peak(anonymous, resident, time.monotonic() - started)


def _status(pid: int) -> Iterator[tuple[str, int]]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            yield name, int(value[:-3]) * 1024


def make_checkpoint(model: str, directory: Path, shards: int) -> int:
    """Write the synthetic checkpoint; the size of its largest shard."""
    from replayssm.builders.calibration import calibration_text
    from replayssm.builders.config import published_config, read_config, weight_bytes
    from replayssm.builders.random_checkpoint import write_byte_tokenizer, write_random_checkpoint

    name, changes = CHANGES[model]
    config = {**published_config(name), **changes}
    total = weight_bytes(read_config(config))["total"]
    write_random_checkpoint(config, directory, max_shard_bytes=total // shards)
    write_byte_tokenizer(directory, calibration_text(), 1000)
    os.sync()  # or the first step would be timed while the kernel writes the checkpoint to the disk
    return max(path.stat().st_size for path in directory.glob("*.safetensors"))


def steps(names: tuple[str, ...], source: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of each step to measure."""
    for name in names:
        command, _, recipe = name.partition(" ")
        options = ["--recipe", recipe] if recipe else []
        target = folder / f"output-of-{command}"
        yield name, [command, "--checkpoint", str(source), "--output", str(target), *options, "--overwrite"]


@click.command()
@click.option("--model", type=click.Choice(list(CHANGES)), multiple=True, default=list(CHANGES), show_default=True)
@click.option("--step", type=click.Choice(STEPS), multiple=True, default=STEPS, show_default=True)
@click.option("--shards", default=6, show_default=True, help="Number of files, about.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to make the temporary directory.")
@click.option("--output", type=click.Path(path_type=Path), help="Append the JSON lines to this file too.")
def main(model: tuple[str, ...], step: tuple[str, ...], shards: int, directory: Path | None, output: Path | None):
    """Measure the peak memory of `replayssm quantize` and `replayssm build`."""
    exceeded = False
    for name in model:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            source = Path(folder) / "checkpoint"
            largest_shard = make_checkpoint(name, source, shards)
            for item, arguments in steps(step, source, Path(folder)):
                peak = measure([*COMMAND, *arguments])
                figure = describe(name, item, peak, source, largest_shard)
                line = json.dumps(figure)
                exceeded |= not figure["correct"]
                print(line, flush=True)
                if output is not None:
                    with output.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
    if exceeded:
        raise SystemExit("peak memory exceeds the largest shard plus 2 GB")


def describe(model: str, step: str, peak: Peak, source: Path, largest_shard: int) -> dict[str, object]:
    """One figure, in the form that all benchmarks write."""
    name, changes = CHANGES[model]
    return {
        "benchmark": "build_memory",
        "op": step,
        "geometry": f"{name}, {changes['num_hidden_layers']} layers",
        "variant": "ours",
        "value": peak.anonymous,
        "unit": "bytes",
        "resident_bytes": peak.resident,
        "limit_bytes": largest_shard + ALLOWANCE_BYTES,
        "largest_shard_bytes": largest_shard,
        "checkpoint_bytes": sum(path.stat().st_size for path in source.iterdir()),
        "seconds": round(peak.seconds, 1),
        "gpu": None,
        "commit": current_commit("--short"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "correct": peak.anonymous < largest_shard + ALLOWANCE_BYTES,
    }


if __name__ == "__main__":
    main()
