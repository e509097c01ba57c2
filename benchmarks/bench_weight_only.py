"""Products with packed weights and mixtures of experts at the sizes of the published models, and what else there is.

    python benchmarks/bench_weight_only.py --model super120b --model qwen122b --model linear --tokens 1 --tokens 256

Bytes are those of the weights that the tokens use, each read once, and nothing else; the ceiling is that of plain reads
in the same run, that of operations a large bf16 product. Weights rotate until they exceed any cache. Variants: "ours";
"ours_fp8" (mixtures with activations in FP8, on Hopper);
"dequantize" (our kernel that writes the weight in bf16, then cuBLAS); "cublas" (bf16 weights); "grouped_mm"
(torch._grouped_mm over bf16 experts, both products of pairs that were sorted beforehand, without activation and
combination); "dequantized_grouped_mm" (the same behind our kernel that writes all experts in bf16).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial

import torch
from e2e_results import measured_flops
from harness import COLD_BYTES, Results, Timing, ceilings, time_graph

from replayssm.plugins import fp8_experts, nvfp4, packed_weights, weight_only
from replayssm.plugins.packed_weights import Weight

DEVICE = torch.device("cuda", 0)
MIXTURES = {
    "super120b": (512, 22, 1024, 2688, "squared_relu"),
    "qwen122b": (256, 8, 3072, 1024, "swiglu"),
}
"""Experts, choices, width and hidden width of an expert, activation."""
LINEARS = (
    ("nano4b", "nvfp4", 12544, 3136),
    ("nano4b", "nvfp4", 3136, 12544),
    ("super120b", "fp8", 18560, 4096),
    ("super120b", "fp8", 4096, 8192),
)
"""Model, format, output and input features."""
ALLOWED = 0.01
"""Relative distance from fp64 in the Euclidean norm: a mixture rounds five values to bf16 on the way, 2^-9 each."""
ALLOWED_IN_FP8 = 0.08
"""The same where weights and activations are rounded to e4m3, 2^-4 each at most, by some 0.03 in this norm."""


def random_weight(format: str, *shape: int, unit: torch.Tensor | None = None) -> Weight:
    scale = torch.full(shape[:-2], 1 / (3 * shape[-1] ** 0.5), device=DEVICE)
    if format == "fp8":
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
        codes = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
        return Weight(format, packed_weights.pack(format, codes), scale / 32, *shape[-2:])
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=DEVICE)
    blocks = (torch.rand(*shape[:-1], shape[-1] // 16, device=DEVICE) / 2 + 0.75).to(torch.float8_e4m3fn)
    if format == fp8_experts.FORMAT:
        return Weight(format, fp8_experts.pack(codes, blocks), scale, *shape[-2:], unit)
    return Weight(format, packed_weights.pack(format, codes, blocks), scale, *shape[-2:])


def units(count: int, largest: float) -> torch.Tensor:
    return torch.full((count,), largest / nvfp4.E4M3_MAX, device=DEVICE)


def values(weight: Weight, expert: int | None = None) -> torch.Tensor:
    """fp64 values of a matrix, or of an expert's."""
    if expert is not None:
        scale = weight.scale[expert]
        weight = Weight(weight.format, weight.tiles[expert], scale, weight.out_features, weight.in_features)
    if weight.format == fp8_experts.FORMAT:
        weight = replace(weight, tiles=weight.tiles.unsqueeze(0))
        codes, *blocks = (tensor[0] for tensor in fp8_experts.unpack(weight))
    else:
        codes, *blocks = packed_weights.unpack(weight)
    if weight.format == "fp8":
        return codes.double() * weight.scale.double()
    return nvfp4.dequantize(codes, *blocks, torch.ones((), device=DEVICE)).double() * weight.scale.double()


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def report(results: Results, timing: Timing, nbytes: float, ceiling: float, operations: float, **fields) -> None:
    rate, peak = operations / timing.median_us / 1e6, measured_flops(DEVICE) / 1e12
    results.add(timing, nbytes, ceiling, window=1, tflop_s=round(rate, 1), ceiling_tflop_s=round(peak, 1), **fields)


