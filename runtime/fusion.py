"""Fewer, larger operators for a network on a GPU: the executor runs `fuse(network, nodes)` instead of the nodes.

Projections of the same input become one matrix product over their joined weights, and elementwise operators join the
norm, activation or product that follows. The kernels of `plugins.elementwise` serve 16-bit activations; everything else
falls back to the operators of `functional_ops`, so a fused network also runs on the CPU, where tests compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from replayssm.plugins import elementwise
from replayssm.plugins.network import Network, Node
from replayssm.runtime import functional_ops as ops

Tensor = torch.Tensor

JOINED_COLUMNS = 8
"""Output features of a joined projection come in these, so that each part starts on a 16-byte boundary."""

JOIN = "+"
"""Between the names of joined weights, in the name of the joined one."""


def fuse(network: Network, nodes: Sequence[Node]) -> list[Node]:
    """`nodes` of `network` with the same results. Names of joined weights are their parts' names with JOIN between."""
    nodes = _join_linears(network, list(nodes))
    for first, second, rule in _RULES:
        nodes = _fuse_pairs(network, nodes, first, second, rule)
    return nodes


def joined_parts(name: str, network: Network) -> list[str]:
    """Weights that a joined one consists of, in order; empty for a weight of the network itself."""
    return name.split(JOIN) if JOIN in name and name not in network.weights else []


def _join_linears(network: Network, nodes: list[Node]) -> list[Node]:
    groups: dict[tuple, list[Node]] = {}
    for node in nodes:
        if node.op == "linear" and len(node.inputs) == 2 and node.attributes["format"] == "dense":
            weight = network.weights.get(node.inputs[1])
            if weight is not None and weight.shape[0] % JOINED_COLUMNS == 0:
                key = (node.inputs[0], weight.dtype, node.attributes["output_dtype"])
                groups.setdefault(key, []).append(node)
    replaced: dict[int, list[Node]] = {}
    for group in groups.values():
        if len(group) == 1:
            continue
        weight = JOIN.join(node.inputs[1] for node in group)
        joined = "+".join(node.outputs[0] for node in group)
        sizes = [network.weights[node.inputs[1]].shape[0] for node in group]
        product = Node("linear", (group[0].inputs[0], weight), (joined,), group[0].attributes)
        split = Node("split", (joined,), tuple(node.outputs[0] for node in group), {"sizes": sizes})
        # All parts read the same value, so the others may move up to where the first one stands.
        replaced |= {id(node): [] for node in group}
        replaced[id(group[0])] = [product, split]
    return [new for node in nodes for new in replaced.get(id(node), [node])]


Rule = Callable[[Network, Node, Node], "Node | None"]


