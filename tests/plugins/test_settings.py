"""What `ReplaySettings` refuse, and what they say of a layer."""

from __future__ import annotations

import dataclasses
import json

import pytest

from replayssm.plugins.settings import ReplaySettings


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


def test_useless_buffer_is_legal_but_reported():
    assert ReplaySettings(buffer_len=8, max_window=8).warnings == ()
    (warning,) = ReplaySettings(buffer_len=4, max_window=8).warnings
    assert "buffer_len 4 is shorter than a verify window of 8 tokens" in warning
