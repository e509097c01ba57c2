"""The `tensorrt` target without TensorRT: a whole network with plugin layers, computed with PyTorch and, but for the
plugins, compiled by TensorRT-RTX. No plan of this target has been built."""

from __future__ import annotations

import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import published
from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.builders.models import build_networks
from replayssm.builders.targets import tensorrt
from replayssm.builders.targets.tensorrt_layers import Layers, load_module
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins import tensorrt_ops
from replayssm.plugins.geometry import UnsupportedGeometryError
from replayssm.plugins.manifest import Limits
from replayssm.plugins.nvfp4 import dequantize
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state, raise_on_error
from replayssm.plugins.tensorrt_ops import PluginSpec, output_tensor
from replayssm.runtime.engine import Engine
from replayssm.runtime.executor import Executor
from replayssm.runtime.session import PREFILL_CHUNK

SLOTS = 2
SETTINGS = ReplaySettings(max_seq_len=64, max_window=4)
OPTIONS = tensorrt.PlanOptions(Limits(SLOTS, 64, 3), SETTINGS, arch=90)
WINDOWS = ((0, 9), (9, 1), (10, 4))
"""(committed tokens, new tokens) of a prefill, a decode and a verify call of one sequence; a fresh one beside it."""


def load(directory):
    checkpoint = Checkpoint.open(directory)
    networks = build_networks(checkpoint.config, checkpoint.module_format, "bfloat16")
    return networks, {name: recipe.load(checkpoint.tensor) for name, recipe in networks.weight_plan.items()}


def call_inputs(network, seq_len, length):
    tokens = length + 2
    inputs = {
        "token_ids": torch.arange(tokens) * 11 % 300,
        "positions": torch.cat([torch.arange(seq_len, seq_len + length), torch.arange(2)]).int(),
        "seq_lens": torch.tensor([seq_len, 0], dtype=torch.int32),
        "window_starts": torch.tensor([0, length], dtype=torch.int32),
        "window_lens": torch.tensor([length, 2], dtype=torch.int32),
        "state_batch_indices": torch.tensor([1, 0], dtype=torch.int32),
        "logits_indices": torch.tensor([length - 1, tokens - 1]),
    }
    if "hidden_states" in network.inputs:
        inputs["hidden_states"] = torch.ones(tokens, network.inputs["hidden_states"].shape[1], dtype=torch.bfloat16)
    return inputs


@pytest.mark.parametrize("name", ["nano", "super", "qwen", "qwen_moe"])
def test_plugin_layers_compute_what_the_executor_computes(tiny_checkpoint, eager_layers, name):
    """Outputs of every call, and the state after all of them."""
    networks, weights = load(tiny_checkpoint(name))
    for network in (networks.main, networks.mtp):
        states = {key: allocate_state(spec.geometry, SETTINGS, SLOTS) for key, spec in network.states.items()}
        executor = Executor(network, weights, states)
        specs = tensorrt.plugin_specs(network, OPTIONS)
        bound = {}
        for key, spec in network.states.items():
            state = allocate_state(spec.geometry, SETTINGS, SLOTS)
            bound |= {f"{key}.{part}": tensor for part, tensor in state.tensors.items()}
            bound[f"{key}.error_flag"] = state.error_flag
        for seq_len, length in WINDOWS:
            inputs = call_inputs(network, seq_len, length)
            expected = executor(inputs)
            layers = eager_layers({**inputs, **bound})
            aliases = tensorrt.emit_network(layers, network, specs, weights.__getitem__, layers.plugin_call)
            assert set(aliases.values()) == set(bound)
            for output, source in aliases.items():
                bound[source].copy_(layers.outputs[output])
            names = {output: output_tensor(output, network.inputs) for output in expected}
            assert set(layers.outputs) == {*aliases, *names.values()}
            assert not set(layers.outputs) & {*inputs, *bound}
            for output, value in expected.items():
                # bf16 near 1: sums over experts in another order move a last bit, 2^-8, a few times.
                difference = (layers.outputs[names[output]].float() - value.float()).abs().max()
                assert difference < 0.2, (network.name, output)
        for key, state in states.items():
            raise_on_error(bound[f"{key}.error_flag"])
            for part, tensor in state.tensors.items():
                difference = (bound[f"{key}.{part}"].float() - tensor.float()).abs().max()
                assert difference <= 0.1 * tensor.float().abs().max(), (key, part)


