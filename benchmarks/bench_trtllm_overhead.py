"""What the TensorRT-LLM module adds to a captured decode step besides its operators: positions and constants.

PYTHONPATH=integrations python benchmarks/bench_trtllm_overhead.py
"""

from __future__ import annotations

import json
import os

# Without TensorRT-LLM: the package then registers nothing and says so.
os.environ["TRTLLM_REPLAYSSM"] = "0"

import torch
from harness import Results, environment, time_graph

from replayssm_trtllm.batch import Batch
from replayssm_trtllm.steps import Steps

# Recurrent layers, heads, row tiles of a head; whether the layers need A_log.
MODELS = {"nano4b": (21, 96, 2, True), "qwen122b": (36, 64, 4, False)}


def main() -> None:
    path = Results("trtllm_overhead").path
    for geometry, (layers, heads, tiles, has_constants) in MODELS.items():
        for batch_size in (1, 32, 256):
            line = measure(geometry, layers, heads, tiles, has_constants, batch_size)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{geometry:9s} B={batch_size:4d} {line['median_us']:8.1f} us a step", flush=True)


def measure(geometry: str, layers: int, heads: int, tiles: int, has_constants: bool, batch_size: int) -> dict:
    device = torch.device("cuda")
    steps = Steps(batch_size + 1, layers * heads * tiles, device)
    slots = torch.randperm(batch_size + 1, device=device)[:batch_size].int()
    lengths = torch.full((batch_size,), 100, dtype=torch.int32, device=device)
    batch = Batch(0, batch_size, slots, True, lengths, None, False)
    constants = [-torch.rand(heads, device=device) for _ in range(layers if has_constants else 0)]

    def one_step() -> None:
        steps.advance(batch)
        if constants:
            torch._foreach_log(torch._foreach_neg(constants))

    # The same length again is a jump back, which moves checkpoints; a length that goes on leaves them.
    steps.advance(batch)
    lengths.add_(1)
    steps.advance(batch)
    correct = bool((steps.positions[slots.long()] == 100).all()) and bool((steps.expected[slots.long()] == 102).all())
    timing = time_graph([one_step] * 20)
    return {
        "benchmark": "trtllm_overhead",
        "op": "positions",
        "geometry": geometry,
        "batch": batch_size,
        "window": 1,
        "variant": "ours",
        "correct": correct,
        "median_us": round(timing.median_us, 3),
        "p10_us": round(timing.p10_us, 3),
        "p90_us": round(timing.p90_us, 3),
        **environment(),
    }


if __name__ == "__main__":
    main()
