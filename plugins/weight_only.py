"""Matrix products of 16-bit activations with weights that stay packed: NVFP4, FP8 or 16 bits, dense or by expert.

A weight, as `plugins.packed_weights` arranges it, is read once per product and becomes 16-bit operands in registers
(kernels/weight_only_gemm.cu), so that with few tokens the time is that of its packed bytes. Sums are fp32; NVFP4 codes
times block scales are exact, the scale of the tensor enters behind the sum.

`plan_*` builds launches without a GPU, for tests that emulate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from replayssm.plugins import launch
from replayssm.plugins.elementwise import CHUNK, Launch, supports
from replayssm.plugins.geometry import FORMATS, REGISTERS_PER_SM, RESERVED_BYTES, KernelConfig, architecture
from replayssm.plugins.packed_weights import TILE_BYTES, TILE_COLUMNS, Weight
from replayssm.plugins.state import dtype_name

Tensor = torch.Tensor

WEIGHT_FORMATS = {"dense": 0, "fp8": 1, "nvfp4": 2, "nvfp4_fp8": 2}
"""WEIGHTS_* of kernels/weight_only.cuh; the last for products in FP8 (`fp8_experts`)."""
MODES = {"dense": 0, "gather": 1, "scatter": 2}
ACTIVATIONS = {None: 0, "squared_relu": 1, "swiglu": 2}

COLUMN_MULTIPLE = 64
"""Input features come in these: whole chunks of a row of activations, and of block scales."""
ROW_MULTIPLE = 8
ASSUMED_ARCH = 90
"""Compute capability that launches are planned for without a GPU."""
BLOCKS_WANTED = 2 * 132
"""Blocks below which a dense product splits its columns; twice the multiprocessors of an H200."""
MOST_TILE_TOKENS = 64
"""Of a dense product."""
ROUTED_PAIRS = 1 << 12
"""Pairs above which several blocks sort them."""
ROUTING_BLOCKS = 16

DEQUANTIZE_ABOVE = 192
"""Tokens above which a dense product dequantizes its weight and leaves the rest to cuBLAS."""


def takes_weight(format: str, out_features: int, in_features: int) -> bool:
    """Whether the kernels take weights of this format and shape."""
    return format in WEIGHT_FORMATS and in_features % COLUMN_MULTIPLE == 0 and out_features % ROW_MULTIPLE == 0


def takes(x: Tensor) -> bool:
    """Whether the kernels take activations x [T, in]."""
    return x.dim() == 2 and supports(x)


def plan_gemm(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    gate: Weight | None = None,
    activation: str | None = None,
    mode: str = "dense",
    order: Tensor | None = None,
    tiles: Tensor | None = None,
    tile_tokens: int = MOST_TILE_TOKENS,
    top_k: int = 1,
    splits: int = 1,
    form: Form | None = None,
    out_unit: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Launch:
    """out = activation(x W^T), see kernels/weight_only_gemm.cu.

    mode: "dense", or tokens by expert with `order` and `tiles` of `plan_route`: "gather" reads x [T, in] for out
    [pairs, out] in sorted order, "scatter" reads x [pairs, in] in sorted order for out in the pairs' own. out: in x's
    dtype, or fp32 [splits, T, out], the unrounded parts of sums over a `splits`th of the columns each.

    Weights of `fp8_experts` take x in e4m3, in units of theirs, and give out in 16 bits, or in e4m3 in units of
    `out_unit`. dtype: what a result is rounded to first, where that is not out's.
    """
    config = _gemm_config(weight, x, out, activation, mode, tile_tokens, form, dtype)
    features = config.threads // (2 if gate is not None else 1)
    token_tiles = -(-x.shape[0] // tile_tokens) if tiles is None else tiles.shape[0]
    gates = [None, None] if gate is None else [gate.tiles, gate.scale]
    sizes = [x.shape[0], x.stride(0), weight.in_features, weight.out_features, top_k]
    arguments = [x, weight.tiles, weight.scale, *gates, tiles, order, *sizes, weight.unit, out_unit, out]
    return Launch(config, arguments, -(-weight.out_features // features), token_tiles, splits)


@dataclass(frozen=True)
class Form:
    """How the product is laid out. wgmma: by Hopper's products of groups of four warps; the same bits.

    blocks: of a multiprocessor, fewer where shared memory ends.
    """

    wgmma: bool
    warps: int
    blocks: int
    stages: int


def gemm_form(format: str, tile_tokens: int, arch: int) -> Form:
    """The fastest on an H200 for the experts of Super-120B and Qwen3.5-122B (docs/results.md)."""
    if format == "nvfp4_fp8":
        return Form(True, 8, 2 if tile_tokens <= 64 else 1, 4)
    if tile_tokens <= 16:
        return Form(False, 4, 5, 3)
    if arch // 10 != 9 or format == "dense":
        return Form(False, 4, 3 if tile_tokens <= 32 else 2, 4)
    return (
        Form(True, 4, 4, 3) if tile_tokens <= 32 else Form(True, 8, 2, 3) if tile_tokens <= 64 else Form(True, 8, 1, 4)
    )


def _gemm_config(
    weight: Weight,
    x: Tensor,
    out: Tensor,
    activation: str | None,
    mode: str,
    tile_tokens: int,
    form: Form | None,
    dtype: torch.dtype | None,
) -> KernelConfig:
    arch = launch.device_arch(x.device) if x.is_cuda else ASSUMED_ARCH
    form = form or gemm_form(weight.format, tile_tokens, arch)
    in_fp8, to_fp8 = weight.format == "nvfp4_fp8", out.dtype == torch.float8_e4m3fn
    group = 8 if to_fp8 and activation == "swiglu" else 4  # warps that store 8 tokens' features together
    features = (16 if activation == "swiglu" else 32) * group
    results = form.warps // group * 8 * (features * out.element_size() + 16)
    stage = tile_tokens * TILE_COLUMNS[weight.format] * x.element_size() + form.warps * TILE_BYTES[weight.format]
    shared = form.stages * stage + results + 4 * tile_tokens
    # A thread holds a sum for every token, and some 56 registers beside them.
    fitting = min(
        architecture(arch).shared_per_sm // (shared + RESERVED_BYTES),
        REGISTERS_PER_SM // (32 * form.warps * (tile_tokens + 56)),
    )
    fitting = max(1, fitting)
    defines = {
        "ACTIVATION": ACTIVATIONS[activation],
        "ACTIVATION_FORMAT": FORMATS[dtype_name(dtype or (out if in_fp8 else x).dtype)],
        "BULK_COPY": 0,
        "MIN_CTAS": min(fitting, form.blocks),
        "MODE": MODES[mode],
        "OUTPUT_FP32": int(out.dtype == torch.float32),
        "SHARED_BYTES": shared,
        "STAGES": form.stages,
        "THREADS": 32 * form.warps,
        "TILE_TOKENS": tile_tokens,
        "USE_WGMMA": int(form.wgmma),
        "WEIGHT_FORMAT": WEIGHT_FORMATS[weight.format],
    }
    if in_fp8:
        defines |= {"FP8_OPERANDS": 1, "OUTPUT_FP8": int(to_fp8)}
    return KernelConfig("weight_only_gemm", tuple(sorted(defines.items())), 1, 32 * form.warps, shared)


def plan_route(ids: Tensor, experts: int, tile_tokens: int, order: Tensor, tiles: Tensor) -> list[Launch]:
    """order, tiles = the pairs of ids int64 [T, top_k] by expert; int32 [pairs], [`most_tiles`, 3]."""
    threads, pairs, cut = 1024, ids.numel(), [tile_tokens, tiles.shape[0], order, tiles]
    needed = 4 * experts + 8 * threads
    defines = (("BULK_COPY", 0), ("THREADS", threads))
    if pairs <= ROUTED_PAIRS:
        # Room for as many, because every amount of shared memory is a kernel of its own to the launcher.
        config = KernelConfig("route_experts", defines, 1, threads, needed + 4 * ROUTED_PAIRS)
        return [Launch(config, [ids, pairs, experts, *cut], 1)]
    blocks = min(ROUTING_BLOCKS, -(-pairs // threads))
    share = -(-pairs // blocks)
    ranks = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=ids.device)
    count = KernelConfig("count_experts", defines, 1, threads, 4 * experts)
    place = KernelConfig("place_pairs", defines, 1, threads, 4 * experts + needed)
    return [
        Launch(count, [ids, pairs, experts, share, ranks, counts], blocks),
        Launch(place, [ids, ranks, counts, pairs, experts, share, *cut], blocks),
    ]


def most_tiles(pairs: int, experts: int, tile_tokens: int) -> int:
    """Tiles of `tile_tokens` pairs of one expert that `pairs` pairs can need."""
    return min(pairs, min(experts, pairs) + pairs // tile_tokens)


def plan_combine(results: Tensor, weights: Tensor, out: Tensor) -> Launch:
    """out [T, n] = sum over k of weights fp32 [T, k] times results [T * k, n]."""
    columns = out.shape[1]
    threads = min(256, -(-columns // (32 * CHUNK)) * 32)
    config = plain_config("combine_experts", out.dtype, threads)
    arguments = [results, weights, weights.shape[1], columns, out]
    return Launch(config, arguments, out.shape[0], -(-columns // (CHUNK * threads)))


def plan_dequantize(weight: Weight, out: Tensor) -> Launch:
    """out [out, in] in its 16-bit dtype = the matrix `weight`."""
    threads = 256
    config = plain_config("dequantize_weights", out.dtype, threads, WEIGHT_FORMAT=WEIGHT_FORMATS[weight.format])
    config = replace(config, shared_bytes=threads // 32 * 8 * (2 * TILE_COLUMNS[weight.format] + 16))
    row_tiles, column_tiles, _ = weight.tiles.shape
    arguments = [weight.tiles, weight.scale, column_tiles, weight.out_features, weight.in_features, out]
    return Launch(config, arguments, -(-row_tiles * column_tiles * 128 // threads))


def plan_sum_splits(parts: Tensor, out: Tensor) -> Launch:
    """out [T, n] = the rounded sum of parts fp32 [splits, T, n]."""
    config = plain_config("sum_splits", out.dtype, 256)
    return Launch(config, [parts, parts.shape[0], out.numel(), out], -(-out.numel() // (4 * 256)))


def plain_config(kernel: str, dtype: torch.dtype, threads: int, **defines: int) -> KernelConfig:
    defines |= {"ACTIVATION_FORMAT": FORMATS[dtype_name(dtype)], "BULK_COPY": 0, "THREADS": threads}
    return KernelConfig(kernel, tuple(sorted(defines.items())), 1, threads, 0)


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """[out, in] in a 16-bit dtype of a packed matrix, each element rounded once."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.tiles.device)
    plan_dequantize(weight, out).run(out.device)
    return out


