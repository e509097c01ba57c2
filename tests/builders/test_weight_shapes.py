"""Names, shapes and stored bytes of weights."""

from __future__ import annotations

import pytest

from replayssm.builders.config import read_config, weight_bytes, weight_shapes
from replayssm.builders.random_checkpoint import TINY_CONFIGS
from replayssm.builders.weight_shapes import fused_experts, storage


def test_fused_experts_cover_the_separate_ones():
    for name in ("super", "qwen_moe"):
        config = read_config(TINY_CONFIGS[name])
        shapes = weight_shapes(config)
        layer = next(layer for layer in config.layers if layer.feed_forward is not None)
        separate = {key: shape for key, shape in shapes.items() if key.startswith(layer.prefix) and ".experts." in key}
        parts = {}
        for fused, (shape, projections) in fused_experts(layer, config.hidden_size).items():
            for expert in range(shape[0]):
                for projection, (start, stop) in projections.items():
                    parts[f"{fused.rsplit('.', 1)[0]}.{expert}.{projection}.weight"] = (stop - start, shape[2])
        assert parts == separate


def test_storage_of_one_weight():
    assert storage((4, 32), "nvfp4") == {
        "weight": ("uint8", (4, 16)),
        "weight_scale": ("float8_e4m3fn", (4, 2)),
        "weight_scale_2": ("float32", ()),
        "input_scale": ("float32", ()),
    }
    assert "input_scale" not in storage((4, 32), "w4a16_nvfp4")
    with pytest.raises(ValueError, match="in blocks of 16"):
        storage((4, 40), "nvfp4")
    with pytest.raises(ValueError, match="unknown module format"):
        storage((4, 32), "int4")


def test_weight_bytes_of_chosen_formats():
    config = read_config(TINY_CONFIGS["nano"])
    dense = weight_bytes(config)["total"]
    chosen = weight_bytes(config, {"layers.1.mixer.up_proj": "fp8"})
    assert dense - chosen["total"] == 256 * 128 - 8
    assert weight_bytes(config, lambda module: "dense")["total"] == dense
