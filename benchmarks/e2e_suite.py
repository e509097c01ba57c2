"""The end-to-end figures of docs/results.md, most important first, in one process and a limited time.

    python benchmarks/e2e_suite.py --seconds 300

What does not fit the time or the memory, or has no kernel, is said and left out. Every figure is what its own script
gives with the options printed before it.
"""

from __future__ import annotations

import argparse
import shlex
import time
import traceback

import e2e_decode_speedup as decode
import e2e_spec_decode_throughput as speculation
import torch
from e2e_model import Model
from e2e_results import E2eResults, device_of, model_of
from e2e_run import free_memory

LOW = "--also float16:nvfp4:stochastic"
STEPS = "--num-steps 128 --warmup-steps 32"
SHORT = "--num-steps 64 --warmup-steps 16"


FP8 = "--weights fp8 --fp8-products"


def plan_of(model: str) -> tuple:
    """Batch 256 with every state, decoding and speculation; the other published batch sizes; batch 256 in FP8."""
    batch = f"--model {model} --batch-size 256"
    speculated = "--num-steps 64 --warmup-steps 16 --repeats 1"
    return (
        (decode, f"{batch} {STEPS} {LOW}"),
        (speculation, f"{batch} {speculated} {LOW}"),
        (decode, f"--model {model} --batch-size 512 --batch-size 128 --batch-size 32 --batch-size 1 {SHORT}"),
        (decode, f"{batch} {FP8} {SHORT} {LOW}"),
        (speculation, f"{batch} {FP8} {speculated} {LOW}"),
    )


PLANS = {model: plan_of(model) for model in ("nano4b", "qwen4b")}
"""(script, options) of each part. A part takes about a minute on an H200."""


def run_one(script, text: str, common: list[str], models: dict[tuple, Model]) -> None:
    options = script.parse([*shlex.split(text), *common])
    device = device_of(options)
    key = (options.model, options.weights, options.fp8_products)
    if key not in models:
        models.clear()
        free_memory(device)
        models[key] = model_of(options)
    results = E2eResults(script.BENCHMARK, options)
    for batch in options.batch_size:
        script.measure(models[key], batch, options, results)


def main(arguments: list[str] | None = None, plan=None) -> int:
    """Returns the number of figures that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="start no figure after this time; default 600")
    parser.add_argument("--part", choices=PLANS, help="default: all, one after the other")
    limit, common = parser.parse_known_args(arguments)
    begin, failed, models = time.perf_counter(), 0, {}
    plan = plan or [one for part in ([limit.part] if limit.part else PLANS) for one in PLANS[part]]
    for script, text in plan:
        spent = time.perf_counter() - begin
        print(f"-- {spent:.0f} s: {script.BENCHMARK} {text}", flush=True)
        if spent > limit.seconds:
            print("   left out: no time", flush=True)
            continue
        try:
            run_one(script, text, common, models)
        except (RuntimeError, ValueError, torch.cuda.OutOfMemoryError) as error:
            failed += 1
            traceback.print_exc(limit=-3)
            print(f"   failed: {str(error)[:300]}", flush=True)
            free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return failed


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
