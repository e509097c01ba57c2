"""Reading NVFP4 and FP8 weights, and the rounding of activations that such checkpoints were made for.

NVFP4 is e2m1 codes in blocks of 16 along the input dimension. value = code * weight_scale (e4m3, one per block) *
weight_scale_2 (fp32, one per tensor); two codes a byte, the even column in the low nibble. This is the layout of
NVIDIA's unified Hugging Face checkpoints. Packing for checkpoints lives in `builders`.
"""

from __future__ import annotations

import torch

from replayssm.plugins.contract import NVFP4_BLOCK

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of codes 0 to 7; bit 3 of a code is its sign."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

_SIGNED = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
_PAIRS = torch.stack([_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)], dim=-1)
"""[256, 2] values of a byte's low and high nibble."""


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Values, fp32 [..., 2 n], of uint8 codes [..., n]."""
    return _PAIRS.to(packed.device)[packed.to(torch.int32)].flatten(-2)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, one each) of x rounded to the nearest e2m1 value, ties to the even code, saturating at 6.

    NaN becomes code 0; the sign of zero is kept.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index in range(len(E2M1_VALUES) - 1):
        midpoint = (E2M1_VALUES[index] + E2M1_VALUES[index + 1]) / 2
        code += magnitude >= midpoint if index % 2 else magnitude > midpoint
    return code | (torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3


def dequantize_nvfp4(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., out, in] in `dtype`, of uint8 [..., out, in / 2], e4m3 [..., out, in / 16] and fp32 [...].

    Computed in fp32 and rounded once.
    """
    scale = weight_scale.float() * weight_scale_2.float().reshape(*weight_scale_2.shape, 1, 1)
    values = unpack_e2m1(weight).unflatten(-1, (-1, NVFP4_BLOCK))
    return values.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_fp8(
    weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., out, in] in `dtype`, of e4m3 [..., out, in] and an fp32 scale [...] for each leading index."""
    return weight.float().mul_(weight_scale.float().reshape(*weight_scale.shape, 1, 1)).to(dtype)


def round_to_nvfp4(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """x as an NVFP4 product reads it: blocks of 16 of the last dimension, block scales in units of input_scale."""
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    block_scale = blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * input_scale)
    scale = block_scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * input_scale
    codes = encode_e2m1(blocks / torch.where(scale == 0, 1.0, scale))
    return (_SIGNED.to(x.device)[codes.to(torch.int32)] * scale).flatten(-2).to(x.dtype)


def round_to_fp8(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """x as an FP8 matrix product reads it: e4m3 in units of input_scale, saturating."""
    scaled = (x.float() / input_scale).clamp(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() * input_scale).to(x.dtype)