def linear(x: Tensor, weight: Weight, output_dtype: torch.dtype) -> Tensor:
    """x [T, in] times the transpose of `weight`, in x's dtype or fp32.

    Above DEQUANTIZE_ABOVE tokens the weight is dequantized for cuBLAS, whose products are then faster.
    """
    if x.shape[0] <= DEQUANTIZE_ABOVE:
        return packed_linear(x, weight, output_dtype)
    dense = dequantize(weight, x.dtype).t()
    return torch.mm(x, dense) if output_dtype == x.dtype else torch.mm(x, dense, out_dtype=output_dtype)


def packed_linear(x: Tensor, weight: Weight, output_dtype: torch.dtype) -> Tensor:
    """`linear` by the packed kernel.

    Into how many parts the sums of a weight with few rows are split depends on the number of tokens, as in cuBLAS.
    """
    tokens = x.shape[0]
    tile_tokens = dense_tile_tokens(tokens)
    warps = gemm_form(weight.format, tile_tokens, launch.device_arch(x.device) if x.is_cuda else ASSUMED_ARCH).warps
    blocks = -(-weight.out_features // (32 * warps)) * -(-tokens // tile_tokens)
    splits = dense_splits(blocks, weight)
    out = torch.empty(tokens, weight.out_features, dtype=output_dtype, device=x.device)
    if splits == 1:
        if tokens:
            plan_gemm(x, weight, out, tile_tokens=tile_tokens).run(x.device)
        return out
    parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device)
    plan_gemm(x, weight, parts, tile_tokens=tile_tokens, splits=splits).run(x.device)
    if output_dtype == torch.float32:
        return parts.sum(0)
    plan_sum_splits(parts, out).run(x.device)
    return out


