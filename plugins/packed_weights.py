"""Weights as the packed products read them: tiles of NVFP4 codes with their scales, of FP8 or of 16-bit numbers.

Weights are kept as `pack` arranges them once, at loading: tiles in the order in which a warp loads them, NVFP4
scales beside their codes, and codes in an order in which eight of them are decoded with eleven instructions. The bytes
are those of the checkpoint, but for rows and columns of zeros that fill the last tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

Bits = Iterable[tuple[int, int]]

WEIGHT_BITS = {"dense": 16, "fp8": 8, "nvfp4": 4}

SIGN_BITS = (15, 31, 12, 28, 13, 29, 14, 30)
MAGNITUDE_BITS = (6, 22, 3, 19, 0, 16, 9, 25)
"""Where code 0 to 7 of a word has its sign and the lowest bit of its magnitude: see decode_nvfp4."""

TILE_ROWS = 32
TILE_COLUMNS = {"dense": 32, "fp8": 64, "nvfp4": 128, "nvfp4_fp8": 128}
TILE_BYTES = {"dense": 2048, "fp8": 2048, "nvfp4": 2304, "nvfp4_fp8": 2304}
CHUNK_BYTES = 16
WORDS_AT_A_TIME = 1 << 24
"""32-bit words that `pack_words` converts at a time."""
PACKED_BYTES = 1 << 26
"""Bytes that `pack` converts at a time, and at least one matrix."""


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
