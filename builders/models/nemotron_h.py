"""Nemotron-H: Mamba2, attention without position encoding, squared-ReLU MLPs and latent MoE, one mixer per layer.

Structure and weight names follow Hugging Face's NemotronHForCausalLM; the draft head follows the weights of the
published checkpoints and vLLM's description of it (vllm/model_executor/models/nemotron_h_mtp.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.builders import functional as F
from replayssm.builders.architecture import AttentionConfig, LayerConfig, Mamba2Config, ModelConfig, MoeConfig
from replayssm.builders.functional import State, Value
from replayssm.builders.models.common import draft_layers, embed, finish, previous_hidden_states
from replayssm.builders.parameters import Parameters
from replayssm.plugins.network import Network


def build_main(config: ModelConfig, parameters: Parameters) -> Network:
    """The language model: logits [R, vocab] fp32 and hidden_states [T, hidden] after the final norm."""
    x = _layers(embed(config, parameters), config.layers, config, parameters)
    return finish(_norm(x, config, parameters, "norm_f"), config, parameters)


def build_mtp(config: ModelConfig, parameters: Parameters) -> Network:
    """The draft head. It reads the token at position p + 1 and the hidden state of position p.

    Its own hidden_states output, after final_layernorm, is what the next recursion reads.
    """
    layers = draft_layers(config)
    first, last = parameters / layers[0].prefix, parameters / layers[-1].prefix
    embedding = _norm(embed(config, parameters), config, first, "enorm")
    previous = _norm(previous_hidden_states(config, parameters.graph), config, first, "hnorm")
    x = F.linear(F.concat(embedding, previous), first.linear("eh_proj", config.hidden_size, 2 * config.hidden_size))
    x = _layers(x, layers, config, parameters)
    return finish(_norm(x, config, last, "final_layernorm"), config, parameters)


def _norm(x: Value, config: ModelConfig, p: Parameters, name: str) -> Value:
    return F.rms_norm(x, p.scalars(f"{name}.weight", x.shape[-1]), config.norm_eps)


def _layers(x: Value, layers: Sequence[LayerConfig], config: ModelConfig, parameters: Parameters) -> Value:
    mixers = {"mamba2": mamba2_mixer, "attention": attention, "mlp": mlp, "moe": moe}
    for layer in layers:
        p = parameters / layer.prefix
        x = F.add(x, mixers[layer.kind](_norm(x, config, p, "norm"), layer, config, p / "mixer"))
    return x


def mamba2_mixer(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    mixer: Mamba2Config = layer.mixer
    g, inner = mixer.geometry, mixer.inner_size
    heads, bc_size = g.nheads, g.ngroups * g.dstate

    projected = F.linear(x, p.linear("in_proj", inner + g.conv_dim + heads, config.hidden_size))
    z, xBC, dt = F.split(projected, [inner, g.conv_dim, heads])
    conv_weight = p.tensor("conv1d.weight", g.conv_dim, mixer.conv.conv_kernel)
    conv_bias = p.tensor("conv1d.bias", g.conv_dim) if mixer.conv_bias else None
    conv_state = State(f"{layer.prefix}conv", mixer.conv, layer.index)
    xBC = F.causal_conv1d_window(xBC, conv_weight, conv_bias, conv_state)
    x, B, C = F.split(xBC, [inner, bc_size, bc_size])
    y = F.mamba2_window(
        F.reshape(x, heads, g.headdim),
        dt,
        F.reshape(B, g.ngroups, g.dstate),
        F.reshape(C, g.ngroups, g.dstate),
        p.scalars("A_log", heads),
        p.scalars("D", heads),
        p.scalars("dt_bias", heads),
        State(f"{layer.prefix}ssm", g, layer.index),
    )
    norm_weight = p.scalars("norm.weight", inner)
    y = F.gated_rms_norm(
        F.reshape(y, inner), z, norm_weight, config.norm_eps, group_size=mixer.norm_group_size, gate_first=True
    )
    return F.linear(y, p.linear("out_proj", config.hidden_size, inner))


def attention(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    mixer: AttentionConfig = layer.mixer
    heads, kv_heads, head_dim, hidden = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, config.hidden_size

    q = F.reshape(F.linear(x, p.linear("q_proj", heads * head_dim, hidden)), heads, head_dim)
    k = F.reshape(F.linear(x, p.linear("k_proj", kv_heads * head_dim, hidden)), kv_heads, head_dim)
    v = F.reshape(F.linear(x, p.linear("v_proj", kv_heads * head_dim, hidden)), kv_heads, head_dim)
    y = F.attention_window(q, k, v, State(f"{layer.prefix}attention", mixer.geometry, layer.index), mixer.scale)
    return F.linear(F.reshape(y, heads * head_dim), p.linear("o_proj", hidden, heads * head_dim))


def mlp(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    return _squared_relu_mlp(x, layer.feed_forward.intermediate_size, config, p)


def moe(x: Value, layer: LayerConfig, config: ModelConfig, p: Parameters) -> Value:
    """Routed experts, in a latent space where the model has one, plus a shared expert on the full width."""
    ff: MoeConfig = layer.feed_forward
    hidden, width = config.hidden_size, ff.latent_size or config.hidden_size

    logits = F.linear(x, p.linear("gate", ff.num_experts, hidden, float32=True))
    bias = p.scalars("gate.e_score_correction_bias", ff.num_experts)
    ids, weights = F.route_sigmoid(logits, bias, ff.top_k, ff.routed_scaling_factor, ff.normalize)
    y = x if ff.latent_size is None else F.linear(x, p.linear("fc1_latent_proj", width, hidden))
    up = p.experts("up_proj", ff.num_experts, ff.intermediate_size, width)
    down = p.experts("down_proj", ff.num_experts, width, ff.intermediate_size)
    y = F.moe(y, ids, weights, [up, down], ff.activation)
    if ff.latent_size is not None:
        y = F.linear(y, p.linear("fc2_latent_proj", hidden, width))
    return F.add(y, _squared_relu_mlp(x, ff.shared_intermediate_size, config, p / "shared_experts"))


def _squared_relu_mlp(x: Value, intermediate_size: int, config: ModelConfig, p: Parameters) -> Value:
    up = F.linear(x, p.linear("up_proj", intermediate_size, config.hidden_size))
    return F.linear(F.squared_relu(up), p.linear("down_proj", config.hidden_size, intermediate_size))
