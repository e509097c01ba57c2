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

import torch

from replayssm.plugins import fp8_experts as fp8
from replayssm.plugins import packed_weights, weight_only
from replayssm.plugins.network import Network, Node
from replayssm.runtime import functional_ops as ops

Tensor = torch.Tensor

JOINED_COLUMNS = 8
"""Output features of a joined projection come in these, so that each part starts on a 16-byte boundary."""

JOIN = "+"
"""Between the names of joined weights, in the name of the joined one."""

PARTS = "@parts"
"""Behind the name of an fp32 weight [n, k], in that of [2 n, k]: the weight in bf16, and what that leaves in bf16."""

NARROW = "@fp8"
"""Behind the name of a value, in that of the same in e4m3, as an FP8 product reads it."""

TILES = "@tiles"
"""Behind the name of a weight, in that of the same as `packed_weights.pack` has it, NVFP4 block scales included."""

FP8_TILES = "@fp8_tiles"
"""The same for `fp8_experts.pack`."""

FP8_UNIT, FP8_UNITS = "@fp8_unit", "@fp8_units"
"""Behind the name of experts' input scales, in those of `fp8_experts.units`, shared or not."""


def fuse(
    network: Network,
    nodes: Sequence[Node],
    pack: bool = True,
    fp8_products: bool = False,
    load: Callable[[str], Tensor] | None = None,
    fp8_experts: bool = False,
) -> list[Node]:
    """`nodes` of `network` with the same results. Names of joined weights are their parts' names with JOIN between.

    pack: take packed weights, and those of experts, as the kernels want them, which multiply without rounding
        activations: named with TILES behind, and with their features in the attribute `tiles`.
    fp8_products: multiply FP8 weights with activations in FP8 where the checkpoint's recipe rounds them so.
    load: gives a weight by name; with it, FP8 projections of one input whose scales are equal are joined too.
    fp8_experts: multiply experts in FP8 (`plugins.fp8_experts`) where the recipe rounds what they read to NVFP4.
    """
    if fp8_products:
        nodes = [_fp8_product(node) for node in nodes]
    nodes = _split_routers(network, _join_linears(network, list(nodes), load))
    if pack:
        if fp8_experts:
            nodes = [_fp8_experts(network, node) if node.op == "moe" else node for node in nodes]
        nodes = [_tile_weights(network, node) if node.op in ("linear", "moe") else node for node in nodes]
    for first, second, rule in _RULES:
        nodes = _fuse_pairs(network, nodes, first, second, rule)
    return _narrow_outputs(network, _pair_ropes(nodes))


def joined_parts(name: str, network: Network) -> list[str]:
    """Weights that a joined one consists of, in order; empty for a weight of the network itself."""
    return name.split(JOIN) if JOIN in name and name not in network.weights else []


def derived(name: str, load: Callable[[str], Tensor]) -> Tensor | None:
    """A weight that is made of others, which `load` gives by name; None for a weight of another kind."""
    if name.endswith(TILES):
        source = name.removesuffix(TILES)
        weight = load(source)
        format = {torch.uint8: "nvfp4", torch.float8_e4m3fn: "fp8"}.get(weight.dtype, "dense")
        return packed_weights.pack(format, weight, load(source + BLOCK_SCALE) if format == "nvfp4" else None)
    if name.endswith(FP8_TILES):
        source = name.removesuffix(FP8_TILES)
        return fp8.pack(load(source), load(source + BLOCK_SCALE))
    if name.endswith((FP8_UNIT, FP8_UNITS)):
        source, _, kind = name.rpartition("@")
        return fp8.units(load(source), "@" + kind == FP8_UNIT)
    if name.endswith(PARTS):
        weight = load(name.removesuffix(PARTS))
        high = weight.bfloat16()
        return torch.cat([high, (weight - high.to(weight.dtype)).bfloat16()])
    return None


NARROWING_OPERATORS = (
    "rms_norm",
    "add_rms_norm",
    "gated_rms_norm",
    "silu_multiply",
    "multiply_sigmoid",
    "squared_relu",
)
"""Operators that can give their last result in e4m3."""

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


def _fp8_experts(network: Network, node: Node) -> Node:
    """Experts whose projections all are NVFP4 with such inputs and shapes; others as they are."""
    first, projections = ops.WEIGHT_OPERATORS["moe"], node.attributes["projections"]
    recipe = {(projection["format"], projection["activations"]) for projection in projections}
    if network.spec(node.inputs[0]).dtype not in ("bfloat16", "float16") or recipe != {("nvfp4", "nvfp4")}:
        return node
    inputs, changed = list(node.inputs[:first]), []
    for at in range(first, len(node.inputs), 4):
        weight, block_scale, scale, input_scale = node.inputs[at : at + 4]
        features = _tiled_features(network, "moe", "nvfp4", [weight, block_scale], "")
        if features is None or not fp8.takes_weight(*features):
            return node
        is_last = at + 4 == len(node.inputs)
        inputs += [weight + FP8_TILES, scale, input_scale + (FP8_UNITS if is_last else FP8_UNIT)]
        changed.append({"format": fp8.FORMAT, "activations": "nvfp4", "tiles": features})
    return replace(node, inputs=tuple(inputs), attributes={**node.attributes, "projections": changed})


