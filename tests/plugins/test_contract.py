"""Parts and byte counts of published geometries as literal numbers, and what the contract refuses."""

from __future__ import annotations

import dataclasses
import json

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
    ReplaySettings,
    conv_ring_len,
    geometry_from_json,
    geometry_to_json,
    readout_parts,
    state_parts,
)

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
    """NVFP4: half a byte an element, an e4m3 scale for 16, one fp32 scale per tile: 0.5625 bytes an element."""
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
    ("u_format", "activation_dtype", "planes"),
    [
        ("bfloat16x2", "bfloat16", (2, "bfloat16")),
        ("bfloat16", "bfloat16", (1, "bfloat16")),
        ("exact", "bfloat16", (1, "float32")),
        ("exact", "float64", (1, "float64")),
    ],
)
def test_u_planes(u_format, activation_dtype, planes):
    assert ReplaySettings(u_format=u_format, activation_dtype=activation_dtype).u_planes == planes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buffer_len": -1}, "buffer_len must be an integer between 0 and 4096, got -1"),
        ({"buffer_len": True}, "buffer_len"),
        ({"buffer_len": 1.5}, "buffer_len"),
        ({"max_window": 0}, "max_window must be an integer between 1 and 2147483647, got 0"),
        ({"max_seq_len": "9"}, "max_seq_len"),
        ({"max_seq_len": 2**31}, "between 1 and 2147483647"),
        ({"state_dtype": "float4"}, "state_dtype must be one of float32, bfloat16"),
        ({"readout_dtype": "int4"}, "readout_dtype"),
        ({"activation_dtype": "bf16"}, "activation_dtype"),
        ({"u_format": "fp8"}, "u_format"),
        ({"buffer_len": 0, "readout_dtype": "nvfp4"}, "choose readout_dtype 'same' or a buffer_len above 0"),
        ({"serial_exact": True, "readout_dtype": "float8"}, "serial_exact reads the checkpoint itself"),
        ({"state_dtype": "float8", "readout_dtype": "float8"}, "reads as many bytes and costs memory"),
        ({"state_rounding": "down"}, "state_rounding must be one of nearest, stochastic"),
        ({"state_rounding": "stochastic"}, "float32 keeps what the flush computes"),
        ({"state_rounding": "stochastic", "state_dtype": "float64"}, "nothing to round stochastically"),
        ({"rounding_seed": 1}, "rounding_seed changes nothing unless state_rounding is 'stochastic'"),
        ({"rounding_seed": -1}, "rounding_seed must be an integer between 0 and 2147483647, got -1"),
        ({"u_source": "ring"}, "u_source must be one of readout, checkpoint"),
        ({"u_source": "checkpoint"}, "without a readout copy everything reads the checkpoint"),
    ],
)
def test_settings_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        ReplaySettings(**fields)


def test_readouts_of_single_layers():
    settings = ReplaySettings(
        state_dtype="float16", readout_dtype="nvfp4", u_source="checkpoint", readout_layers=[[4, "same"], (0, "float8")]
    )
    assert settings.readout_layers == ((0, "float8"), (4, "same"))
    assert settings == ReplaySettings(**json.loads(json.dumps(dataclasses.asdict(settings))))
    own = [settings.of_layer(layer) for layer in (0, 1, 4)]
    assert [layer.readout_dtype for layer in own] == ["float8", "nvfp4", "same"]
    # Without a copy there is one state to read, which is no other source.
    assert [layer.u_source for layer in own] == ["checkpoint", "checkpoint", "readout"]
    assert all(layer.readout_layers == () and layer.of_layer(0) is layer for layer in own)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"readout_layers": 3}, "must be pairs of a layer and its readout_dtype, got 3"),
        ({"readout_layers": [(1, "float8", 2)]}, "must be pairs"),
        ({"readout_layers": [(1, "float8"), ("a", "same")]}, "must be pairs"),
        ({"readout_layers": [(-1, "float8")]}, "a layer is a number from 0 on, got -1"),
        ({"readout_layers": [(True, "float8")]}, "a layer is a number from 0 on, got True"),
        ({"readout_layers": [(0, "int4")]}, "layer 0: ReplaySettings.readout_dtype must be one of"),
        ({"readout_layers": [(0, "float8"), (0, "same")]}, "names layer 0 twice, as float8 and same: keep one of them"),
        ({"readout_layers": [(7, "float8")], "state_dtype": "float8"}, "layer 7: a float8 readout of a float8"),
        ({"readout_layers": [(7, "float8")], "buffer_len": 0}, "layer 7: buffer_len 0"),
    ],
)
def test_readouts_of_single_layers_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        ReplaySettings(**fields)


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


def test_useless_buffer_is_legal_but_reported():
    assert ReplaySettings(buffer_len=8, max_window=8).warnings == ()
    (warning,) = ReplaySettings(buffer_len=4, max_window=8).warnings
    assert "buffer_len 4 is shorter than max_window 8" in warning


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
