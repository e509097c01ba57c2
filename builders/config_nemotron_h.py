"""`config.json` of NemotronHForCausalLM."""

from __future__ import annotations

from typing import Any

from replayssm.builders.architecture import (
    NEMOTRON_H,
    FeedForward,
    LayerConfig,
    Mamba2Config,
    Mixer,
    MlpConfig,
    MoeConfig,
    MtpConfig,
)
from replayssm.builders.config_common import WITHOUT_MTP, read_attention, read_top_k
from replayssm.builders.fields import Fields, is_name, parse_number
from replayssm.plugins.contract import ConvGeometry, Mamba2Geometry

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
        if not isinstance(entries, str | list | tuple):
            raise fields.error(key, entries, "a string or a list of layer kinds")
        unknown = [entry for entry in entries if not is_name(entry, known)]
        if unknown or not entries:
            raise fields.error(key, entries, f"entries out of {', '.join(known)}, got {unknown[:3]}")
        found.append([known[entry] for entry in entries])
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"{fields.where}: {pattern_key} {pattern!r} and {fields.name_of(*list_keys)} {listed!r} "
            "describe different layers; expected the same"
        )
    return found[0]


def read_nemotron_h(fields: Fields) -> dict[str, Any]:
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
    ngroups = fields.integer("n_groups", "mamba_n_groups")
    geometry = Mamba2Geometry(
        nheads=fields.multiple(fields.integer("mamba_num_heads"), ngroups, "mamba_num_heads", of_key="n_groups"),
        headdim=fields.integer("mamba_head_dim"),
        dstate=fields.integer("ssm_state_size", "mamba_d_state"),
        ngroups=ngroups,
    )
    kernel = fields.integer("conv_kernel", "mamba_d_conv", minimum=2)
    bias = fields.boolean("use_conv_bias", "mamba_conv_bias", default=True)
    return Mamba2Config(geometry, ConvGeometry(geometry.conv_dim, kernel), bias)


def _nemotron_attention(fields: Fields) -> Mixer:
    # rope_theta and partial_rotary_factor may be present: nothing reads them, the model has no position encoding.
    return read_attention(fields, rope=None, qk_norm=False, output_gate=False)


def _nemotron_mlp(fields: Fields) -> FeedForward:
    return MlpConfig(fields.integer("intermediate_size"), "squared_relu")


def _nemotron_moe(fields: Fields) -> FeedForward:
    num_experts = fields.integer("n_routed_experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=read_top_k(fields, num_experts),
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


def _nemotron_mtp(fields: Fields) -> MtpConfig | None:
    fields.expect("num_nextn_predict_layers", 0, 1, hint=WITHOUT_MTP)
    if not fields.integer("num_nextn_predict_layers", default=0, minimum=0):
        return None
    keys = ("mtp_hybrid_override_pattern", ("mtp_layers_block_type",))
    kinds = _nemotron_kinds(fields, *keys)
    if kinds not in (["attention", "mlp"], ["attention", "moe"]):
        raise fields.error(fields.name_of(keys[0], *keys[1]), kinds, "attention followed by mlp or moe ('*-' or '*E')")
    return MtpConfig(tuple(_nemotron_layer(fields, kind, i, f"mtp.layers.{i}.") for i, kind in enumerate(kinds)))
