"""A stand-in for the module `tensorrt` (or `tensorrt_rtx`) that builds and runs networks with PyTorch on the CPU.

It has what `builders.targets` and `runtime.plans` call, under NVIDIA's names and rules: layers whose shapes are
inferred lazily, plans as bytes, I/O tensors bound by address, optimization profiles, contexts that are refused what a
profile does not cover. State is in place only if both of its names are bound to one address, and tokens that no row
owns are NaN behind a plugin, as uninitialised memory may be. `faults` makes plans misbehave, for tests of
`replayssm check`.

It says nothing about NVIDIA's compiler: kernels, fusion, copies and numbers of a real plan need a GPU.
"""

from __future__ import annotations

import ctypes
import enum
import json
import types
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from math import prod

import torch

from replayssm.plugins import nvfp4, tensorrt_ops
from replayssm.plugins.contract import state_parts
from replayssm.plugins.state import LayerState, torch_dtype
from replayssm.plugins.tensorrt_ops import ROWS, PluginSpec
from replayssm.runtime.executor import STATEFUL_OPERATORS

FAULTS = ("copy", "detach", "drift", "scribble", "rows", "leak")
"""copy: the inspector shows copies of state. detach: state is updated in a buffer of the engine's own. drift: every
rewrite of a checkpoint loses a thousandth. scribble: every call writes where nothing reads. rows: the last row of a
call sees the first one's window. leak: every call takes memory."""

SENTINELS = {"T": 97, "R": 89, "B": 83}
"""Sizes that stand for dynamic dimensions while shapes are inferred, by running the network on zeros. Meta tensors
would need no arithmetic, but importing what serves them takes seconds."""

DataType = enum.Enum("DataType", ["FLOAT", "HALF", "BF16", "FP8", "FP4", "INT8", "INT32", "INT64", "BOOL", "UINT8"])
TORCH_TYPES = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.FP8: torch.float8_e4m3fn,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.BOOL: torch.bool,
}
OF_TORCH = {value: key for key, value in TORCH_TYPES.items()}
TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])


@dataclass
class Fp4:
    """Decoded fp4 elements: only dequantizing gives them a meaning."""

    values: torch.Tensor

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return "fp4"


class Tensor:
    """ITensor: an output of a layer, or an input of the network where `layer` is None."""

    def __init__(self, layer, index, name, sample=None):
        self.layer, self.index, self.name, self._sample = layer, index, name, sample
        self.is_network_input = layer is None

    @property
    def sample(self):
        """A value of its dtype and shape."""
        if self._sample is None:
            self._sample = self.layer.samples()[self.index]
        return self._sample

    @property
    def dtype(self):
        return DataType.FP4 if isinstance(self.sample, Fp4) else OF_TORCH[self.sample.dtype]

    @property
    def shape(self):
        return tuple(-1 if size in SENTINELS.values() else size for size in self.sample.shape)

    def set_dimension_name(self, axis, name):
        shape = list(self._sample.shape)
        shape[axis] = SENTINELS[name]
        self._sample = torch.zeros(shape, dtype=self._sample.dtype)


class Layer:
    """ILayer: `function(layer, *values)` computes its outputs. inferring: only their dtypes and shapes are wanted."""

    def __init__(self, kind, inputs, function, num_outputs=1, name=""):
        self.kind, self.inputs, self.function, self.num_outputs = kind, list(inputs), function, num_outputs
        self.name, self.inferring = name, False
        self._outputs = {}

    def set_input(self, index, tensor):
        self.inputs[index:] = [tensor]

    def get_output(self, index):
        if index not in self._outputs:
            self._outputs[index] = Tensor(self, index, f"{self.name}_{index}")
        return self._outputs[index]

    def samples(self):
        self.inferring = True
        try:
            return self.run([tensor.sample for tensor in self.inputs])
        finally:
            self.inferring = False

    def run(self, values):
        result = self.function(self, *values)
        return result if isinstance(result, tuple) else (result,)


class Weights:
    def __init__(self, dtype, pointer, count):
        self.dtype, self.count = dtype, count
        nbytes = count // 2 if dtype is DataType.FP4 else count * TORCH_TYPES[dtype].itemsize
        self.bytes = _at(pointer, nbytes).clone()


