"""The operators as quickly deployable TensorRT plugins whose kernels are embedded ahead of time.

A plan that was built with them needs neither Python nor a plugin library: it holds the PTX of the same sources that
`plugins.launch` runs. A plugin is one kernel. The window kernels serve decode, verify and prefill rows alike, so one
plan can serve all phases and its weights exist once; they walk prefill rows token by token. A plan of prefill rows
alone embeds the chunked prefill kernels instead, at the price of a second copy of the weights.

State parts and the error flag are network inputs with an output each, both bound to one address; the outputs are
declared as aliases, or, with alias "bound", TensorRT is not told. It allows one alias per tensor, so every stateful
node has an error flag tensor of its own and no two nodes share a state. A builder times plugins on arbitrary contents;
rows that are invalid touch no state (design rule 8).

Attention is a plugin too: the native KV-cache update writes cache row i for batch row i, which would tie a sequence to
its place in the batch, while a row here names its slot.

Names carry a hash of the kernel's source: TensorRT's timing cache knows a plugin by name and shapes only, and a stale
one must not meet another kernel. What builders and runtime must agree on about plans is here too; neither imports
TensorRT before it is asked to.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import struct
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import Geometry, geometry_from_json, geometry_to_json, state_parts
from replayssm.plugins.geometry import KernelConfig, UnsupportedGeometryError
from replayssm.plugins.nvrtc import compile_kernel, kernel_source
from replayssm.plugins.prefill_geometry import prefill_config
from replayssm.plugins.settings import ReplaySettings

LOGGED_ERRORS = 64
"""Of how many errors a logger keeps the texts: a process that runs plans may run for months."""

MODULES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
OLDEST_VERSIONS = {"tensorrt": (10, 13), "tensorrt-rtx": (1, 5)}
DATA_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "fp4": "FP4",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}
"""TensorRT's names of torch's dtypes, and of "fp4": two e2m1 elements a byte, the even one in the low nibble."""

PLANS_FILE = "plans.json"
PLANS_VERSION = 2
"""Of PLANS_FILE: compiler, alias mode, profiles, and each network's plan with its aliases or its list of steps."""

ALIASES = ("declared", "bound")
OUTPUT_SUFFIX = ".out"
NAMESPACE = "replayssm"
ERROR_FLAG = "error_flag"
ROWS = ("seq_lens", "window_starts", "window_lens", "state_batch_indices")
TYPE_NAMES = {
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "int8": "INT8",
    "int32": "INT32",
}
"""TensorRT's names of plugin types, by torch's."""

BOUND_TYPES = {"uint8": "int8"}
"""Plugins take no UINT8: packed readouts and their scales are bound as INT8, and the kernels read their own types."""


class Operator(NamedTuple):
    """inputs: tensors before the state, in the kernel's order; like: the input that the output has the shape and dtype
    of; parts: of the state, which follow from a layer's settings."""

    inputs: tuple[str, ...]
    like: str
    parts: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Plugin inputs; the outputs are the operator's own, then the parts and the error flag again."""
        return (*self.inputs, *self.parts, ERROR_FLAG, *ROWS)


OPERATORS = {
    "mamba2_window": Operator(("x", "dt", "B", "C", "A_log", "D", "dt_bias"), "x"),
    "gdn_window": Operator(("q", "k", "v", "a", "b", "A_log", "dt_bias"), "v"),
    "causal_conv1d_window": Operator(("x", "weight", "bias"), "x"),
    "attention_window": Operator(("q", "k", "v"), "q"),
}


@dataclass(frozen=True)
class PluginSpec:
    """What a plugin's kernel is compiled for: the one attribute of every plugin, as JSON.

    arch: compute capability (major * 10 + minor) of the GPU that the plan is for. slots: of every state tensor.
    layer: the launch scalar of recurrent layers. query_heads, scale: of attention. alias: one of ALIASES.
    prefill: of recurrent layers in a plan whose rows are all longer than max_window.
    """

    geometry: Geometry
    settings: ReplaySettings
    slots: int
    arch: int
    layer: int = 0
    query_heads: int = 0
    scale: float = 0.0
    alias: str = "declared"
    prefill: bool = False

    def to_json(self) -> str:
        fields = {**vars(self), "geometry": geometry_to_json(self.geometry), "settings": vars(self.settings)}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PluginSpec:
        fields = json.loads(text)
        geometry, settings = geometry_from_json(fields.pop("geometry")), ReplaySettings(**fields.pop("settings"))
        return cls(geometry, settings, **fields)

    @property
    def operator(self) -> str:
        names = {"conv": "causal_conv1d_window"}
        return names.get(self.geometry.kind, f"{self.geometry.kind}_window")

    @property
    def signature(self) -> Operator:
        """The operator with the parts of this layer's state."""
        parts = tuple(part.name for part in state_parts(self.geometry, self.settings))
        return OPERATORS[self.operator]._replace(parts=parts)


