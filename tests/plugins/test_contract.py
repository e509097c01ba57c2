"""Parts and byte counts of published geometries as literal numbers, and what the contract refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from replayssm.plugins.contract import (
    ELEMENT_BITS,
    MAX_ROW_TILE_BYTES,
    AttentionGeometry,
    ConvGeometry,
    ErrorBit,
    GdnGeometry,
    Mamba2Geometry,
    conv_ring_len,
    geometry_from_json,
    geometry_to_json,
    readout_parts,
    state_parts,
)
from replayssm.plugins.settings import ReplaySettings

NANO4B = Mamba2Geometry(nheads=96, headdim=80, dstate=128, ngroups=8)
SUPER120B = Mamba2Geometry(nheads=128, headdim=64, dstate=128, ngroups=8)
QWEN4B = GdnGeometry(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128)
QWEN122B = GdnGeometry(num_k_heads=16, num_v_heads=64, head_k_dim=128, head_v_dim=128)


def nbytes(geometry, settings) -> dict[str, int]:
    return {part.name: part.nbytes for part in state_parts(geometry, settings)}


# Bytes of one layer and sequence: fp32 state, convolution inputs of 3 tokens in bf16, and 16 ring rows (x, B, dt or
# bf16 u, k, g), as computed independently from the published configurations.
PUBLISHED = {
    "nano4b": (NANO4B, 3_932_160, 58_368, {"ring_x": 245_760, "ring_B": 32_768, "ring_dt": 6_144}),
    "super120b": (SUPER120B, 4_194_304, 61_440, {"ring_x": 262_144, "ring_B": 32_768, "ring_dt": 8_192}),
    "qwen4b": (QWEN4B, 2_097_152, 49_152, {"ring_u": 131_072, "ring_k": 65_536, "ring_g": 2_048}),
    "qwen122b": (QWEN122B, 4_194_304, 73_728, {"ring_u": 262_144, "ring_k": 65_536, "ring_g": 4_096}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_byte_counts(name):
    geometry, state, conv, ring = PUBLISHED[name]
    settings = ReplaySettings(buffer_len=16, u_format="bfloat16")
    got = nbytes(geometry, settings)
    assert got["checkpoint"] == state
    # The ring holds L + 1 rows at windows of one token; the published counts are for L.
    assert {part: got[part] * 16 // 17 for part in ring} == ring
    assert nbytes(ConvGeometry(geometry.conv_dim, 4), settings) == {"conv_ring": conv // 3 * 4}
    heads, rows, columns = geometry.state_shape
    assert geometry.row_tiles * heads * 4 == got["checkpoint_position"]
    assert rows // geometry.row_tiles * columns * 4 <= MAX_ROW_TILE_BYTES


@pytest.mark.parametrize(
    ("geometry", "row_tiles"),
    [
        (NANO4B, 2),
        (SUPER120B, 2),
        (QWEN4B, 4),
        (Mamba2Geometry(nheads=1, headdim=7, dstate=8192, ngroups=1), 7),
        (Mamba2Geometry(nheads=1, headdim=3, dstate=4, ngroups=1), 1),
    ],
)
def test_row_tiles_divide_the_rows(geometry, row_tiles):
    assert geometry.row_tiles == row_tiles


def test_every_part_of_a_replay_slot():
    """Order, shapes and dtypes are what kernels and engines take."""
    settings = ReplaySettings(buffer_len=16, max_window=5, max_seq_len=1000)
    assert [(p.name, p.shape, p.dtype) for p in state_parts(NANO4B, settings)] == [
        ("checkpoint", (96, 80, 128), "float32"),
        ("checkpoint_position", (96, 2), "int32"),
        ("ring_x", (21, 96, 80), "bfloat16"),
        ("ring_B", (21, 8, 128), "bfloat16"),
        ("ring_dt", (21, 96), "float32"),
    ]
    assert [(p.name, p.shape, p.dtype) for p in state_parts(QWEN4B, settings)] == [
        ("checkpoint", (32, 128, 128), "float32"),
        ("checkpoint_position", (32, 4), "int32"),
        ("ring_k", (21, 16, 128), "bfloat16"),
        ("ring_u", (21, 32, 2, 128), "bfloat16"),
        ("ring_g", (21, 32), "float32"),
    ]
    assert [(p.name, p.shape, p.dtype) for p in state_parts(ConvGeometry(9728, 4), settings)] == [
        ("conv_ring", (8, 9728), "bfloat16")
    ]
    assert [(p.name, p.shape, p.dtype) for p in state_parts(AttentionGeometry(8, 128), settings)] == [
        ("k_cache", (1000, 8, 128), "bfloat16"),
        ("v_cache", (1000, 8, 128), "bfloat16"),
    ]


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "per_token"),
    [(4, 8, 128, 16_384), (8, 2, 128, 8_192), (8, 4, 256, 32_768), (12, 2, 256, 24_576)],
)
def test_kv_bytes_per_token(layers, heads, dim, per_token):
    settings = ReplaySettings(max_seq_len=100)
    assert sum(nbytes(AttentionGeometry(heads, dim), settings).values()) * layers == 100 * per_token


def test_baseline_parts():
    """No ring and no position; snapshots only where a verify window exists."""
    assert list(nbytes(NANO4B, ReplaySettings(buffer_len=0))) == ["checkpoint"]
    assert nbytes(NANO4B, ReplaySettings(buffer_len=0, max_window=5)) == {
        "checkpoint": 3_932_160,
        "snapshots": 5 * 3_932_160,
    }


def test_readout_parts():
    """NVFP4: half a byte an element, an e4m3 scale for 16: 0.5625 bytes an element, and a byte a row."""
    parts = {part.name: part for part in readout_parts(NANO4B, "nvfp4")}
    elements = 96 * 80 * 128
    assert parts["readout"].nbytes + parts["readout_block_scale"].nbytes == elements * 0.5625
    assert parts["readout_scale"].nbytes == 96 * 80
    assert {p.name: p.nbytes for p in readout_parts(NANO4B, "float8")} == {
        "readout": elements,
        "readout_scale": 96 * 80,
    }
    assert readout_parts(NANO4B, "same") == ()
    names = [part.name for part in state_parts(NANO4B, ReplaySettings(readout_dtype="nvfp4"))]
    assert names[:5] == ["checkpoint", "checkpoint_position", "readout", "readout_block_scale", "readout_scale"]


@pytest.mark.parametrize(
    ("buffer_len", "max_window", "ring_len"),
    [(16, 1, 17), (16, 5, 21), (4, 8, 16), (1, 1, 2), (64, 64, 128), (0, 5, 0)],
)
def test_ring_lengths(buffer_len, max_window, ring_len):
    assert ReplaySettings(buffer_len=buffer_len, max_window=max_window).ring_len == ring_len
    assert conv_ring_len(ConvGeometry(8, 4), max_window) == 3 + max_window


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mamba2Geometry(6, 8, 16, 4), r"nheads \(6\) must be a multiple of ngroups \(4\)"),
        (
            lambda: Mamba2Geometry(0, 8, 16, 1),
            "Mamba2Geometry.nheads must be an integer between 1 and 2147483647, got 0",
        ),
        (lambda: GdnGeometry(4, 6, 8, 8), r"num_v_heads \(6\) must be a multiple of num_k_heads \(4\)"),
        (lambda: ConvGeometry(8, True), "conv_kernel"),
        (lambda: AttentionGeometry(2, 1.0), "head_dim"),
        (lambda: readout_parts(Mamba2Geometry(1, 4, 48, 1), "nvfp4"), "multiples of 32, got 48"),
        (lambda: geometry_from_json({"kind": "rwkv", "nheads": 1}), "unknown geometry kind 'rwkv'"),
    ],
)
def test_geometry_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("geometry", [NANO4B, QWEN4B, ConvGeometry(9728, 4), AttentionGeometry(8, 128)])
def test_geometry_json_round_trip(geometry):
    value = geometry_to_json(geometry)
    assert geometry_from_json(value) == geometry
    assert value["kind"] == geometry.kind


def test_contract_is_frozen_and_knows_torch_sizes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NANO4B.nheads = 1
    for name, width in ELEMENT_BITS.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() * 8 == width


def test_every_error_bit_has_a_message():
    bits = [value for name, value in vars(ErrorBit).items() if name.isupper() and isinstance(value, int)]
    assert sorted(bits) == [1 << index for index in range(len(bits))]
    assert set(bits) == set(ErrorBit.MESSAGES)
    assert ErrorBit.describe(0) == ""
    assert ErrorBit.describe(1 | 8).count(";") == 1


@pytest.mark.parametrize(
    ("rows", "columns", "tiles"), [(80, 128, 2), (64, 128, 2), (128, 128, 4), (37, 256, 37), (40, 16, 1), (8, 2**20, 8)]
)
def test_row_tiles_are_the_fewest_that_fit(rows, columns, tiles):
    """37 is prime and 37 rows of 256 are too many for one tile, so every row is one. The last has no row that fits."""
    assert Mamba2Geometry(1, rows, columns, 1).row_tiles == tiles


def test_huge_sizes_are_answered_at_once():
    assert Mamba2Geometry(1, 2**31 - 1, 128, 1).row_tiles == 2**31 - 1
    with pytest.raises(ValueError, match="between 1 and 2147483647"):
        Mamba2Geometry(1, 2**31, 128, 1)
