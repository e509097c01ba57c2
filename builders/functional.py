"""Functional operators over symbolic values: the vocabulary that model definitions are written in.

Each operator appends one `Node` to the `plugins.network.Network` under construction and returns the `Value`s it
defines, with shape and dtype inferred and checked: a wrong shape fails here, naming the operator, not in some target.
Weight formats live in `builders.parameters`; a model definition passes the handles that it got there.

Conventions: tokens are packed, so the first dimension of an activation is "T" (or "R" after `gather`) and operators
act on the last one. Norms, routers and softmax compute in fp32 (fp64 where activations are fp64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from replayssm.builders.parameters import Projection
from replayssm.plugins.contract import (
    AnyGeometry,
    AttentionGeometry,
    ConvGeometry,
    GdnGeometry,
    Geometry,
    Mamba2Geometry,
)
from replayssm.plugins.network import CALL_INPUTS, Dim, Network, Node, StateSpec, TensorSpec

ROWS = ("seq_lens", "window_starts", "window_lens", "state_batch_indices")
"""Call inputs that every stateful operator takes, in this order, after its own."""


class Graph:
    """A network under construction."""

    def __init__(self, name: str, activation_dtype: str) -> None:
        self.network = Network(name)
        self.activation_dtype = activation_dtype
        for input_name, (dtype, shape) in CALL_INPUTS.items():
            self.network.inputs[input_name] = TensorSpec(dtype, shape)

    @property
    def scalar_dtype(self) -> str:
        """dtype of norms' weights, A_log and the like, and of what is computed with them."""
        return "float64" if self.activation_dtype == "float64" else "float32"

    def input(self, name: str, spec: TensorSpec | None = None) -> Value:
        """A call input by name; with `spec`, an extra input that is declared now."""
        if spec is not None:
            self.network.inputs[name] = spec
        return self.value(name)

    def value(self, name: str) -> Value:
        return Value(name, self.network.spec(name), self)

    def emit(
        self,
        op: str,
        inputs: Sequence[Value],
        output: TensorSpec,
        attributes: dict[str, Any] | None = None,
        state: str | None = None,
    ) -> Value:
        """Append a node and return its output."""
        return self.emit_several(op, inputs, [output], attributes, state)[0]

    def emit_several(
        self,
        op: str,
        inputs: Sequence[Value],
        outputs: Sequence[TensorSpec],
        attributes: dict[str, Any] | None = None,
        state: str | None = None,
    ) -> tuple[Value, ...]:
        """Append a node and return its outputs."""
        network, index = self.network, len(self.network.nodes)
        suffixes = [""] if len(outputs) == 1 else [f".{i}" for i in range(len(outputs))]
        names = tuple(f"v{index}_{op}{suffix}" for suffix in suffixes)
        network.values.update(zip(names, outputs, strict=True))
        network.nodes.append(Node(op, tuple(v.name for v in inputs), names, attributes or {}, state))
        return tuple(self.value(name) for name in names)

    def stateful(
        self,
        op: str,
        inputs: Sequence[Value],
        output: TensorSpec,
        state: State,
        attributes: dict[str, Any] | None = None,
    ) -> Value:
        """Append a stateful node; `state` is declared with its first and only use."""
        if state.name in self.network.states:
            raise ValueError(f"{op}: state {state.name!r} is already used by another node")
        self.network.states[state.name] = StateSpec(state.geometry, state.layer)
        rows = [self.input(name) for name in ROWS]
        return self.emit(op, [*inputs, *rows], output, attributes=attributes, state=state.name)

    def finish(self, **outputs: Value) -> Network:
        """The validated network with `outputs` under their public names."""
        self.network.outputs = {public: value.name for public, value in outputs.items()}
        self.network.validate()
        return self.network


@dataclass(frozen=True)
class Value:
    """A named tensor of the network: a call input, a weight or an operator's output."""

    name: str
    spec: TensorSpec
    graph: Graph = field(repr=False, compare=False)

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    def like(self, *last: Dim, dtype: str | None = None) -> TensorSpec:
        """Spec of this value with its last dimension replaced by `last`."""
        return TensorSpec(dtype or self.dtype, (*self.shape[:-1], *last))