def load_module(target: str) -> ModuleType:
    """The Python module behind a target; ValueError with the command that installs it where it is missing or old."""
    install = f"pip install '.[{target}]' in the project's folder"
    for name in MODULES[target]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        version, oldest = version_of(module), OLDEST_VERSIONS[target]
        if version < oldest:
            raise ValueError(
                f"the {target} target needs {name} {'.'.join(map(str, oldest))} or later, found {module.__version__}: "
                f"{install}"
            )
        return module
    raise ValueError(f"the {target} target needs the package {target}, which is not installed: {install}")


def version_of(module: ModuleType) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)


def state_tensors(name: str, geometry: Geometry, settings: ReplaySettings, slots: int) -> dict[str, tuple[str, tuple]]:
    """dtype and shape of a plan's inputs for the state `name`; each has an output of its name and OUTPUT_SUFFIX."""
    tensors = {}
    for part in state_parts(geometry, settings):
        tensors[f"{name}.{part.name}"] = (BOUND_TYPES.get(part.dtype, part.dtype), (slots, *part.shape))
    return {**tensors, f"{name}.{ERROR_FLAG}": ("int32", (1,))}


def output_tensor(public: str, inputs: Collection[str]) -> str:
    """A plan's name of the network output `public`: names are unique, and draft heads take and give hidden states."""
    return public + OUTPUT_SUFFIX if public in inputs else public


def plugin_name(spec: PluginSpec) -> str:
    """Name within NAMESPACE: the kernel, formats that give it other tensors, and 8 hexadecimal digits of its source.

    A plugin has no optional inputs, so a readout or a scaled checkpoint makes it another one.
    """
    kernel, formats = kernel_config(spec).kernel, ""
    if spec.operator in ("mamba2_window", "gdn_window"):
        names = {part.name for part in state_parts(spec.geometry, spec.settings)}
        formats += f"_{spec.settings.state_dtype}" if "checkpoint_scale" in names else ""
        formats += f"_{spec.settings.readout_dtype}_readout" if "readout" in names else ""
    return f"{kernel}{formats}_{hashlib.sha256(kernel_source(kernel).encode()).hexdigest()[:8]}"


@cache
def kernel_config(spec: PluginSpec) -> KernelConfig:
    """The kernel to embed; UnsupportedGeometryError for what has none within a plugin's limits."""
    settings = spec.settings
    if settings.is_baseline or settings.serial_exact:
        raise UnsupportedGeometryError(
            "TensorRT plugins embed the replay kernels: buffer_len 0 and serial_exact run on the torch target"
        )
    if spec.operator == "causal_conv1d_window":
        # A layer without a bias gets zeros: a plugin has no optional inputs.
        return geo.conv_config(spec.geometry, settings, True, settings.activation_dtype)
    if spec.operator == "attention_window":
        queries = geo.attention_queries(spec.query_heads, spec.geometry, settings.max_window, 1)
        return geo.attention_config(spec.geometry, settings, spec.query_heads, queries)
    make = prefill_config if spec.prefill else geo.window_config
    return make(spec.geometry, settings, spec.arch, embedded=True)


def ptx(spec: PluginSpec) -> bytes:
    """PTX of the kernel for the build GPU's architecture; later GPUs accept it too. Compiles without a GPU."""
    config = kernel_config(spec)
    compiled = compile_kernel(config.kernel, dict(config.defines), geo.compile_target(spec.arch), kind="ptx")
    return compiled.image.rstrip(b"\0")


def tensor_types(spec: PluginSpec) -> dict[str, str]:
    """dtype of every plugin input by name."""
    act = spec.settings.activation_dtype
    parts = {p.name: BOUND_TYPES.get(p.dtype, p.dtype) for p in state_parts(spec.geometry, spec.settings)}
    scalars = dict.fromkeys(("A_log", "D", "dt_bias"), "float32")
    names = spec.signature.tensors
    known = {**scalars, **parts, ERROR_FLAG: "int32", **dict.fromkeys(ROWS, "int32")}
    return {name: known.get(name, act) for name in names}