def _fuse_pairs(network: Network, nodes: list[Node], first: str, second: str, rule: Rule) -> list[Node]:
    """Replace pairs where a node `second` reads what a node `first` computes and `rule` gives a fused node.

    A result of `first` that others read too must be among the fused node's outputs; that node then takes the place of
    `first`, and otherwise that of `second`.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    uses.update(network.outputs.values())
    made_by = {name: index for index, node in enumerate(nodes) for name in node.outputs}
    out: list[Node | None] = list(nodes)
    for index, node in enumerate(nodes):
        if node.op != second:
            continue
        for name in node.inputs:
            at = made_by.get(name)
            if at is None or nodes[at].op != first or out[at] is not nodes[at]:
                continue
            fused = rule(network, nodes[at], node)
            if fused is None or (name not in fused.outputs and uses[name] > 1):
                continue
            place = at if name in fused.outputs else index
            out[at] = out[index] = None
            out[place] = fused
            break
    return [node for node in out if node is not None]


def _add_norm(network: Network, add: Node, norm: Node) -> Node | None:
    if norm.inputs[0] != add.outputs[0]:
        return None
    return Node("add_rms_norm", (*add.inputs, norm.inputs[1]), (*add.outputs, *norm.outputs), norm.attributes)


def _silu_multiply(network: Network, silu: Node, multiply: Node) -> Node | None:
    if multiply.inputs[0] != silu.outputs[0] or not _same_shape(network, *multiply.inputs):
        return None
    return Node("silu_multiply", (silu.inputs[0], multiply.inputs[1]), multiply.outputs)


def _multiply_sigmoid(network: Network, sigmoid: Node, multiply: Node) -> Node | None:
    if multiply.inputs[1] != sigmoid.outputs[0] or not _same_shape(network, *multiply.inputs):
        return None
    return Node("multiply_sigmoid", (multiply.inputs[0], sigmoid.inputs[0]), multiply.outputs)


def _norm_rope(network: Network, norm: Node, rope: Node) -> Node | None:
    inputs = (*norm.inputs, rope.inputs[1])
    return Node("norm_rope", inputs, rope.outputs, {**norm.attributes, **rope.attributes})


_RULES: tuple[tuple[str, str, Rule], ...] = (
    ("rms_norm", "rope", _norm_rope),
    ("add", "rms_norm", _add_norm),
    ("silu", "multiply", _silu_multiply),
    ("sigmoid", "multiply", _multiply_sigmoid),
)


def _same_shape(network: Network, x: str, y: str) -> bool:
    return network.spec(x).shape == network.spec(y).shape


# The operators. Each takes the kernel where it can.


def _kernels_take(activations: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> bool:
    return (
        activations[0].is_cuda
        and elementwise.supports(*activations)
        and elementwise.supports_scale(*weights)
        and activations[0].shape[0] > 0
    )


def linear(x: Tensor, weight: Tensor, *scales: Tensor, output_dtype: torch.dtype, **attributes: Any) -> Tensor:
    """As `functional_ops.linear`; the product itself is returned in fp32 where that is asked for."""
    narrow = x.is_cuda and x.dtype in elementwise.SIXTEEN_BITS and x.dim() == 2 and weight.dtype == x.dtype
    if narrow and output_dtype == torch.float32 and attributes["format"] == "dense":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return ops.linear(x, weight, *scales, output_dtype=output_dtype, **attributes)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    if x.dim() == 2 and _kernels_take([x], [weight]):
        return elementwise.rms_norm(x, weight, eps, zero_centered)
    return ops.rms_norm(x, weight, eps=eps, zero_centered=zero_centered)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, *, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y))."""
    if x.dim() == 2 and _kernels_take([x, y], [weight]):
        return elementwise.add_rms_norm(x, y, weight, eps, zero_centered)
    total = x + y
    return total, ops.rms_norm(total, weight, eps=eps, zero_centered=zero_centered)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, *, eps: float, group_size: int, gate_first: bool) -> Tensor:
    if x.dim() == 2 and group_size % elementwise.CHUNK == 0 and _kernels_take([x, z], [weight]):
        return elementwise.gated_rms_norm(x, z, weight, eps, group_size, gate_first)
    return ops.gated_rms_norm(x, z, weight, eps=eps, group_size=group_size, gate_first=gate_first)


def norm_rope(
    x: Tensor, weight: Tensor, positions: Tensor, *, eps: float, zero_centered: bool, theta: float, dim: int
) -> Tensor:
    """rope(rms_norm(x)) of heads."""
    if _kernels_take([x], [weight]) and positions.dtype == torch.int32 and positions.is_contiguous():
        return elementwise.norm_rope(x, weight, positions, eps, zero_centered, theta, dim)
    return ops.rope(ops.rms_norm(x, weight, eps=eps, zero_centered=zero_centered), positions, theta=theta, dim=dim)


def silu_multiply(x: Tensor, y: Tensor) -> Tensor:
    return elementwise.activate("silu_multiply", x, y) if _kernels_take([x, y]) else F.silu(x) * y


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    return elementwise.activate("multiply_sigmoid", x, gate) if _kernels_take([x, gate]) else x * gate.sigmoid()


def squared_relu(x: Tensor) -> Tensor:
    return elementwise.activate("squared_relu", x) if _kernels_take([x]) else ops.squared_relu(x)


FUSED_OPERATORS: dict[str, Callable[..., Any]] = {
    **ops.OPERATORS,
    "linear": linear,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "norm_rope": norm_rope,
    "silu_multiply": silu_multiply,
    "multiply_sigmoid": multiply_sigmoid,
    "squared_relu": squared_relu,
}
"""Operators of a fused network."""
