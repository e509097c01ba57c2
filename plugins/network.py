"""The network of an engine: a flat list of functional operator calls.

Model definitions (`builders/models`) are traced once into a `Network`. Every target then lowers the same list: the
torch target stores it in the engine directory and the runtime interprets it, the TensorRT targets turn each call into
layers. Neither the runtime nor a target needs the model's Python code.

A network is straight-line code in single-assignment form. Values are named; a name is a network input, a weight, or
the output of exactly one earlier node. Shapes are tuples whose entries are ints or the symbols

    T   packed tokens of the call          B   rows of the call          R   rows that need logits
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from replayssm.plugins.contract import ELEMENT_BITS, Geometry, geometry_from_json, geometry_to_json
from replayssm.plugins.integers import MAX_SIZE
from replayssm.plugins.settings import ReplaySettings

Dim = int | str
SYMBOLS = ("T", "B", "R")
DTYPES = (*ELEMENT_BITS, "int64")

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


LAYER_STRIDE = 1 << 20
"""Between the ranks' numbers of a layer of a divided model, which key the random bits of stochastic rounding."""


@dataclass(frozen=True)
class StateSpec:
    """State that a stateful node reads and writes, allocated by the runtime from its geometry.

    `layer` is the launch scalar that keys random bits; it is unique per recurrent layer of an engine.
    """

    geometry: Geometry
    layer: int

    @property
    def number(self) -> int:
        """Of the layer in the model, also where this is a part of it."""
        return self.layer % LAYER_STRIDE

    def settings(self, replay: ReplaySettings) -> ReplaySettings:
        """What `replay`, of an engine, says of this state."""
        return replay.of_layer(self.number)


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
    def from_json(cls, value: Any) -> Network:
        """Inverse of `to_json`. Raises ValueError for anything of another form, naming the place."""
        _require_fields("a network", value, cls)
        name = _text("a network's name", value["name"])
        where = f"network {name!r}"
        network = cls(
            name=name,
            inputs=_specs(where, value, "inputs", TensorSpec),
            weights=_specs(where, value, "weights", WeightSpec),
            states={key: _state(f"{where}, state {key!r}", v) for key, v in _mapping(where, value, "states").items()},
            nodes=[
                _node(f"{where}, node {index}", v)
                for index, v in enumerate(_typed(f"{where}: nodes", value["nodes"], list))
            ],
            values=_specs(where, value, "values", TensorSpec),
            outputs={key: _text(f"{where}: output {key!r}", v) for key, v in _mapping(where, value, "outputs").items()},
        )
        network.validate()
        return network


def _typed(what: str, value: Any, kind: type) -> Any:
    # `to_json` keeps tuples, which only the JSON text turns into lists.
    if not isinstance(value, (list, tuple) if kind is list else kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what} must be a {_JSON_NAMES[kind]}, got {repr(value)[:40]}")
    return value


_JSON_NAMES = {dict: "JSON object", list: "JSON list", str: "text", int: "whole number"}


def _require_fields(what: str, value: Any, kind: type) -> None:
    """ValueError unless `value` is an object with exactly the fields of the dataclass `kind`."""
    expected = {item.name for item in fields(kind)}
    if _typed(what, value, dict).keys() != expected:
        raise ValueError(f"{what} must have the fields {', '.join(sorted(expected))}, got {', '.join(sorted(value))}")


def _text(what: str, value: Any) -> str:
    return _typed(what, value, str)


def _texts(what: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(f"each of {what}", item) for item in _typed(what, value, list))


def _mapping(where: str, value: dict[str, Any], name: str) -> dict[str, Any]:
    return _typed(f"{where}: {name}", value[name], dict)


def _specs(where: str, value: dict[str, Any], name: str, kind: type) -> dict[str, Any]:
    symbols = SYMBOLS if kind is TensorSpec else ()
    return {key: _spec(f"{where}: {key!r}", item, kind, symbols) for key, item in _mapping(where, value, name).items()}


def _spec(what: str, value: Any, kind: type, symbols: tuple[str, ...]) -> Any:
    _require_fields(what, value, kind)
    if _text(f"the dtype of {what}", value["dtype"]) not in DTYPES:
        raise ValueError(f"the dtype of {what} must be one of {', '.join(DTYPES)}, got {value['dtype'][:40]!r}")
    shape = _typed(f"the shape of {what}", value["shape"], list)
    for size in shape:
        known = isinstance(size, str) and size in symbols
        if not known and not 0 <= _typed(f"a size of {what}", size, int) <= MAX_SIZE:
            raise ValueError(f"a size of {what} must lie in [0, {MAX_SIZE}], got {size}")
    return kind(value["dtype"], tuple(shape))


def _state(what: str, value: Any) -> StateSpec:
    _require_fields(what, value, StateSpec)
    if not 0 <= _typed(f"the layer of {what}", value["layer"], int) <= MAX_SIZE:
        raise ValueError(f"the layer of {what} must lie in [0, {MAX_SIZE}], got {value['layer']}")
    _typed(f"the geometry of {what}", value["geometry"], dict)
    try:
        return StateSpec(geometry_from_json(value["geometry"]), value["layer"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _node(what: str, value: Any) -> Node:
    _require_fields(what, value, Node)
    state = value["state"]
    return Node(
        _text(f"the op of {what}", value["op"]),
        _texts(f"the inputs of {what}", value["inputs"]),
        _texts(f"the outputs of {what}", value["outputs"]),
        _typed(f"the attributes of {what}", value["attributes"], dict),
        None if state is None else _text(f"the state of {what}", state),
    )
