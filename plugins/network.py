"""The network of an engine: a flat list of functional operator calls.

Model definitions (`builders/models`) are traced once into a `Network`. Every target then lowers the same list: the
torch target stores it in the engine directory and the runtime interprets it, the TensorRT targets turn each call into
layers. Neither the runtime nor a target needs the model's Python code.

A network is straight-line code in single-assignment form. Values are named; a name is a network input, a weight, or
the output of exactly one earlier node. Shapes are tuples whose entries are ints or the symbols

    T   packed tokens of the call          B   rows of the call          R   rows that need logits
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from replayssm.plugins.contract import Geometry, geometry_from_json, geometry_to_json

Dim = int | str
SYMBOLS = ("T", "B", "R")

CALL_INPUTS: dict[str, tuple[str, tuple[Dim, ...]]] = {
    "token_ids": ("int64", ("T",)),
    "positions": ("int32", ("T",)),
    "seq_lens": ("int32", ("B",)),
    "window_starts": ("int32", ("B",)),
    "window_lens": ("int32", ("B",)),
    "state_batch_indices": ("int32", ("B",)),
    "logits_indices": ("int64", ("R",)),
}
"""Inputs of every network, by name: (dtype, shape). `hidden_states` [T, hidden] is an extra input of draft heads.

Row b owns the tokens [window_starts[b], window_starts[b] + window_lens[b]); `positions` holds each token's absolute
position; `logits_indices` names the tokens whose logits are wanted.
"""


@dataclass(frozen=True)
class TensorSpec:
    """Static description of a value; `dtype` is torch's name."""

    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class WeightSpec:
    """A constant: its stored dtype and shape. `name` is the key in the engine's weight files."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateSpec:
    """State that a stateful node reads and writes, allocated by the runtime from its geometry.

    `layer` is the launch scalar that keys random bits; it is unique per recurrent layer of an engine.
    """

    geometry: Geometry
    layer: int


@dataclass(frozen=True)
class Node:
    """One operator call. `state` names the StateSpec of a stateful operator."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    state: str | None = None


@dataclass
class Network:
    """A traced network. `outputs` maps public output names ("logits", "hidden_states") to value names."""

    name: str
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    states: dict[str, StateSpec] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, TensorSpec] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    def spec(self, name: str) -> TensorSpec:
        """Description of an input, weight or computed value."""
        if name in self.values:
            return self.values[name]
        if name in self.inputs:
            return self.inputs[name]
        weight = self.weights[name]
        return TensorSpec(weight.dtype, weight.shape)

    def validate(self) -> None:
        """Raise ValueError unless every name is defined exactly once and before its use."""
        defined = [*self.inputs, *self.weights]
        if len(set(defined)) != len(defined):
            raise ValueError(f"network {self.name!r}: an input and a weight share a name")
        known = set(defined)
        for index, node in enumerate(self.nodes):
            where = f"network {self.name!r}, node {index} ({node.op})"
            for name in node.inputs:
                if name not in known:
                    raise ValueError(f"{where} reads {name!r}, which nothing before it defines")
            if node.state is not None and node.state not in self.states:
                raise ValueError(f"{where} uses state {node.state!r}, which is not declared")
            for name in node.outputs:
                if name in known:
                    raise ValueError(f"{where} defines {name!r} a second time")
                if name not in self.values:
                    raise ValueError(f"{where} has no shape for its output {name!r}")
                known.add(name)
        for public, name in self.outputs.items():
            if name not in known:
                raise ValueError(f"network {self.name!r}: output {public!r} is {name!r}, which is not defined")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inputs": {name: asdict(spec) for name, spec in self.inputs.items()},
            "weights": {name: asdict(spec) for name, spec in self.weights.items()},
            "states": {
                name: {"geometry": geometry_to_json(spec.geometry), "layer": spec.layer}
                for name, spec in self.states.items()
            },
            "nodes": [asdict(node) for node in self.nodes],
            "values": {name: asdict(spec) for name, spec in self.values.items()},
            "outputs": dict(self.outputs),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Network:
        network = cls(
            name=value["name"],
            inputs={k: TensorSpec(v["dtype"], tuple(v["shape"])) for k, v in value["inputs"].items()},
            weights={k: WeightSpec(v["dtype"], tuple(v["shape"])) for k, v in value["weights"].items()},
            states={k: StateSpec(geometry_from_json(v["geometry"]), v["layer"]) for k, v in value["states"].items()},
            nodes=[
                Node(v["op"], tuple(v["inputs"]), tuple(v["outputs"]), v["attributes"], v["state"])
                for v in value["nodes"]
            ],
            values={k: TensorSpec(v["dtype"], tuple(v["shape"])) for k, v in value["values"].items()},
            outputs=dict(value["outputs"]),
        )
        network.validate()
        return network
