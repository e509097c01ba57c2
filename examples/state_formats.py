"""State formats as values: fp32 states as they would read back, batched and on any device, for accuracy studies.

`plugins.reference.formats` stores bytes; a study needs only what they mean, for thousands of sequences at once, and one
format that no engine offers: a 4-bit state that is read and updated alike ("nvfp4" as the state).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.plugins.reference.formats import NVFP4_LEAST_SCALE, round_stochastic
from replayssm.plugins.settings import ReplaySettings

_FP8 = torch.float8_e4m3fn


class StateFormat(NamedTuple):
    """state: float32, bfloat16, float16, float8 or nvfp4. readout, u_source, readout_layers: as in `ReplaySettings`."""

    state: str
    stochastic: bool = False
    readout: str = "same"
    u_source: str = "readout"
    readout_layers: tuple[tuple[int, str], ...] = ()

    def of_layer(self, layer: int) -> StateFormat:
        """As `ReplaySettings.of_layer`."""
        readout = dict(self.readout_layers).get(layer, self.readout)
        return self._replace(readout=readout, readout_layers=())

    @property
    def u_format(self) -> str:
        """As engines keep a token's u."""
        return ReplaySettings(readout_dtype=self.readout, u_source=self.u_source).with_u_format().u_format

    @property
    def name(self) -> str:
        parts = [self.state, *(["stochastic"] if self.stochastic else [])]
        if self.readout != "same":
            parts += [f"{self.readout} readout", *(["u from checkpoint"] if self.u_source == "checkpoint" else [])]
        parts += [f"{readout} in layer {layer}" for layer, readout in self.readout_layers]
        return ", ".join(parts)


def _power_of_two(field: Tensor) -> Tensor:
    return (field << 23).view(torch.float32)


def _largest_exponent(blocks: Tensor) -> Tensor:
    return (blocks.abs().view(torch.int32)).amax(-1) >> 23


def float8_value(S: Tensor, bits: Tensor | None = None) -> Tensor:
    """decode_float8(*encode_float8(S, bits)) of finite states [..., rows, columns]."""
    field = (_largest_exponent(S) - 7).clamp(min=1)[..., None]
    scaled = S * _power_of_two(254 - field)
    codes = scaled.to(_FP8) if bits is None else round_stochastic(scaled, bits, _FP8)
    return codes.to(torch.float32) * _power_of_two(field)


def nvfp4_value(S: Tensor) -> Tensor:
    """decode_nvfp4(*encode_nvfp4(S)) of finite states [..., rows, columns]."""
    field = (_largest_exponent(S) - 10).clamp(27, 227)[..., None, None]
    inverse = _power_of_two(254 - field)
    blocks = S.unflatten(-1, (-1, 16))
    block_scale = blocks.abs().amax(-1, keepdim=True) * (inverse * (1 / 6))
    block_scale = block_scale.clamp(min=NVFP4_LEAST_SCALE).to(_FP8).to(torch.float32)
    # Rounded to fp16 and to one bit of mantissa, as a kernel does it.
    half = (blocks * (inverse * 2.0**-14 / block_scale)).to(torch.float16).view(torch.int16).to(torch.int32)
    kept = ((half & 0x7FFF) + 0xFF + (half >> 9 & 1)) & 0x0E00
    magnitude = kept.to(torch.int16).view(torch.float16).to(torch.float32) * 2.0**14
    return (torch.copysign(magnitude, blocks) * (block_scale * _power_of_two(field))).flatten(-2)


def _sixteen_bits(S: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    return (S.to(dtype) if bits is None else round_stochastic(S, bits, dtype)).to(torch.float32)


class Store:
    """What a flush makes of a state: `checkpoint(S, bits)` and `readout(S)`, both fp32 values [rows, heads, P, N].

    wrap: applied to every function, such as torch.compile.
    """

    def __init__(self, form: StateFormat, wrap: Callable = lambda function: function) -> None:
        self.form = form
        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        if form.state in dtypes:
            dtype = dtypes[form.state]
            self.checkpoint = wrap(lambda S, bits=None: _sixteen_bits(S, dtype, bits))
        elif form.state == "float8":
            self.checkpoint = wrap(float8_value)
        elif form.state == "nvfp4" and not form.stochastic:
            self.checkpoint = wrap(lambda S, bits=None: nvfp4_value(S))
        elif form.state == "float32" and not form.stochastic:
            self.checkpoint = lambda S, bits=None: S
        else:
            raise ValueError(f"no such state: {form.name}")
        if form.readout not in ("same", "float8", "nvfp4"):
            raise ValueError(f"readout must be same, float8 or nvfp4, got {form.readout!r}")
        self.readout = None
        if form.readout == "float8":
            self.readout = wrap(float8_value)
        elif form.readout == "nvfp4":
            self.readout = wrap(lambda S: nvfp4_value(S))