@pytest.mark.parametrize("name", ["nano", "qwen_moe"])
def test_everything_but_the_plugins_compiles_in_one_plan(tiny_checkpoint, name):
    """NVIDIA's compiler on the uncut network, where inputs stand for what plugins return."""
    try:
        module = load_module("tensorrt-rtx")
    except ValueError as error:
        pytest.skip(str(error))

    class PluginsAsInputs(Layers):
        def plugin(self, call, name, aliased=True):
            spec, tensors = call
            operator = spec.signature
            assert len(tensors) == len(operator.tensors)
            like = tensors[operator.tensors.index(operator.like)]
            dims = ("T", *tuple(like.shape)[1:])
            y = self.input(f"{name}.y", spec.settings.activation_dtype, dims)
            first = len(operator.inputs)
            return [y, *tensors[first : first + len(operator.parts) + 1]]

    networks, weights = load(tiny_checkpoint(name))
    layers = PluginsAsInputs(module, name)
    specs = tensorrt.plugin_specs(networks.main, OPTIONS)
    tensorrt.emit_network(layers, networks.main, specs, weights.__getitem__, lambda spec, tensors: (spec, tensors))
    assert len(layers.compile(tensorrt.profiles(Limits(SLOTS, 64, 3)))) > 0


@pytest.mark.parametrize("name", ["nano", "super", "qwen", "qwen_moe"])
def test_both_targets_get_the_same_operators(plan_engine, tiny_checkpoint, tmp_path, monkeypatch, name):
    """The sequence that becomes layers and plugins is the one that the torch target executes, value by value with the
    dtypes and shapes that TensorRT infers, and state by state with the tensors that the torch target allocates."""
    emitted, lowerings = [], []

    class Recorded(tensorrt.Lowering):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            lowerings.append(self)

        def emit(self, nodes):
            emitted.extend(nodes)
            super().emit(nodes)

    def call(trtp, spec, tensors, original=tensorrt_ops.plugin_call):
        emitted.append(spec)
        return original(trtp, spec, tensors)

    monkeypatch.setattr(tensorrt, "Lowering", Recorded)
    monkeypatch.setattr(tensorrt_ops, "plugin_call", call)
    engine, module = plan_engine(name)
    build_engine(tiny_checkpoint(name), tmp_path / "torch", BuildOptions(dtype="float16", **SIZES))
    executed = Engine.load(tmp_path / "torch").networks
    assert executed == engine.networks
    nodes = [node for network in executed.values() for node in network.nodes]
    assert [item.operator if isinstance(item, PluginSpec) else item.op for item in emitted] == [n.op for n in nodes]
    types = {"BF16": "bfloat16", "HALF": "float16", "FLOAT": "float32", "INT32": "int32", "INT64": "int64"}
    for lowering, network in zip(lowerings, executed.values(), strict=True):
        assert set(network.values) <= set(lowering.values)
        for value, spec in network.values.items():
            tensor = lowering.values[value]
            dtype = types[tensor.dtype.name]
            # Expert numbers are int32 within a plan.
            assert dtype == spec.dtype or (dtype, spec.dtype) == ("int32", "int64"), value
            assert tensor.shape == tuple(-1 if isinstance(size, str) else size for size in spec.shape), value
    for network in executed.values():
        inputs = next(built.inputs for built, _ in module.plans.values() if set(network.states) & states_of(built))
        for state, spec in network.states.items():
            allocated = allocate_state(spec.geometry, engine.manifest.replay, 4)
            for part, tensor in allocated.tensors.items():
                found = inputs[f"{state}.{part}"]
                assert (types[found.dtype.name], found.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))


SIZES = {"max_batch_size": 4, "max_seq_len": 400, "max_draft_len": 3, "buffer_len": 8}


def states_of(built):
    return {name.rpartition(".")[0] for name in built.inputs if "." in name}


