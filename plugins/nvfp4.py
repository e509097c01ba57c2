"""NVFP4 and FP8 number formats as an engine reads them: decoding weights, rounding activations.

An NVFP4 element is a 4-bit float (e2m1: sign, 2 exponent bits, 1 mantissa bit); 16 consecutive elements of a row share
an e4m3 `weight_scale`, a tensor shares an fp32 `weight_scale_2`. Two elements fill a byte, the even column in the low
nibble. An FP8 element is e4m3 and a tensor shares an fp32 `weight_scale`. Weights are encoded in `builders.nvfp4`.
"""

from __future__ import annotations

import torch

from replayssm.plugins.contract import NVFP4_BLOCK

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""Smallest positive e4m3 value; a block scale never falls below it."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each code; bit 3 is the sign."""


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
    """fp32 values of e2m1 codes (uint8), one each.

    The three low bits at the foot of an fp16 exponent are the number times 2^-14, zero and 0.5 included, as fp16
    subnormals. No table: one would have to be copied to every device, which a CUDA graph cannot capture.
    """
    bits = codes.to(torch.int16)
    half = ((bits & 7) << 9) | ((bits << 12) & -(2**15))
    return half.view(torch.float16).to(torch.float32).mul_(2.0**14)


def decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 2 n] of packed codes uint8 [..., n]."""
    return decode(unpack_nibbles(packed))


def block_scales(blocks: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """e4m3 scales [..., n] with which blocks [..., n, 16] fill the range of e2m1, in units of `scale_2`."""
    scale = blocks.abs().amax(-1).float() / (E2M1_MAX * scale_2)
    return torch.where(scale == 0, 1.0, scale).clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., out, in] in `dtype` of an NVFP4 weight; computed in fp32 and rounded once.

    weight: uint8 [..., out, in / 2]; weight_scale: e4m3 [..., out, in / 16]; weight_scale_2: fp32 [...], so [] for one
    matrix and [experts] for stacked ones.
    """
    blocks = decode_packed(weight).unflatten(-1, (-1, NVFP4_BLOCK))
    if blocks.shape[:-1] != weight_scale.shape:
        raise ValueError(
            f"an NVFP4 weight of shape {list(weight.shape)} needs block scales of shape {list(blocks.shape[:-1])}, "
            f"got {list(weight_scale.shape)}"
        )
    scale = weight_scale.float() * _leading(weight_scale_2)
    return blocks.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_fp8(
    weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., out, in] in `dtype` of an FP8 weight e4m3 and its scale fp32 [...], as in `dequantize`."""
    return weight.float().mul_(_leading(weight_scale)).to(dtype)


def _leading(scale: torch.Tensor) -> torch.Tensor:
    """A scale per matrix, shaped to multiply [..., out, in]."""
    return scale.float().reshape(*scale.shape, 1, 1) if scale.dim() else scale.float()


def round_to_nvfp4(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """x as an NVFP4 product reads it: blocks of 16 of the last dimension, block scales in units of `input_scale`."""
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    scale = (block_scales(blocks, input_scale).float() * input_scale).unsqueeze(-1)
    return (decode(encode(blocks / scale)) * scale).flatten(-2).to(x.dtype)


def round_to_fp8(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """x as an FP8 product reads it: e4m3 in units of `input_scale`, saturating."""
    scaled = (x.float() / input_scale).clamp(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() * input_scale).to(x.dtype)


SIGN_BITS = (15, 31, 18, 2, 0, 16, 1, 17)
MAGNITUDE_BITS = (9, 25, 12, 28, 3, 19, 6, 22)
"""Where code 0 to 7 of a word of a state's readout has its sign and the lowest bit of its magnitude (contract)."""

_LANES = 4


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., columns] of state rows in the kernels' order: uint8 [..., columns / 2]; columns in 32s."""
    words = codes.unflatten(-1, (-1, 2, _LANES, 4)).movedim(-2, -4).flatten(-2).to(torch.int64)
    packed = torch.zeros(words.shape[:-1], dtype=torch.int64, device=codes.device)
    for index, (sign, magnitude) in enumerate(zip(SIGN_BITS, MAGNITUDE_BITS, strict=True)):
        code = words[..., index]
        packed |= ((code & 7) << magnitude) | ((code >> 3) << sign)
    octets = torch.stack([(packed >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1)
    return octets.flatten(-3).to(torch.uint8)


def unpack_words(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_words`: codes uint8 [..., columns]."""
    octets = packed.unflatten(-1, (_LANES, -1, 4)).to(torch.int64)
    words = sum(octets[..., index] << (8 * index) for index in range(4))
    codes = torch.stack(
        [
            ((words >> magnitude) & 7) | (((words >> sign) & 1) << 3)
            for sign, magnitude in zip(SIGN_BITS, MAGNITUDE_BITS, strict=True)
        ],
        dim=-1,
    )
    return codes.unflatten(-1, (2, 4)).movedim(-4, -2).flatten(-4).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., n] two to a byte, the even one in the low nibble: uint8 [..., n / 2]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
