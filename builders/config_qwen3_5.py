"""`config.json` of the Qwen3.5 classes, dense and MoE."""

from __future__ import annotations

from typing import Any

from replayssm.builders.architecture import QWEN3_5, GdnConfig, LayerConfig, MlpConfig, MoeConfig, MtpConfig, RopeConfig
from replayssm.builders.config_common import WITHOUT_MTP, read_attention, read_top_k
from replayssm.builders.fields import Fields, is_name
from replayssm.plugins.contract import ConvGeometry, GdnGeometry

_MOST_LAYERS = 10_000  # far beyond any model; a damaged number must not fill the memory


def read_qwen3_5(fields: Fields, is_moe: bool) -> dict[str, Any]:
    _check_qwen(fields)
    feed_forward = _qwen_moe(fields) if is_moe else MlpConfig(fields.integer("intermediate_size"), "swiglu")
    attention = read_attention(fields, _qwen_rope(fields), qk_norm=True, output_gate=True)
    kinds = _qwen_kinds(fields)
    gdn = _qwen_gdn(fields) if "gdn" in kinds else None

    def layer(kind: str, index: int, prefix: str) -> LayerConfig:
        mixer, name = (gdn, "linear_attn") if kind == "gdn" else (attention, "self_attn")
        return LayerConfig(index, prefix, mixer, feed_forward, f"{prefix}{name}.", f"{prefix}mlp.")

    fields.expect("mtp_num_hidden_layers", 0, 1, hint=WITHOUT_MTP)
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
    if count > _MOST_LAYERS:
        raise fields.error("num_hidden_layers", count, f"at most {_MOST_LAYERS}")
    interval = fields.integer("full_attention_interval", default=None)
    listed = fields.get("layer_types", default=None)
    names = {"linear_attention": "gdn", "full_attention": "attention"}
    if listed is not None:
        if not isinstance(listed, list | tuple):
            raise fields.error("layer_types", listed, "a list of layer kinds")
        unknown = [entry for entry in listed if not is_name(entry, names)]
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
    num_k_heads, num_v_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    geometry = GdnGeometry(
        num_k_heads=num_k_heads,
        num_v_heads=fields.multiple(num_v_heads, num_k_heads, "linear_num_value_heads", of_key="linear_num_key_heads"),
        head_k_dim=fields.integer("linear_key_head_dim"),
        head_v_dim=fields.integer("linear_value_head_dim"),
    )
    kernel = fields.integer("linear_conv_kernel_dim", minimum=2)
    return GdnConfig(geometry, ConvGeometry(geometry.conv_dim, kernel))


def _qwen_moe(fields: Fields) -> MoeConfig:
    num_experts = fields.integer("num_experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=read_top_k(fields, num_experts),
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