def _tile_weights(network: Network, node: Node) -> Node:
    dtype = network.spec(node.inputs[0]).dtype
    done = any("tiles" in projection for projection in node.attributes.get("projections", ()))
    if dtype not in ("bfloat16", "float16") or done:
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


def _join_linears(network: Network, nodes: list[Node], load: Callable[[str], Tensor] | None) -> list[Node]:
    groups: dict[tuple, list[Node]] = {}
    for node in nodes:
        if (kind := _joined_kind(network, node, load)) is not None:
            groups.setdefault((node.inputs[0], node.attributes["output_dtype"], *kind), []).append(node)
    replaced: dict[int, list[Node]] = {}
    for group in groups.values():
        if len(group) == 1:
            continue
        x, _, *scales = group[0].inputs
        weight = JOIN.join(node.inputs[1] for node in group)
        joined = "+".join(node.outputs[0] for node in group)
        sizes = [network.weights[node.inputs[1]].shape[0] for node in group]
        product = replace(group[0], inputs=(x, weight, *scales), outputs=(joined,))
        split = Node("split", (joined,), tuple(node.outputs[0] for node in group), {"sizes": sizes})
        # All parts read the same value, so the others may move up to where the first one stands.
        replaced |= {id(node): [] for node in group}
        replaced[id(group[0])] = [product, split]
    return [new for node in nodes for new in replaced.get(id(node), [node])]


def _joined_kind(network: Network, node: Node, load: Callable[[str], Tensor] | None) -> tuple | None:
    """What projections must have in common to be joined; None for what is none, or must stay alone."""
    dense = node.op == "linear" and len(node.inputs) == 2 and node.attributes["format"] == "dense"
    if not dense and (node.op != "fp8_linear" or load is None):
        return None
    weight = network.weights.get(node.inputs[1])
    if weight is None or weight.shape[0] % JOINED_COLUMNS:
        return None
    return (weight.dtype, *(float(load(name)) for name in node.inputs[2:]))


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


def _linear_norm(network: Network, linear: Node, norm: Node) -> Node | None:
    others = [name for name in norm.inputs[:2] if name != linear.outputs[0]]
    if linear.attributes["format"] != "dense" or len(linear.inputs) != 2 or len(others) != 1:
        return None
    attributes = {**norm.attributes, "output_dtype": linear.attributes["output_dtype"]}
    return Node("linear_add_rms_norm", (*linear.inputs, *others, norm.inputs[2]), norm.outputs, attributes)


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
    ("linear", "add_rms_norm", _linear_norm),
    ("silu", "multiply", _silu_multiply),
    ("sigmoid", "multiply", _multiply_sigmoid),
)


def _pair_ropes(nodes: list[Node]) -> list[Node]:
    """One node for the queries' and the keys' norm and rotation, in the place of the later one."""
    uses = Counter(name for node in nodes for name in node.inputs)
    made_by = {
        name: node for node in nodes if node.op == "norm_rope" for name in node.outputs if uses[name] == 1
    }  # one that others read too must stay where it is
    replaced: dict[int, list[Node]] = {}
    for node in nodes:
        if node.op != "attention_window" or not all(name in made_by for name in node.inputs[:2]):
            continue
        q, k = (made_by[name] for name in node.inputs[:2])
        if q is k or q.inputs[2] != k.inputs[2] or q.attributes != k.attributes:
            continue
        inputs = (q.inputs[0], k.inputs[0], q.inputs[1], k.inputs[1], q.inputs[2])
        first, last = sorted((q, k), key=nodes.index)
        replaced |= {id(first): [], id(last): [Node("norm_ropes", inputs, (*q.outputs, *k.outputs), q.attributes)]}
    return [new for node in nodes for new in replaced.get(id(node), [node])]


def _narrow_outputs(network: Network, nodes: list[Node]) -> list[Node]:
    """Operators whose result an FP8 product reads give it in e4m3: beside 16 bits, or alone if no one else reads it."""
    uses = Counter(name for node in nodes for name in node.inputs)
    uses.update(network.outputs.values())
    made_by = {node.outputs[-1]: index for index, node in enumerate(nodes) if node.op in NARROWING_OPERATORS}
    out = list(nodes)
    for index, node in enumerate(nodes):
        at = made_by.pop(node.inputs[0], None) if node.op == "fp8_linear" else None
        if at is None:
            continue
        x, weight, scale, input_scale = node.inputs
        attributes = {**nodes[at].attributes, "wide": uses[x] > 1}
        inputs, outputs = (*nodes[at].inputs, input_scale), (*nodes[at].outputs, x + NARROW)
        out[at] = replace(nodes[at], inputs=inputs, outputs=outputs, attributes=attributes)
        out[index] = replace(node, inputs=(x + NARROW, weight, scale, input_scale))
    return out


def _same_shape(network: Network, x: str, y: str) -> bool:
    return network.spec(x).shape == network.spec(y).shape
