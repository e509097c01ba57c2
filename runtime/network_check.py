"""Whether this version's interpreter can run a network that was read from a file.

`Network.validate` checks names; here every node is held against what its operator takes: number of inputs and outputs,
attributes, and the geometry of its state. What passes can still be nonsense in its shapes, which running a token shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.integers import is_integer
from replayssm.plugins.network import CALL_INPUTS, DTYPES, Network, Node
from replayssm.runtime.functional_ops import WEIGHT_OPERATORS, scale_count

ROW_INPUTS = 4
"""Inputs of a stateful operator behind its own: seq_lens, window_starts, window_lens, state_batch_indices."""

OUTPUTS = ("logits", "hidden_states")
Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return is_integer(value, 1)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _one_of(*allowed: Any) -> Check:
    return lambda value: (value is None or isinstance(value, str)) and value in allowed


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_whole(item) for item in value)


def _shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(_whole(item) for item in value[1:])


def _projections(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict)
        and item.keys() == _FORMAT.keys()
        and all(check(item[name]) for name, check in _FORMAT.items())
        for item in value
    )


_FORMAT = {"format": _one_of("dense", "nvfp4", "fp8"), "activations": _one_of(None, "nvfp4", "fp8")}
_EXPERT_PROJECTIONS = {"squared_relu": 2, "swiglu": 3}


@dataclass(frozen=True)
class _Rule:
    """inputs: how many an operator takes, None where `_input_counts` says. outputs: None: one per size."""

    inputs: tuple[int, ...] | None
    outputs: int | None = 1
    attributes: dict[str, Check] = field(default_factory=dict)
    geometry: type | None = None


_RULES = {
    "embedding": _Rule(None, attributes=_FORMAT),
    "linear": _Rule(None, attributes={**_FORMAT, "output_dtype": _one_of(*DTYPES)}),
    "rms_norm": _Rule((2,), attributes={"eps": _number, "zero_centered": _flag}),
    "gated_rms_norm": _Rule((3,), attributes={"eps": _number, "group_size": _whole, "gate_first": _flag}),
    "silu": _Rule((1,)),
    "squared_relu": _Rule((1,)),
    "sigmoid": _Rule((1,)),
    "add": _Rule((2,)),
    "multiply": _Rule((2,)),
    "split": _Rule((1,), None, {"sizes": _sizes}),
    "concat": _Rule(None),
    "reshape": _Rule((1,), attributes={"shape": _shape}),
    "rope": _Rule((2,), attributes={"theta": _number, "dim": _whole}),
    "gather": _Rule((2,)),
    "route_sigmoid": _Rule((2,), 2, {"top_k": _whole, "scaling": _number, "normalize": _flag}),
    "route_softmax": _Rule((1,), 2, {"top_k": _whole}),
    "moe": _Rule(None, attributes={"activation": _one_of(*_EXPERT_PROJECTIONS), "projections": _projections}),
    "mamba2_window": _Rule((7 + ROW_INPUTS,), geometry=Mamba2Geometry),
    "gdn_window": _Rule((7 + ROW_INPUTS,), geometry=GdnGeometry),
    "causal_conv1d_window": _Rule((2 + ROW_INPUTS, 3 + ROW_INPUTS), attributes={"bias": _flag}, geometry=ConvGeometry),
    "attention_window": _Rule((3 + ROW_INPUTS,), attributes={"scale": _number}, geometry=AttentionGeometry),
}


def check_network(network: Network) -> None:
    """Raise ValueError for the first thing in `network` that this version does not run."""
    where = f"network {network.name!r}"
    missing = set(OUTPUTS) - network.outputs.keys()
    if missing:
        raise ValueError(f"{where} has no output {', '.join(sorted(missing))}")
    unknown = network.inputs.keys() - CALL_INPUTS.keys() - {"hidden_states"}
    if unknown:
        raise ValueError(f"{where} has the unknown inputs {', '.join(sorted(unknown))}")
    for name, spec in network.inputs.items():
        if name in CALL_INPUTS and (spec.dtype, spec.shape) != CALL_INPUTS[name]:
            raise ValueError(f"{where}: the input {name!r} must be {CALL_INPUTS[name]}, got {spec}")
    for index, node in enumerate(network.nodes):
        _check_node(f"{where}, node {index} ({node.op})", network, node)
    used = [node.state for node in network.nodes if node.state is not None]
    if sorted(used) != sorted(network.states):
        raise ValueError(f"{where}: each state must belong to one node")


def _check_node(where: str, network: Network, node: Node) -> None:
    rule = _RULES.get(node.op)
    if rule is None:
        raise ValueError(f"{where}: the operator is unknown; known are {', '.join(_RULES)}")
    if node.attributes.keys() != rule.attributes.keys():
        raise ValueError(f"{where} must have the attributes {_listed(rule.attributes)}, got {_listed(node.attributes)}")
    for name, check in rule.attributes.items():
        if not check(node.attributes[name]):
            raise ValueError(f"{where}: the attribute {name!r} cannot be {repr(node.attributes[name])[:40]}")
    counts = rule.inputs or _input_counts(node)
    if len(node.inputs) not in counts:
        raise ValueError(f"{where} takes {' or '.join(map(str, counts))} inputs, got {len(node.inputs)}")
    outputs = rule.outputs or len(node.attributes["sizes"])
    if len(node.outputs) != outputs:
        raise ValueError(f"{where} has {outputs} outputs, got {len(node.outputs)}")
    if (node.state is None) != (rule.geometry is None):
        raise ValueError(f"{where} must {'have no' if rule.geometry is None else 'have a'} state")
    if rule.geometry is not None:
        _check_state(where, network, node, rule.geometry)


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _input_counts(node: Node) -> tuple[int, ...]:
    if node.op == "concat":
        return (max(1, len(node.inputs)),)
    projections = node.attributes.get("projections", [node.attributes])
    expected = _EXPERT_PROJECTIONS.get(node.attributes.get("activation"), 1)
    if len(projections) != expected:
        raise ValueError(f"{node.op} must have {expected} projections, got {len(projections)}")
    scales = sum(1 + scale_count(item["format"], item["activations"]) for item in projections)
    return (WEIGHT_OPERATORS[node.op] + scales,)


def _check_state(where: str, network: Network, node: Node, kind: type) -> None:
    """The geometry has the operator's kind and the sizes of its inputs, so that no state is larger than its use."""
    geometry = network.states[node.state].geometry
    if not isinstance(geometry, kind):
        raise ValueError(f"{where}: the state must have {kind.__name__}, got {geometry}")
    shapes = [network.spec(name).shape for name in node.inputs[:4]]
    if kind is Mamba2Geometry:
        got = (shapes[0][1:], shapes[2][1:])
        expected = ((geometry.nheads, geometry.headdim), (geometry.ngroups, geometry.dstate))
    elif kind is GdnGeometry:
        got = (shapes[0][1:], shapes[2][1:])
        expected = ((geometry.num_k_heads, geometry.head_k_dim), (geometry.num_v_heads, geometry.head_v_dim))
    elif kind is ConvGeometry:
        got, expected = (shapes[1],), ((geometry.conv_dim, geometry.conv_kernel),)
    else:
        got, expected = (shapes[1][1:],), ((geometry.num_kv_heads, geometry.head_dim),)
    if got != expected:
        raise ValueError(f"{where}: its inputs have the sizes {got}, its state's geometry {expected}")