def _at(pointer, nbytes, device="cpu"):
    """Memory at an address of the host, or of a GPU, as uint8 [nbytes]."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device != "cpu":
        described = {"data": (pointer, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        return torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=described), device=device)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)


def _alike(a, b):
    """What a strongly typed network demands of two operands."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.dim() == b.dim(), (a.shape, b.shape)


class Network:
    """INetworkDefinition: the layers that `builders.targets.tensorrt_layers.Layers` adds."""

    def __init__(self, module):
        self.module, self.layers, self.inputs, self.outputs = module, [], {}, []

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_input(self, index):
        return list(self.inputs.values())[index]

    def get_output(self, index):
        return self.outputs[index]

    def _add(self, kind, inputs, function, num_outputs=1):
        layer = Layer(kind, inputs, function, num_outputs, f"{kind}_{len(self.layers)}")
        self.layers.append(layer)
        return layer

    def add_input(self, name, dtype, shape):
        assert not set(shape) & set(SENTINELS.values())
        sample = torch.zeros([max(size, 0) for size in shape], dtype=TORCH_TYPES[dtype])
        tensor = self.inputs[name] = Tensor(None, 0, name, sample)
        return tensor

    def mark_output(self, tensor):
        self.outputs.append(tensor)

    def add_constant(self, shape, weights):
        if weights.dtype is DataType.FP4:
            value = Fp4(nvfp4.decode_packed(weights.bytes.view(*shape[:-1], shape[-1] // 2)))
        else:
            value = weights.bytes.view(TORCH_TYPES[weights.dtype]).view(shape)
        return self._add("Constant", [], lambda layer: value)

    def add_identity(self, a):
        return self._add("Identity", [a], lambda layer, x: x)

    def add_elementwise(self, a, b, operation):
        def run(layer, x, y):
            _alike(x, y)
            return operation(x, y)

        return self._add("ElementWise", [a, b], run)

    def add_unary(self, a, operation):
        return self._add("Unary", [a], lambda layer, x: operation(x))

    def add_activation(self, a, operation):
        return self._add("Activation", [a], lambda layer, x: operation(x))

    def add_cast(self, a, dtype):
        return self._add("Cast", [a], lambda layer, x: x.to(TORCH_TYPES[dtype]))

    def add_reduce(self, a, operation, axes, keep):
        axis = axes.bit_length() - 1
        return self._add("Reduce", [a], lambda layer, x: operation(x, axis, keepdim=keep))

    def add_matrix_multiply(self, a, op_a, b, op_b):
        def run(layer, x, y):
            _alike(x, y)
            return torch.matmul(op_a(x), op_b(y))

        return self._add("MatrixMultiply", [a, b], run)

    def add_softmax(self, a):
        return self._add("SoftMax", [a], lambda layer, x: x.softmax(layer.axes.bit_length() - 1))

    def add_topk(self, a, operation, k, axes):
        def run(layer, x):
            values, indices = x.topk(k, dim=axes.bit_length() - 1)
            return values, indices.int()

        return self._add("TopK", [a], run, 2)

    def add_gather(self, a, indices, axis):
        def run(layer, x, i):
            assert i.is_cuda or not i.numel() or 0 <= int(i.min()) <= int(i.max()) < x.shape[axis]
            return x.index_select(axis, i)

        return self._add("Gather", [a, indices], run)

    def add_gather_v2(self, a, indices, mode):
        return self._add("Gather", [a, indices], lambda layer, x, i: x.gather(layer.axis, i.long()))

    def add_shuffle(self, a):
        def run(layer, x):
            x = x.permute(getattr(layer, "first_transpose", None) or tuple(range(x.dim())))
            dims = getattr(layer, "reshape_dims", None)
            return x if dims is None else x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(dims)])

        return self._add("Shuffle", [a], run)

    def add_slice(self, a, start, size, stride):
        def run(layer, x):
            for axis, begin, count in zip(layer.axes, start, size, strict=True):
                assert 0 <= begin <= begin + count <= x.shape[axis]
                x = x.narrow(axis, begin, count)
            return x

        return self._add("Slice", [a], run)

    def add_concatenation(self, tensors):
        return self._add("Concatenation", tensors, lambda layer, *values: torch.cat(values, dim=layer.axis))

    def add_quantize(self, a, scale, dtype):
        def run(layer, x, s):
            return (x.float() / s).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(TORCH_TYPES[dtype])

        return self._add("Quantize", [a, scale], run)

    def add_dequantize(self, a, scale, dtype):
        def run(layer, x, s):
            values = x.values if isinstance(x, Fp4) else x.float()
            if not isinstance(x, Fp4):
                assert s.dim() == 0
                return (values * s).to(TORCH_TYPES[dtype])
            assert layer.axis == values.dim() - 1
            assert s.dtype == TORCH_TYPES[dtype], "RTX 1.7 demands it"
            return (values * s.float().repeat_interleave(16, dim=-1)).to(TORCH_TYPES[dtype])

        return self._add("Dequantize", [a, scale], run)

    def add_dynamic_quantize(self, a, axis, block, dtype, scale_dtype):
        def run(layer, x, scale):
            blocks = x.float().unflatten(-1, (-1, block))
            block_scale = nvfp4.block_scales(blocks, scale)
            codes = nvfp4.encode(blocks / (block_scale.float() * scale).unsqueeze(-1))
            return Fp4(nvfp4.decode(codes).flatten(-2)), block_scale

        layer = self._add("DynamicQuantize", [a], run, 2)
        layer.set_input = lambda index, tensor: layer.inputs.append(tensor)
        return layer

    def add_moe(self, a, ids, scores):
        def run(layer, x, experts, weights, gate, up, down):
            assert x.shape[1] == experts.shape[1] == 1
            assert (experts.dtype, weights.dtype) == (torch.int32, x.dtype)
            out = torch.zeros(*x.shape[:2], down.shape[2], dtype=x.dtype)
            for token in range(0 if layer.inferring else len(x)):
                for expert, weight in zip(experts[token, 0].tolist(), weights[token, 0], strict=True):
                    hidden = torch.nn.functional.silu(x[token] @ gate[expert]) * (x[token] @ up[expert])
                    out[token] += weight * (hidden @ down[expert])
            return out

        layer = self._add("MoE", [a, ids, scores], run)
        layer.set_gated_weights = lambda gate, up, down, kind: layer.inputs.extend((gate, up, down))
        return layer

    def add_plugin(self, call, aot):
        assert aot, "an engine must not need Python"
        if "rtx" in self.module.__name__:
            raise AttributeError("TensorRT-RTX has no plugin layers")
        _, tensors, attributes, aliases = call
        spec = PluginSpec.from_json(attributes["spec"])
        layer = self._add("PluginV3", tensors, _run_plugin, len(aliases))
        layer.aliases, layer.spec, layer.launch = aliases, spec, self.module.launch_plugin
        return layer


def _run_plugin(layer, *values):
    """The operator's output and the state that it leaves, in tensors of their own."""
    spec = layer.spec
    operator = spec.signature
    named = dict(zip(operator.tensors, values, strict=True))
    if layer.inferring:
        return (named[operator.like], *(named[name] for name in (*operator.parts, tensorrt_ops.ERROR_FLAG)))
    if layer.launch is not None:
        return layer.launch(spec, values)
    types = [str(value.dtype).removeprefix("torch.") for value in values]
    assert types == list(tensorrt_ops.tensor_types(spec).values())
    dtypes = {part.name: torch_dtype(part.dtype) for part in state_parts(spec.geometry, spec.settings)}
    parts = {name: named[name].clone().view(dtypes[name]) for name in operator.parts}
    flag = named[tensorrt_ops.ERROR_FLAG].clone()
    state = LayerState(spec.geometry, spec.settings, parts, flag)
    rows = [named[name] for name in ROWS]
    own = [named[name] for name in operator.inputs]
    if spec.prefill:
        # The prefill kernels leave windows, and rows that are no prefill, as they are.
        idle = rows[2] <= spec.settings.max_window
        rows[2] = rows[2].masked_fill(idle, 0)
    y = STATEFUL_OPERATORS[spec.operator](state, spec.layer, {"scale": spec.scale}, *own, *rows)
    owned = torch.zeros(y.shape[0], dtype=torch.bool)
    for start, length in zip(rows[1].tolist(), rows[2].tolist(), strict=True):
        owned[start : start + length] = True
    y[~owned] = torch.nan
    return (y, *(part.view(named[name].dtype) for name, part in parts.items()), flag)


def evaluate(network, values):
    """Outputs by name, from the values of inputs, and of constants that are not the layers' own."""
    values = dict(values)
    for name, tensor in network.inputs.items():
        value, shape = values[tensor], tensor.shape
        assert OF_TORCH[value.dtype] is tensor.dtype, name
        assert all(size in (-1, found) for size, found in zip(shape, value.shape, strict=True)), name
    for layer in network.layers:
        if layer.get_output(0) in values:
            continue
        results = layer.run([values[tensor] for tensor in layer.inputs])
        values.update((layer.get_output(index), result) for index, result in enumerate(results))
    return {tensor.name: values[tensor] for tensor in network.outputs}


class BuilderConfig:
    def __init__(self):
        self.flags, self.previews, self.profiles = {"TF32"}, {}, []
        self.max_aux_streams = None
        self.profiling_verbosity = None

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def set_preview_feature(self, feature, value):
        self.previews[feature] = value

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)
        return len(self.profiles) - 1


