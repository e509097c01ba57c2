"""Hugging Face `config.json` to `ModelConfig`.

Reads NemotronHForCausalLM and Qwen3.5 (dense and MoE, language models and the text part of the multimodal classes) in
the spellings of the published checkpoints and of transformers 5. A field that would change the computation and is not
supported raises one ValueError naming file, key, value and expectation; unrelated fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from replayssm.builders.architecture import (
    NEMOTRON_H,
    QWEN3_5,
    AttentionConfig,
    FeedForward,
    GdnConfig,
    LayerConfig,
    Mamba2Config,
    Mixer,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    RopeConfig,
)
from replayssm.builders.fields import Fields, parse_number
from replayssm.builders.formats import QuantizationFormats, read_formats
from replayssm.builders.weight_shapes import weight_bytes, weight_shapes
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry

__all__ = [
    "PUBLISHED",
    "LayerConfig",
    "ModelConfig",
    "QuantizationFormats",
    "published",
    "read_config",
    "weight_bytes",
    "weight_shapes",
]

ARCHITECTURES = {
    "NemotronHForCausalLM": NEMOTRON_H,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
}
_ARCHITECTURE_OF_MODEL_TYPE = {
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}

PUBLISHED = {
    "nano4b": "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
    "super120b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "super120b-nvfp4": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "qwen4b": "Qwen/Qwen3.5-4B",
    "qwen122b": "Qwen/Qwen3.5-122B-A10B",
    "qwen122b-nvfp4": "nvidia/Qwen3.5-122B-A10B-NVFP4",
}
"""Short names and Hugging Face ids of the models whose configs ship with this package."""


def read_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Description of the model in a checkpoint directory, a `config.json` file, or a parsed config.

    From a directory or file, `hf_quant_config.json` and `generation_config.json` beside it are read too.
    Raises ValueError for unsupported or contradictory content, FileNotFoundError where there is no config.
    """
    if isinstance(source, Mapping):
        return _read(source, None, None, str(source.get("_name_or_path") or "config"), "hf_quant_config")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the config.json of a Hugging Face checkpoint")
    quant_path, generation_path = path.with_name("hf_quant_config.json"), path.with_name("generation_config.json")
    return _read(
        read_json(path),
        read_json(quant_path) if quant_path.is_file() else None,
        read_json(generation_path) if generation_path.is_file() else None,
        str(path),
        str(quant_path),
    )


def published(name: str) -> ModelConfig:
    """A published model by Hugging Face id or short name (`PUBLISHED`). Its `source` says where the values are from."""
    return read_config(published_config(name))


def published_config(name: str) -> dict[str, Any]:
    """The Hugging Face style config of a published model."""
    full = PUBLISHED.get(name, name)
    if full not in PUBLISHED.values():
        known = ", ".join(f"{short} ({long})" for short, long in PUBLISHED.items())
        raise ValueError(f"unknown published model {name!r}; known are {known}")
    file = resources.files("replayssm.builders.published") / f"{full.split('/')[-1]}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read(
    config: Mapping[str, Any],
    quant: Mapping[str, Any] | None,
    generation: Mapping[str, Any] | None,
    where: str,
    quant_where: str,
) -> ModelConfig:
    architecture = _architecture(config, where)
    formats = read_formats(config, quant, where, quant_where)
    multimodal = architecture.endswith("ForConditionalGeneration")
    if multimodal and "text_config" not in config:
        raise ValueError(f"{where}: text_config is missing, which {architecture} needs")
    text = Fields(config["text_config"] if multimodal else config, f"{where}: text_config" if multimodal else where)
    read = _read_nemotron_h if ARCHITECTURES[architecture] == NEMOTRON_H else _read_qwen3_5
    tie = config.get("tie_word_embeddings")
    eos = (generation or {}).get("eos_token_id")
    eos = text.get("eos_token_id", default=config.get("eos_token_id")) if eos is None else eos
    return ModelConfig(
        architecture=architecture,
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        tie_word_embeddings=text.boolean("tie_word_embeddings", default=False) if tie is None else bool(tie),
        max_position_embeddings=text.integer("max_position_embeddings"),
        dtype=_dtype(config, text),
        bos_token_id=text.integer("bos_token_id", default=None, minimum=0),
        eos_token_ids=_token_ids(eos, where),
        pad_token_id=text.integer("pad_token_id", default=None, minimum=0),
        multimodal=multimodal,
        formats=formats,
        source=where,
        **read(text, architecture),
    )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    named = config.get("architectures")
    if named:
        supported = [name for name in named if name in ARCHITECTURES]
        if not supported:
            raise ValueError(f"{where}: architectures is {named!r}, expected one of {', '.join(ARCHITECTURES)}")
        return supported[0]
    model_type = config.get("model_type")
    if model_type not in _ARCHITECTURE_OF_MODEL_TYPE:
        raise ValueError(
            f"{where}: architectures is missing and model_type is {model_type!r}, "
            f"expected architectures with one of {', '.join(ARCHITECTURES)}"
        )
    return _ARCHITECTURE_OF_MODEL_TYPE[model_type]


