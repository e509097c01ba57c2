"""What the configs of both families spell alike."""

from __future__ import annotations

from replayssm.builders.architecture import AttentionConfig, RopeConfig
from replayssm.builders.fields import Fields
from replayssm.plugins.contract import AttentionGeometry

WITHOUT_MTP = "set it to 0 to use the model without its draft head"


def read_attention(fields: Fields, rope: RopeConfig | None, qk_norm: bool, output_gate: bool) -> AttentionConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    fields.multiple(num_heads, num_kv_heads, "num_attention_heads", of_key="num_key_value_heads")
    head_dim = fields.integer("head_dim", "attention_head_dim")
    return AttentionConfig(num_heads, AttentionGeometry(num_kv_heads, head_dim), rope, qk_norm, output_gate)


def read_top_k(fields: Fields, num_experts: int) -> int:
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.error("num_experts_per_tok", top_k, f"at most the number of experts ({num_experts})")
    return top_k