def measure_linear(results: Results, case: tuple, tokens: list[int], ceiling: float) -> None:
    model, format, rows, columns = case
    nbytes, wide_bytes = rows * columns * (0.5625 if format == "nvfp4" else 1), 2 * rows * columns
    weights = [random_weight(format, rows, columns) for _ in range(max(2, int(COLD_BYTES // nbytes) + 1))]
    wide = [weight_only.dequantize(w, torch.bfloat16) for w in weights[: max(2, int(COLD_BYTES // wide_bytes) + 1)]]
    for batch in tokens:
        x = torch.randn(batch, columns, device=DEVICE).bfloat16()
        wanted = x.double() @ values(weights[0]).T
        variants: dict[str, tuple[list[Callable], float]] = {
            "ours": ([partial(ours, x, w) for w in weights], nbytes),
            "dequantize": ([partial(dequantized, x, w) for w in weights], nbytes),
            "cublas": ([partial(torch.mm, x, w.t()) for w in wide], wide_bytes),
        }
        for variant, (calls, moved) in variants.items():
            error = distance(calls[0](), wanted)
            fields = {"format": "bfloat16" if variant == "cublas" else format, "model": model, "variant": variant}
            fields |= {"op": "linear", "geometry": f"{rows}x{columns}", "batch": batch}
            fields |= {"error": round(error, 6), "correct": error < ALLOWED}
            report(results, time_graph(calls), moved, ceiling, 2 * batch * rows * columns, **fields)


def ours(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Packed at any number of tokens."""
    return weight_only.packed_linear(x, weight, x.dtype)


def dequantized(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return x @ weight_only.dequantize(weight, x.dtype).t()


def reference(x, ids, weights, held: list[Weight], activation: str) -> torch.Tensor:
    out = torch.zeros(len(x), held[-1].out_features, dtype=torch.float64, device=DEVICE)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        hidden = [x[token].double() @ values(matrix, expert).T for matrix in held[:-1]]
        wide = hidden[0].relu() ** 2 if activation == "squared_relu" else hidden[0] * hidden[0].sigmoid() * hidden[1]
        out.index_add_(0, token, weights[token, choice, None] * (wide @ values(held[-1], expert).T))
    return out


def measure_mixture(results: Results, model: str, tokens: list[int], ceiling: float) -> None:
    experts, top_k, width, hidden, activation = MIXTURES[model]
    inner = [random_weight("nvfp4", experts, hidden, width) for _ in range(2 if activation == "swiglu" else 1)]
    held = [*inner, random_weight("nvfp4", experts, width, hidden)]
    # Inputs of an expert lie within 6, its hidden values within 60.
    in_fp8 = (
        []
        if torch.cuda.get_device_capability()[0] != 9
        else [
            *(random_weight(fp8_experts.FORMAT, experts, hidden, width, unit=units(1, 6)) for _ in inner),
            random_weight(fp8_experts.FORMAT, experts, width, hidden, unit=units(experts, 60)),
        ]
    )
    shapes = ((hidden * len(inner), width), (width, hidden))
    wide = [torch.randn(experts, *shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    elements = width * hidden * len(held)
    for batch in tokens:
        x = torch.randn(batch, width, device=DEVICE).bfloat16()
        draws = [torch.rand(batch, experts, device=DEVICE).topk(top_k).indices for _ in range(4)]
        weights = torch.rand(batch, top_k, device=DEVICE)
        used = sum(len(ids.unique()) for ids in draws) / len(draws)
        few = 1  # tokens compared: each has experts of its own
        got = weight_only.moe(x, draws[0], weights, held, activation)
        error = distance(got[:few], reference(x[:few], draws[0][:few], weights[:few], held, activation))
        common = {"op": "moe", "geometry": model, "batch": batch, "experts_used": round(used, 1)}
        operations = 2 * batch * top_k * elements
        calls = [partial(weight_only.moe, x, ids, weights, held, activation) for ids in draws]
        fields = {**common, "format": "nvfp4", "variant": "ours", "error": round(error, 6), "correct": error < ALLOWED}
        report(results, time_graph(calls), used * elements * 0.5625, ceiling, operations, **fields)
        if in_fp8:
            got = fp8_experts.moe(x, draws[0], weights, in_fp8, activation)
            error = distance(got[:few], reference(x[:few], draws[0][:few], weights[:few], in_fp8, activation))
            calls = [partial(fp8_experts.moe, x, ids, weights, in_fp8, activation) for ids in draws]
            fields |= {"variant": "ours_fp8", "error": round(error, 6), "correct": error < ALLOWED_IN_FP8}
            report(results, time_graph(calls), used * elements * 0.5625, ceiling, operations, **fields)
        timing, used = time_grouped_mm(draws[0], wide)
        fields = {**common, "format": "bfloat16", "variant": "grouped_mm"}
        report(results, timing, used * elements * 2, ceiling, operations, **fields)
        # A peer's weights are rows of one matrix; the time depends on sizes alone.
        first = held[0]
        rows = Weight("nvfp4", first.tiles.flatten(0, 1), first.scale[:1], experts * hidden, width)
        writing = time_graph([partial(weight_only.dequantize, rows, torch.bfloat16)])
        both = Timing(*(len(held) * one + two for one, two in zip(astuple(writing), astuple(timing), strict=True)))
        fields = {**common, "format": "nvfp4", "variant": "dequantized_grouped_mm"}
        report(results, both, experts * elements * 0.5625, ceiling, operations, **fields)


def time_grouped_mm(ids: torch.Tensor, wide: list[torch.Tensor]) -> tuple[Timing, int]:
    """(time of both products over bf16 experts, experts used)."""
    counts = torch.bincount(ids.flatten(), minlength=len(wide[0]))
    ends, calls = counts.cumsum(0).to(torch.int32), []
    for weight in wide:
        pairs = torch.randn(ids.numel(), weight.shape[2], device=DEVICE).bfloat16()
        calls.append(partial(torch._grouped_mm, pairs, weight.transpose(1, 2), offs=ends))
    timing = time_graph(calls)
    return Timing(*(len(calls) * value for value in astuple(timing))), int((counts > 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[*MIXTURES, "linear"], help="default: all")
    parser.add_argument("--tokens", action="append", type=int, help="default: 1 to 2560")
    options = parser.parse_args()
    tokens = options.tokens or [1, 16, 64, 256, 512, 1280, 2560]
    results = Results("weight_only")
    pool = torch.empty(COLD_BYTES * 2, dtype=torch.uint8, device=DEVICE)
    ceiling = ceilings(COLD_BYTES, pool)["read"]
    for model in options.model or [*MIXTURES, "linear"]:
        if model != "linear":
            measure_mixture(results, model, tokens, ceiling)
            continue
        for case in LINEARS:
            measure_linear(results, case, tokens, ceiling)


if __name__ == "__main__":
    main()
