"""Functional operators of a network as TensorRT layers.

Every function lowers one operator and rounds where `runtime.functional_ops` rounds: norms, routers, silu and the sum
over experts in fp32, everything else in the activation dtype. What may differ is the order of sums inside a product,
and what is listed here:

- Activations of NVFP4 and FP8 checkpoints are quantized, as their recipe says; the torch target keeps them. Their
  NVFP4 block scales pass through the activation dtype, the form in which NVIDIA's own builders write this product.
- Stacked experts: one second-level scale serves all of them, the largest, and what an expert's own differs by is
  multiplied to its fp32 result; likewise one input scale. Block scales hide the difference.
- An NVFP4 embedding table is unpacked when the plan is built, because fp4 constants cannot feed a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from replayssm.builders.targets.tensorrt_layers import Layers, Tensor
from replayssm.plugins import nvfp4
from replayssm.plugins.network import Network, Node
from replayssm.plugins.state import torch_dtype


class Lowering:
    """Emits nodes of `network` into `layers`.

    read: engine weight name -> tensor, called when a weight is first needed. positions: bound of the rope tables.
    unpacked: weight formats that the GPU has no products for: those weights become constants in the activation dtype.
    values: tensors by value name; the caller puts the inputs of the nodes there and takes the outputs from there.
    """

    def __init__(
        self,
        network: Network,
        layers: Layers,
        read: Callable[[str], torch.Tensor],
        positions: int,
        unpacked: Sequence[str] = (),
    ) -> None:
        self.network, self.layers, self.read, self.positions = network, layers, read, positions
        self.unpacked = tuple(unpacked)
        self.values: dict[str, Tensor] = {}
        self._constants: dict[object, Tensor] = {}

    def emit(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op not in OPERATORS:
                raise ValueError(f"the TensorRT targets have no layers for operator {node.op!r}")
            outputs = OPERATORS[node.op](self, node)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            self.values.update(zip(node.outputs, outputs, strict=True))

    def __getitem__(self, name: str) -> Tensor:
        """A value, or a weight as a constant."""
        return self.weight(name) if name in self.network.weights else self.values[name]

    def result(self, name: str) -> Tensor:
        """A value as the network declares it: expert numbers, int32 within a plan, as int64."""
        dtype = self.dtype(name)
        return self.layers.cast(self.values[name], dtype) if dtype == "int64" else self.values[name]

    def weight(self, name: str, key: str = "", change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Tensor:
        """A weight as a constant, once per plan. change, keyed by `key`: applied when the weight is read."""
        return self.once((name, key), lambda: change(self.read(name)) if change else self.read(name))

    def packed_weight(self, name: str) -> Tensor:
        """Packed bytes as an fp4 constant, once per plan."""
        key = (name, "packed")
        if key not in self._constants:
            self._constants[key] = self.layers.packed_constant(self.read(name))
        return self._constants[key]

    def once(self, key: object, make: Callable[[], torch.Tensor]) -> Tensor:
        if key not in self._constants:
            self._constants[key] = self.layers.constant(make())
        return self._constants[key]

    def scalar(self, value: float, rank: int, dtype: str = "float32") -> Tensor:
        """A constant of size 1 in each of `rank` dimensions."""
        return self.once((value, rank, dtype), lambda: torch.full((1,) * rank, value, dtype=torch_dtype(dtype)))

    def dtype(self, name: str) -> str:
        return self.network.spec(name).dtype

    def wide(self, name: str) -> Tensor:
        """The value in fp32."""
        return self.layers.cast(self[name], "float32")

    def normalized(self, wide: Tensor, eps: float, rank: int) -> Tensor:
        """wide / rms(wide) over the last dimension, in fp32."""
        layers = self.layers
        square = layers.add(layers.mean(layers.multiply(wide, wide)), self.scalar(eps, rank))
        return layers.multiply(wide, layers.divide(self.scalar(1.0, rank), layers.sqrt(square)))

    def silu(self, wide: Tensor) -> Tensor:
        return self.layers.multiply(wide, self.layers.sigmoid(wide))


def embedding(low: Lowering, node: Node) -> Tensor:
    ids, table, *scales = node.inputs
    if node.attributes["format"] == "dense":
        return low.layers.gather_rows(low.weight(table), low[ids])
    dtype = torch_dtype(low.dtype(node.outputs[0]))
    unpacked = low.weight(table, "unpacked", lambda packed: nvfp4.dequantize(packed, *map(low.read, scales[:2]), dtype))
    return low.layers.gather_rows(unpacked, low[ids])


def linear(low: Lowering, node: Node) -> Tensor:
    x, *tensors = node.inputs
    value, dtype = low[x], low.dtype(x)
    if node.attributes["format"] == "dense":
        dtype = low.dtype(tensors[0])
    projection = _Projection(low, tensors, node.attributes, dtype)
    y = projection(low.layers.cast(value, dtype))
    return low.layers.cast(y, node.attributes["output_dtype"])


class _Projection:
    """A weight in its format, dequantized by layers, and how its input is quantized.

    tensors: names of the weight, its scales and the input scale. dtype: of the product.
    """

    def __init__(self, low: Lowering, tensors: Sequence[str], attributes: dict, dtype: str) -> None:
        self.low, self.dtype = low, dtype
        self.format, self.activations = attributes["format"], attributes["activations"]
        self.tensors = tensors
        self.unpacked = self.format in low.unpacked
        self.stacked = len(low.network.spec(tensors[0]).shape) == 3

    @staticmethod
    def tensor_count(attributes: dict) -> int:
        return {"dense": 1, "nvfp4": 3, "fp8": 2}[attributes["format"]] + (attributes["activations"] is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [.., in] times the weight transposed, in `dtype`."""
        layers = self.low.layers
        y = layers.matmul_transposed(self._quantized(x), self._weight())
        ratio = self._ratio()
        if ratio is None:
            return y
        scaled = layers.multiply(layers.cast(y, "float32"), self.low.once((self.tensors[0], "ratio"), lambda: ratio))
        return layers.cast(scaled, self.dtype)

    def _weight(self) -> Tensor:
        low, layers, weight = self.low, self.low.layers, self.tensors[0]
        if self.format == "dense":
            return low.weight(weight)
        if self.unpacked:
            scales = self.tensors[1:3] if self.format == "nvfp4" else self.tensors[1:2]
            decode = nvfp4.dequantize if self.format == "nvfp4" else nvfp4.dequantize_fp8
            dtype = torch_dtype(self.dtype)
            return low.weight(weight, "unpacked", lambda stored: decode(stored, *map(low.read, scales), dtype))
        if self.format == "fp8":
            wide = layers.dequantize(low.weight(weight), self._shared_scale(self.tensors[1]), "float32")
            return layers.cast(wide, self.dtype)
        scale = layers.dequantize(low.weight(self.tensors[1]), self._shared_scale(self.tensors[2]), "float32")
        return layers.cast(layers.dequantize(low.packed_weight(weight), scale, "float32", blocked=True), self.dtype)

    def _quantized(self, x: Tensor) -> Tensor:
        if self.activations is None or self.unpacked:
            return x
        layers, scale = self.low.layers, self._shared_scale(self.tensors[-1])
        if self.activations == "fp8":
            return layers.cast(layers.dequantize(layers.quantize_fp8(x, scale), scale, "float32"), self.dtype)
        data, block_scale = layers.dynamic_quantize_fp4(x, scale)
        block_scale = layers.dequantize(block_scale, scale, self.dtype)
        return layers.dequantize(data, block_scale, self.dtype, blocked=True)

    def _shared_scale(self, name: str) -> Tensor:
        """The largest of the experts' scales, or the scale itself, as a constant of rank 0."""
        return self.low.weight(name, "largest", lambda scale: scale.float().max())

    def _ratio(self) -> torch.Tensor | None:
        """Each expert's second-level scale over the largest, [E, 1, 1]; None where they are all the same."""
        if not self.stacked or self.format == "dense" or self.unpacked:
            return None
        scale = self.low.read(self.tensors[2 if self.format == "nvfp4" else 1]).float()
        return None if (scale == scale[0]).all() else (scale / scale.max()).view(-1, 1, 1)


