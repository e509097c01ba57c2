"""How a state is stored and read back: the executable form of "State formats" in `plugins.contract`.

Functions take states [..., rows, columns] on any device; rows that belong together are the last two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.plugins.contract import NVFP4_BLOCK
from replayssm.plugins.nvfp4 import decode, pack_words, unpack_words
from replayssm.plugins.reference.rounding import rounding_bits
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, torch_dtype

Parts = dict[str, torch.Tensor]

_FP8 = torch.float8_e4m3fn
_NAN_CODE = 0x7F
_SIXTH = 1 / 6

NVFP4_LEAST_SCALE = 2.0**-6
"""The smallest normal e4m3 number, below which no block scale of a readout falls."""

# (smallest normal magnitude for formats whose subnormals start above those of fp32, dropped mantissa bits)
_STOCHASTIC = {torch.bfloat16: (0.0, 16), torch.float16: (2.0**-14, 13), _FP8: (2.0**-6, 20)}


@dataclass(frozen=True)
class RandomKey:
    """Which random bits a state is rounded with: `position` is the new c, `layer` the operator's scalar."""

    layer: int
    position: int


def round_stochastic(values: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 `values` in `dtype`, rounded up or down with the random `bits` (int32, 0 to 2^16 - 1) of each."""
    normal, dropped = _STOCHASTIC[dtype]
    a = values.abs()
    subnormal = a < normal
    z = torch.where(subnormal, a + normal, a)
    addend = bits >> 3 if dropped == 13 else bits if dropped == 16 else (bits << 4) | 8
    kept = ((z.view(torch.int32) + addend) >> dropped) << dropped
    up_or_down = kept.view(torch.float32)
    up_or_down = torch.where(subnormal, up_or_down - normal, up_or_down)
    return torch.where(values.isfinite(), torch.copysign(up_or_down, values), values).to(dtype)


def _largest_exponent(blocks: torch.Tensor) -> torch.Tensor:
    """Largest fp32 exponent field (0 to 255) over the last dimension, as int32. Anything not finite gives 255."""
    return (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1) >> 23


def _power_of_two(field: torch.Tensor) -> torch.Tensor:
    """2^(field - 127) of fp32 exponent fields 1 to 254, NaN of 255."""
    return torch.where(field == 255, torch.nan, (field << 23).view(torch.float32))


def encode_float8(S: torch.Tensor, bits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 elements, uint8 scales [..., rows]) of fp32 S; stochastic where `bits` are given."""
    largest = _largest_exponent(S)
    field = (largest - 7).clamp(min=1)
    scaled = S * _power_of_two(254 - field)[..., None]
    codes = scaled.to(_FP8) if bits is None else round_stochastic(scaled, bits, _FP8)
    broken = largest == 255
    codes = torch.where(broken[..., None], _NAN_CODE, codes.view(torch.uint8)).view(_FP8)
    return codes, torch.where(broken, 255, field).to(torch.uint8)


def decode_float8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 values, exact."""
    return codes.to(torch.float32) * _power_of_two(scale.to(torch.int32))[..., None]


def encode_nvfp4(S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., rows, columns / 2], block scales e4m3 [..., rows, columns / 16], row scales uint8
    [..., rows]) of fp32 S [..., rows, columns]."""
    largest = _largest_exponent(S)
    broken = largest == 255
    field = (largest - 10).clamp(27, 227)
    blocks = torch.where(broken[..., None], 0.0, S).unflatten(-1, (-1, NVFP4_BLOCK))
    inverse = _power_of_two(254 - field)[..., None]
    sixth = torch.tensor(_SIXTH, dtype=torch.float32, device=S.device)
    block_scale = (blocks.abs().amax(-1) * (inverse * sixth)).clamp(min=NVFP4_LEAST_SCALE).to(_FP8)
    # The fp16 bits of a code's number times 2^-14, of whose mantissa one bit is kept.
    scaled = blocks * (inverse * 2.0**-14 / block_scale.to(torch.float32))[..., None]
    half = scaled.to(torch.float16).view(torch.int16).to(torch.int32)
    magnitude = half & 0x7FFF
    magnitude = (magnitude + 0xFF + (magnitude >> 9 & 1)) >> 9
    sign = torch.where(broken[..., None, None], 0, half >> 12 & 8)
    codes = (magnitude | sign).to(torch.uint8).flatten(-2)
    return pack_words(codes), block_scale, torch.where(broken, 255, field).to(torch.uint8)


def decode_nvfp4(packed: torch.Tensor, block_scale: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 values, exact."""
    blocks = decode(unpack_words(packed)).unflatten(-1, (-1, NVFP4_BLOCK))
    values = (blocks * block_scale.to(torch.float32)[..., None]).flatten(-2)
    return values * _power_of_two(scale.to(torch.int32))[..., None]


def encode_checkpoint(S: torch.Tensor, settings: ReplaySettings, key: RandomKey) -> Parts:
    """ "checkpoint" and, for float8, "checkpoint_scale" of S [heads, rows, columns]."""
    bits = None
    if settings.state_rounding == "stochastic":
        bits = rounding_bits(tuple(S.shape), settings.rounding_seed, key.layer, key.position, S.device)
    if settings.state_dtype == "float8":
        return dict(zip(("checkpoint", "checkpoint_scale"), encode_float8(S.float(), bits), strict=True))
    dtype = torch_dtype(settings.state_dtype)
    return {"checkpoint": S.to(dtype) if bits is None else round_stochastic(S.float(), bits, dtype)}


def decode_checkpoint(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """S in `dtype` of the parts that `encode_checkpoint` gives."""
    if "checkpoint_scale" in parts:
        return decode_float8(parts["checkpoint"], parts["checkpoint_scale"]).to(dtype)
    return parts["checkpoint"].to(dtype)


def encode_readout(S: torch.Tensor, settings: ReplaySettings) -> Parts:
    """Readout parts of S [heads, rows, columns]; nothing where outputs read the checkpoint."""
    if settings.readout_dtype == "float8":
        return dict(zip(("readout", "readout_scale"), encode_float8(S.float()), strict=True))
    if settings.readout_dtype == "nvfp4":
        names = ("readout", "readout_block_scale", "readout_scale")
        return dict(zip(names, encode_nvfp4(S.float()), strict=True))
    return {}


def decode_readout(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """S in `dtype` of the parts that `encode_readout` gives."""
    if "readout_block_scale" in parts:
        return decode_nvfp4(parts["readout"], parts["readout_block_scale"], parts["readout_scale"]).to(dtype)
    return decode_float8(parts["readout"], parts["readout_scale"]).to(dtype)


def slot_parts(state: LayerState, slot: int, prefix: str) -> Parts:
    """Views of a slot's "checkpoint" or "readout" parts."""
    names = (name for name in state.tensors if name.startswith(prefix) and name != "checkpoint_position")
    return {name: state[name][slot] for name in names}


def store_state(state: LayerState, slot: int, S: torch.Tensor, key: RandomKey) -> None:
    """Write the checkpoint and the readout of a slot from the same S. Does not touch the position."""
    parts = {
        **encode_checkpoint(S, state.settings, key),
        **encode_readout(S, state.settings),
    }
    for name, values in parts.items():
        state[name][slot] = values


def load_checkpoint(state: LayerState, slot: int, dtype: torch.dtype) -> torch.Tensor:
    """What a flush reads of a slot: S [heads, rows, columns] in `dtype`."""
    return decode_checkpoint(slot_parts(state, slot, "checkpoint"), dtype)


def load_readout(state: LayerState, slot: int, dtype: torch.dtype) -> torch.Tensor:
    """What outputs read of a slot: the readout copy, or the checkpoint where there is none."""
    if state.settings.readout_dtype == "same":
        return load_checkpoint(state, slot, dtype)
    return decode_readout(slot_parts(state, slot, "readout"), dtype)
