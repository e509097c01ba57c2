"""What both families share: the embedding, the output head and the numbering of the draft head's layers."""

from __future__ import annotations

from dataclasses import replace

from replayssm.builders import functional as F
from replayssm.builders.architecture import LayerConfig, ModelConfig
from replayssm.builders.functional import Graph, Value
from replayssm.builders.parameters import Parameters
from replayssm.plugins.network import Network, TensorSpec


def embed(config: ModelConfig, parameters: Parameters) -> Value:
    """Embeddings [T, hidden] of the call's token_ids."""
    module = config.embedding_name.removesuffix(".weight")
    table = parameters.linear(module, config.vocab_size, config.hidden_size)
    return F.embedding(parameters.graph.input("token_ids"), table)


def finish(hidden_states: Value, config: ModelConfig, parameters: Parameters) -> Network:
    """The network with its outputs: logits [R, vocab] fp32 of the wanted rows, and hidden_states [T, hidden]."""
    graph = parameters.graph
    module = config.lm_head_name.removesuffix(".weight")
    head = parameters.linear(module, config.vocab_size, config.hidden_size)
    logits = F.linear(F.gather(hidden_states, graph.input("logits_indices")), head, output_dtype=graph.scalar_dtype)
    return graph.finish(logits=logits, hidden_states=hidden_states)


def previous_hidden_states(config: ModelConfig, graph: Graph) -> Value:
    """The draft head's extra input: hidden_states [T, hidden] of the model, or of the head's last recursion."""
    return graph.input("hidden_states", TensorSpec(graph.activation_dtype, ("T", config.hidden_size)))


def draft_layers(config: ModelConfig) -> tuple[LayerConfig, ...]:
    """Layers of the draft head, numbered after the model's, because the number keys a layer's random bits."""
    return tuple(replace(layer, index=len(config.layers) + layer.index) for layer in config.mtp.layers)