def test_sizes_without_a_plugin_are_refused_before_anything_is_built():
    network = build_networks(published("nano4b"), mtp=False).main
    specs = tensorrt.plugin_specs(network, OPTIONS)
    assert set(specs) == set(network.states)
    layers = [spec.layer for spec in specs.values() if spec.geometry.kind == "mamba2"]
    assert len(set(layers)) == len(layers) > 0
    own = replace(OPTIONS.replay, readout_layers=((layers[1], "float8"),))
    of_layers = tensorrt.plugin_specs(network, replace(OPTIONS, replay=own)).values()
    assert [spec.layer for spec in of_layers if spec.settings.readout_dtype == "float8"] == [layers[1]] * 2
    with pytest.raises(UnsupportedGeometryError, match="buffer_len 0 and serial_exact run on the torch target"):
        tensorrt.plugin_specs(network, replace(OPTIONS, replay=ReplaySettings(buffer_len=0)))


def test_formats_without_products_are_unpacked_and_named():
    config = published("nano4b")
    modules = quantizable_modules(config)
    plan = build_networks(config, dict.fromkeys(modules, "nvfp4"), mtp=False).weight_plan
    with pytest.warns(UserWarning, match=r"8\.9 has no nvfp4 products: .* GB of weights become"):
        assert tensorrt.formats_to_unpack(plan, 89) == ("nvfp4",)
    fp8 = build_networks(config, dict.fromkeys(modules, "fp8"), mtp=False).weight_plan
    with pytest.warns(UserWarning, match=r"8\.6 has no fp8 products"):
        assert tensorrt.formats_to_unpack(fp8, 86) == ("fp8",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tensorrt.formats_to_unpack(plan, 120) == ()
        assert tensorrt.formats_to_unpack(fp8, 89) == ()


def test_an_unpacked_weight_is_a_constant_in_the_activation_dtype(eager_layers):
    """Products of a GPU without fp4: the same weight, and activations as they are."""
    from replayssm.builders import functional as F
    from replayssm.builders.functional import Graph
    from replayssm.builders.nvfp4 import quantize
    from replayssm.builders.parameters import Parameters
    from replayssm.plugins.network import TensorSpec

    graph = Graph("main", "bfloat16")
    weight = Parameters(graph, lambda module: "nvfp4", {}).linear("up", 32, 64)
    x = graph.input("x", TensorSpec("bfloat16", ("T", 64)))
    network = graph.finish(y=F.linear(x, weight))
    generator = torch.Generator().manual_seed(0)
    packed = quantize(torch.randn(32, 64, generator=generator))
    weights = dict(zip(weight.tensors, (*packed, torch.tensor(0.01)), strict=True))
    value = torch.randn(5, 64, generator=generator).bfloat16()
    layers = eager_layers({"x": value})
    tensorrt.emit_network(layers, network, {}, weights.__getitem__, None, unpacked=("nvfp4",))
    assert torch.equal(layers.outputs["y"], value @ dequantize(*packed, torch.bfloat16).T)


def test_a_machine_without_a_gpu_is_refused(monkeypatch, tmp_path):
    module = types.ModuleType("tensorrt")
    module.__version__ = "11.4.0"
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", types.ModuleType("tensorrt.plugin"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this machine has none: use --target torch, or tensorrt-rtx"):
        tensorrt.write_tensorrt(tmp_path, {}, {}, None, None, Limits(), ReplaySettings())


@pytest.mark.parametrize(("version", "accepted"), [("10.9.0", False), ("10.12.0", False), ("10.13.0", True)])
def test_versions_are_compared_as_numbers(monkeypatch, version, accepted):
    module = types.ModuleType("tensorrt")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    if accepted:
        assert load_module("tensorrt") is module
    else:
        with pytest.raises(ValueError, match=rf"needs tensorrt 10\.13 or later, found {version}"):
            load_module("tensorrt")


def test_attributes_of_a_plugin_fit_its_node():
    network = build_networks(published("qwen4b"), mtp=False).main
    node = next(node for node in network.nodes if node.op == "gdn_window")
    state = network.states[node.state]
    spec = PluginSpec(state.geometry, SETTINGS, 8, 90, state.layer)
    assert spec.operator == node.op


def test_the_prefill_profile_covers_a_sessions_chunk():
    """builders and runtime share no code; this is where the two numbers meet."""
    assert tensorrt.PREFILL_TOKENS == PREFILL_CHUNK
    prefill = tensorrt.profiles(Limits(4, 512, 3))[-1]
    assert prefill.sizes["T"] == (1, PREFILL_CHUNK, 4 * 4 + PREFILL_CHUNK)
    assert [profile.name for profile in tensorrt.profiles(Limits(4, 512, 0))] == ["decode", "prefill"]
