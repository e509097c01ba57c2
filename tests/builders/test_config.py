"""HF configs: spellings, published models, exact byte counts, and one clear error for everything unsupported."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re

import pytest

from replayssm.builders.config import PUBLISHED, published, published_config, read_config, weight_bytes, weight_shapes
from replayssm.builders.formats import read_formats
from replayssm.builders.random_checkpoint import TINY_CONFIGS
from replayssm.builders.weight_shapes import quantizable_modules


def changed(name: str, **changes) -> dict:
    """A tiny config with keys replaced (None removes one); for the multimodal one, those of its text part."""
    config = copy.deepcopy(TINY_CONFIGS[name])
    target = config.get("text_config", config)
    for key, value in changes.items():
        target.pop(key, None)
        if value is not None:
            target[key] = value
    return config


def same_model(first, second) -> bool:
    return dataclasses.replace(first, source="") == dataclasses.replace(second, source="")


def test_published_byte_counts():
    """Sums over safetensors headers of the published checkpoints, which the derived shapes must reproduce exactly."""
    super_bf16, super_nvfp4 = weight_bytes(published("super120b")), weight_bytes(published("super120b-nvfp4"))
    assert super_bf16["total"] == 247_222_108_160
    assert super_nvfp4["uint8"] == 56_382_455_808
    assert super_nvfp4["float8_e4m3fn"] == 11_873_353_728
    assert super_nvfp4["total"] == 80_297_329_824
    qwen_nvfp4 = weight_bytes(published("qwen122b-nvfp4"))
    assert qwen_nvfp4["uint8"] == 57_982_058_496
    assert qwen_nvfp4["float8_e4m3fn"] == 7_247_757_312


def test_both_qwen_122b_checkpoints_leave_the_same_vision_tower():
    """Its size is not published, but one tower must explain the rest of both published totals to the byte."""
    original = 250_173_007_840 - weight_bytes(published("qwen122b"))["total"]
    quantized = 83_474_870_752 - weight_bytes(published("qwen122b-nvfp4"))["total"]
    assert original == quantized == 902_581_728


def test_published_tensor_and_module_counts():
    assert len(weight_shapes(published("nano4b"))) == 263
    super120b = published("super120b")
    with_mtp, without = len(weight_shapes(super120b)), len(weight_shapes(super120b, mtp=False))
    assert with_mtp - without == 1040
    # Each quantized module replaces one tensor by four (NVFP4) or three (FP8); 8 attention layers add two KV scales.
    nvfp4 = published("super120b-nvfp4")
    formats = [nvfp4.formats.module_format(module) for module in quantizable_modules(nvfp4)]
    tensors = with_mtp + 3 * formats.count("nvfp4") + 2 * formats.count("fp8") + 2 * 8
    assert formats.count("nvfp4") == 40_960 + 1
    assert tensors == 165_860
    assert len(formats) - formats.count("dense") == 41_100


@pytest.mark.parametrize(
    ("name", "kinds", "hidden", "parameters_billion"),
    [
        ("nano4b", {"mamba2": 21, "attention": 4, "mlp": 17}, 3136, 3.9736),
        ("super120b", {"mamba2": 40, "attention": 8, "moe": 40}, 4096, 120.669),
        ("qwen4b", {"gdn": 24, "attention": 8}, 2560, 4.2058),
        ("qwen122b", {"gdn": 36, "attention": 12}, 3072, 122.112),
    ],
)
def test_published_layers(name, kinds, hidden, parameters_billion):
    """Parameters to the digits in which they are given."""
    config = published(name)
    assert {kind: sum(layer.kind == kind for layer in config.layers) for kind in kinds} == kinds
    assert len(config.layers) == sum(kinds.values())
    assert config.hidden_size == hidden
    assert config.max_position_embeddings == 262_144
    parameters = sum(math.prod(shape) for shape in weight_shapes(config, mtp=False).values())
    assert parameters / 1e9 == pytest.approx(parameters_billion, abs=6e-5 if parameters_billion < 10 else 6e-4)


def test_published_positions_and_geometry():
    nano, super120b, qwen4b = published("nano4b"), published("super120b"), published("qwen4b")
    assert [layer.index for layer in nano.attention_layers] == [12, 17, 24, 32]
    assert [layer.index for layer in super120b.attention_layers] == [7, 16, 25, 36, 47, 58, 69, 78]
    assert [layer.index for layer in qwen4b.attention_layers] == list(range(3, 32, 4))
    mixer = nano.layers[0].mixer
    assert (mixer.geometry.nheads, mixer.geometry.headdim, mixer.norm_group_size) == (96, 80, 960)
    assert weight_shapes(nano)["layers.0.mixer.in_proj.weight"] == (17504, 3136)
    assert nano.attention_layers[0].mixer.rope is None
    assert qwen4b.attention_layers[0].mixer.rope.dim == 64
    assert weight_shapes(qwen4b)["layers.3.self_attn.q_proj.weight"] == (2 * 16 * 256, 2560)
    assert "lm_head.weight" not in weight_shapes(qwen4b)
    assert super120b.eos_token_ids == (2, 11)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_data_states_its_source(name):
    config = published_config(name)
    assert "public descriptions" in config["_source"]
    assert "Not confirmed" in config["_source"]
    assert config["_name_or_path"] == PUBLISHED[name]
    assert published(PUBLISHED[name]) == published(name)


def test_unknown_published_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown published model 'nano'; known are nano4b \(nvidia/"):
        published("nano")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # layer lists: the pattern, transformers' names, and the names of older configs
        (
            "nano",
            {
                "hybrid_override_pattern": None,
                "layers_block_type": [
                    "linear_attention",
                    "mlp",
                    "linear_attention",
                    "full_attention",
                    "mlp",
                    "linear_attention",
                ],
            },
        ),
        (
            "nano",
            {
                "hybrid_override_pattern": None,
                "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
            },
        ),
        ("nano", {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]}),
        ("nano", {"num_hidden_layers": 6}),
        # an infinite limit as transformers 5 saves it, as JSON's Infinity, and under the older key
        ("nano", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
        ("nano", {"time_step_limit": [0.0, math.inf]}),
        ("nano", {"mamba_dt_limit": [0, math.inf]}),
        ("nano", {"conv_kernel": None, "mamba_d_conv": 4}),
        ("nano", {"n_groups": None, "mamba_n_groups": 2}),
        ("nano", {"head_dim": None, "attention_head_dim": 32}),
        ("nano", {"norm_eps": 1e-5, "layer_norm_epsilon": 1e-5}),
        ("nano", {"dtype": None, "torch_dtype": "bfloat16"}),
        ("nano", {"dtype": "torch.bfloat16"}),
        ("nano", {"architectures": None}),
        ("nano", {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["attention", "mlp"]}),
        # read by nothing: the model has no position encoding
        ("nano", {"rope_theta": 10000, "partial_rotary_factor": 1.0}),
        ("super", {"n_group": None, "topk_group": None, "n_shared_experts": None}),
        ("qwen", {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25}),
        ("qwen", {"rope_parameters": None, "rope_theta": 1e7, "rope_scaling": {"type": "mrope"}}),
        (
            "qwen",
            {
                "full_attention_interval": None,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            },
        ),
        (
            "qwen",
            {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]},
        ),
        ("qwen", {"full_attention_interval": None}),
        ("qwen_vl", {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}),
        ("qwen_moe", {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    ],
)
def test_spellings_of_one_model_agree(name, changes):
    assert same_model(read_config(changed(name, **changes)), read_config(TINY_CONFIGS[name]))


def test_list_of_layers_without_regular_interval():
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    config = read_config(changed("qwen", full_attention_interval=None, layer_types=kinds))
    assert [layer.kind for layer in config.layers] == ["attention", "gdn", "gdn", "attention"]


def test_multimodal_wrapper_is_its_text_part():
    wrapper = read_config(TINY_CONFIGS["qwen_vl"])
    text = {**TINY_CONFIGS["qwen_vl"]["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    assert wrapper.multimodal
    assert wrapper.layers == read_config(text).layers
    # The wrapper's own key decides about the tie.
    tied = {**copy.deepcopy(TINY_CONFIGS["qwen_vl"]), "tie_word_embeddings": True}
    assert read_config(tied).tie_word_embeddings
    tied["text_config"]["tie_word_embeddings"] = False
    assert read_config(tied).tie_word_embeddings


def test_mtp_is_described_or_absent():
    nano, qwen = read_config(TINY_CONFIGS["nano"]), read_config(TINY_CONFIGS["qwen_moe"])
    assert [layer.kind for layer in nano.mtp.layers] == ["attention", "mlp"]
    assert [layer.kind for layer in read_config(TINY_CONFIGS["super"]).mtp.layers] == ["attention", "moe"]
    assert qwen.mtp.layers[0].mixer == qwen.layers[3].mixer
    assert qwen.mtp.layers[0].feed_forward == qwen.layers[3].feed_forward
    for name, key in (("nano", "num_nextn_predict_layers"), ("qwen", "mtp_num_hidden_layers")):
        for value in (0, None):
            assert read_config(changed(name, **{key: value})).mtp is None


def test_files_beside_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["qwen"]))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11]}))
    assert read_config(tmp_path).eos_token_ids == (2, 11)
    assert read_config(tmp_path / "config.json") == read_config(tmp_path)
    quantization = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert read_config(tmp_path).formats.default == "fp8"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nano", {"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM'], expected one of"),
        ("nano", {"architectures": None, "model_type": "llama"}, "model_type is 'llama'"),
        ("nano", {"hidden_size": None}, "hidden_size is missing"),
        ("nano", {"hidden_size": "128"}, "hidden_size is '128', expected an integer >= 1"),
        ("nano", {"hidden_size": True}, "hidden_size is True, expected an integer"),
        ("nano", {"hybrid_override_pattern": "M-X"}, "got ['X']"),
        ("nano", {"hybrid_override_pattern": ""}, "hybrid_override_pattern is ''"),
        ("nano", {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        ("nano", {"layers_block_type": ["mamba"]}, "describe different layers"),
        ("nano", {"hybrid_override_pattern": 6}, "hybrid_override_pattern is 6, expected a string or a list"),
        ("qwen", {"layer_types": 4}, "layer_types is 4, expected a list"),
        ("nano", {"num_hidden_layers": 7}, "num_hidden_layers is 7, expected 6"),
        ("nano", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', expected 'relu2'"),
        ("nano", {"mamba_hidden_act": "tanh"}, "mamba_hidden_act is 'tanh', expected 'silu'"),
        ("nano", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("nano", {"mlp_bias": True}, "mlp_bias is True"),
        ("nano", {"use_bias": True}, "use_bias is True"),
        ("nano", {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("nano", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("nano", {"residual_in_fp32": True}, "residual_in_fp32 is True"),
        ("nano", {"time_step_limit": [0.001, 0.1]}, "a clamp of dt is not supported"),
        ("nano", {"num_attention_heads": 5}, "num_attention_heads is 5, expected a multiple of num_key_value_heads"),
        ("nano", {"mamba_num_heads": 7}, "mamba_num_heads is 7, expected a multiple of n_groups (2)"),
        ("nano", {"num_nextn_predict_layers": 2}, "set it to 0 to use the model without its draft head"),
        ("nano", {"mtp_hybrid_override_pattern": "M"}, "expected attention followed by mlp or moe"),
        ("nano", {"conv_kernel": 3, "mamba_d_conv": 4}, "conv_kernel is 3 but mamba_d_conv"),
        ("nano", {"dtype": "int8"}, "dtype is 'int8'"),
        ("nano", {"eos_token_id": "2"}, "eos_token_id is '2'"),
        ("super", {"n_group": 8}, "n_group is 8, expected 1"),
        ("super", {"n_shared_experts": 2}, "n_shared_experts is 2, expected 1"),
        ("super", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most the number of experts (8)"),
        ("super", {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ("super", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a finite number above 0"),
        ("qwen", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("qwen", {"attention_bias": True}, "attention_bias is True"),
        ("qwen", {"attn_output_gate": False}, "attn_output_gate is False, expected True"),
        ("qwen", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen", {"layer_types": ["full_attention"] * 4}, "expected the interval of layer_types"),
        ("qwen", {"layer_types": ["linear_attention"]}, "num_hidden_layers is 4, expected 1"),
        ("qwen", {"layer_types": ["mamba"] * 4}, "layer_types is 'mamba'"),
        ("qwen", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3, expected a multiple of"),
        ("qwen", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type is 'yarn'"),
        ("qwen", {"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ("qwen", {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("qwen", {"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers is 3, expected 0 or 1"),
        ("qwen", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ("qwen_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("qwen_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen_vl", {"hidden_act": "gelu"}, "text_config: hidden_act is 'gelu'"),
    ],
)
def test_unsupported_field_is_one_clear_error(tmp_path, name, changes, message):
    """The message names file, key, value and expectation."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(name, **changes)))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_remote_code_is_never_needed(tmp_path):
    """auto_map is ignored where the architecture is known, and part of the explanation where it is not."""
    auto_map = {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    assert read_config(changed("nano", auto_map=auto_map)) == read_config(TINY_CONFIGS["nano"])
    with pytest.raises(ValueError, match="remote code"):
        read_config(changed("nano", auto_map=auto_map, architectures=["OtherForCausalLM"]))


WRONG = [None, 5, -1, 1.5, True, "x", [], [[1]], {}, [{}], {"__float__": [1]}, {"__float__": "x"}, math.inf, 10**400]


def replaced(value, path=()):
    """Every (path, copy of `value` with the value at the path replaced by one of WRONG)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        for wrong in WRONG:
            other = copy.copy(value)
            other[key] = wrong
            yield (*path, key), other
        for inner, changed_item in replaced(item, (key,)):
            other = copy.copy(value)
            other[key] = changed_item
            yield (*path, *inner), other


QUANTIZATION = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head"],
    "exclude_modules": ["lm_head"],
    "kv_cache_scheme": {"type": "float", "num_bits": 8},
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "quantized_layers": {"layers.0.mixer.in_proj": {"quant_algo": "NVFP4", "group_size": 16}},
}
ADDED = {
    "eos_token_id": [1, 2], "bos_token_id": 1, "dtype": "bfloat16", "time_step_limit": [0, {"__float__": "Infinity"}],
    "quantization_config": QUANTIZATION,
}  # fmt: skip


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_any_wrong_value_is_a_value_error(name):
    """Whatever stands in place of any value, nested ones included: the config is read, or refused with one line."""
    messages = []
    configs = [config for _, config in replaced({**TINY_CONFIGS[name], **ADDED})]
    for config in configs:
        try:
            read_config(config)
        except ValueError as error:
            messages.append(str(error))
    assert 100 < len(messages) < len(configs)
    assert not [message for message in messages if not message.startswith("config") or "\n" in message]


def test_any_wrong_value_in_hf_quant_config_is_a_value_error():
    messages = []
    for _, quant in replaced({"quantization": QUANTIZATION}):
        try:
            read_formats({}, quant, "config.json", "hf_quant_config.json")
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert not [message for message in messages if not message.startswith("hf_quant_config.json: ")]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nano", {"architectures": 5}, "architectures is 5, expected a list of class names"),
        ("nano", {"architectures": [[1]]}, "architectures is [[1]], expected one of"),
        ("nano", {"hybrid_override_pattern": [[1]]}, "hybrid_override_pattern is [[1]], expected entries out of"),
        ("nano", {"mtp_hybrid_override_pattern": [[1]]}, "mtp_hybrid_override_pattern is [[1]], expected entries"),
        ("nano", {"norm_eps": {"__float__": [1]}, "layer_norm_epsilon": None}, "norm_eps is {'__float__': [1]}"),
        ("nano", {"eos_token_id": 1.5}, "eos_token_id is 1.5, expected a token id or a list"),
        ("nano", {"quantization_config": 5}, "quantization_config is 5, expected an object"),
        ("nano", {"quantization_config": {**QUANTIZATION, "quant_algo": [1]}}, "quant_algo is [1], expected one of"),
        ("nano", {"quantization_config": {**QUANTIZATION, "ignore": 5}}, "ignore is 5, expected a list"),
        ("nano", {"quantization_config": {**QUANTIZATION, "ignore": [{}]}}, "ignore is [{}], expected a list"),
        ("qwen", {"layer_types": [[1]]}, "layer_types is [1], expected linear_attention"),
    ],
)
def test_wrong_types_are_named(name, changes, message):
    config = changed(name, **changes)
    config.pop("layers_block_type", None)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(config)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ['{"a": ' + "[" * 200_000, '{"a": ' + "1" * 5000 + "}"])
def test_json_that_python_does_not_parse(tmp_path, file, content):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["nano"]))
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{file}: not valid JSON")):
        read_config(tmp_path)


def test_end_of_sequence_names_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["nano"]))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": {}}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is \{\}"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}"])
def test_config_that_is_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        read_config(tmp_path)


def test_wrapper_without_text_config():
    with pytest.raises(ValueError, match="text_config is missing"):
        read_config({"architectures": ["Qwen3_5ForConditionalGeneration"]})
