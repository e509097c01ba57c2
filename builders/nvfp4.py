"""NVFP4 and FP8 weights: the number formats of modelopt's unified Hugging Face checkpoints.

An NVFP4 element is a 4-bit float (e2m1: sign, 2 exponent bits, 1 mantissa bit); 16 consecutive elements of a row share
an e4m3 `weight_scale`, a tensor shares an fp32 `weight_scale_2`:

    value = e2m1 * (weight_scale * weight_scale_2)         weight_scale_2 = amax / (6 * 448)

An FP8 element is e4m3 and a tensor shares an fp32 `weight_scale` = amax / 448. Every result here equals modelopt 0.47's
bit for bit, with two exceptions: NaN and infinity are refused, and a tensor of zeros gets scales of 1 where modelopt
writes NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from replayssm.builders.formats import GROUP_SIZE
from replayssm.plugins.nvfp4 import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_TINY,
    block_scales,
    decode,
    dequantize,
    dequantize_fp8,
    encode,
    pack_nibbles,
    unpack_nibbles,
)

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_TINY",
    "Fp8Weight",
    "Nvfp4Weight",
    "amax",
    "decode",
    "dequantize",
    "dequantize_fp8",
    "encode",
    "fp8_scale",
    "nvfp4_scale",
    "pack",
    "quantize",
    "quantize_fp8",
    "unpack",
]

# Rows are converted in pieces of about so many elements: temporaries stay small whatever the weight's size.
_CHUNK_ELEMENTS = 2**22


class Nvfp4Weight(NamedTuple):
    """weight uint8 [..., K / 2], weight_scale float8_e4m3fn [..., K / 16], weight_scale_2 fp32 []."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor


class Fp8Weight(NamedTuple):
    """weight float8_e4m3fn, same shape as the source; weight_scale fp32 []."""

    weight: torch.Tensor
    weight_scale: torch.Tensor


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte [..., K] -> [..., K / 2]: the even column in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes fill a byte, so the last dimension must be even, got shape {list(codes.shape)}")
    return pack_nibbles(codes)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`."""
    return unpack_nibbles(packed)


def amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as fp32 []. ValueError where the weight holds NaN or infinity."""
    if weight.numel() == 0:
        return torch.zeros(())
    low, high = torch.aminmax(weight)
    largest = torch.maximum(-low, high).float()
    if not torch.isfinite(largest):
        raise ValueError("the weight holds NaN or infinity and cannot be quantized; repair the checkpoint")
    return largest


def _scale_of(largest: torch.Tensor, maximum: float) -> torch.Tensor:
    scale = largest.float() / maximum
    return torch.where(scale > 0, scale, torch.ones_like(scale)).reshape(())


def nvfp4_scale(largest: torch.Tensor) -> torch.Tensor:
    """`weight_scale_2` or `input_scale` fp32 [] of a tensor (or activation) with that largest magnitude."""
    return _scale_of(largest, E2M1_MAX * E4M3_MAX)


def fp8_scale(largest: torch.Tensor) -> torch.Tensor:
    """`weight_scale` or `input_scale` fp32 [] of a tensor (or activation) with that largest magnitude."""
    return _scale_of(largest, E4M3_MAX)


def quantize(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Nvfp4Weight:
    """NVFP4 of a floating-point weight [..., K], K a multiple of 16.

    largest: magnitude that fills the range, fp32 []; by default the weight's own. Weights that engines fuse (q, k, v;
        gate, up) share the largest of all. Raises ValueError for NaN, infinity and other widths.
    """
    if weight.dim() == 0 or weight.shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"NVFP4 needs a last dimension in blocks of {GROUP_SIZE}, got shape {list(weight.shape)}: "
            "leave this weight dense"
        )
    own = amax(weight)
    scale_2 = nvfp4_scale(own if largest is None else largest).to(weight.device)
    rows = weight.reshape(-1, weight.shape[-1])
    columns = rows.shape[1]
    packed = torch.empty(rows.shape[0], columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows.shape[0], columns // GROUP_SIZE, dtype=torch.float8_e4m3fn, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows.shape[0], step):
        blocks = rows[start : start + step].unflatten(-1, (-1, GROUP_SIZE))
        scales[start : start + step] = block_scales(blocks, scale_2)
        divisor = scales[start : start + step].float() * scale_2
        packed[start : start + step] = pack(encode(blocks / divisor.unsqueeze(-1)).flatten(-2))
    leading = weight.shape[:-1]
    return Nvfp4Weight(packed.view(*leading, -1), scales.view(*leading, -1), scale_2)


def quantize_fp8(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Fp8Weight:
    """FP8 of a floating-point weight. As modelopt, the quotient is rounded to the weight's dtype before e4m3.

    largest: as in `quantize`. Raises ValueError for NaN and infinity.
    """
    own = amax(weight)
    scale = fp8_scale(own if largest is None else largest).to(weight.device)
    return Fp8Weight((weight / scale).to(torch.float8_e4m3fn), scale)