class Profile:
    def __init__(self):
        self.shapes = {}

    def set_shape(self, name, least, best, most):
        assert all(a <= b <= c for a, b, c in zip(least, best, most, strict=True)), (name, least, best, most)
        self.shapes[name] = (tuple(least), tuple(best), tuple(most))


class Builder:
    def __init__(self, module, logger):
        self.module, self.logger = module, logger

    def create_network(self, flags):
        # Networks are strongly typed by a flag before 11, which later versions and RTX do not need.
        old = "rtx" not in self.module.__name__ and int(self.module.__version__.split(".")[0]) < 11
        assert flags == (1 << self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED if old else 0)
        return Network(self.module)

    def create_builder_config(self):
        return BuilderConfig()

    def create_optimization_profile(self):
        return Profile()

    def build_serialized_network(self, network, config):
        aliased = any(any(alias is not None for alias in getattr(layer, "aliases", ())) for layer in network.layers)
        if aliased and not config.previews.get("ALIASED_PLUGIN_IO_10_03"):
            self.logger.log(self.module.ILogger.ERROR, "aliased plugin I/O is a preview feature")
            return None
        names = [*network.inputs, *(tensor.name for tensor in network.outputs)]
        if len(set(names)) != len(names):
            self.logger.log(self.module.ILogger.ERROR, "two I/O tensors have one name")
            return None
        content = f"stand-in plan {len(self.module.plans)}".encode()
        self.module.plans[content] = (network, config)
        return content


