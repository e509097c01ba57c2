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

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""Smallest positive e4m3 value; a block scale never falls below it."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each code; bit 3 is the sign."""

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


def encode(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0 to 15) of fp32 `values`: nearest e2m1 number, ties to the even mantissa, clamped at 6.

    A negative value that rounds to zero keeps its sign (code 8); -0.0 itself becomes code 0, as modelopt has it.
    """
    magnitude = values.abs()
    codes = (values < 0).to(torch.uint8) << 3
    # Half-way points between neighbours. A tie goes up where the upper neighbour is the even one (1, 2 and 4).
    for bound in (0.25, 1.25, 2.5, 5.0):
        codes += magnitude > bound
    for bound in (0.75, 1.75, 3.5):
        codes += magnitude >= bound
    return codes


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e2m1 codes."""
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=codes.device)
    return table[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte [..., K] -> [..., K / 2]: the even column in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes fill a byte, so the last dimension must be even, got shape {list(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude as fp32 []. ValueError where the weight holds NaN or infinity."""
    if weight.numel() == 0:
        return torch.zeros(())
    low, high = torch.aminmax(weight)
    largest = torch.maximum(-low, high).float()
    if not torch.isfinite(largest):
        raise ValueError("the weight holds NaN or infinity and cannot be quantised; repair the checkpoint")
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
        block_amax = blocks.abs().amax(-1).float()
        block_scale = block_amax / (E2M1_MAX * scale_2)
        block_scale = torch.where(block_scale == 0, 1.0, block_scale).clamp(E4M3_TINY, E4M3_MAX)
        scales[start : start + step] = block_scale.to(torch.float8_e4m3fn)
        divisor = scales[start : start + step].float() * scale_2
        packed[start : start + step] = pack(encode(blocks / divisor.unsqueeze(-1)).flatten(-2))
    leading = weight.shape[:-1]
    return Nvfp4Weight(packed.view(*leading, -1), scales.view(*leading, -1), scale_2)


def dequantize(weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> torch.Tensor:
    """fp32 [..., K] of an NVFP4 weight uint8 [..., K / 2], scales [..., K / 16] and []."""
    blocks = decode(unpack(weight)).unflatten(-1, (-1, GROUP_SIZE))
    if blocks.shape[:-1] != weight_scale.shape:
        raise ValueError(
            f"an NVFP4 weight of shape {list(weight.shape)} needs block scales of shape {list(blocks.shape[:-1])}, "
            f"got {list(weight_scale.shape)}"
        )
    return (blocks * (weight_scale.float() * weight_scale_2.float()).unsqueeze(-1)).flatten(-2)


def quantize_fp8(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Fp8Weight:
    """FP8 of a floating-point weight. As modelopt, the quotient is rounded to the weight's dtype before e4m3.

    largest: as in `quantize`. Raises ValueError for NaN and infinity.
    """
    own = amax(weight)
    scale = fp8_scale(own if largest is None else largest).to(weight.device)
    return Fp8Weight((weight / scale).to(torch.float8_e4m3fn), scale)


def dequantize_fp8(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """fp32 of an FP8 weight and its scale []."""
    return weight.float() * weight_scale.float()