def scalars(spec: PluginSpec, tokens: Any, rows: Any) -> list[Any]:
    """int32 arguments in the kernel's order. All tensors are dense, so their strides follow from the geometry.

    tokens, rows: the call's sizes, numbers or symbolic expressions.
    """
    g, settings = spec.geometry, spec.settings
    strides = [prod(part.shape) for part in state_parts(g, settings)]
    # The last 0: no prefill kernel follows, so a window kernel walks prefill rows itself.
    first, layer = [tokens, spec.slots, settings.max_seq_len], [spec.layer, *settings.rounding_scalars, 0]
    if spec.operator == "mamba2_window":
        groups = g.ngroups * g.dstate
        return [*first, *layer, g.nheads * g.headdim, g.nheads, groups, groups, *strides]
    if spec.operator == "gdn_window":
        keys, values = g.num_k_heads * g.head_k_dim, g.num_v_heads * g.head_v_dim
        return [*first, *layer, keys, keys, values, g.num_v_heads, g.num_v_heads, *strides]
    if spec.operator == "causal_conv1d_window":
        return [*first, g.conv_dim, *strides]
    keys = g.num_kv_heads * g.head_dim
    (scale_bits,) = struct.unpack("i", struct.pack("f", spec.scale))
    return [*first, rows, scale_bits, spec.query_heads * g.head_dim, keys, keys, *divmod(strides[0], 2**16)]


def grid(spec: PluginSpec, tokens: Any, rows: Any, math: Any) -> tuple[Any, Any, Any]:
    """Blocks along x, y and z. math: gives `cdiv` and `min` of sizes, such as `tensorrt.plugin`."""
    config = kernel_config(spec)
    if spec.operator == "attention_window":
        return tokens, geo.attention_tiles(config), 1
    if spec.operator == "causal_conv1d_window":
        # As `launch.conv_chunks`, without its special case: blocks of a short window without a chunk end at once.
        return config.blocks_x, rows, math.min(64, math.cdiv(tokens, geo.CONV_CHUNK))
    return config.blocks_x, rows, 1


def error_logger(module: ModuleType) -> Any:
    """A logger for TensorRT that prints nothing and keeps the texts of the last errors in `errors`."""

    class Collector(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=LOGGED_ERRORS)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Collector()


def register(trtp: ModuleType, spec: PluginSpec) -> str:
    """Register the plugin of `spec` with `tensorrt.plugin` and return its name. Idempotent."""
    name = plugin_name(spec)
    known = getattr(trtp.op, NAMESPACE, None)
    if known is None or not hasattr(known, name):
        _register(trtp, spec.signature, f"{NAMESPACE}::{name}")
    return name


def plugin_call(trtp: ModuleType, spec: PluginSpec, tensors: list[Any]) -> Any:
    """What `INetworkDefinition.add_plugin` takes; tensors in the order of `PluginSpec.signature`."""
    name = register(trtp, spec)
    return getattr(getattr(trtp.op, NAMESPACE), name)(*tensors, spec=spec.to_json())


def _register(trtp: ModuleType, operator: Operator, plugin_id: str) -> None:
    """TensorRT reads the schema from signatures, which are made here because they follow from `operator`."""
    tensors, outputs = operator.tensors, len(operator.parts) + 2
    first_part, like = len(operator.inputs), tensors.index(operator.like)
    results = tuple[(trtp.TensorDesc,) * outputs]

    def describe(*arguments, spec):
        declared = PluginSpec.from_json(spec).alias == "declared"
        state = arguments[first_part : first_part + outputs - 1]
        return (arguments[like].like(), *(desc.aliased() if declared else desc.like() for desc in state))

    def autotune(*arguments):
        types = tensor_types(PluginSpec.from_json(arguments[len(tensors)]))
        inputs = [TYPE_NAMES[types[name]] for name in tensors]
        all_types = [*inputs, inputs[like], *inputs[first_part : first_part + outputs - 1]]
        return [trtp.AutoTuneCombination(", ".join(all_types), "LINEAR")]

    def implement(*arguments):
        spec = PluginSpec.from_json(arguments[len(tensors)])
        config = kernel_config(spec)
        tokens = arguments[like].shape_expr[0]
        rows = arguments[tensors.index("seq_lens")].shape_expr[0]
        blocks = dict(zip(("grid_x", "grid_y", "grid_z"), grid(spec, tokens, rows, trtp), strict=True))
        launch = trtp.KernelLaunchParams(**blocks, block_x=config.threads, shared_mem=config.shared_bytes)
        values = scalars(spec, tokens, rows)
        extra = trtp.SymIntExprs(len(values))
        for index, value in enumerate(values):
            extra[index] = trtp.SymInt32(value)
        return config.kernel, ptx(spec), launch, extra

    attribute = [("spec", str)]
    inputs = [(name, trtp.TensorDesc) for name in tensors]
    returned = tuple[str, bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    results_argument = [("outputs", results)]
    _sign(describe, [*inputs, *attribute], results)
    _sign(autotune, [*inputs, *attribute, *results_argument], list[trtp.AutoTuneCombination])
    _sign(implement, [*inputs, *attribute, *results_argument, ("tactic", int)], returned)
    trtp.register(plugin_id)(describe)
    trtp.autotune(plugin_id)(autotune)
    trtp.aot_impl(plugin_id)(implement)


def _sign(function: Any, parameters: list[tuple[str, Any]], returns: Any) -> None:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters],
        return_annotation=returns,
    )
