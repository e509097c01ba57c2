"""Layers of TensorRT and TensorRT-RTX behind one small class that hides what differs between them.

Both modules have the same classes and names. Their differences, and those between versions, live here and nowhere
else: strong typing (a flag before 11), which precisions and attributes exist, and how a failure is reported. Neither
package is imported before a build asks for it.

dtypes are torch's names, plus "fp4" (`tensorrt_ops.DATA_TYPES`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from replayssm.plugins.state import dtype_name
from replayssm.plugins.tensorrt_ops import DATA_TYPES, error_logger, load_module, version_of

__all__ = ["Layers", "Profile", "Tensor", "load_module"]

FP4_BLOCK = 16
NATIVE_MOE_ARCHITECTURES = (100, 103, 110)
"""Compute capabilities (major * 10 + minor) that TensorRT has its own mixture-of-experts layer for."""

Tensor = Any
"""A tensor of the network under construction (`ITensor`)."""


@dataclass(frozen=True)
class Profile:
    """Sizes that one optimization profile covers: (smallest, what to optimize for, largest) of each symbol."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]

    def shapes(self, shape: Sequence[int | str]) -> list[tuple[int, ...]]:
        """The three shapes of a tensor whose dimensions may be symbols."""
        return [tuple(self.sizes[d][i] if isinstance(d, str) else d for d in shape) for i in range(3)]