def rms_norm(low: Lowering, node: Node) -> Tensor:
    x, weight = node.inputs
    rank, eps = len(low.network.spec(x).shape), node.attributes["eps"]
    zero_centered = node.attributes["zero_centered"]
    shape = (1,) * (rank - 1) + (-1,)
    scale = low.weight(weight, f"norm{rank}", lambda w: (1 + w if zero_centered else w).view(shape))
    y = low.layers.multiply(low.normalized(low.wide(x), eps, rank), scale)
    return low.layers.cast(y, low.dtype(x))


def gated_rms_norm(low: Lowering, node: Node) -> Tensor:
    x, z, weight = node.inputs
    width, group = low.network.spec(x).shape[-1], node.attributes["group_size"]
    layers, gate_first = low.layers, node.attributes["gate_first"]
    gate, wide = low.silu(low.wide(z)), low.wide(x)
    if gate_first:
        wide = layers.multiply(wide, gate)
    groups = low.normalized(layers.reshape(wide, (0, width // group, group)), node.attributes["eps"], 3)
    scale = low.weight(weight, "groups", lambda w: w.view(1, -1, group))
    wide = layers.reshape(layers.multiply(groups, scale), (0, width))
    if not gate_first:
        wide = layers.multiply(wide, gate)
    return layers.cast(wide, low.dtype(x))


def silu(low: Lowering, node: Node) -> Tensor:
    return low.layers.cast(low.silu(low.wide(node.inputs[0])), low.dtype(node.inputs[0]))


def squared_relu(low: Lowering, node: Node) -> Tensor:
    positive = low.layers.relu(low[node.inputs[0]])
    return low.layers.multiply(positive, positive)


def sigmoid(low: Lowering, node: Node) -> Tensor:
    return low.layers.sigmoid(low[node.inputs[0]])


def add(low: Lowering, node: Node) -> Tensor:
    return low.layers.add(low[node.inputs[0]], low[node.inputs[1]])


def multiply(low: Lowering, node: Node) -> Tensor:
    return low.layers.multiply(low[node.inputs[0]], low[node.inputs[1]])


def split(low: Lowering, node: Node) -> tuple[Tensor, ...]:
    sizes = node.attributes["sizes"]
    return tuple(
        low.layers.slice_last(low[node.inputs[0]], sum(sizes[:index]), size) for index, size in enumerate(sizes)
    )


def concat(low: Lowering, node: Node) -> Tensor:
    return low.layers.concat_last([low[name] for name in node.inputs])


def reshape(low: Lowering, node: Node) -> Tensor:
    return low.layers.reshape(low[node.inputs[0]], (0, *node.attributes["shape"][1:]))


def rope(low: Lowering, node: Node) -> Tensor:
    """Tables of the torch target's own cosines and sines: a GPU's fast ones lose the low bits of large angles."""
    x, positions = node.inputs
    layers, theta, dim = low.layers, node.attributes["theta"], node.attributes["dim"]
    half, width = dim // 2, low.network.spec(x).shape[-1]

    def table(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return function(torch.arange(low.positions, dtype=torch.float32)[:, None] * frequency)

    def rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Tensor:
        constant = low.once(("rope", function.__name__, theta, dim), lambda: table(function))
        return layers.reshape(layers.gather_rows(constant, low[positions]), (0, 1, half))

    cos, sin = rows(torch.cos), rows(torch.sin)
    first, second = (layers.cast(layers.slice_last(low[x], start, half), "float32") for start in (0, half))
    rotated = layers.concat_last(
        [
            layers.subtract(layers.multiply(first, cos), layers.multiply(second, sin)),
            layers.add(layers.multiply(second, cos), layers.multiply(first, sin)),
        ]
    )
    rotated = layers.cast(rotated, low.dtype(x))
    return rotated if dim == width else layers.concat_last([rotated, layers.slice_last(low[x], dim, width - dim)])


def gather(low: Lowering, node: Node) -> Tensor:
    return low.layers.gather_rows(low[node.inputs[0]], low[node.inputs[1]])


def route_sigmoid(low: Lowering, node: Node) -> tuple[Tensor, Tensor]:
    """ids are int32 inside a plan."""
    logits, bias = node.inputs
    layers, a = low.layers, node.attributes
    scores = layers.sigmoid(low.wide(logits))
    corrected = layers.add(scores, low.weight(bias, "row", lambda b: b.view(1, -1)))
    _, ids = layers.topk(corrected, a["top_k"])
    weights = layers.gather_elements(scores, ids)
    if a["normalize"]:
        weights = layers.divide(weights, layers.add(layers.sum(weights, 1, keep=True), low.scalar(1e-20, 2)))
    return ids, layers.multiply(weights, low.scalar(a["scaling"], 2))


def route_softmax(low: Lowering, node: Node) -> tuple[Tensor, Tensor]:
    """ids are int32 inside a plan."""
    layers = low.layers
    weights, ids = layers.topk(layers.softmax(low.wide(node.inputs[0])), node.attributes["top_k"])
    return ids, layers.divide(weights, layers.sum(weights, 1, keep=True))


def moe(low: Lowering, node: Node) -> Tensor:
    """NVIDIA's layer for dense gated experts where the GPU has it, or else every expert over every token, the unchosen
    ones with weight 0.

    The latter reads all experts and computes experts / top_k times more than needed: fp4 weights cannot be gathered.
    """
    x, ids, weights, *tensors = node.inputs
    layers, dtype = low.layers, low.dtype(x)
    dense = all(attributes["format"] == "dense" for attributes in node.attributes["projections"])
    if layers.has_moe and dense and node.attributes["activation"] == "swiglu":
        return _native_moe(low, x, ids, weights, tensors)
    projections = []
    for attributes in node.attributes["projections"]:
        count = _Projection.tensor_count(attributes)
        projections.append(_Projection(low, tensors[:count], attributes, dtype))
        tensors = tensors[count:]
    *inner, down = projections
    width = low.network.spec(x).shape[-1]
    tokens = layers.reshape(low[x], (1, -1, width))
    hidden = [projection(tokens) for projection in inner]
    if node.attributes["activation"] == "squared_relu":
        positive = layers.relu(hidden[0])
        value = layers.multiply(positive, positive)
    else:
        gate = layers.cast(low.silu(layers.cast(hidden[0], "float32")), dtype)
        value = layers.multiply(gate, hidden[1])
    y = layers.cast(down(value), "float32")
    return layers.cast(layers.sum(layers.multiply(y, _scores(low, ids, weights, down)), 0), dtype)


def _native_moe(low: Lowering, x: str, ids: str, weights: str, tensors: Sequence[str]) -> Tensor:
    """The experts' weights [E, in, out] are ours transposed, and scores are rounded to the activation dtype."""
    layers, (width, k) = low.layers, (low.network.spec(name).shape[-1] for name in (x, ids))
    gate, up, down = (low.weight(name, "transposed", lambda w: w.transpose(1, 2)) for name in tensors)
    scores = layers.cast(low[weights], low.dtype(x))
    rows = [layers.reshape(value, (0, 1, size)) for value, size in ((low[x], width), (low[ids], k), (scores, k))]
    return layers.reshape(layers.moe_swiglu(*rows, gate, up, down), (0, low.network.spec(tensors[-1]).shape[1]))


def _scores(low: Lowering, ids: str, weights: str, down: _Projection) -> Tensor:
    """[E, T, 1] fp32 of the chosen experts' ids and weights [T, k]."""
    layers, k = low.layers, low.network.spec(ids).shape[-1]
    experts = low.network.spec(down.tensors[0]).shape[0]
    numbers = low.once(("experts", experts), lambda: torch.arange(experts, dtype=torch.int32).view(1, 1, -1))
    chosen = layers.cast(layers.equal(layers.reshape(low[ids], (0, k, 1)), numbers), "float32")
    scores = layers.sum(layers.multiply(chosen, layers.reshape(low[weights], (0, k, 1))), 1)
    return layers.reshape(layers.transpose(scores), (0, 0, 1))


OPERATORS: dict[str, Callable[[Lowering, Node], Tensor | tuple[Tensor, ...]]] = {
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "silu": silu,
    "squared_relu": squared_relu,
    "sigmoid": sigmoid,
    "add": add,
    "multiply": multiply,
    "split": split,
    "concat": concat,
    "reshape": reshape,
    "rope": rope,
    "gather": gather,
    "route_sigmoid": route_sigmoid,
    "route_softmax": route_softmax,
    "moe": moe,
}
"""Stateless operators by name; stateful ones cut the network, or become plugin layers."""