def _dtype(config: Mapping[str, Any], text: Fields) -> str:
    value = Fields(config, text.where).get("dtype", "torch_dtype", default=None)
    value = text.get("dtype", "torch_dtype", default="bfloat16") if value is None else value
    name = str(value).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32", "float64"):
        raise text.error("dtype", value, "bfloat16, float16, float32 or float64")
    return name


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ValueError(f"{where}: eos_token_id is {value!r}, expected a token id or a list of them")
    return ids


def _attention(fields: Fields, rope: RopeConfig | None, qk_norm: bool, output_gate: bool) -> AttentionConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", num_heads, f"a multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = fields.integer("head_dim", "attention_head_dim")
    return AttentionConfig(num_heads, AttentionGeometry(num_kv_heads, head_dim), rope, qk_norm, output_gate)


# --- Nemotron-H --------------------------------------------------------------------------------------------------

_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCK_TYPES = {
    "mamba": "mamba2",
    "mamba2": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def _nemotron_kinds(fields: Fields, pattern_key: str, list_keys: tuple[str, ...]) -> list[str]:
    """Layer kinds from a pattern string, from a list, or from both if they agree."""
    pattern = fields.get(pattern_key, default=None)
    listed = fields.get(*list_keys, default=None)
    if pattern is None and listed is None:
        raise ValueError(f"{fields.where}: {pattern_key} is missing, expected a string of M, *, - and E")
    found = []
    for key, entries, known in ((pattern_key, pattern, _PATTERN), (fields.name_of(*list_keys), listed, _BLOCK_TYPES)):
        if entries is None:
            continue
        unknown = [entry for entry in entries if entry not in known]
        if unknown or not entries:
            raise fields.error(key, entries, f"entries out of {', '.join(known)}, got {unknown[:3]}")
        found.append([known[entry] for entry in entries])
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"{fields.where}: {pattern_key} {pattern!r} and {fields.name_of(*list_keys)} {listed!r} "
            "describe different layers; expected the same"
        )
    return found[0]


def _read_nemotron_h(fields: Fields, architecture: str) -> dict[str, Any]:
    kinds = _nemotron_kinds(fields, "hybrid_override_pattern", ("layers_block_type", "layer_types"))
    count = fields.integer("num_hidden_layers", default=len(kinds))
    if count != len(kinds):
        raise fields.error("num_hidden_layers", count, f"{len(kinds)}, the number of layers in the pattern")
    _check_nemotron(fields, kinds)
    return {
        "family": NEMOTRON_H,
        "layers": tuple(_nemotron_layer(fields, kind, i, f"layers.{i}.") for i, kind in enumerate(kinds)),
        "norm_eps": fields.number("layer_norm_epsilon", "norm_eps", "rms_norm_eps", default=1e-5),
        "zero_centered_norms": False,
        "mtp": _nemotron_mtp(fields),
    }