class Engine:
    """ICudaEngine over a network."""

    def __init__(self, module, network, config):
        self.module, self.network, self.config = module, network, config
        self.tensors = {**network.inputs, **{tensor.name: tensor for tensor in network.outputs}}
        self.num_io_tensors, self.num_optimization_profiles = len(self.tensors), max(1, len(config.profiles))
        self.num_aux_streams = 7 if config.max_aux_streams is None else config.max_aux_streams
        self.num_layers = len(network.layers)
        self.device_memory_size_v2 = 4096
        self.contexts = []
        constants = [layer for layer in network.layers if layer.kind == "Constant"]
        self.constants = {layer.get_output(0): self._resident(layer.run([])[0]) for layer in constants}

    def _resident(self, value):
        move = self.module.device
        return Fp4(value.values.to(move)) if isinstance(value, Fp4) else value.to(move)

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.network.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return self.tensors[name].dtype

    def get_tensor_shape(self, name):
        return self.tensors[name].shape

    def get_tensor_profile_shape(self, name, profile):
        return list(self.config.profiles[profile].shapes[name])

    def get_aliased_input_tensor(self, name):
        tensor = self.tensors[name]
        aliases = getattr(tensor.layer, "aliases", None)
        alias = None if aliases is None else aliases[tensor.index]
        return None if alias is None else tensor.layer.inputs[alias].name

    def create_execution_context(self, strategy):
        context = Context(self, strategy)
        self.contexts.append(context)
        return context

    def create_engine_inspector(self):
        return types.SimpleNamespace(get_engine_information=self._information)

    def _information(self, form):
        layers = []
        for layer in self.network.layers:
            if layer.kind == "Constant":
                continue
            outputs = [{"Name": layer.get_output(index).name} for index in range(layer.num_outputs)]
            inputs = [{"Name": tensor.name} for tensor in layer.inputs]
            if layer.kind == "PluginV3" and "copy" in self.module.faults:
                state, copy = inputs[len(layer.spec.signature.inputs)], {"Name": f"copy of {layer.name}"}
                layers.append(
                    {"Name": f"Reformat {state['Name']}", "LayerType": "Reformat", "Inputs": [state], "Outputs": [copy]}
                )
                inputs = [copy if tensor is state else tensor for tensor in inputs]
            layers.append({"Name": layer.name, "LayerType": layer.kind, "Inputs": inputs, "Outputs": outputs})
        if self.config.profiling_verbosity != "DETAILED":
            layers = [layer["Name"] for layer in layers]
        return json.dumps({"Layers": layers, "Bindings": list(self.tensors)})