@dataclass(frozen=True)
class State:
    """State of one stateful layer, as a model definition names it."""

    name: str
    geometry: Geometry
    layer: int


def _check(op: str, what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise ValueError(f"{op}: {what} must be {_show(expected)}, got {_show(got)}")


def _show(value: Any) -> str:
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)


def _geometry(op: str, state: State, kind: type[AnyGeometry]) -> AnyGeometry:
    if not isinstance(state.geometry, kind):
        raise ValueError(f"{op}: state {state.name!r} must have a {kind.__name__}, got {state.geometry!r}")
    return state.geometry


def embedding(ids: Value, table: Projection) -> Value:
    """Rows of `table` [vocab, hidden] for `ids` [T] (int64), in the activation dtype."""
    _check("embedding", "ids", ids.shape, ("T",))
    _check("embedding", f"format of {table.name}", table.kind == "fp8", False)
    graph = ids.graph
    spec = TensorSpec(graph.activation_dtype, ("T", table.shape[1]))
    return graph.emit("embedding", [ids, *table.values(graph)], spec, attributes=dict(table.attributes))


def linear(x: Value, weight: Projection, output_dtype: str | None = None) -> Value:
    """x [.., in] times weight [out, in] transposed.

    With `output_dtype` "float32" the fp32 accumulator is returned, where a target has such a product; others round to
    the activation dtype first. A weight kept in fp32 (a router) is multiplied in fp32.
    """
    out_features, in_features = weight.shape
    _check("linear", f"the last dimension of x, for {weight.name},", x.shape[-1], in_features)
    dtype = output_dtype or (weight.dense_dtype or x.graph.activation_dtype)
    attributes = {**weight.attributes, "output_dtype": dtype}
    return x.graph.emit(
        "linear", [x, *weight.values(x.graph)], x.like(out_features, dtype=dtype), attributes=attributes
    )


def rms_norm(x: Value, weight: Value, eps: float, zero_centered: bool = False) -> Value:
    """x / rms(x) * weight over the last dimension; `zero_centered` multiplies by (1 + weight)."""
    _check("rms_norm", f"weight {weight.name}", weight.shape, (x.shape[-1],))
    return x.graph.emit("rms_norm", [x, weight], x.spec, attributes={"eps": eps, "zero_centered": zero_centered})


def gated_rms_norm(x: Value, z: Value, weight: Value, eps: float, group_size: int, gate_first: bool) -> Value:
    """RMSNorm of groups of `group_size` along the last dimension, and a gate silu(z).

    gate_first: norm(x * silu(z)) * weight (Mamba2 of Nemotron-H); otherwise norm(x) * weight * silu(z) (GDN). `weight`
    covers the last dimension, or one group that all groups share.
    """
    width = x.shape[-1]
    _check("gated_rms_norm", "z", z.shape, x.shape)
    if not isinstance(width, int) or width % group_size:
        raise ValueError(f"gated_rms_norm: the last dimension of x ({width}) must be a multiple of {group_size}")
    if weight.shape not in ((width,), (group_size,)):
        raise ValueError(f"gated_rms_norm: weight must be [{width}] or [{group_size}], got {_show(weight.shape)}")
    attributes = {"eps": eps, "group_size": group_size, "gate_first": gate_first}
    return x.graph.emit("gated_rms_norm", [x, z, weight], x.spec, attributes=attributes)


def silu(x: Value) -> Value:
    """x * sigmoid(x)."""
    return x.graph.emit("silu", [x], x.spec)


def squared_relu(x: Value) -> Value:
    """max(x, 0) squared."""
    return x.graph.emit("squared_relu", [x], x.spec)


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return x.graph.emit("sigmoid", [x], x.spec)


def add(x: Value, y: Value) -> Value:
    """x + y, of equal shapes."""
    _check("add", "y", y.shape, x.shape)
    _check("add", "dtype of y", y.dtype, x.dtype)
    return x.graph.emit("add", [x, y], x.spec)


def multiply(x: Value, y: Value) -> Value:
    """x * y; the last dimension of y may be 1 and is then repeated."""
    if y.shape != x.shape:
        _check("multiply", "y", y.shape, (*x.shape[:-1], 1))
    _check("multiply", "dtype of y", y.dtype, x.dtype)
    return x.graph.emit("multiply", [x, y], x.spec)


