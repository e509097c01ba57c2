"""The plugins, taken through TensorRT's plugin protocol on the CPU with the lean runtime's bindings.

The bindings hold the real registry, creators and plugin base classes. What only libnvinfer can make, symbolic
dimensions and the descriptors of a build, is stood in for here. How TensorRT launches the kernels is not checked.
"""

from __future__ import annotations

import enum
import importlib
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm.plugins import arguments, launch, tensorrt_ops
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry, state_parts
from replayssm.plugins.geometry import EMBEDDED_SHARED_BYTES, UnsupportedGeometryError
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state, torch_dtype
from replayssm.plugins.tensorrt_ops import PluginSpec

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from embedded_plugins import Plugin

SETTINGS = ReplaySettings(max_window=5, max_seq_len=512)
SLOTS = 3
SPECS = {
    "mamba2_window": PluginSpec(Mamba2Geometry(8, 64, 128, 2), SETTINGS, SLOTS, 90, layer=7),
    "gdn_window": PluginSpec(GdnGeometry(2, 4, 64, 128), SETTINGS, SLOTS, 90, layer=5),
    "causal_conv1d_window": PluginSpec(ConvGeometry(1032, 4), SETTINGS, SLOTS, 90),
    # 256 is Qwen3.5's head_dim, with which a block of 4 warps would exceed a plugin's shared memory.
    "attention_window": PluginSpec(AttentionGeometry(2, 256), SETTINGS, SLOTS, 90, query_heads=40, scale=0.0625),
}


class Dim:
    """A dimension expression with a value; `known` at build time, or not."""

    def __init__(self, value, known=True):
        self.value, self.known = int(value), known

    def is_constant(self):
        return self.known

    def is_size_tensor(self):
        return False

    def get_constant_value(self):
        assert self.known
        return self.value


class Dims(list):
    def __init__(self, items=0):
        super().__init__([None] * items if isinstance(items, int) else items)


class ExpressionBuilder:
    def __init__(self, trt):
        op = trt.DimensionOperation
        self.functions = {
            op.SUM: lambda a, b: a + b,
            op.PROD: lambda a, b: a * b,
            op.MIN: min,
            op.MAX: max,
            op.FLOOR_DIV: lambda a, b: a // b,
            op.CEIL_DIV: lambda a, b: -(-a // b),
        }

    def constant(self, value):
        return Dim(value)

    def operation(self, op, a, b):
        return Dim(self.functions[op](a.value, b.value), a.known and b.known)


@pytest.fixture(scope="module")
def trt():
    """The lean bindings under the name `tensorrt`, which their plugin package imports."""
    try:
        real = importlib.import_module("tensorrt_lean_bindings")
    except ImportError:
        pytest.skip("tensorrt-lean-cu13-bindings and tensorrt-lean-cu13-libs are not installed")
    module = types.ModuleType("tensorrt")
    module.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("__")})
    module.__version__, module.__path__ = real.__version__, []
    linear = enum.Enum("TensorFormat", ["LINEAR"])
    stand_ins = {name: type(name, (), {"scale": None}) for name in ("ISymExpr", "ITensor", "PluginTensorDesc")}
    stand_ins |= {"DynamicPluginTensorDesc": type("DynamicPluginTensorDesc", (), {}), "TensorFormat": linear}
    module.__dict__.update({"IDimensionExpr": Dim, "DimsExprs": Dims, **stand_ins})
    for name in ("type", "dtype", "expr"):
        setattr(module.ISymExpr, name, None)
    previous = sys.modules.get("tensorrt")
    sys.modules["tensorrt"] = module
    try:
        module.plugin = importlib.import_module("tensorrt_lean_bindings.plugin")
    finally:
        sys.modules.pop("tensorrt")
        if previous is not None:
            sys.modules["tensorrt"] = previous
    return module


def types_of(trt):
    return {
        "float32": trt.DataType.FLOAT,
        "bfloat16": trt.DataType.BF16,
        "float8_e4m3fn": trt.DataType.FP8,
        "int8": trt.DataType.INT8,
        "float16": trt.DataType.HALF,
        "int32": trt.DataType.INT32,
    }


