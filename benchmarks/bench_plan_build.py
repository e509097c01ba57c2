"""How long does TensorRT-RTX take to compile a real-width model on the CPU, and how much memory?

A 24-layer hybrid with the widths of Nemotron-3 Nano 4B and W4A16 NVFP4 weights (random bytes) is written to a
temporary directory and built twice in processes of their own: once as it is, and once with the compiler replaced by
nothing, which leaves what the builder itself needs. One JSON line for each.

    python benchmarks/bench_plan_build.py
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import click
import torch
from bench_build_memory import measure
from commit import current_commit

LAYERS = "M-M-M-M-M-*-M-M-M-M-M-*-"
RUN = "from replayssm.scripts.cli import main; main()"
WITHOUT_COMPILER = (
    "from replayssm.builders.targets.tensorrt_layers import Layers; Layers.compile = lambda *_: memoryview(b'-'); "
)


def make_checkpoint(directory: Path, vocab_size: int) -> None:
    """Write the synthetic checkpoint: every quantizable module W4A16 NVFP4."""
    from replayssm.builders.calibration import calibration_text
    from replayssm.builders.checkpoint import SINGLE_NAME
    from replayssm.builders.config import published_config, read_config, weight_shapes
    from replayssm.builders.random_checkpoint import disk_name, random_weight, write_byte_tokenizer
    from replayssm.builders.safetensors_file import SafetensorsWriter
    from replayssm.builders.weight_shapes import dense_dtype, quantizable_modules, storage
    from replayssm.plugins.state import torch_dtype

    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": ["lm_head"],
        "group_size": 16,
    }
    changes = {"hybrid_override_pattern": LAYERS, "num_hidden_layers": len(LAYERS), "vocab_size": vocab_size}
    content = {**published_config("nano4b"), **changes, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(content))
    config = read_config(content)
    quantized = set(quantizable_modules(config))
    tensors = {}
    for name, shape in weight_shapes(config).items():
        module = name.removesuffix(".weight")
        module_format = "w4a16_nvfp4" if module in quantized else "dense"
        for suffix, stored in storage(shape, module_format, dense_dtype(config, name)).items():
            tensors[f"{module}.{suffix}" if module in quantized else name] = stored
    generator = torch.Generator().manual_seed(0)
    with SafetensorsWriter(directory / SINGLE_NAME, {disk_name(config, k): v for k, v in tensors.items()}) as writer:
        for name, (dtype, shape) in tensors.items():
            if dtype == "uint8":
                weight = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            elif name.endswith(("_scale", "_scale_2")):
                weight = 0.01 + 0.1 * torch.rand(shape, generator=generator)
            else:
                weight = random_weight(config, name, shape, generator)
            writer.write(disk_name(config, name), weight.to(torch_dtype(dtype)))
    write_byte_tokenizer(directory, calibration_text(), 1000)
    os.sync()


def holds_the_model(directory: Path) -> bool:
    """Whether an engine of segments is whole: files with their SHA-256, a plan for every segment between stateful
    operators, with its values, and in the plans as many bytes as the weights have that lie nowhere else.

    More needs a GPU: without one TensorRT-RTX reads no plan back.
    """
    from replayssm.builders.targets.tensorrt_segments import Segment, cut
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.plans import PlanRuntime

    engine = Engine.load(directory, "full")
    described, plans = PlanRuntime.describe(directory)["networks"], 0
    for name, network in engine.networks.items():
        for step, written in zip(cut(network), described[name], strict=True):
            if not isinstance(step, Segment):
                if written != {"kind": "stateful", "node": step}:
                    return False
                continue
            values = [[step.start, step.stop], list(step.inputs), list(step.outputs)]
            if [written["nodes"], written["inputs"], written["outputs"]] != values:
                return False
            plans += 0 if step.is_view else (directory / written["file"]).stat().st_size
    beside = sum(weight.nbytes for weight in engine.weights.values())
    return plans >= engine.manifest.quantization["weight_bytes"] - beside


def _cpu_seconds() -> float:
    """Of all finished child processes: on a shared machine it says more than elapsed time."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@click.command()
@click.option("--vocab-size", default=131072, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), help="Where to make the temporary directory.")
@click.option("--output", type=click.Path(path_type=Path), help="Append the JSON lines to this file too.")
def main(vocab_size: int, directory: Path | None, output: Path | None) -> None:
    """Time and memory of `replayssm build --target tensorrt-rtx`."""
    from replayssm.builders.targets.tensorrt_layers import load_module

    version = load_module("tensorrt-rtx").__version__
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        source, engine = Path(folder) / "checkpoint", Path(folder) / "engine"
        source.mkdir()
        make_checkpoint(source, vocab_size)
        weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        for variant, prologue in (("ours", ""), ("ours, without the compiler", WITHOUT_COMPILER)):
            arguments = ["build", "--checkpoint", str(source), "--output", str(engine), "--target", "tensorrt-rtx"]
            before = _cpu_seconds()
            peak = measure([sys.executable, "-c", prologue + RUN, *arguments, "--overwrite"])
            plans = [path.stat().st_size for path in (engine / "plans").glob("*.plan")]
            line = json.dumps(
                {
                    **({} if prologue else {"correct": holds_the_model(engine)}),
                    "benchmark": "plan_build",
                    "op": "build tensorrt-rtx",
                    "geometry": f"nano4b, {len(LAYERS)} layers, W4A16, vocabulary {vocab_size}",
                    "variant": variant,
                    "value": round(peak.seconds, 1),
                    "unit": "s",
                    "cpu_seconds": round(_cpu_seconds() - before, 1),
                    "anonymous_bytes": peak.anonymous,
                    "resident_bytes": peak.resident,
                    "weight_bytes": weights,
                    "plans": len(plans),
                    "plan_bytes": sum(plans),
                    "largest_plan_bytes": max(plans),
                    "compiler": version,
                    "gpu": None,
                    "commit": current_commit("--short"),
                    "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                }
            )
            print(line, flush=True)
            if output is not None:
                with output.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