def split(x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
    """Consecutive parts of the last dimension."""
    _check("split", f"the sum of sizes {tuple(sizes)}", sum(sizes), x.shape[-1])
    return x.graph.emit_several("split", [x], [x.like(size) for size in sizes], {"sizes": list(sizes)})


def concat(*values: Value) -> Value:
    """Values joined along the last dimension."""
    first = values[0]
    for value in values[1:]:
        _check("concat", "the leading dimensions of all inputs", value.shape[:-1], first.shape[:-1])
        _check("concat", "the dtype of all inputs", value.dtype, first.dtype)
    return first.graph.emit("concat", values, first.like(sum(value.shape[-1] for value in values)))


def reshape(x: Value, *trailing: int) -> Value:
    """x with everything but its first dimension reshaped to `trailing`."""
    _check("reshape", f"the size of {trailing}", math.prod(trailing), math.prod(x.shape[1:]))
    shape = (x.shape[0], *trailing)
    return x.graph.emit("reshape", [x], TensorSpec(x.dtype, shape), attributes={"shape": list(shape)})


def rope(x: Value, theta: float, dim: int) -> Value:
    """Rotary position embedding of x [T, heads, head_dim] at each token's absolute position.

    The first `dim` entries of a head are rotated in the half-split form (entry i pairs with i + dim / 2) by the angle
    position * theta^(-2 i / dim), computed in fp32; the rest passes through.
    """
    _check("rope", "the rank of x", len(x.shape), 3)
    if dim % 2 or dim > x.shape[-1]:
        raise ValueError(f"rope: dim must be even and at most head_dim {x.shape[-1]}, got {dim}")
    positions = x.graph.input("positions")
    return x.graph.emit("rope", [x, positions], x.spec, attributes={"theta": theta, "dim": dim})


def gather(x: Value, indices: Value) -> Value:
    """Rows of x [T, n] named by `indices` [R]."""
    _check("gather", "the rank of x", len(x.shape), 2)
    return x.graph.emit("gather", [x, indices], TensorSpec(x.dtype, (*indices.shape, *x.shape[1:])))


def route_sigmoid(
    logits: Value, correction_bias: Value, top_k: int, scaling: float, normalize: bool
) -> tuple[Value, Value]:
    """Experts by top-k of sigmoid(logits) + correction_bias; weights are the *uncorrected* scores.

    logits [T, E] fp32; ids [T, top_k] int64, weights [T, top_k] fp32, divided by their sum + 1e-20 if `normalize` and
    then multiplied by `scaling`.
    """
    _check("route_sigmoid", "correction_bias", correction_bias.shape, (logits.shape[-1],))
    attributes = {"top_k": top_k, "scaling": scaling, "normalize": normalize}
    return _route("route_sigmoid", [logits, correction_bias], attributes)


def route_softmax(logits: Value, top_k: int) -> tuple[Value, Value]:
    """Experts by top-k of softmax(logits [T, E]); weights sum to 1. ids int64 and weights fp32, both [T, top_k]."""
    return _route("route_softmax", [logits], {"top_k": top_k})


def _route(op: str, inputs: list[Value], attributes: dict[str, Any]) -> tuple[Value, Value]:
    logits = inputs[0]
    if not 0 < attributes["top_k"] <= logits.shape[-1]:
        raise ValueError(f"{op}: top_k must be between 1 and {logits.shape[-1]} experts, got {attributes['top_k']}")
    specs = [logits.like(attributes["top_k"], dtype=dtype) for dtype in ("int64", logits.graph.scalar_dtype)]
    ids, weights = logits.graph.emit_several(op, inputs, specs, attributes)
    return ids, weights


def moe(x: Value, ids: Value, weights: Value, projections: Sequence[Projection], activation: str) -> Value:
    """Sum over each token's experts of weights * expert(x).

    activation "squared_relu": projections (up, down), expert(x) = down(relu(up(x))^2); "swiglu": (gate, up, down),
    expert(x) = down(silu(gate(x)) * up(x)). Projections are stacked [E, out, in]; x [T, in], ids and weights [T, k].
    """
    expected = {"squared_relu": 2, "swiglu": 3}
    if activation not in expected or len(projections) != expected[activation]:
        raise ValueError(f"moe: activation {activation!r} with {len(projections)} projections; known: {expected}")
    *inner, down = projections
    for projection in inner:
        _check("moe", f"stacked shape of {projection.name}", projection.shape[2], x.shape[-1])
        _check("moe", f"output of {projection.name}", projection.shape[1], down.shape[2])
    _check("moe", "weights", weights.shape, ids.shape)
    graph = x.graph
    inputs = [x, ids, weights, *(value for projection in projections for value in projection.values(graph))]
    attributes = {"activation": activation, "projections": [dict(p.attributes) for p in projections]}
    return graph.emit("moe", inputs, x.like(down.shape[1]), attributes=attributes)


def causal_conv1d_window(x: Value, weight: Value, bias: Value | None, state: State) -> Value:
    """silu of the depthwise causal convolution of x [T, C] with weight [C, K], continued across calls."""
    op = "causal_conv1d_window"
    geometry = _geometry(op, state, ConvGeometry)
    channels = geometry.conv_dim
    _check(op, "x", x.shape, ("T", channels))
    _check(op, f"weight {weight.name}", weight.shape, (channels, geometry.conv_kernel))
    if bias is not None:
        _check(op, f"bias {bias.name}", bias.shape, (channels,))
    inputs = [x, weight] if bias is None else [x, weight, bias]
    return x.graph.stateful(op, inputs, x.spec, state, {"bias": bias is not None})


def mamba2_window(
    x: Value, dt: Value, B: Value, C: Value, A_log: Value, D: Value, dt_bias: Value, state: State
) -> Value:
    """Mamba2 recurrence over each row's window: x [T, H, P], dt [T, H], B and C [T, G, N] -> [T, H, P]."""
    op = "mamba2_window"
    g = _geometry(op, state, Mamba2Geometry)
    _check(op, "x", x.shape, ("T", g.nheads, g.headdim))
    _check(op, "dt", dt.shape, ("T", g.nheads))
    for name, value in (("B", B), ("C", C)):
        _check(op, name, value.shape, ("T", g.ngroups, g.dstate))
    for name, value in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        _check(op, name, value.shape, (g.nheads,))
    return x.graph.stateful(op, [x, dt, B, C, A_log, D, dt_bias], x.spec, state)


def gdn_window(q: Value, k: Value, v: Value, a: Value, b: Value, A_log: Value, dt_bias: Value, state: State) -> Value:
    """Gated DeltaNet over each row's window: q, k [T, Hk, dk] raw, v [T, Hv, dv], a, b [T, Hv] -> [T, Hv, dv]."""
    op = "gdn_window"
    g = _geometry(op, state, GdnGeometry)
    for name, value in (("q", q), ("k", k)):
        _check(op, name, value.shape, ("T", g.num_k_heads, g.head_k_dim))
    _check(op, "v", v.shape, ("T", g.num_v_heads, g.head_v_dim))
    for name, value in (("a", a), ("b", b)):
        _check(op, name, value.shape, ("T", g.num_v_heads))
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        _check(op, name, value.shape, (g.num_v_heads,))
    return v.graph.stateful(op, [q, k, v, a, b, A_log, dt_bias], v.spec, state)


def attention_window(q: Value, k: Value, v: Value, state: State, scale: float) -> Value:
    """Causal grouped-query attention over the cache and the window: q [T, Hq, hd], k and v [T, Hkv, hd] -> like q."""
    op = "attention_window"
    g = _geometry(op, state, AttentionGeometry)
    for name, value in (("k", k), ("v", v)):
        _check(op, name, value.shape, ("T", g.num_kv_heads, g.head_dim))
    _check(op, "the head dimension of q", q.shape[-1], g.head_dim)
    if q.shape[1] % g.num_kv_heads:
        raise ValueError(f"{op}: {q.shape[1]} query heads must be a multiple of {g.num_kv_heads} key heads")
    return q.graph.stateful(op, [q, k, v], q.spec, state, {"scale": scale})
