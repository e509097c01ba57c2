"""Matrix products of 16-bit activations with weights that stay packed: NVFP4, FP8 or 16 bits, dense or by expert.

A weight is read once per product and becomes 16-bit operands in registers (kernels/weight_only_gemm.cu), so that with
few tokens the time is that of its packed bytes. Sums are fp32; NVFP4 codes times block scales are exact, the scale of
the tensor enters behind the sum.

Weights are kept as `pack` arranges them once, at loading: tiles in the order in which a warp loads them, NVFP4
scales beside their codes, and codes in an order in which eight of them are decoded with eleven instructions. The bytes
are those of the checkpoint, but for rows and columns of zeros that fill the last tiles.

`plan_*` builds launches without a GPU, for tests that emulate them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from replayssm.plugins import launch
from replayssm.plugins.elementwise import CHUNK, Launch, supports
from replayssm.plugins.geometry import FORMATS, REGISTERS_PER_SM, RESERVED_BYTES, KernelConfig, architecture
from replayssm.plugins.state import dtype_name

Tensor = torch.Tensor

Bits = Iterable[tuple[int, int]]

WEIGHT_FORMATS = {"dense": 0, "fp8": 1, "nvfp4": 2, "nvfp4_fp8": 2}
"""WEIGHTS_* of kernels/weight_only.cuh; the last for products in FP8 (`fp8_experts`)."""
WEIGHT_BITS = {"dense": 16, "fp8": 8, "nvfp4": 4}
MODES = {"dense": 0, "gather": 1, "scatter": 2}
ACTIVATIONS = {None: 0, "squared_relu": 1, "swiglu": 2}

SIGN_BITS = (15, 31, 12, 28, 13, 29, 14, 30)
MAGNITUDE_BITS = (6, 22, 3, 19, 0, 16, 9, 25)
"""Where code 0 to 7 of a word has its sign and the lowest bit of its magnitude: see decode_nvfp4."""

TILE_ROWS = 32
TILE_COLUMNS = {"dense": 32, "fp8": 64, "nvfp4": 128, "nvfp4_fp8": 128}
TILE_BYTES = {"dense": 2048, "fp8": 2048, "nvfp4": 2304, "nvfp4_fp8": 2304}
CHUNK_BYTES = 16
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
WORDS_AT_A_TIME = 1 << 24
"""32-bit words that `pack_words` converts at a time."""
PACKED_BYTES = 1 << 26
"""Bytes that `pack` converts at a time, and at least one matrix."""

DEQUANTIZE_ABOVE = 192
"""Tokens above which a dense product dequantizes its weight and leaves the rest to cuBLAS."""


@dataclass(frozen=True)
class Weight:
    """One projection [out_features, in_features], dense or stacked by expert, as the kernels read it.

    tiles: uint8 [..., row tiles, column tiles, bytes] of `pack`. scale: fp32 [...], one per matrix; None for 16 bits.
    unit: of the activations that products in FP8 read (`fp8_experts`).
    """

    format: str
    tiles: Tensor
    scale: Tensor | None
    out_features: int
    in_features: int
    unit: Tensor | None = None


def pack(format: str, weight: Tensor, block_scale: Tensor | None = None) -> Tensor:
    """Tiles uint8 [..., row tiles, column tiles, bytes] of a weight [..., out, in] (nvfp4: [..., out, in / 2]).

    block_scale: of nvfp4, e4m3 [..., out, in / 16]. Kernels/weight_only.cuh has the layout. Needs the memory of a few
    experts beside the result.
    """
    codes = weight.contiguous().view(torch.uint8)
    stacked = codes if codes.dim() == 3 else codes.unsqueeze(0)
    scales = None if block_scale is None else block_scale.contiguous().view(torch.uint8).view(*stacked.shape[:2], -1)
    out, step = None, max(1, PACKED_BYTES // stacked[0].numel())
    for start in range(0, len(stacked), step):
        part = slice(start, start + step)
        tiles = _tile_codes(stacked[part], WEIGHT_BITS[format])
        if format == "nvfp4":
            tiles = pack_words(tiles)
        if scales is not None:
            tiles = torch.cat([tiles, tile_scales(scales[part])], -1)
        if out is None:
            out = torch.empty(len(stacked), *tiles.shape[1:], dtype=torch.uint8, device=codes.device)
        out[part] = tiles
    return out if codes.dim() == 3 else out[0]


def _tile_codes(codes: Tensor, bits: int) -> Tensor:
    """[E, row tiles, column tiles, 2048] of bytes [E, rows, n]: row tiles of 32 rows, column tiles of 64 bytes.

    Of 16 columns, lane t has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, as m16n8k16 wants them.
    """
    filled, pair = padded(codes, TILE_ROWS, 4 * CHUNK_BYTES), bits // 4
    experts, rows, columns = filled.shape
    # row = 32 R + 8 part + g, byte = 64 K + 2 bits step + 8 pair half + pair t + b
    split = filled.view(experts, rows // 32, 4, 8, columns // 64, 32 // bits, 2, 4, pair)
    # stored by (R, K, part, lane 4 g + t, step, half, b)
    return split.permute(0, 1, 4, 2, 3, 7, 5, 6, 8).reshape(experts, rows // 32, columns // 64, -1)


def tile_scales(scales: Tensor) -> Tensor:
    """[E, row tiles, column tiles, 256] of bytes [E, rows, n]: two of each row for each of four lanes."""
    filled = padded(scales, TILE_ROWS, 8)
    experts, rows, columns = filled.shape
    # row = 32 R + 16 m + 8 half + g, byte = 8 K + 2 t + b; stored by (R, K, m, lane 4 g + t, half, b)
    split = filled.view(experts, rows // 32, 2, 2, 8, columns // 8, 4, 2)
    return split.permute(0, 1, 5, 2, 4, 6, 3, 7).reshape(experts, rows // 32, columns // 8, -1)


def untiled_scales(tiles: Tensor) -> Tensor:
    """The bytes [E, rows, n] of `tile_scales` in tiles [E, row tiles, column tiles, bytes]."""
    experts, row_tiles, column_tiles, _ = tiles.shape
    scales = tiles[..., 2048:].reshape(experts, row_tiles, column_tiles, 2, 8, 4, 2, 2)
    return scales.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(experts, row_tiles * 32, -1)


def padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """values [E, m, n] with zeros behind, so that m and n are multiples of `rows` and `columns`."""
    missing = (-values.shape[2] % columns, -values.shape[1] % rows)
    return F.pad(values, (0, missing[0], 0, missing[1])) if any(missing) else values


def unpack(weight: Weight) -> list[Tensor]:
    """The weight as `pack` took it: codes and, for nvfp4, e4m3 block scales. For what the kernels do not serve."""
    tiles = weight.tiles if weight.tiles.dim() == 4 else weight.tiles.unsqueeze(0)
    experts, row_tiles, column_tiles, _ = tiles.shape
    codes, bits = tiles[..., :2048].contiguous(), WEIGHT_BITS[weight.format]
    if weight.format == "nvfp4":
        codes = unpack_words(codes)
    codes = codes.view(experts, row_tiles, column_tiles, 4, 8, 4, 32 // bits, 2, bits // 4)
    codes = codes.permute(0, 1, 3, 4, 2, 6, 7, 5, 8).reshape(experts, row_tiles * 32, -1)
    found = [codes[:, : weight.out_features, : weight.in_features * bits // 8].contiguous()]
    if weight.format == "nvfp4":
        scales = untiled_scales(tiles)[:, : weight.out_features, : weight.in_features // 16]
        found.append(scales.contiguous().view(torch.float8_e4m3fn))
    elif weight.format == "fp8":
        found[0] = found[0].view(torch.float8_e4m3fn)
    return found if weight.tiles.dim() == 4 else [tensor[0] for tensor in found]


def pack_words(codes: Tensor) -> Tensor:
    """NVFP4 codes uint8 [..., n] of a checkpoint, two to a byte, in the kernels' order; n in fours."""
    return permuted_bits(codes, checkpoint_bits(), zip(SIGN_BITS, MAGNITUDE_BITS, strict=True))