def input_shapes(spec, tokens, rows):
    """Shape of every plugin input, from the operator's documentation."""
    g = spec.geometry
    parts = {part.name: (spec.slots, *part.shape) for part in state_parts(g, spec.settings)}
    if spec.operator == "mamba2_window":
        own = {"x": (tokens, g.nheads, g.headdim), "dt": (tokens, g.nheads)}
        own |= dict.fromkeys("BC", (tokens, g.ngroups, g.dstate))
        own |= dict.fromkeys(("A_log", "D", "dt_bias"), (g.nheads,))
    elif spec.operator == "gdn_window":
        own = dict.fromkeys("qk", (tokens, g.num_k_heads, g.head_k_dim))
        own |= {"v": (tokens, g.num_v_heads, g.head_v_dim)}
        own |= dict.fromkeys("ab", (tokens, g.num_v_heads))
        own |= dict.fromkeys(("A_log", "dt_bias"), (g.num_v_heads,))
    elif spec.operator == "causal_conv1d_window":
        own = {"x": (tokens, g.conv_dim), "weight": (g.conv_dim, g.conv_kernel), "bias": (g.conv_dim,)}
    else:
        own = {"q": (tokens, spec.query_heads, g.head_dim)}
        own |= dict.fromkeys("kv", (tokens, g.num_kv_heads, g.head_dim))
    shapes = {**own, **parts, "error_flag": (1,), **dict.fromkeys(tensorrt_ops.ROWS, (rows,))}
    assert tuple(shapes) == spec.signature.tensors
    return shapes


def drive(trt, spec, tokens, rows):
    """Walk a plugin through a build with concrete sizes: what an engine would embed."""
    shapes = input_shapes(spec, tokens, rows)
    dtypes = [types_of(trt)[dtype] for dtype in tensorrt_ops.tensor_types(spec).values()]
    call = tensorrt_ops.plugin_call(trt.plugin, spec, [trt.ITensor() for _ in shapes])
    tensors, shape_tensors, plugin = call(trt.QuickPluginCreationRequest.STRICT_AOT)
    assert (len(tensors), shape_tensors) == (len(shapes), [])
    output_types = plugin.get_output_data_types(dtypes, [len(shape) for shape in shapes.values()])
    builder = ExpressionBuilder(trt)
    dynamic = (tokens, rows)
    expressions = [Dims([Dim(size, size not in dynamic) for size in shape]) for shape in shapes.values()]
    output_shapes = [tuple(dim.value for dim in dims) for dims in plugin.get_output_shapes(expressions, [], builder)]

    def described(dtype, shape):
        result, tensor = trt.DynamicPluginTensorDesc(), trt.PluginTensorDesc()
        tensor.dims, tensor.type, tensor.format, tensor.scale = shape, dtype, trt.TensorFormat.LINEAR, 1.0
        result.desc, result.min, result.opt, result.max = tensor, shape, shape, shape
        return result

    pairs = [*zip(dtypes, shapes.values(), strict=True), *zip(output_types, output_shapes, strict=True)]
    io, count = [described(*pair) for pair in pairs], len(shapes)
    combinations = plugin.get_supported_format_combinations(io, count)
    plugin.configure_plugin(io[:count], io[count:])
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)
    extra = type("Extra", (dict,), {})()
    parameters = types.SimpleNamespace()
    plugin.get_launch_params(expressions, io, count, parameters, extra, builder)
    kernel, ptx = plugin.get_kernel([item.desc for item in io[:count]], [item.desc for item in io[count:]])
    return types.SimpleNamespace(
        output_types=output_types,
        output_shapes=output_shapes,
        aliases=dict(plugin.aliased_map),
        combinations=[item.type for item in combinations],
        types=[dtype for dtype, _ in pairs],
        kernel=kernel,
        ptx=ptx.decode(),
        grid=tuple(getattr(parameters, f"grid_{axis}").expr.value for axis in "xyz"),
        block=tuple(getattr(parameters, f"block_{axis}").expr.value for axis in "xyz"),
        shared_bytes=parameters.shared_mem.expr.value,
        scalars=[extra[index].expr.value for index in range(extra.nbSymExprs)],
    )


def entry_parameters(ptx, kernel):
    match = re.search(rf"\.entry\s+{kernel}\s*\((.*?)\)", ptx, re.DOTALL)
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", match[1])


@pytest.fixture(scope="module", params=list(SPECS))
def driven(request, trt):
    spec = SPECS[request.param]
    return spec, drive(trt, spec, tokens=13, rows=6)


def test_outputs_and_aliases(driven):
    """The operator's own output, then every state part and the error flag in place."""
    spec, plugin = driven
    operator, shapes = spec.signature, input_shapes(spec, 13, 6)
    in_place = (*operator.parts, "error_flag")
    expected = [shapes[operator.like], *(shapes[name] for name in in_place)]
    assert plugin.output_shapes == expected
    tensors = operator.tensors
    assert plugin.aliases == {0: -1, **{1 + i: tensors.index(name) for i, name in enumerate(in_place)}}
    assert plugin.output_types[0] == plugin.types[tensors.index(operator.like)]