def _check_nemotron(fields: Fields, kinds: list[str]) -> None:
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"):
        fields.expect(key, False)
    fields.expect("mamba_hidden_act", "silu")
    fields.expect("mlp_hidden_act", "relu2")
    fields.expect("final_logit_softcapping", 0)
    if "attention" in kinds:
        fields.expect("sliding_window", 0)
    if "moe" in kinds:
        fields.expect("n_group", 1)
        fields.expect("topk_group", 1)
        fields.expect("n_shared_experts", 1)
    limit = fields.get("time_step_limit", "mamba_dt_limit", default=None)
    if limit is not None:
        numbers = [parse_number(item) for item in limit] if isinstance(limit, list | tuple) else limit
        if numbers != [0.0, float("inf")]:
            raise fields.error("time_step_limit", limit, "[0, Infinity] (a clamp of dt is not supported)")


def _nemotron_layer(fields: Fields, kind: str, index: int, prefix: str) -> LayerConfig:
    part = _NEMOTRON_PARTS[kind](fields)
    if kind in ("mamba2", "attention"):
        return LayerConfig(index, prefix, mixer=part, mixer_prefix=f"{prefix}mixer.")
    return LayerConfig(index, prefix, feed_forward=part, feed_forward_prefix=f"{prefix}mixer.")


def _nemotron_mamba2(fields: Fields) -> Mixer:
    geometry = Mamba2Geometry(
        nheads=fields.integer("mamba_num_heads"),
        headdim=fields.integer("mamba_head_dim"),
        dstate=fields.integer("ssm_state_size", "mamba_d_state"),
        ngroups=fields.integer("n_groups", "mamba_n_groups"),
    )
    kernel = fields.integer("conv_kernel", "mamba_d_conv", minimum=2)
    bias = fields.boolean("use_conv_bias", "mamba_conv_bias", default=True)
    return Mamba2Config(geometry, ConvGeometry(geometry.conv_dim, kernel), bias)


def _nemotron_attention(fields: Fields) -> Mixer:
    # rope_theta and partial_rotary_factor may be present: nothing reads them, the model has no position encoding.
    return _attention(fields, rope=None, qk_norm=False, output_gate=False)


def _nemotron_mlp(fields: Fields) -> FeedForward:
    return MlpConfig(fields.integer("intermediate_size"), "squared_relu")


def _nemotron_moe(fields: Fields) -> FeedForward:
    num_experts = fields.integer("n_routed_experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=_top_k(fields, num_experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        latent_size=fields.integer("moe_latent_size", default=None),
        activation="squared_relu",
        router="sigmoid",
        routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
        normalize=fields.boolean("norm_topk_prob", default=True),
        shared_gate=False,
    )


_NEMOTRON_PARTS = {
    "mamba2": _nemotron_mamba2,
    "attention": _nemotron_attention,
    "mlp": _nemotron_mlp,
    "moe": _nemotron_moe,
}


def _top_k(fields: Fields, num_experts: int) -> int:
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", top_k, f"at most the number of experts ({num_experts})")
    return top_k


_WITHOUT_MTP = "set it to 0 to use the model without its draft head"


