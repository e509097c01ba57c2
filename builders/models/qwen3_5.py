"""Qwen3.5, dense and MoE: Gated DeltaNet and gated attention, each followed by a SwiGLU MLP or MoE.

Structure and weight names follow Hugging Face's Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM; the draft head follows
the weights of the published checkpoints and vLLM's description of it (vllm/model_executor/models/qwen3_5_mtp.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.builders import functional as F
from replayssm.builders.architecture import AttentionConfig, GdnConfig, LayerConfig, ModelConfig, MoeConfig
from replayssm.builders.functional import State, Value
from replayssm.builders.models.common import draft_layers, embed, finish, previous_hidden_states
from replayssm.builders.parameters import Parameters
from replayssm.plugins.network import Network


def build_main(config: ModelConfig, parameters: Parameters) -> Network:
    """The language model: logits [R, vocab] fp32 and hidden_states [T, hidden] after the final norm."""
    x = _layers(embed(config, parameters), config.layers, config, parameters)
    return finish(_norm(x, config, parameters, "norm"), config, parameters)


def build_mtp(config: ModelConfig, parameters: Parameters) -> Network:
    """The draft head. It reads the token at position p + 1 and the hidden state of position p.

    Its own hidden_states output, after mtp.norm, is what the next recursion reads.
    """
    p = parameters / "mtp"
    embedding = _norm(embed(config, parameters), config, p, "pre_fc_norm_embedding")
    previous = _norm(previous_hidden_states(config, parameters.graph), config, p, "pre_fc_norm_hidden")
    x = F.linear(F.concat(embedding, previous), p.linear("fc", config.hidden_size, 2 * config.hidden_size))
    x = _layers(x, draft_layers(config), config, parameters)
    return finish(_norm(x, config, p, "norm"), config, parameters)


def _norm(x: Value, config: ModelConfig, p: Parameters, name: str) -> Value:
    return F.rms_norm(x, p.scalars(f"{name}.weight", x.shape[-1]), config.norm_eps, zero_centered=True)


def _layers(x: Value, layers: Sequence[LayerConfig], config: ModelConfig, parameters: Parameters) -> Value:
    mixers = {"gdn": gated_delta_net, "attention": attention}
    feed_forwards = {"mlp": mlp, "moe": moe}
    for layer in layers:
        p = parameters / layer.prefix
        normed = _norm(x, config, p, "input_layernorm")
        x = F.add(x, mixers[layer.mixer.kind](normed, layer, config, parameters / layer.mixer_prefix))
        normed = _norm(x, config, p, "post_attention_layernorm")
        x = F.add(x, feed_forwards[layer.feed_forward.kind](normed, layer, config, p / "mlp"))
    return x


def gated_delta_net(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    mixer: GdnConfig = layer.mixer
    g, hidden, key_size, value_size = mixer.geometry, config.hidden_size, mixer.key_size, mixer.value_size

    qkv = F.linear(x, p.linear("in_proj_qkv", g.conv_dim, hidden))
    z = F.linear(x, p.linear("in_proj_z", value_size, hidden))
    a = F.linear(x, p.linear("in_proj_a", g.num_v_heads, hidden))
    b = F.linear(x, p.linear("in_proj_b", g.num_v_heads, hidden))
    conv_weight = p.tensor("conv1d.weight", g.conv_dim, mixer.conv.conv_kernel)
    qkv = F.causal_conv1d_window(qkv, conv_weight, None, State(f"{layer.prefix}conv", mixer.conv, layer.index))
    q, k, v = F.split(qkv, [key_size, key_size, value_size])
    y = F.gdn_window(
        F.reshape(q, g.num_k_heads, g.head_k_dim),
        F.reshape(k, g.num_k_heads, g.head_k_dim),
        F.reshape(v, g.num_v_heads, g.head_v_dim),
        a,
        b,
        p.scalars("A_log", g.num_v_heads),
        p.scalars("dt_bias", g.num_v_heads),
        State(f"{layer.prefix}ssm", g, layer.index),
    )
    norm_weight = p.scalars("norm.weight", g.head_v_dim)
    y = F.gated_rms_norm(
        F.reshape(y, value_size), z, norm_weight, config.norm_eps, group_size=g.head_v_dim, gate_first=False
    )
    return F.linear(y, p.linear("out_proj", hidden, value_size))


def attention(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    """Attention with normalised q and k, partial rope and, per head, an output gate beside the query."""
    mixer: AttentionConfig = layer.mixer
    heads, kv_heads, head_dim, hidden = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, config.hidden_size

    q_gate = F.linear(x, p.linear("q_proj", heads * 2 * head_dim, hidden))
    q, gate = F.split(F.reshape(q_gate, heads, 2 * head_dim), [head_dim, head_dim])
    k = F.reshape(F.linear(x, p.linear("k_proj", kv_heads * head_dim, hidden)), kv_heads, head_dim)
    v = F.reshape(F.linear(x, p.linear("v_proj", kv_heads * head_dim, hidden)), kv_heads, head_dim)
    q = F.rope(_norm(q, config, p, "q_norm"), mixer.rope.theta, mixer.rope.dim)
    k = F.rope(_norm(k, config, p, "k_norm"), mixer.rope.theta, mixer.rope.dim)
    y = F.attention_window(q, k, v, State(f"{layer.prefix}attention", mixer.geometry, layer.index), mixer.scale)
    y = F.reshape(F.multiply(y, F.sigmoid(gate)), heads * head_dim)
    return F.linear(y, p.linear("o_proj", hidden, heads * head_dim))


def mlp(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    return _swiglu_mlp(x, layer.feed_forward.intermediate_size, config, p)


def moe(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    """Routed experts plus a shared expert that is scaled by its own sigmoid gate."""
    ff: MoeConfig = layer.feed_forward
    hidden = config.hidden_size

    ids, weights = F.route_softmax(F.linear(x, p.linear("gate", ff.num_experts, hidden)), ff.top_k)
    gate = p.experts("gate_proj", ff.num_experts, ff.intermediate_size, hidden)
    up = p.experts("up_proj", ff.num_experts, ff.intermediate_size, hidden)
    down = p.experts("down_proj", ff.num_experts, hidden, ff.intermediate_size)
    y = F.moe(x, ids, weights, [gate, up, down], ff.activation)
    shared = _swiglu_mlp(x, ff.shared_intermediate_size, config, p / "shared_expert")
    shared_gate = F.sigmoid(F.linear(x, p.linear("shared_expert_gate", 1, hidden)))
    return F.add(y, F.multiply(shared, shared_gate))


def _swiglu_mlp(x: Value, intermediate_size: int, config: ModelConfig, p: Parameters) -> Value:
    gate = F.linear(x, p.linear("gate_proj", intermediate_size, config.hidden_size))
    up = F.linear(x, p.linear("up_proj", intermediate_size, config.hidden_size))
    return F.linear(F.multiply(F.silu(gate), up), p.linear("down_proj", config.hidden_size, intermediate_size))