def unpack_words(codes: Tensor) -> Tensor:
    """Inverse of `pack_words`."""
    return permuted_bits(codes, zip(SIGN_BITS, MAGNITUDE_BITS, strict=True), checkpoint_bits())


def checkpoint_bits() -> list[tuple[int, int]]:
    return [(4 * index + 3, 4 * index) for index in range(8)]


def permuted_bits(codes: Tensor, sources: Bits, targets: Bits) -> Tensor:
    """The eight 4-bit codes of each four bytes of uint8 [..., n] elsewhere in them: by code, where its sign is and the
    lowest bit of its magnitude."""
    moves: dict[int, int] = {}  # by distance: the bits that arrive
    for (sign, magnitude), (new_sign, new_magnitude) in zip(sources, targets, strict=True):
        for distance, bits in ((new_sign - sign, 1 << new_sign), (new_magnitude - magnitude, 7 << new_magnitude)):
            moves[distance] = moves.get(distance, 0) | bits
    words = codes.contiguous().view(torch.int32).flatten()
    out = torch.zeros_like(words)
    for start in range(0, len(words), WORDS_AT_A_TIME):
        part = words[start : start + WORDS_AT_A_TIME]
        for distance, bits in moves.items():
            # Masked behind the shift, which drags the sign of a negative word along.
            moved = part << distance if distance >= 0 else part >> -distance
            out[start : start + WORDS_AT_A_TIME] |= moved.bitwise_and_(bits - (bits >> 31 << 32))
    return out.view(torch.uint8).view(codes.shape)


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