class Layers:
    """A TensorRT network under construction.

    Operands of one call must agree in dtype and rank: networks are strongly typed and nothing is converted silently.
    Constants point at the caller's memory, so the object keeps them until it is dropped, after `compile`.
    arch: compute capability (major * 10 + minor) that is built for, where that is one.
    Raises ValueError, with TensorRT's own messages, where a layer or the whole network is refused.
    """

    def __init__(self, module: ModuleType, name: str, arch: int = 0) -> None:
        self.module, self.name = module, name
        self._logger = error_logger(module)
        self._builder = module.Builder(self._logger)
        flags, creation = 0, module.NetworkDefinitionCreationFlag
        if "rtx" not in module.__name__ and version_of(module) < (11, 0):
            flags |= 1 << int(creation.STRONGLY_TYPED)
        self.network = self._builder.create_network(flags)
        self.aliases_inputs = False
        self.has_moe = arch in NATIVE_MOE_ARCHITECTURES and hasattr(self.network, "add_moe")  # from 10.16 on
        self._inputs: dict[str, tuple[int | str, ...]] = {}
        self._outputs: set[str] = set()
        self._kept: list[Any] = []

    # Inputs, outputs, constants

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> Tensor:
        """A network input; symbols in `shape` are dynamic dimensions."""
        dims = tuple(-1 if isinstance(d, str) else d for d in shape)
        tensor = self.network.add_input(name, self._dtype(dtype), dims)
        if tensor is None:
            raise self._refused(f"input {name}")
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                tensor.set_dimension_name(axis, size)
        self._inputs[name] = tuple(shape)
        return tensor

    def output(self, name: str, tensor: Tensor, dtype: str, shape: Sequence[int | str]) -> None:
        """Make `tensor` the network output `name`; ValueError where TensorRT inferred another dtype or shape."""
        expected = tuple(-1 if isinstance(d, str) else d for d in shape)
        if tensor.dtype != self._dtype(dtype) or tuple(tensor.shape) != expected:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{self.name}: output {name} is {found}, expected {dtype} {list(expected)}")
        if tensor.name in self._outputs or tensor.is_network_input:
            tensor = self._only(self.network.add_identity(tensor), "identity")
        tensor.name = name
        self._outputs.add(name)
        self.network.mark_output(tensor)

    def constant(self, value: torch.Tensor) -> Tensor:
        """A constant of value's dtype and shape."""
        value = value.contiguous()
        return self._constant(value, dtype_name(value.dtype), tuple(value.shape))

    def packed_constant(self, value: torch.Tensor) -> Tensor:
        """An fp4 constant [..., 2 n] of packed bytes uint8 [..., n]."""
        value = value.contiguous()
        return self._constant(value, "fp4", (*value.shape[:-1], 2 * value.shape[-1]))

    def _constant(self, value: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
        weights = self.module.Weights(self._dtype(dtype), value.data_ptr(), math.prod(shape))
        self._kept += [value, weights]
        return self._only(self.network.add_constant(shape, weights), "constant")

    # Arithmetic

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise(a, b, "SUM")

    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise(a, b, "SUB")

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise(a, b, "PROD")

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise(a, b, "DIV")

    def equal(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise(a, b, "EQUAL")

    def sqrt(self, a: Tensor) -> Tensor:
        return self._only(self.network.add_unary(a, self.module.UnaryOperation.SQRT), "sqrt")

    def sigmoid(self, a: Tensor) -> Tensor:
        return self._only(self.network.add_activation(a, self.module.ActivationType.SIGMOID), "sigmoid")

    def relu(self, a: Tensor) -> Tensor:
        return self._only(self.network.add_activation(a, self.module.ActivationType.RELU), "relu")

    def cast(self, a: Tensor, dtype: str) -> Tensor:
        """`a` itself where it has the dtype already."""
        if a.dtype == self._dtype(dtype):
            return a
        return self._only(self.network.add_cast(a, self._dtype(dtype)), "cast")

    def mean(self, a: Tensor) -> Tensor:
        """Over the last dimension, which stays with size 1."""
        return self._reduce(a, "AVG", len(a.shape) - 1, True)

    def sum(self, a: Tensor, axis: int, keep: bool = False) -> Tensor:
        return self._reduce(a, "SUM", axis, keep)

    def matmul_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        """a [.., n, in] times b [.., out, in] transposed; leading dimensions broadcast."""
        operation = self.module.MatrixOperation
        layer = self.network.add_matrix_multiply(a, operation.NONE, b, operation.TRANSPOSE)
        return self._only(layer, "matrix multiply")

    def softmax(self, a: Tensor) -> Tensor:
        """Over the last dimension."""
        layer = self.network.add_softmax(a)
        layer.axes = 1 << (len(a.shape) - 1)
        return self._only(layer, "softmax")

    def topk(self, a: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of the last dimension, and their indices (int32)."""
        layer = self.network.add_topk(a, self.module.TopKOperation.MAX, k, 1 << (len(a.shape) - 1))
        return self._only(layer, "top k"), layer.get_output(1)

    # Layout

    def gather_rows(self, a: Tensor, indices: Tensor) -> Tensor:
        """Rows a[indices]."""
        return self._only(self.network.add_gather(a, indices, 0), "gather")

    def gather_elements(self, a: Tensor, indices: Tensor) -> Tensor:
        """a[t, indices[t, k]] of matrices."""
        layer = self.network.add_gather_v2(a, indices, self.module.GatherMode.ELEMENT)
        if layer is not None:
            layer.axis = 1
        return self._only(layer, "gather elements")

    def reshape(self, a: Tensor, dims: Sequence[int]) -> Tensor:
        """0 keeps the dimension at that place; one entry may be -1."""
        layer = self.network.add_shuffle(a)
        layer.reshape_dims = tuple(dims)
        return self._only(layer, "reshape")

    def transpose(self, a: Tensor) -> Tensor:
        """Of a matrix."""
        layer = self.network.add_shuffle(a)
        layer.first_transpose = (1, 0)
        return self._only(layer, "transpose")

    def slice_last(self, a: Tensor, start: int, size: int) -> Tensor:
        layer = self.network.add_slice(a, (start,), (size,), (1,))
        if layer is not None:
            layer.axes = (len(a.shape) - 1,)
        return self._only(layer, "slice")

    def concat_last(self, values: Sequence[Tensor]) -> Tensor:
        layer = self.network.add_concatenation(list(values))
        if layer is not None:
            layer.axis = len(values[0].shape) - 1
        return self._only(layer, "concatenation")

    # Quantization

    def dequantize(self, a: Tensor, scale: Tensor, dtype: str, blocked: bool = False) -> Tensor:
        """a times scale: one for all of a, or `blocked`, one for each 16 elements of the last dimension."""
        layer = self.network.add_dequantize(a, scale, self._dtype(dtype))
        if layer is not None and blocked:
            layer.axis = len(a.shape) - 1
        return self._only(layer, "dequantize")

    def quantize_fp8(self, a: Tensor, scale: Tensor) -> Tensor:
        return self._only(self.network.add_quantize(a, scale, self._dtype("float8_e4m3fn")), "quantize")

    def dynamic_quantize_fp4(self, a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """fp4 elements and fp8 scales in units of `scale`, one for each 16 elements of the last dimension."""
        types = self._dtype("fp4"), self._dtype("float8_e4m3fn")
        layer = self.network.add_dynamic_quantize(a, len(a.shape) - 1, FP4_BLOCK, *types)
        if layer is not None:
            layer.set_input(1, scale)
        return self._only(layer, "dynamic quantize"), layer.get_output(1)

    # Mixture of experts, plugins and compilation

    def moe_swiglu(self, a: Tensor, ids: Tensor, scores: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """a [T, 1, H] through the experts ids [T, 1, k] with scores [T, 1, k]; gate and up [E, H, I], down [E, I, H].
        Only where `has_moe`."""
        layer = self.network.add_moe(a, ids, scores)
        if layer is not None:
            layer.set_gated_weights(gate, up, down, self.module.MoEActType.SILU)
        return self._only(layer, "mixture of experts")

    def plugin(self, call: Any, name: str, aliased: bool = True) -> list[Tensor]:
        """Outputs of a quickly deployable plugin with its ahead-of-time implementation; `call` is what
        `tensorrt.plugin.op.<namespace>.<name>(...)` returned. aliased: it declares that outputs share memory with
        inputs. Only TensorRT has plugins."""
        self.aliases_inputs |= aliased
        layer = self.network.add_plugin(call, aot=True)
        self._only(layer, name)
        layer.name = name
        return [layer.get_output(index) for index in range(layer.num_outputs)]

    def compile(self, profiles: Sequence[Profile]) -> memoryview:
        """The serialized plan. Every profile must give a size to every symbol of the inputs."""
        config = self._builder.create_builder_config()
        # fp32 means fp32: TF32 would round a router's inputs to 10 bits.
        config.clear_flag(self.module.BuilderFlag.TF32)
        # Auxiliary streams would let a plugin meet state that another stream still writes, and cost events in graphs.
        config.max_aux_streams = 0
        # Names of tensors in the plan: `replayssm check` looks there for copies of state.
        config.profiling_verbosity = self.module.ProfilingVerbosity.DETAILED
        if self.aliases_inputs:
            config.set_preview_feature(self.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        dynamic = {name: shape for name, shape in self._inputs.items() if any(isinstance(d, str) for d in shape)}
        for profile in profiles if dynamic else ():
            added = self._builder.create_optimization_profile()
            for name, shape in dynamic.items():
                added.set_shape(name, *profile.shapes(shape))
            config.add_optimization_profile(added)
        plan = self._builder.build_serialized_network(self.network, config)
        if plan is None:
            raise self._refused("the network")
        return memoryview(plan)

    def _elementwise(self, a: Tensor, b: Tensor, operation: str) -> Tensor:
        kind = getattr(self.module.ElementWiseOperation, operation)
        return self._only(self.network.add_elementwise(a, b, kind), operation)

    def _reduce(self, a: Tensor, operation: str, axis: int, keep: bool) -> Tensor:
        kind = getattr(self.module.ReduceOperation, operation)
        return self._only(self.network.add_reduce(a, kind, 1 << axis, keep), operation)

    def _dtype(self, name: str) -> Any:
        if name not in DATA_TYPES:
            raise ValueError(f"{self.name}: TensorRT has no type for {name}: build with --dtype bfloat16 or float16")
        return getattr(self.module.DataType, DATA_TYPES[name])

    def _only(self, layer: Any, what: str) -> Tensor:
        """The layer's first output. Shapes are inferred lazily, so reading them here is what makes an error surface."""
        if layer is None:
            raise self._refused(what)
        output = layer.get_output(0)
        try:
            len(output.shape)
        except (ValueError, RuntimeError):
            raise self._refused(what) from None
        return output

    def _refused(self, what: str) -> ValueError:
        # Without a GPU every message of RTX is followed by one about the missing device.
        messages = [text for text in self._logger.errors if "cudaError" not in text and "CUDA" not in text]
        reason = "; ".join(dict.fromkeys(messages[-3:])) or "no reason given"
        return ValueError(f"{self.module.__name__} {self.module.__version__} refused {self.name}, {what}: {reason}")
