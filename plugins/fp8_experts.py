"""Mixtures of experts with NVFP4 weights, multiplied in FP8, for GPUs with FP8 products but none in FP4 (Hopper).

Where a recipe rounds what experts read to NVFP4 as well (W4A4), such a GPU has two ways to compute them: with 16-bit
activations (`weight_only.moe`), or, here, with activations in e4m3, at twice the rate. e4m3 has two bits of mantissa
more than the e2m1 of the recipe. Units of activations are those with which the recipe's largest input is the largest
e4m3 number, and larger ones saturate.

Weights become e4m3 in registers. A code times the scale of its block has six significant bits, and e4m3 has four: 1/2,
1, 2 and 4 times a scale are exact, 3/2, 3 and 6 times a scale are rounded, by at most 1/21 and for three scales in
eight by nothing. Scales below LEAST_SCALE, where that of a whole tensor's largest block is 448, become LEAST_SCALE, and
their blocks' codes the nearest ones.

The kernel is weight_only_gemm.cu with FP8_OPERANDS. Its sums keep fewer bits than fp32 has, as all FP8 products of
Hopper do: about 14.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm.plugins import nvfp4, packed_weights, weight_only
from replayssm.plugins.elementwise import CHUNK, Launch
from replayssm.plugins.packed_weights import Weight

Tensor = torch.Tensor

FORMAT = "nvfp4_fp8"
"""Of a `Weight` whose tiles are those of `pack`."""
ARCHITECTURES = (90,)
COLUMN_MULTIPLE = 128
"""Input features come in these: tiles whole, because activations lie in an order of their own within them."""
ROW_MULTIPLE = 128
"""Of hidden features, which the next projection reads as columns."""
LEAST_SCALE = 0.25
LEAST_CODE = 40
"""LEAST_SCALE in e4m3: an eighth of a half of it is the smallest number with all bits."""
EIGHTH = 24
"""Codes of e4m3 that a factor of 8 spans."""
SIGN_BITS = (7, 15, 23, 31, 3, 11, 19, 27)
MAGNITUDE_BITS = (0, 4, 8, 12, 16, 20, 24, 28)
"""Where code 0 to 7 of a word has its sign and the lowest bit of its magnitude: see decode_nvfp4_as_fp8."""
INPUT_SCALE_TO_UNIT = nvfp4.E2M1_MAX
"""A checkpoint's input scale is that of e4m3 blocks of e2m1 numbers: the largest input over 6 x 448."""


def takes_weight(out_features: int, in_features: int) -> bool:
    """Whether the kernels take NVFP4 experts of this shape."""
    return in_features % COLUMN_MULTIPLE == 0 and out_features % ROW_MULTIPLE == 0


def pack(weight: Tensor, block_scale: Tensor) -> Tensor:
    """Tiles uint8 [E, row tiles, column tiles, bytes] of experts [E, out, in / 2] with e4m3 scales [E, out, in / 16].

    Needs the memory of a few experts beside the result.
    """
    experts, rows, width = weight.shape
    shape = (experts, -(-rows // packed_weights.TILE_ROWS), width // 64, packed_weights.TILE_BYTES["nvfp4"])
    out = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    step = max(1, packed_weights.PACKED_BYTES // weight[0].numel())
    for start in range(0, experts, step):
        part = slice(start, start + step)
        codes, scales = _representable(weight[part].contiguous(), block_scale[part].contiguous().view(torch.uint8))
        order = zip(SIGN_BITS, MAGNITUDE_BITS, strict=True)
        words = packed_weights.permuted_bits(codes, packed_weights.checkpoint_bits(), order)
        # row = 32 R + 8 part + g, byte = 64 K + 16 t + b; stored by (R, K, part, lane 4 g + t, b)
        split = packed_weights.padded(words, packed_weights.TILE_ROWS, 64)
        split = split.view(len(codes), -1, 4, 8, width // 64, 64).permute(0, 1, 4, 2, 3, 5)
        out[part, ..., :2048] = split.reshape(*out[part].shape[:3], 2048)
        out[part, ..., 2048:] = packed_weights.tile_scales(scale_bytes(scales))
    return out


def _representable(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks whose scales are at least LEAST_SCALE."""
    small = scales < LEAST_CODE
    if bool(small.any()):
        table = _rounded_codes().to(codes.device)
        at = scales.clamp(max=LEAST_CODE).long().repeat_interleave(8, -1) * 16
        low, high = table[at + (codes & 15)], table[at + (codes >> 4)]
        codes = low | high << 4
    return codes, scales.clamp(min=LEAST_CODE)


def _rounded_codes() -> Tensor:
    """uint8 [(LEAST_CODE + 1) * 16]: by the code of a scale and that of a number, that of the nearest number with
    LEAST_SCALE."""
    scales = torch.arange(LEAST_CODE + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / LEAST_SCALE
    numbers = torch.tensor(nvfp4.E2M1_VALUES)
    distances = (numbers * scales[:, None]).unsqueeze(-1) - numbers
    nearest = distances.abs().argmin(-1).to(torch.uint8)
    return torch.cat([nearest, nearest | 8], 1).flatten()


def scale_bytes(scales: Tensor) -> Tensor:
    """What `block_numbers` of weight_only.cuh reads."""
    mantissa = scales & 7
    return scales - EIGHTH | ((mantissa >= 1) & (mantissa <= 5)).to(torch.uint8) << 7


def unpack(weight: Weight) -> list[Tensor]:
    """Codes and e4m3 block scales in a checkpoint's order, as `_representable` has left them."""
    experts, row_tiles, column_tiles, _ = weight.tiles.shape
    codes = weight.tiles[..., :2048].reshape(experts, row_tiles, column_tiles, 4, 8, 64).permute(0, 1, 3, 4, 2, 5)
    codes = codes.reshape(experts, row_tiles * 32, -1)[:, : weight.out_features].contiguous()
    codes = packed_weights.permuted_bits(
        codes, zip(SIGN_BITS, MAGNITUDE_BITS, strict=True), packed_weights.checkpoint_bits()
    )
    scales = packed_weights.untiled_scales(weight.tiles)[:, : weight.out_features]
    return [codes, ((scales & 127) + EIGHTH).contiguous().view(torch.float8_e4m3fn)]


def units(input_scale: Tensor, shared: bool) -> Tensor:
    """fp32 units of e4m3 activations for input scales [E]: [E], or [1] where all experts read the same values."""
    scale = input_scale.float() * INPUT_SCALE_TO_UNIT
    return scale.amax().view(1) if shared else scale


def plan_quantize(x: Tensor, unit: Tensor, out: Tensor) -> Launch:
    """out e4m3 [T, n], in the order of `fp8_place` in weight_only.cuh, = x [T, n] in units of `unit` fp32 [1]."""
    columns = x.shape[1]
    threads = min(256, -(-columns // (32 * CHUNK)) * 32)
    config = weight_only.plain_config("quantize_expert_inputs", x.dtype, threads)
    arguments = [x, unit, columns, x.stride(0), out]
    return Launch(config, arguments, x.shape[0], -(-columns // (CHUNK * threads)))


def moe(x: Tensor, ids: Tensor, weights: Tensor, projections: Sequence[Weight], activation: str) -> Tensor:
    """As `weight_only.moe`, for projections in FORMAT with units: x's are [1], those of the hidden values [E]."""
    narrow = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if x.shape[0]:
        plan_quantize(x, projections[0].unit, narrow).run(x.device)
    return weight_only.moe(narrow, ids, weights, projections, activation, x.dtype)