def test_the_only_format_is_the_networks_own(driven):
    _, plugin = driven
    assert plugin.combinations == plugin.types


def test_kernel_parameters_are_the_declared_tensors_and_scalars(driven):
    """A wrong order would not fail in TensorRT, it would compute garbage."""
    spec, plugin = driven
    inputs, outputs = len(spec.signature.tensors), len(plugin.output_shapes)
    expected = ["u64"] * inputs + ["u32"] * len(plugin.scalars) + ["u64"] * outputs
    assert plugin.kernel == spec.operator
    assert entry_parameters(plugin.ptx, plugin.kernel) == expected


def make_arguments(spec, tokens, rows):
    """Arguments of our own launcher for the same call, over tensors on the CPU."""
    state = allocate_state(spec.geometry, spec.settings, spec.slots)
    dtypes, shapes = tensorrt_ops.tensor_types(spec), input_shapes(spec, tokens, rows)
    operator = spec.signature
    own = [torch.zeros(shapes[name], dtype=torch_dtype(dtypes[name])) for name in operator.inputs]
    index = tuple(torch.zeros(rows, dtype=torch.int32) for _ in range(4))
    out = torch.zeros(shapes[operator.like], dtype=torch_dtype(spec.settings.activation_dtype))
    if spec.operator == "causal_conv1d_window":
        return state, arguments.conv_arguments(*own, state, index, out)
    if spec.operator == "attention_window":
        return state, arguments.attention_arguments(*own, state, index, spec.scale, out)
    make = {"mamba2_window": arguments.mamba2_arguments, "gdn_window": arguments.gdn_arguments}[spec.operator]
    return state, make(*own, state, index, spec.layer, out)


def test_arguments_are_those_of_the_launcher(driven):
    """Same scalars, and tensors of the same shapes and dtypes in the same places."""
    spec, plugin = driven
    _, expected = make_arguments(spec, 13, 6)
    assert plugin.scalars == [argument for argument in expected if isinstance(argument, int)]
    tensors = [argument for argument in expected if not isinstance(argument, int)]
    shapes = [*input_shapes(spec, 13, 6).values(), *plugin.output_shapes]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    dtypes = list(tensorrt_ops.tensor_types(spec).values())
    assert [str(tensor.dtype).removeprefix("torch.") for tensor in tensors[: len(dtypes)]] == dtypes


def test_launch_parameters(driven):
    spec, plugin = driven
    config = tensorrt_ops.kernel_config(spec)
    assert plugin.block == (config.threads, 1, 1)
    assert plugin.shared_bytes == config.shared_bytes <= EMBEDDED_SHARED_BYTES
    if spec.operator == "attention_window":
        assert plugin.grid == (13, 4, 1)
    else:
        assert plugin.grid == (config.blocks_x, 6, 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (64, 1), (65, 2), (300, 5), (10**5, 64)])
def test_long_convolutions_use_as_many_blocks_as_the_launcher(trt, tokens, blocks):
    spec = SPECS["causal_conv1d_window"]
    assert drive(trt, spec, tokens, rows=1).grid[2] == blocks
    state = allocate_state(spec.geometry, spec.settings, 1)
    assert launch.conv_chunks(tokens, 1, state) == blocks


def test_the_stand_in_gets_what_nvidias_bindings_get(driven):
    """`tests/gpu` launches what `aot_impl` returns to a stand-in, where these bindings are not installed."""
    spec, plugin = driven
    other = Plugin(spec, list(input_shapes(spec, 13, 6).values()))
    assert (other.kernel, other.ptx.decode()) == (plugin.kernel, plugin.ptx)
    assert (other.grid, other.block, other.shared_bytes) == (plugin.grid, plugin.block, plugin.shared_bytes)
    assert list(other.scalars) == plugin.scalars


def test_kernels_write_through_their_outputs(driven):
    """State is read through the input pointer and written through the output pointer: never as read-only memory."""
    _, plugin = driven
    assert ".version 9.0" in plugin.ptx or ".version 8." in plugin.ptx
    assert ".target sm_90" in plugin.ptx
    assert "ld.global.nc" not in plugin.ptx


def test_registration_is_idempotent_and_tagged(trt):
    for operator, spec in SPECS.items():
        name = tensorrt_ops.register(trt.plugin, spec)
        assert tensorrt_ops.register(trt.plugin, spec) == name
        assert re.fullmatch(rf"{operator}_[0-9a-f]{{8}}", name)
        assert trt.get_plugin_registry().get_creator(name, "1", "replayssm") is not None


def test_state_parts_in_the_contracts_order():
    for spec in SPECS.values():
        parts = tuple(part.name for part in state_parts(spec.geometry, spec.settings))
        assert parts == spec.signature.parts
        assert PluginSpec.from_json(spec.to_json()) == spec


