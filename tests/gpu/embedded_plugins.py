"""The plugins' kernels as TensorRT launches them: what `aot_impl` returned, loaded as PTX by the driver.

`tensorrt.plugin` is a stand-in that hands the registered functions plain numbers for symbolic sizes; everything else
is the product's: the PTX, its entry, the grid, the block, the shared memory and the int32 arguments. The driver gets no
attribute that TensorRT would not set.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from replayssm.plugins import tensorrt_ops
from replayssm.plugins.tensorrt_ops import NAMESPACE, PluginSpec

sys.path.append(str(Path(__file__).parents[1] / "stand_in"))
from tensorrt_stand_in import make_module


class Plugin:
    """One plugin over the shapes of a call. kernel, ptx: entry and image; grid, block, shared_bytes, scalars: the
    launch."""

    def __init__(self, spec: PluginSpec, shapes: list[tuple[int, ...]]) -> None:
        self.spec, trtp = spec, make_module().plugin
        name = tensorrt_ops.register(trtp, spec)
        inputs = [trtp.TensorDesc(shape, dtype) for shape, dtype in zip(shapes, _types(spec), strict=True)]
        implement = trtp.implementations[f"{NAMESPACE}::{name}"]
        kernel, self.ptx, launch, self.scalars = implement(*inputs, spec.to_json(), (), 0)
        self.kernel = kernel
        self.grid = tuple(getattr(launch, f"grid_{axis}", 1) for axis in "xyz")
        self.block = tuple(getattr(launch, f"block_{axis}", 1) for axis in "xyz")
        self.shared_bytes = launch.shared_mem


def _types(spec: PluginSpec) -> list[str]:
    return list(tensorrt_ops.tensor_types(spec).values())


class EmbeddedPlugins:
    """The stateful operators, each call one plugin launch on the current stream, or with `prefill` two: window rows by
    the window plugin, prefill rows by the prefill plugin, as an engine with a prefill plan runs them. arch: compute
    capability."""

    def __init__(self, arch: int, prefill: bool = False) -> None:
        self.arch, self.prefill = arch, prefill

    def mamba2_window(self, *arguments):
        *own, state, seq_lens, starts, lengths, slots, layer = arguments
        if not self.prefill:
            return self._launch(state, own, (seq_lens, starts, lengths, slots), layer=layer)
        long = lengths > state.settings.max_window
        windows = (seq_lens, starts, lengths.masked_fill(long, 0), slots)
        prompts = (seq_lens, starts, lengths.masked_fill(~long, 0), slots)
        y = self._launch(state, own, windows, layer=layer)
        # Tokens that a launch does not own stay zero.
        return y + self._launch(state, own, prompts, layer=layer, prefill=True)

    gdn_window = mamba2_window

    def causal_conv1d_window(self, x, weight, bias, state, *rows):
        return self._launch(state, (x, weight, bias), rows)

    def attention_window(self, q, k, v, state, *rest):
        *rows, scale = rest
        return self._launch(state, (q, k, v), rows, query_heads=q.shape[1], scale=scale)

    def _launch(self, state, own, rows, **more):
        spec = PluginSpec(state.geometry, state.settings, state.slots, self.arch, **more)
        inputs = [*(tensor.contiguous() for tensor in own), *state.flat(), state.error_flag, *rows]
        return run_plugin(spec, inputs, unowned=0.0)[0]


def run_plugin(
    spec: PluginSpec, inputs: Sequence[torch.Tensor], unowned: float = torch.nan
) -> tuple[torch.Tensor, ...]:
    """A plugin's outputs, state in place. unowned: what the output of tokens that no row owns holds."""
    operator = spec.signature
    # A plan binds packed bytes as INT8.
    found = [str(tensor.dtype).removeprefix("torch.").replace("uint8", "int8") for tensor in inputs]
    assert found == _types(spec)
    inputs = [tensor.contiguous() for tensor in inputs]
    out = torch.full_like(inputs[operator.tensors.index(operator.like)], unowned)
    first = len(operator.inputs)
    in_place = inputs[first : first + len(operator.parts) + 1]
    plugin = _plugin(spec, tuple(tuple(tensor.shape) for tensor in inputs))
    launch_ptx(plugin, [*inputs, *plugin.scalars, out, *in_place])
    return (out, *in_place)


@cache
def _plugin(spec: PluginSpec, shapes: tuple[tuple[int, ...], ...]) -> Plugin:
    return Plugin(spec, list(shapes))


def launch_ptx(plugin: Plugin, arguments: list) -> None:
    """cuLaunchKernel with nothing but what a plan holds."""
    from cuda.bindings import driver

    torch.cuda.current_stream()  # makes the primary context current
    function = _load(plugin.kernel, plugin.ptx)
    numbers = [a & 0xFFFFFFFF if isinstance(a, int) else a.data_ptr() for a in arguments]
    values = (ctypes.c_uint64 * len(numbers))(*numbers)
    base = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * len(numbers))(*range(base, base + 8 * len(numbers), 8))
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    sizes = (*plugin.grid, *plugin.block, plugin.shared_bytes)
    _check(driver.cuLaunchKernel(function, *sizes, stream, ctypes.addressof(pointers), 0))


@cache
def _load(kernel: str, ptx: bytes):
    from cuda.bindings import driver

    module = _check(driver.cuModuleLoadData(ptx + b"\0"))
    return _check(driver.cuModuleGetFunction(module, kernel.encode()))


def _check(result: tuple):
    from cuda.bindings import driver

    code, *values = result
    assert code == driver.CUresult.CUDA_SUCCESS, driver.cuGetErrorString(code)[1].decode()
    return values[0] if values else None