def dense_tile_tokens(tokens: int) -> int:
    return next((size for size in (8, 16, 32) if tokens <= size), MOST_TILE_TOKENS)


def dense_splits(blocks: int, weight: Weight) -> int:
    """Parts of the sums of a product of `blocks` blocks, each of at least four tiles of columns."""
    if blocks == 0 or 2 * blocks > BLOCKS_WANTED:
        return 1
    steps = -(-weight.in_features // TILE_COLUMNS[weight.format])
    splits = max(1, min(steps // 4, -(-BLOCKS_WANTED // blocks)))
    return -(-steps // -(-steps // splits))  # as many as have work


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    projections: Sequence[Weight],
    activation: str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`functional_ops.moe` for stacked `projections`: up and down, or gate, up and down for "swiglu".

    ids int64 [T, k]; weights fp32 [T, k]. Everything is decided on the device, so the call can be captured. A token's
    result does not depend on the tokens beside it: its sums run in one order. dtype: of the result, where that is not
    x's, which is in e4m3 then (`fp8_experts.moe`).
    """
    *inner, down = projections
    dtype = dtype or x.dtype
    (tokens, top_k), experts = ids.shape, down.tiles.shape[0]
    out = torch.empty(tokens, down.out_features, dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    pairs, tile_tokens = tokens * top_k, expert_tile_tokens(tokens * top_k, experts)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty(most_tiles(pairs, experts, tile_tokens), 3, dtype=torch.int32, device=x.device)
    hidden = torch.empty(pairs, down.in_features, dtype=x.dtype, device=x.device)
    results = torch.empty(pairs, down.out_features, dtype=dtype, device=x.device)
    common = {"order": order, "tiles": tiles, "tile_tokens": tile_tokens, "top_k": top_k, "dtype": dtype}
    gate = inner[0] if activation == "swiglu" else None
    for plan in (
        *plan_route(ids.contiguous(), experts, tile_tokens, order, tiles),
        plan_gemm(x, inner[-1], hidden, gate=gate, activation=activation, mode="gather", out_unit=down.unit, **common),
        plan_gemm(hidden, down, results, mode="scatter", **common),
        plan_combine(results, weights.contiguous(), out),
    ):
        plan.run(x.device)
    return out


def expert_tile_tokens(pairs: int, experts: int) -> int:
    """Tokens of a tile: the usual expert has no more, so that its weights are read once."""
    mean = pairs / experts
    return 16 if mean <= 12 else 32 if mean <= 28 else 64 if mean <= 80 else 128