def _nemotron_mtp(fields: Fields) -> MtpConfig | None:
    fields.expect("num_nextn_predict_layers", 0, 1, hint=_WITHOUT_MTP)
    if not fields.integer("num_nextn_predict_layers", default=0, minimum=0):
        return None
    keys = ("mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
    kinds = _nemotron_kinds(fields, *keys)
    if kinds not in (["attention", "mlp"], ["attention", "moe"]):
        raise fields.error(fields.name_of(keys[0], *keys[1]), kinds, "attention followed by mlp or moe ('*-' or '*E')")
    return MtpConfig(tuple(_nemotron_layer(fields, kind, i, f"mtp.layers.{i}.") for i, kind in enumerate(kinds)))


# --- Qwen3.5 -----------------------------------------------------------------------------------------------------


def _read_qwen3_5(fields: Fields, architecture: str) -> dict[str, Any]:
    _check_qwen(fields)
    is_moe = architecture.startswith("Qwen3_5Moe")
    feed_forward = _qwen_moe(fields) if is_moe else MlpConfig(fields.integer("intermediate_size"), "swiglu")
    attention = _attention(fields, _qwen_rope(fields), qk_norm=True, output_gate=True)
    kinds = _qwen_kinds(fields)
    gdn = _qwen_gdn(fields) if "gdn" in kinds else None

    def layer(kind: str, index: int, prefix: str) -> LayerConfig:
        mixer, name = (gdn, "linear_attn") if kind == "gdn" else (attention, "self_attn")
        return LayerConfig(index, prefix, mixer, feed_forward, f"{prefix}{name}.", f"{prefix}mlp.")

    fields.expect("mtp_num_hidden_layers", 0, 1, hint=_WITHOUT_MTP)
    mtp = None
    if fields.integer("mtp_num_hidden_layers", default=0, minimum=0):
        fields.expect("mtp_use_dedicated_embeddings", False)
        mtp = MtpConfig((layer("attention", 0, "mtp.layers.0."),))
    return {
        "family": QWEN3_5,
        "layers": tuple(layer(kind, i, f"layers.{i}.") for i, kind in enumerate(kinds)),
        "norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "zero_centered_norms": True,
        "mtp": mtp,
    }


def _check_qwen(fields: Fields) -> None:
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("attn_output_gate", True)
    fields.expect("use_sliding_window", False)
    fields.expect("norm_topk_prob", True)
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [])
    fields.expect("final_logit_softcapping", 0)


def _qwen_kinds(fields: Fields) -> list[str]:
    count = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval", default=None)
    listed = fields.get("layer_types", default=None)
    names = {"linear_attention": "gdn", "full_attention": "attention"}
    if listed is not None:
        unknown = [entry for entry in listed if entry not in names]
        if unknown:
            raise fields.error("layer_types", unknown[0], " or ".join(names))
        if len(listed) != count:
            raise fields.error("num_hidden_layers", count, f"{len(listed)}, the length of layer_types")
        kinds = [names[entry] for entry in listed]
    if listed is None or interval is not None:
        every = interval or 4
        regular = ["attention" if (index + 1) % every == 0 else "gdn" for index in range(count)]
        if listed is not None and kinds != regular:
            raise fields.error("full_attention_interval", interval, "the interval of layer_types, or nothing")
        kinds = regular
    return kinds


def _qwen_gdn(fields: Fields) -> GdnConfig:
    geometry = GdnGeometry(
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        head_k_dim=fields.integer("linear_key_head_dim"),
        head_v_dim=fields.integer("linear_value_head_dim"),
    )
    kernel = fields.integer("linear_conv_kernel_dim", minimum=2)
    return GdnConfig(geometry, ConvGeometry(geometry.conv_dim, kernel))


def _qwen_moe(fields: Fields) -> MoeConfig:
    num_experts = fields.integer("num_experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=_top_k(fields, num_experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        latent_size=None,
        activation="swiglu",
        router="softmax",
        routed_scaling_factor=1.0,
        normalize=True,
        shared_gate=True,
    )


def _qwen_rope(fields: Fields) -> RopeConfig:
    """New spelling: rope_parameters {rope_type, rope_theta, partial_rotary_factor, ...}; old: the same keys outside."""
    nested = fields.get("rope_parameters", "rope_scaling", default={})
    inner = Fields(nested, f"{fields.where}: {fields.name_of('rope_parameters', 'rope_scaling')}")
    kind = inner.get("rope_type", "type", default="default")
    if kind not in ("default", "mrope"):
        raise inner.error("rope_type", kind, "'default' (scaled rotary encodings are not supported)")
    merged = Fields({**fields.values, **inner.values}, fields.where)
    theta = merged.number("rope_theta")
    factor = merged.number("partial_rotary_factor", default=0.25)
    head_dim = fields.integer("head_dim")
    dim = int(head_dim * factor)
    if not 0 < dim <= head_dim or dim % 2:
        raise merged.error("partial_rotary_factor", factor, f"an even number of at most head_dim ({head_dim}) elements")
    return RopeConfig(theta, dim)