@dataclass
class Context:
    """IExecutionContext."""

    engine: Engine
    strategy: object
    profile: int | None = None
    shapes: dict = field(default_factory=dict)
    addresses: dict = field(default_factory=dict)
    memory: tuple = (0, 0)
    runs: int = 0
    shape_changes: int = 0
    aux_streams: list | None = None

    def set_device_memory(self, pointer, size):
        self.memory = (pointer, size)

    def set_aux_streams(self, streams):
        self.aux_streams = list(streams)

    def set_optimization_profile_async(self, index, stream):
        if not 0 <= index < self.engine.num_optimization_profiles:
            return False
        self.profile = index
        return True

    def set_input_shape(self, name, shape):
        least, _, most = self.engine.config.profiles[self.profile].shapes[name]
        if not all(a <= size <= b for a, size, b in zip(least, shape, most, strict=True)):
            return False
        if self.runs and self.shapes.get(name) != tuple(shape):
            self.shape_changes += 1
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, pointer):
        if name not in self.engine.tensors:
            return False
        self.addresses[name] = pointer
        return True

    def get_tensor_address(self, name):
        return self.addresses.get(name, 0)

    def infer_shapes(self):
        dynamic = [name for name, tensor in self.engine.network.inputs.items() if -1 in tensor.shape]
        return [name for name in dynamic if name not in self.shapes]

    def execute_async_v3(self, stream):
        network, faults = self.engine.network, self.engine.module.faults
        assert self.profile is not None
        assert not self.infer_shapes()
        assert not [name for name in self.engine.tensors if not self.addresses.get(name)]
        assert self.memory[0], "the context's memory is managed by the user"
        assert self.memory[1] >= self.engine.device_memory_size_v2
        if "leak" in faults:
            self.engine.module.leaked += 1 << 20
        self.runs += 1
        values, device = dict(self.engine.constants), self.engine.module.device
        for name, tensor in network.inputs.items():
            shape = self.shapes.get(name, tensor.shape)
            dtype = TORCH_TYPES[tensor.dtype]
            memory = _at(self.addresses[name], prod(shape) * dtype.itemsize, device)
            values[tensor] = memory.view(dtype).view(shape)
        if "rows" in faults and "window_starts" in network.inputs:
            starts = values[network.inputs["window_starts"]] = values[network.inputs["window_starts"]].clone()
            starts[-1] = starts[0]
        outputs = evaluate(network, values)
        for tensor in network.outputs:
            value = outputs[tensor.name].contiguous()
            if hasattr(tensor.layer, "aliases") and tensor.index:
                if "detach" in faults:
                    continue
                if "drift" in faults and tensor.name.endswith(".checkpoint.out"):
                    value = value * 0.999
                if "scribble" in faults and tensor.name.endswith(".k_cache.out"):
                    value = value.clone()
                    value[:, -1] = self.runs
            if value.data_ptr() != self.addresses[tensor.name]:
                _at(self.addresses[tensor.name], value.nbytes, device).copy_(value.flatten().view(torch.uint8))
        return True


