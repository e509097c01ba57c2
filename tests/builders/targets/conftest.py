"""A twin of `Layers` that computes with PyTorch, so that lowerings are checked without TensorRT and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from replayssm.plugins import nvfp4
from replayssm.plugins.state import LayerState, torch_dtype
from replayssm.plugins.tensorrt_ops import ERROR_FLAG, ROWS, tensor_types
from replayssm.runtime.executor import STATEFUL_OPERATORS


@dataclass
class Fp4:
    """Decoded fp4 elements: only dequantizing gives them a meaning."""

    values: torch.Tensor
    dtype: str = "fp4"

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def _alike(a: torch.Tensor, b: torch.Tensor) -> None:
    """What a strongly typed network demands of two operands."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.dim() == b.dim(), (a.shape, b.shape)


class EagerLayers:
    """The methods of `Layers` over PyTorch tensors. inputs: value of each network input by name."""

    def __init__(self, inputs: dict[str, torch.Tensor], has_moe: bool = False) -> None:
        self.inputs, self.outputs, self.has_moe = inputs, {}, has_moe

    def input(self, name, dtype, shape):
        value = self.inputs[name]
        assert value.dtype == torch_dtype(dtype)
        assert value.dim() == len(shape)
        assert all(isinstance(size, str) or size == got for size, got in zip(shape, value.shape, strict=True))
        return value

    def output(self, name, tensor, dtype, shape):
        assert tensor.dtype == torch_dtype(dtype)
        assert tensor.dim() == len(shape)
        assert all(isinstance(size, str) or size == got for size, got in zip(shape, tensor.shape, strict=True))
        self.outputs[name] = tensor

    def constant(self, value):
        return value

    def packed_constant(self, value):
        return Fp4(nvfp4.decode_packed(value))

    def _binary(self, function, a, b):
        _alike(a, b)
        return function(a, b)

    def add(self, a, b):
        return self._binary(torch.add, a, b)

    def subtract(self, a, b):
        return self._binary(torch.sub, a, b)

    def multiply(self, a, b):
        return self._binary(torch.mul, a, b)

    def divide(self, a, b):
        return self._binary(torch.div, a, b)

    def equal(self, a, b):
        return self._binary(torch.eq, a, b)

    def sqrt(self, a):
        return a.sqrt()

    def sigmoid(self, a):
        return a.sigmoid()

    def relu(self, a):
        return a.relu()

    def cast(self, a, dtype):
        return a.to(torch_dtype(dtype))

    def mean(self, a):
        return a.mean(-1, keepdim=True)

    def sum(self, a, axis, keep=False):
        return a.sum(axis, keepdim=keep)

    def matmul_transposed(self, a, b):
        return self._binary(torch.matmul, a, b.transpose(-1, -2))

    def softmax(self, a):
        return a.softmax(-1)

    def topk(self, a, k):
        values, ids = a.topk(k, dim=-1)
        return values, ids.int()

    def gather_rows(self, a, indices):
        return a.index_select(0, indices)

    def gather_elements(self, a, indices):
        return a.gather(1, indices.long())

    def reshape(self, a, dims):
        return a.reshape([a.shape[axis] if size == 0 else size for axis, size in enumerate(dims)])

    def transpose(self, a):
        assert a.dim() == 2
        return a.T

    def slice_last(self, a, start, size):
        assert 0 <= start <= start + size <= a.shape[-1]
        return a.narrow(-1, start, size)

    def concat_last(self, values):
        return torch.cat(values, dim=-1)

    def dequantize(self, a, scale, dtype, blocked=False):
        assert isinstance(a, Fp4) == blocked or a.dtype == torch.float8_e4m3fn
        values = a.values if isinstance(a, Fp4) else a.float()
        if not blocked:
            assert scale.dim() == 0
            return (values * scale).to(torch_dtype(dtype))
        assert scale.dtype == torch_dtype(dtype), "RTX 1.7 demands it"
        return (values * scale.float().repeat_interleave(16, dim=-1)).to(torch_dtype(dtype))

    def quantize_fp8(self, a, scale):
        return (a.float() / scale).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)

    def dynamic_quantize_fp4(self, a, scale):
        assert 2 <= a.dim() <= 3
        blocks = a.float().unflatten(-1, (-1, 16))
        block_scale = nvfp4.block_scales(blocks, scale)
        codes = nvfp4.encode(blocks / (block_scale.float() * scale).unsqueeze(-1))
        return Fp4(nvfp4.decode(codes).flatten(-2)), block_scale

    def moe_swiglu(self, a, ids, scores, gate, up, down):
        assert self.has_moe
        assert (a.shape[1], ids.dtype, scores.dtype) == (1, torch.int32, a.dtype)
        out = torch.zeros(a.shape[0], 1, down.shape[2], dtype=a.dtype)
        for token, (experts, weights) in enumerate(zip(ids[:, 0].tolist(), scores[:, 0], strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                x = a[token]
                out[token] += weight * ((torch.nn.functional.silu(x @ gate[expert]) * (x @ up[expert])) @ down[expert])
        return out

    def plugin(self, call, name, aliased=True):
        """call: (PluginSpec, tensors in its operator's order). State is updated in place, as by aliased outputs."""
        spec, tensors = call
        operator = spec.signature
        types = tensor_types(spec)
        assert [str(tensor.dtype).removeprefix("torch.") for tensor in tensors] == list(types.values())
        named = dict(zip(operator.tensors, tensors, strict=True))
        parts = {part: named[part] for part in operator.parts}
        state = LayerState(spec.geometry, spec.settings, parts, named[ERROR_FLAG])
        own, rows = [named[part] for part in operator.inputs], [named[row] for row in ROWS]
        function = STATEFUL_OPERATORS[spec.operator]
        y = function(state, spec.layer, {"scale": spec.scale}, *own, *rows)
        return [y, *parts.values(), named[ERROR_FLAG]]


@pytest.fixture(scope="session")
def eager_layers() -> type[EagerLayers]:
    return EagerLayers
