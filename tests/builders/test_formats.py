"""Which format each module has: declared for all, per module, and refused where it is unknown."""

from __future__ import annotations

import re

import pytest

from replayssm.builders.formats import read_formats


def formats_of(section: dict | None = None, hf_quant: dict | None = None):
    config = {} if section is None else {"quantization_config": {"quant_method": "modelopt", **section}}
    return read_formats(config, hf_quant, "config.json", "hf_quant_config.json")


def test_formats_by_default_and_exclusion():
    formats = formats_of(
        {"quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.self_attn*", "backbone.layers.1.mixer"]}
    )
    assert formats.module_format("layers.2.mlp.up_proj") == "nvfp4"
    assert formats.module_format("model.language_model.layers.2.mlp.up_proj") == "nvfp4"
    assert formats.module_format("lm_head") == "dense"
    assert formats.module_format("layers.0.self_attn.q_proj") == "dense"
    assert formats.module_format("layers.1.mixer.in_proj") == "dense"
    assert formats.module_format("layers.11.mixer.in_proj") == "nvfp4"


def test_formats_per_module():
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.experts.3.down_proj": {"quant_algo": "FP8"},
        "model.layers.0.self_attn.o_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    formats = formats_of({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert formats.module_format("layers.0.mlp.experts.2.down_proj") == "nvfp4"
    assert formats.module_format("layers.0.mlp.experts.3.down_proj") == "fp8"
    assert formats.module_format("layers.0.self_attn.o_proj") == "w4a16_nvfp4"
    assert formats.module_format("layers.0.mlp.shared_expert.up_proj") == "dense"
    assert formats.is_quantized
    assert not formats_of().is_quantized


def test_kv_cache_scheme_is_noticed_in_both_files():
    assert formats_of({"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}).kv_cache == "fp8"
    assert formats_of(None, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}).kv_cache == "fp8"
    assert formats_of({"quant_algo": "FP8"}).kv_cache is None


@pytest.mark.parametrize(
    ("section", "hf_quant", "message"),
    [
        ({"quant_method": "gptq"}, None, "quant_method is 'gptq', expected 'modelopt'"),
        ({}, None, "quant_algo is missing"),
        ({"quant_algo": "NVFP4_AWQ"}, None, "quant_algo is 'NVFP4_AWQ', expected one of NVFP4, W4A16_NVFP4, FP8"),
        ({"quant_algo": "MIXED_PRECISION"}, None, "quantized_layers is missing or empty"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 1}}, None, "quantized_layers['a'] is 1"),
        ({"quant_algo": "NVFP4", "group_size": 32}, None, "group_size is 32, expected 16"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": "int8"}, None, "kv_cache_scheme is 'int8'"),
        (None, {"quantization": None}, "hf_quant_config.json: quantization is None"),
        ({"quant_algo": "NVFP4"}, {"quantization": {"quant_algo": "FP8"}}, "contradict each other"),
    ],
)
def test_unsupported_quantization(section, hf_quant, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        formats_of(section, hf_quant)