def _plugin_module(module):
    """`tensorrt.plugin`: registration, and calls that know their outputs' aliases. `implementations` holds aot_impl."""
    plugin = types.ModuleType(f"{module.__name__}.plugin")

    class TensorDesc:
        def __init__(self, shape_expr=(), dtype=None, alias=None):
            self.shape_expr, self.dtype, self.alias = shape_expr, dtype, alias

        def like(self):
            return TensorDesc(self.shape_expr, self.dtype)

        def aliased(self):
            return TensorDesc(self.shape_expr, self.dtype, self)

    class SymIntExprs(list):
        def __init__(self, count):
            super().__init__([None] * count)

    def register(plugin_id):
        namespace, name = plugin_id.split("::")

        def decorate(function):
            def operator(*tensors, **attributes):
                descriptions = [TensorDesc() for _ in tensors]
                outputs = function(*descriptions, **attributes)
                aliases = [None if d.alias is None else descriptions.index(d.alias) for d in outputs]
                return plugin_id, tensors, attributes, aliases

            spaces = vars(plugin.op)
            setattr(spaces.setdefault(namespace, types.SimpleNamespace()), name, operator)
            return function

        return decorate

    def keep(kind):
        return lambda plugin_id: lambda function: kind.__setitem__(plugin_id, function)

    plugin.op, plugin.implementations, plugin.tactics = types.SimpleNamespace(), {}, {}
    plugin.TensorDesc, plugin.SymIntExprs, plugin.SymInt32 = TensorDesc, SymIntExprs, int
    plugin.AutoTuneCombination = tuple
    plugin.KernelLaunchParams = types.SimpleNamespace
    plugin.cdiv, plugin.min, plugin.max = (lambda a, b: -(-a // b)), min, max
    plugin.register, plugin.aot_impl, plugin.autotune = register, keep(plugin.implementations), keep(plugin.tactics)
    return plugin


def _binary_operations():
    names = {"SUM": torch.add, "SUB": torch.sub, "PROD": torch.mul, "DIV": torch.div, "EQUAL": torch.eq}
    return types.SimpleNamespace(**names)


def make_module(name: str = "tensorrt", version: str = "11.4.0") -> types.ModuleType:
    """A fresh module. plans: what was built, by bytes. faults: a set of FAULTS. engines: what was deserialized.

    device: where plans run. launch_plugin: runs a plugin of (spec, inputs) and returns its outputs, for a GPU; None
    computes it with the reference.
    """
    module = types.ModuleType(name)
    module.__version__, module.__path__, module.__spec__ = version, [], ModuleSpec(name, None)
    module.plans, module.faults, module.engines, module.leaked = {}, set(), [], 0
    module.device, module.launch_plugin = "cpu", None

    class Logger:
        ERROR, INTERNAL_ERROR, WARNING = "error", "internal error", "warning"

        def __init__(self, severity=None):
            pass

        def log(self, severity, message):
            pass

    class Runtime:
        def __init__(self, logger):
            self.logger = logger

        def deserialize_cuda_engine(self, plan):
            built = module.plans.get(bytes(plan))
            if built is None:
                self.logger.log(Logger.ERROR, "the plan has an invalid magic tag")
                return None
            module.engines.append(Engine(module, *built))
            return module.engines[-1]

    module.ILogger = module.Logger = Logger
    module.Runtime, module.Weights, module.DataType, module.TensorIOMode = Runtime, Weights, DataType, TensorIOMode
    module.Builder = lambda logger: Builder(module, logger)
    module.ElementWiseOperation = _binary_operations()
    module.UnaryOperation = types.SimpleNamespace(SQRT=torch.sqrt)
    module.ActivationType = types.SimpleNamespace(SIGMOID=torch.sigmoid, RELU=torch.relu)
    module.MatrixOperation = types.SimpleNamespace(NONE=lambda x: x, TRANSPOSE=lambda x: x.transpose(-1, -2))
    module.ReduceOperation = types.SimpleNamespace(AVG=torch.mean, SUM=torch.sum)
    module.TopKOperation = types.SimpleNamespace(MAX="max")
    module.MoEActType = types.SimpleNamespace(SILU="silu")
    module.GatherMode = types.SimpleNamespace(ELEMENT="element")
    module.BuilderFlag = types.SimpleNamespace(TF32="TF32")
    module.PreviewFeature = types.SimpleNamespace(ALIASED_PLUGIN_IO_10_03="ALIASED_PLUGIN_IO_10_03")
    module.ProfilingVerbosity = types.SimpleNamespace(DETAILED="DETAILED")
    module.NetworkDefinitionCreationFlag = types.SimpleNamespace(STRONGLY_TYPED=1)
    module.ExecutionContextAllocationStrategy = types.SimpleNamespace(USER_MANAGED="user")
    module.LayerInformationFormat = types.SimpleNamespace(JSON="json")
    module.plugin = _plugin_module(module)
    return module
