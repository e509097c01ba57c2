"""What the end-to-end benchmarks share: options, the lines that they write, ceilings and rooflines."""

from __future__ import annotations

import argparse
import datetime
import json
from functools import cache
from pathlib import Path

import torch
from e2e_model import Model, load_model
from harness import RESULTS, ceilings, environment

from replayssm.builders.inspection import WEIGHT_FORMATS
from replayssm.plugins.settings import READOUT_DTYPES, ROUNDINGS, STATE_DTYPES, ReplaySettings

MATMUL_TFLOPS_SIZE = 8192
CEILING_BYTES = 1 << 30


def add_common_options(parser: argparse.ArgumentParser, batch_sizes: list[int], steps: int, warmup: int) -> None:
    add = parser.add_argument
    add("--model", "--model-id", required=True, help="engine directory, checkpoint directory or published name")
    add("--random-weights", action="store_true", help="random weights of the checkpoint's shape; implied by a name")
    add("--layers", type=int, help="keep this many leading layers; results say so")
    add("--vocabulary", type=int, help="keep this many tokens, so that an output head weighs as in the whole model")
    add("--batch-size", type=int, action="append", help=f"may be given several times; default {batch_sizes}")
    add("--num-steps", type=int, default=steps, help=f"timed steps of each variant; default {steps}")
    add("--warmup-steps", type=int, default=warmup, help=f"default {warmup}")
    add("--repeats", type=int, default=4, help="turns of each variant; default 4")
    add("--buffer-len", type=int, default=16, help="L; default 16")
    add("--state-dtype", "--mamba-ssm-cache-dtype", choices=STATE_DTYPES, default="float32")
    add("--state-rounding", choices=ROUNDINGS, default="nearest")
    add("--readout-dtype", choices=READOUT_DTYPES, default="same")
    add("--fp8-products", action="store_true", help="FP8 weights times activations in FP8, where the recipe has it so")
    add(
        "--fp8-experts",
        action="store_true",
        help="NVFP4 experts in FP8 where the recipe rounds what they read to NVFP4",
    )
    add("--weights", choices=WEIGHT_FORMATS, help="format of random weights; default as the model was published")
    add("--target", choices=["torch"], default="torch", help="what runs the network")
    add("--device", default="cuda")
    add("--seed", type=int, default=0)
    add("--no-profile", action="store_true", help="do not split the step time by kernels")
    add("--output", type=Path, help="file of result lines; default benchmarks/results/<benchmark>-<gpu>-<date>.jsonl")
    add("--plot", type=Path, help="also draw the run's lines, as SVG")
    parser.set_defaults(default_batch_sizes=batch_sizes)


def device_of(options: argparse.Namespace) -> torch.device:
    options.batch_size = options.batch_size or options.default_batch_sizes
    device = torch.device(options.device)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def model_of(options: argparse.Namespace, mtp: bool = False, tiles: bool = True) -> Model:
    """The model that the common options name; mtp: with its draft head; tiles: as for `load_model`."""
    return load_model(
        options.model,
        device_of(options),
        random_weights=options.random_weights,
        layers=options.layers,
        mtp=mtp,
        fp8_products=options.fp8_products,
        fp8_experts=options.fp8_experts,
        tiles=tiles,
        weights=options.weights,
        vocabulary=options.vocabulary,
    )


class E2eResults:
    """Appends one JSON object per figure and prints a short line."""

    def __init__(self, benchmark: str, options: argparse.Namespace) -> None:
        self.benchmark, self.plot, self.lines = benchmark, options.plot, []
        if device_of(options).type == "cuda":
            self.environment = environment()
        else:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            self.environment = {"gpu": "none", "commit": "unknown", "date": now}
        gpu = self.environment["gpu"].lower().replace(" ", "-")
        default = RESULTS / f"{benchmark}-{gpu}-{self.environment['date'][:10]}.jsonl"
        self.path = options.output or default
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **fields) -> dict:
        line = {"benchmark": self.benchmark, **fields, **self.environment}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        split = {
            key: fields[key] for key in ("split_us", "kernels_per_step", "gap_us", "largest_gap_us") if key in fields
        }
        print(
            f"{fields['geometry']:9s} B={fields['batch']:4d} W={fields['window']} {fields['variant']:22s} "
            f"{fields.get('median_us', 0):9.1f} us {fields['tokens_per_s']:9.0f} tokens/s, {fields['speedup']:.3f}x"
            f"{' random weights' if fields['random_weights'] else ''} {split or ''} correct={fields['correct']}",
            flush=True,
        )
        return line

    def close(self) -> Path:
        """Draw what was asked for; returns the file of lines."""
        if self.plot is not None:
            from plot_steps import plot_run  # here: only this needs matplotlib

            plot_run(self.lines, self.plot)
        return self.path


def model_fields(model: Model, settings: ReplaySettings, batch: int, options: argparse.Namespace) -> dict:
    return {
        "geometry": model.name,
        "batch": batch,
        "window": settings.max_window,
        "state_dtype": settings.state_dtype,
        "state_rounding": settings.state_rounding,
        "readout_dtype": settings.readout_dtype,
        "L": settings.buffer_len,
        "target": options.target,
        "random_weights": model.random,
        "layers": model.layers_run,
        "layers_total": model.layers_total,
        "fp8_products": model.fp8_products,
        "fp8_experts": model.fp8_experts,
        "vocabulary": model.vocab_size,
    }


@cache
def measured_ceiling(device: torch.device) -> float | None:
    """Bytes per second of plain reads over much more memory than any cache; None without a GPU."""
    if device.type != "cuda":
        return None
    pool = torch.randn(2 * CEILING_BYTES // 4, device=device)
    return ceilings(CEILING_BYTES, pool)["read"] * 1e9


@cache
def measured_flops(device: torch.device, fp8: bool = False) -> float | None:
    """Operations per second of one large product of random matrices in bf16 or FP8; None without a GPU."""
    if device.type != "cuda":
        return None
    size = MATMUL_TFLOPS_SIZE
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if fp8:
        (a, b), one = (x.to(torch.float8_e4m3fn) for x in (a, b)), torch.ones((), device=device)
    multiply = (lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)) if fp8 else lambda: a @ b
    for _ in range(3):
        multiply()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        multiply()
    end.record()
    end.synchronize()
    return 10 * 2 * size**3 / (begin.elapsed_time(end) / 1e3)


def roofline(model: Model, tokens: int, ceiling: float | None) -> dict:
    """Least times of a step's matrix products over `tokens` tokens: weights read once, and operations."""
    fields = {"weight_bytes": model.step_weight_bytes}
    if ceiling is None:
        return fields
    device, fp8 = torch.device("cuda", 0), model.fp8_elements
    flops = measured_flops(device)
    seconds = 2 * tokens * (model.product_elements - fp8) / flops
    if fp8:
        seconds += 2 * tokens * fp8 / measured_flops(device, fp8=True)
    return {
        **fields,
        "ceiling_gb_s": round(ceiling / 1e9, 1),
        "ceiling_tflop_s": round(flops / 1e12, 1),
        "weights_once_us": round(1e6 * model.step_weight_bytes / ceiling, 1),
        "products_us": round(1e6 * seconds, 1),
    }
