"""The traced network: JSON round trip and the checks of single assignment."""

from __future__ import annotations

import dataclasses
import json

import pytest

from replayssm.plugins.contract import ConvGeometry, Mamba2Geometry
from replayssm.plugins.network import CALL_INPUTS, Network, Node, StateSpec, TensorSpec, WeightSpec


def small_network() -> Network:
    return Network(
        name="main",
        inputs={name: TensorSpec(dtype, shape) for name, (dtype, shape) in CALL_INPUTS.items()},
        weights={"embedding": WeightSpec("bfloat16", (64, 8)), "conv": WeightSpec("bfloat16", (8, 4))},
        states={
            "conv.0": StateSpec(ConvGeometry(8, 4), 0),
            "ssm.0": StateSpec(Mamba2Geometry(2, 2, 2, 1), 1),
        },
        nodes=[
            Node("embedding", ("token_ids", "embedding"), ("h",)),
            Node(
                "causal_conv1d_window",
                ("h", "conv", "seq_lens", "window_starts", "window_lens", "state_batch_indices"),
                ("x",),
                {"bias": False},
                "conv.0",
            ),
        ],
        values={"h": TensorSpec("bfloat16", ("T", 8)), "x": TensorSpec("bfloat16", ("T", 8))},
        outputs={"hidden_states": "x"},
    )


def test_json_round_trip():
    network = small_network()
    network.validate()
    text = json.dumps(network.to_json())
    assert Network.from_json(json.loads(text)) == network


def test_spec_finds_inputs_weights_and_values():
    network = small_network()
    assert network.spec("seq_lens") == TensorSpec("int32", ("B",))
    assert network.spec("conv") == TensorSpec("bfloat16", (8, 4))
    assert network.spec("x") == TensorSpec("bfloat16", ("T", 8))
    with pytest.raises(KeyError):
        network.spec("nothing")


def replace_node(network: Network, index: int, **changes) -> None:
    network.nodes[index] = dataclasses.replace(network.nodes[index], **changes)


BROKEN = {
    "an input and a weight share a name": lambda n: n.weights.update(token_ids=WeightSpec("bfloat16", (1,))),
    r"node 0 \(embedding\) reads 'lost', which nothing": lambda n: replace_node(n, 0, inputs=("lost",)),
    r"node 0 \(embedding\) reads 'x'": lambda n: replace_node(n, 0, inputs=("x",)),
    "uses state 'ssm.7', which is not declared": lambda n: replace_node(n, 1, state="ssm.7"),
    "node 1 .* defines 'h' a second time": lambda n: replace_node(n, 1, outputs=("h",)),
    "defines 'conv' a second time": lambda n: replace_node(n, 0, outputs=("conv",)),
    "has no shape for its output 'x'": lambda n: n.values.pop("x"),
    "output 'logits' is 'y', which is not defined": lambda n: n.outputs.update(logits="y"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_validate_refuses(message):
    network = small_network()
    BROKEN[message](network)
    with pytest.raises(ValueError, match=message):
        network.validate()
    with pytest.raises(ValueError, match=message):
        Network.from_json(network.to_json())


MALFORMED = {
    "op of network 'main', node 0 must be a text": lambda v: v["nodes"][0].update(op=[]),
    "state of network 'main', node 1 must be a text": lambda v: v["nodes"][1].update(state=3),
    "attributes of network 'main', node 0 must be a JSON object": lambda v: v["nodes"][0].update(attributes=None),
    "each of the inputs of .*, node 0 must be a text": lambda v: v["nodes"][0].update(inputs=["token_ids", {}]),
    "nodes must be a JSON list": lambda v: v.update(nodes={}),
    "node 0 must have the fields": lambda v: v["nodes"][0].pop("inputs"),
    "a network must have the fields": lambda v: v.update(more=1),
    "outputs must be a JSON object": lambda v: v.update(outputs=[]),
    "output 'hidden_states' must be a text": lambda v: v["outputs"].update(hidden_states=1),
    "layer of .* must be a whole number, got 'x'": lambda v: v["states"]["ssm.0"].update(layer="x"),
    "layer of .* must be a whole number, got True": lambda v: v["states"]["ssm.0"].update(layer=True),
    "state 'ssm.0': unknown geometry kind": lambda v: v["states"]["ssm.0"]["geometry"].update(kind="x"),
    "state 'ssm.0': .*unexpected keyword": lambda v: v["states"]["ssm.0"]["geometry"].update(x=1),
    "state 'ssm.0': .*must be an integer": lambda v: v["states"]["ssm.0"]["geometry"].update(nheads="2"),
    "dtype of .*'conv' must be one of": lambda v: v["weights"]["conv"].update(dtype="nn"),
    "dtype of .*'h' must be a text": lambda v: v["values"]["h"].update(dtype=[]),
    "a size of .*'conv' must be a whole number, got 'T'": lambda v: v["weights"]["conv"].update(shape=["T"]),
    "a size of .*'h' must be a whole number, got 1.5": lambda v: v["values"]["h"].update(shape=["T", 1.5]),
    "a size of .*'h' must lie in": lambda v: v["values"]["h"].update(shape=["T", 2**40]),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_from_json_refuses_another_form(message):
    value = json.loads(json.dumps(small_network().to_json()))
    MALFORMED[message](value)
    with pytest.raises(ValueError, match=message):
        Network.from_json(value)


@pytest.mark.parametrize("value", [None, [], "main", 1, {}])
def test_from_json_refuses_what_is_no_network(value):
    with pytest.raises(ValueError, match="a network must"):
        Network.from_json(value)
