"""Fewer, larger operators for a network on a GPU: the executor runs `fuse(network, nodes)` instead of the nodes.

Projections of the same input become one matrix product over their joined weights, and elementwise operators join the
norm, activation or product that follows. Weights of 4 and 8 bits stay packed and become operands in the products of
`plugins.weight_only`, which takes them in an order of its own. The kernels serve 16-bit activations; everything
else falls back to the operators of `functional_ops`, so a fused network also runs on the CPU, where tests compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from replayssm.plugins import elementwise, routing, weight_only
from replayssm.plugins.network import Network, Node
from replayssm.runtime import functional_ops as ops

Tensor = torch.Tensor

JOINED_COLUMNS = 8
"""Output features of a joined projection come in these, so that each part starts on a 16-byte boundary."""

JOIN = "+"
"""Between the names of joined weights, in the name of the joined one."""

PARTS = "@parts"
"""Behind the name of an fp32 weight [n, k], in that of [2 n, k]: the weight in bf16, and what that leaves in bf16."""

TILES = "@tiles"
"""Behind the name of a weight, in that of the same as `weight_only.pack` arranges it, NVFP4 block scales included."""


def fuse(network: Network, nodes: Sequence[Node], pack: bool = True, fp8_products: bool = False) -> list[Node]:
    """`nodes` of `network` with the same results. Names of joined weights are their parts' names with JOIN between.

    pack: take packed weights, and those of experts, as the kernels want them, which multiply without rounding
        activations: named with TILES behind, and with their features in the attribute `tiles`.
    fp8_products: multiply FP8 weights with activations in FP8 where the checkpoint's recipe rounds them so.
    """
    if fp8_products:
        nodes = [_fp8_product(node) for node in nodes]
    nodes = _split_routers(network, _join_linears(network, list(nodes)))
    if pack:
        nodes = [_tile_weights(network, node) if node.op in ("linear", "moe") else node for node in nodes]
    for first, second, rule in _RULES:
        nodes = _fuse_pairs(network, nodes, first, second, rule)
    return nodes


def joined_parts(name: str, network: Network) -> list[str]:
    """Weights that a joined one consists of, in order; empty for a weight of the network itself."""
    return name.split(JOIN) if JOIN in name and name not in network.weights else []


def derived(name: str, load: Callable[[str], Tensor]) -> Tensor | None:
    """A weight that is made of others, which `load` gives by name; None for a weight of another kind."""
    if name.endswith(TILES):
        source = name.removesuffix(TILES)
        weight = load(source)
        format = {torch.uint8: "nvfp4", torch.float8_e4m3fn: "fp8"}.get(weight.dtype, "dense")
        return weight_only.pack(format, weight, load(source + BLOCK_SCALE) if format == "nvfp4" else None)
    if name.endswith(PARTS):
        weight = load(name.removesuffix(PARTS))
        high = weight.bfloat16()
        return torch.cat([high, (weight - high.to(weight.dtype)).bfloat16()])
    return None


BLOCK_SCALE = "_scale"
"""Behind the name of an NVFP4 weight, in that of its block scales."""


def _split_routers(network: Network, nodes: list[Node]) -> list[Node]:
    """Routers with fp32 weights as one product of 16-bit numbers: each weight as the sum of two of them.

    That keeps 16 bits of it: all of a weight that a checkpoint stores in bf16, and twice what activations have.
    """
    routed = {node.inputs[0]: node for node in nodes if node.op == "route_sigmoid"}
    uses = Counter(name for node in nodes for name in node.inputs)
    changed: dict[int, Node] = {}
    for node in nodes:
        router = routed.get(node.outputs[0]) if node.op == "linear" else None
        weight = network.weights.get(node.inputs[1]) if router is not None else None
        if weight is None or weight.dtype != "float32" or uses[node.outputs[0]] > 1:
            continue
        if network.spec(node.inputs[0]).dtype == "bfloat16":
            changed[id(node)] = replace(node, inputs=(node.inputs[0], node.inputs[1] + PARTS))
            changed[id(router)] = replace(router, attributes={**router.attributes, "parts": 2})
    return [changed.get(id(node), node) for node in nodes]


def _tile_weights(network: Network, node: Node) -> Node:
    dtype = network.spec(node.inputs[0]).dtype
    if dtype not in ("bfloat16", "float16"):
        return node
    at = ops.WEIGHT_OPERATORS[node.op]
    inputs, projections = list(node.inputs[:at]), []
    for projection in node.attributes.get("projections", [node.attributes]):
        count = 1 + ops.scale_count(projection["format"], projection["activations"])
        tensors, at = list(node.inputs[at : at + count]), at + count
        if (features := _tiled_features(network, node.op, projection["format"], tensors, dtype)) is not None:
            projection = {**projection, "tiles": features}
            tensors[0] += TILES
            if projection["format"] == "nvfp4":
                del tensors[1]
        inputs += tensors
        projections.append(projection)
    changed = {"projections": projections} if "projections" in node.attributes else projections[0]
    return replace(node, inputs=tuple(inputs), attributes={**node.attributes, **changed})


def _fp8_product(node: Node) -> Node:
    if node.op != "linear" or node.attributes["activations"] != "fp8":
        return node
    return replace(node, op="fp8_linear", attributes={"output_dtype": node.attributes["output_dtype"]})


def _tiled_features(
    network: Network, op: str, format: str, tensors: list[str], activation_dtype: str
) -> list[int] | None:
    """[out, in] of a weight that the kernels take; None for others, such as 16-bit ones without experts."""
    if tensors[0] not in network.weights or (op == "linear" and format == "dense"):
        return None
    if format == "nvfp4" and tensors[1] != tensors[0] + BLOCK_SCALE:
        return None
    if format == "dense" and network.weights[tensors[0]].dtype != activation_dtype:
        return None
    *_, rows, columns = network.weights[tensors[0]].shape
    columns *= 2 if format == "nvfp4" else 1
    return [rows, columns] if weight_only.takes_weight(format, rows, columns) else None


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


def linear(
    x: Tensor,
    weight: Tensor,
    *scales: Tensor,
    output_dtype: torch.dtype,
    format: str,
    activations: str | None,
    emulate: bool = False,
    tiles: list[int] | None = None,
) -> Tensor:
    """As `functional_ops.linear`; the product itself is returned in fp32 where that is asked for."""
    if tiles is not None:
        (held,) = _held([weight, *scales], [{"format": format, "activations": activations, "tiles": tiles}])
        rows = x if elementwise.supports(x) else x.contiguous()
        if x.is_cuda and weight_only.takes(rows):
            return weight_only.linear(rows, held, output_dtype)
        weight, *scales = _checkpoint_tensors(held, scales[-1] if activations is not None else None, x.dtype)
    narrow = x.is_cuda and x.dtype in elementwise.SIXTEEN_BITS and x.dim() == 2 and weight.dtype == x.dtype
    if narrow and output_dtype == torch.float32 and format == "dense":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return ops.linear(
        x, weight, *scales, output_dtype=output_dtype, format=format, activations=activations, emulate=emulate
    )


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor, *, output_dtype: torch.dtype) -> Tensor:
    """x [T, in], rounded to FP8, times the transpose of an FP8 weight."""
    rows = x if elementwise.supports(x) else x.contiguous()
    sizes = weight.shape[0] % 16 or weight.shape[1] % 16
    if x.is_cuda and x.dim() == 2 and x.shape[0] > 0 and elementwise.supports(rows) and not sizes:
        narrow = elementwise.quantize_fp8(rows, input_scale)
        return torch._scaled_mm(narrow, weight.t(), input_scale, scale, out_dtype=output_dtype)
    attributes = {"format": "fp8", "activations": "fp8", "output_dtype": output_dtype, "emulate": True}
    return ops.linear(x, weight, scale, input_scale, **attributes)


def _held(tensors: Sequence[Tensor], projections: Sequence[dict[str, Any]]) -> list[weight_only.Weight]:
    """Projections in tiles as the kernels read them; `tensors` holds tiles, scale and input scale of each."""
    found, at = [], 0
    for projection in projections:
        scaled = projection["format"] != "dense"
        scale = tensors[at + 1] if scaled else None
        found.append(weight_only.Weight(projection["format"], tensors[at], scale, *projection["tiles"]))
        at += 1 + scaled + (projection["activations"] is not None)
    return found


def _checkpoint_tensors(held: weight_only.Weight, input_scale: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """What `functional_ops` reads: codes, block scales, scale, input scale, as far as there are; dtype: of 16 bits."""
    found = weight_only.unpack(held)
    if held.format == "dense":
        found = [tensor.view(dtype) for tensor in found]
    return found + [scale for scale in (held.scale, input_scale) if scale is not None]


def route_sigmoid(
    logits: Tensor, correction_bias: Tensor, *, top_k: int, scaling: float, normalize: bool, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """As `functional_ops.route_sigmoid`, of the sum of `parts` logits [T, parts * E]."""
    if logits.is_cuda and logits.shape[0] > 0 and routing.supports(logits, top_k, correction_bias):
        return routing.route(logits, correction_bias, top_k, scaling, normalize, parts)
    logits = logits.unflatten(1, (parts, -1)).sum(1) if parts > 1 else logits
    return ops.route_sigmoid(logits, correction_bias, top_k=top_k, scaling=scaling, normalize=normalize)


def route_softmax(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    if logits.is_cuda and logits.shape[0] > 0 and routing.supports(logits, top_k, None):
        return routing.route(logits, None, top_k)
    return ops.route_softmax(logits, top_k=top_k)


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *tensors: Tensor,
    activation: str,
    projections: list[dict[str, Any]],
    emulate: bool = False,
) -> Tensor:
    """As `functional_ops.moe`."""
    tiled = all("tiles" in projection for projection in projections)
    if x.is_cuda and tiled and weights.dtype == torch.float32:
        held, rows = _held(tensors, projections), x if elementwise.supports(x) else x.contiguous()
        if weight_only.takes(rows) and len({weight.format for weight in held}) == 1:
            return weight_only.moe(rows, ids, weights, held, activation)
    plain, at = [], 0
    for projection in projections:
        scaled, rounded = projection["format"] != "dense", projection["activations"] is not None
        count = 1 + (scaled + rounded if "tiles" in projection else ops.scale_count(**projection))
        own, at = tensors[at : at + count], at + count
        if "tiles" in projection:
            (held,) = _held(own, [projection])
            own = _checkpoint_tensors(held, own[-1] if rounded else None, x.dtype)
        plain += own
    projections = [{"format": p["format"], "activations": p["activations"]} for p in projections]
    return ops.moe(x, ids, weights, *plain, activation=activation, projections=projections, emulate=emulate)


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
    "fp8_linear": fp8_linear,
    "linear": linear,
    "moe": moe,
    "route_sigmoid": route_sigmoid,
    "route_softmax": route_softmax,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "norm_rope": norm_rope,
    "silu_multiply": silu_multiply,
    "multiply_sigmoid": multiply_sigmoid,
    "squared_relu": squared_relu,
}
"""Operators of a fused network."""