FORMATS = [{"readout_dtype": "nvfp4"}, {"readout_dtype": "float8"}, {"state_dtype": "float8", "readout_dtype": "nvfp4"}]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: "-".join(formats.values()))
@pytest.mark.parametrize("operator", ["mamba2_window", "gdn_window"])
def test_packed_state_is_bound_as_int8(operator, formats):
    """A plugin has no UINT8 tensors. What the plan calls INT8 has the bytes of the contract's parts."""
    plain = SPECS[operator]
    spec = replace(plain, settings=replace(plain.settings, **formats))
    parts = {part.name: part for part in state_parts(spec.geometry, spec.settings)}
    assert spec.signature.parts == tuple(parts)
    assert set(plain.signature.parts) < set(parts)
    types = tensorrt_ops.tensor_types(spec)
    bound = tensorrt_ops.state_tensors("layer", spec.geometry, spec.settings, SLOTS)
    for name, part in parts.items():
        expected = "int8" if part.dtype == "uint8" else part.dtype
        assert types[name] == expected
        assert bound[f"layer.{name}"] == (expected, (SLOTS, *part.shape))
    assert set(types.values()) <= set(tensorrt_ops.TYPE_NAMES)
    assert "int8" in types.values()


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: "-".join(formats.values()))
@pytest.mark.parametrize("operator", ["mamba2_window", "gdn_window"])
def test_packed_state_makes_another_plugin(trt, operator, formats):
    plain = SPECS[operator]
    spec = replace(plain, settings=replace(plain.settings, **formats))
    try:
        name = tensorrt_ops.plugin_name(spec)
    except UnsupportedGeometryError as error:
        pytest.skip(f"no kernel yet: {error}")
    assert all(word in name for word in formats.values())
    plugin = drive(trt, spec, tokens=13, rows=6)
    tensors = spec.signature.tensors
    in_place = (*spec.signature.parts, "error_flag")
    assert plugin.aliases == {0: -1, **{1 + i: tensors.index(part) for i, part in enumerate(in_place)}}
    scalars, outputs = ["u32"] * len(plugin.scalars), ["u64"] * (len(in_place) + 1)
    assert entry_parameters(plugin.ptx, plugin.kernel) == ["u64"] * len(tensors) + scalars + outputs
    _, expected = make_arguments(spec, 13, 6)
    assert plugin.scalars == [argument for argument in expected if isinstance(argument, int)]
    assert plugin.shared_bytes <= EMBEDDED_SHARED_BYTES


@pytest.mark.parametrize("operator", ["mamba2_window", "gdn_window"])
def test_prefill_rows_have_a_plugin_of_their_own(trt, operator):
    """Same tensors, same scalars, the chunked kernel within a plugin's shared memory."""
    window = SPECS[operator]
    plugin = drive(trt, replace(window, prefill=True), tokens=300, rows=6)
    assert plugin.kernel == operator.replace("window", "prefill")
    assert plugin.shared_bytes <= EMBEDDED_SHARED_BYTES
    assert plugin.scalars == drive(trt, window, tokens=300, rows=6).scalars
    tensors, outputs = len(window.signature.tensors), len(plugin.output_shapes)
    expected = ["u64"] * tensors + ["u32"] * len(plugin.scalars) + ["u64"] * outputs
    assert entry_parameters(plugin.ptx, plugin.kernel) == expected
    assert "ld.global.nc" not in plugin.ptx


def test_state_that_is_bound_without_being_declared(trt):
    """--alias bound: the same plugin without aliases; a runtime binds both names to one address all the same."""
    spec = replace(SPECS["mamba2_window"], alias="bound")
    plugin = drive(trt, spec, tokens=13, rows=6)
    assert set(plugin.aliases.values()) == {-1}
    assert plugin.scalars == drive(trt, SPECS["mamba2_window"], tokens=13, rows=6).scalars


@pytest.mark.parametrize(
    ("geometry", "settings", "message"),
    [
        (Mamba2Geometry(8, 64, 128, 2), ReplaySettings(buffer_len=0), "buffer_len 0 and serial_exact"),
        (AttentionGeometry(2, 512), ReplaySettings(), "needs a head_dim in 16s up to 256"),
        (Mamba2Geometry(8, 64, 128, 2), ReplaySettings(activation_dtype="float32"), "activations are float32"),
    ],
)
def test_layers_without_a_plugin_are_refused(geometry, settings, message):
    with pytest.raises(UnsupportedGeometryError, match=message):
        tensorrt_ops.kernel_config(PluginSpec(geometry, settings, 2, 90, query_heads=8))
