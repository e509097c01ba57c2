"""TensorRT-RTX compiles every network, on the CPU. What its plans compute is not checked: that needs a GPU."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm.builders.config import published, read_config
from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.builders.models import build_networks
from replayssm.builders.random_checkpoint import TINY_CONFIGS
from replayssm.builders.targets.tensorrt import emit_segment, profiles
from replayssm.builders.targets.tensorrt_layers import Layers, Profile, load_module
from replayssm.builders.targets.tensorrt_operators import Lowering
from replayssm.builders.targets.tensorrt_segments import cut
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins.manifest import EngineDirectoryError, FileEntry, Limits, sha256_file, verify_files
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import torch_dtype
from replayssm.runtime import plans
from replayssm.runtime.engine import Engine
from replayssm.runtime.session import Session

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import bench_plan_build

SETTINGS = ReplaySettings(max_seq_len=64, max_window=4)


@pytest.fixture(scope="module")
def rtx():
    """The module, or a skip where it is not installed."""
    try:
        return load_module("tensorrt-rtx")
    except ValueError as error:
        pytest.skip(str(error))


def constant_weights(recipe):
    """A tensor of one value, another for each weight: TensorRT stores equal constants once."""
    value = zlib.crc32(recipe.sources[0].encode()) % 100
    if recipe.dtype in ("uint8", "float8_e4m3fn"):
        return torch.full(recipe.shape, 16 + value, dtype=torch.uint8).view(torch_dtype(recipe.dtype))
    return torch.full(recipe.shape, 0.5 + value / 100, dtype=torch_dtype(recipe.dtype))


def compile_network(module, network, plan, phases):
    """Sizes of the plans of every segment, after a look at what TensorRT takes and gives at each cut."""
    sizes = []
    for step in cut(network):
        if isinstance(step, int) or step.is_view:
            continue
        layers = Layers(module, f"{network.name}-{step.start}")
        emit_segment(layers, network, step, lambda name: constant_weights(plan[name]), SETTINGS)
        built = layers.network
        inputs = [built.get_input(index) for index in range(built.num_inputs)]
        outputs = [built.get_output(index) for index in range(built.num_outputs)]
        for tensors, names in ((inputs, step.inputs), (outputs, step.outputs)):
            assert tuple(tensor.name for tensor in tensors) == names
            for tensor in tensors:
                spec = network.spec(tensor.name)
                assert str(tensor.dtype).removeprefix("DataType.") == TYPES[spec.dtype]
                assert tuple(tensor.shape) == tuple(-1 if isinstance(size, str) else size for size in spec.shape)
        sizes.append(len(layers.compile(phases)))
    return sizes


TYPES = {"bfloat16": "BF16", "float16": "HALF", "float32": "FLOAT", "int32": "INT32", "int64": "INT64"}


def test_nvidia_accepts_the_native_experts(rtx):
    """Types and shapes of its layer; RTX has no kernel for it, so nothing is compiled. Data-centre Blackwell has."""
    networks = networks_of(read_config(TINY_CONFIGS["qwen_moe"]), "dense")
    network, plan = networks.main, networks.weight_plan
    nodes = [node for node in network.nodes if node.op in ("route_softmax", "moe")][:2]
    layers = Layers(rtx, "experts", arch=100)
    assert layers.has_moe
    assert not Layers(rtx, "experts", arch=120).has_moe
    lowering = Lowering(network, layers, lambda name: constant_weights(plan[name]), 8)
    for name in {name for node in nodes for name in node.inputs} - {name for node in nodes for name in node.outputs}:
        if name not in network.weights:
            spec = network.spec(name)
            lowering.values[name] = layers.input(name, spec.dtype, spec.shape)
    lowering.emit(nodes)
    spec = network.spec(nodes[1].outputs[0])
    layers.output("y", lowering.values[nodes[1].outputs[0]], spec.dtype, spec.shape)
    kinds = [layers.network.get_layer(index).type for index in range(layers.network.num_layers)]
    assert rtx.LayerType.MOE in kinds


def networks_of(config, module_format, dtype="bfloat16"):
    return build_networks(config, dict.fromkeys(quantizable_modules(config), module_format), dtype)


@pytest.mark.parametrize("module_format", ["dense", "w4a16_nvfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["nano", "super", "qwen", "qwen_moe"])
def test_tiny_layouts(rtx, name, module_format):
    """The draft head's modules are never quantized, so it is compiled once a layout."""
    networks = networks_of(read_config(TINY_CONFIGS[name]), module_format)
    phases = profiles(Limits(4, 64, 3))[-1:]
    for network in (networks.main, networks.mtp) if module_format == "dense" else (networks.main,):
        assert all(size > 0 for size in compile_network(rtx, network, networks.weight_plan, phases))


@pytest.mark.parametrize(("dtype", "module_format"), [("float16", "nvfp4"), ("float32", "dense")])
def test_other_activation_dtypes(rtx, dtype, module_format):
    networks = networks_of(read_config(TINY_CONFIGS["qwen"]), module_format, dtype)
    assert compile_network(rtx, networks.main, networks.weight_plan, profiles(Limits(4, 64, 3))[-1:])


@pytest.mark.parametrize("name", ["nano", "qwen_moe"])
def test_fp8(rtx, name):
    networks = networks_of(read_config(TINY_CONFIGS[name]), "fp8")
    assert compile_network(rtx, networks.main, networks.weight_plan, profiles(Limits(4, 64, 3))[-1:])


@pytest.mark.parametrize(
    ("name", "module_format"),
    [
        *[("nano4b", "dense"), ("nano4b", "w4a16_nvfp4"), ("nano4b", "nvfp4")],
        ("super120b", "w4a16_nvfp4"),
        *[("qwen4b", "dense"), ("qwen4b", "w4a16_nvfp4"), ("qwen4b", "nvfp4")],
        ("qwen122b", "nvfp4"),
    ],
)
def test_published_widths(rtx, name, module_format):
    """One layer of each kind; the vocabulary and the number of experts are cut, all other sizes are the model's."""
    config = published(name)
    layers = {}
    for layer in config.layers:
        layers.setdefault(layer.kind, layer)
    kept = []
    for layer in layers.values():
        feed_forward = layer.feed_forward
        if feed_forward is not None and feed_forward.kind == "moe":
            layer = replace(layer, feed_forward=replace(feed_forward, num_experts=feed_forward.top_k + 2))
        kept.append(layer)
    config = replace(config, layers=tuple(kept), vocab_size=1024, mtp=None)
    networks = networks_of(config, module_format)
    weight_bytes = sum(recipe.nbytes for recipe in networks.weight_plan.values())
    sizes = compile_network(rtx, networks.main, networks.weight_plan, profiles(Limits(4, 64, 3))[-1:])
    # Packed weights stay packed: in 16 bits they would be 3.5 times as large.
    assert sum(sizes) < 1.1 * weight_bytes + 10e6


@pytest.fixture(scope="module")
def engine(rtx, tiny_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("rtx") / "engine"
    options = BuildOptions(target="tensorrt-rtx", max_batch_size=2, max_seq_len=64, max_draft_len=3)
    done = []
    manifest = build_engine(
        tiny_checkpoint("qwen"), directory, options, progress=lambda now, total, name: done.append((now, total))
    )
    return directory, manifest, done


def test_engine_directory(engine, tiny_checkpoint, tmp_path):
    directory, manifest, done = engine
    verify_files(directory, manifest, "full")
    assert manifest.target == "tensorrt-rtx"
    described = json.loads((directory / "plans.json").read_text())
    assert [profile["name"] for profile in described["profiles"]] == ["decode", "verify", "prefill"]
    assert described["profiles"][1]["sizes"]["T"] == [1, 8, 8]
    files = {step["file"] for steps in described["networks"].values() for step in steps if step["kind"] == "plan"}
    assert files == {entry.name for entry in manifest.files if entry.name.endswith(".plan")}
    assert [now for now, _ in done] == sorted(now for now, _ in done)
    assert done[-1][0] <= done[-1][1]


def test_the_build_benchmark_says_correct_of_a_whole_engine_alone(engine, tmp_path):
    """Not of one whose plans lack a segment or the weights, as where the benchmark leaves the compiler out."""
    directory, manifest, _ = engine
    assert bench_plan_build.holds_the_model(directory)
    described = json.loads((directory / "plans.json").read_text())
    first = next(step for step in described["networks"]["main"] if step["kind"] == "plan")
    for change in ("outputs", "weights"):
        broken = tmp_path / change
        shutil.copytree(directory, broken)
        if change == "outputs":
            first["outputs"] = [*first["outputs"][::-1], "other"]
            (broken / "plans.json").write_text(json.dumps(described))
        else:
            for plan in (broken / "plans").glob("*.plan"):
                plan.write_bytes(b"-")
        paths = [(entry.name, broken / entry.name) for entry in manifest.files]
        files = tuple(FileEntry(name, path.stat().st_size, sha256_file(path)) for name, path in paths)
        (broken / "config.json").write_text(json.dumps(replace(manifest, files=files).to_json()))
        assert not bench_plan_build.holds_the_model(broken)


def test_both_targets_receive_the_same_operators(engine, tiny_checkpoint, tmp_path):
    """The networks are equal, and the steps of the plans run each of their operators once, in order."""
    directory, manifest, _ = engine
    options = BuildOptions(max_batch_size=2, max_seq_len=64, max_draft_len=3)
    torch_manifest = build_engine(tiny_checkpoint("qwen"), tmp_path / "torch", options)
    assert torch_manifest.replay == manifest.replay
    assert (directory / "networks.json").read_bytes() == (tmp_path / "torch" / "networks.json").read_bytes()
    described = json.loads((directory / "plans.json").read_text())["networks"]
    for name, content in json.loads((directory / "networks.json").read_text()).items():
        network, order = Network.from_json(content), []
        for step in described[name]:
            order += [step["node"]] if step["kind"] == "stateful" else range(*step["nodes"])
            if step["kind"] == "stateful":
                assert network.nodes[step["node"]].state is not None
        assert order == list(range(len(network.nodes)))


def test_weights_of_stateful_operators_lie_beside_the_plans(engine):
    from safetensors import safe_open

    directory, manifest, _ = engine
    stored = set()
    for name in manifest.weight_files:
        with safe_open(directory / name, framework="pt") as file:
            stored |= set(file.keys())
    networks = [Network.from_json(value) for value in json.loads((directory / "networks.json").read_text()).values()]
    assert stored == {
        name
        for network in networks
        for node in network.nodes
        if node.state is not None
        for name in node.inputs
        if name in network.weights
    }


def test_running_the_plans_needs_a_gpu(engine, monkeypatch):
    """NVIDIA's own runtime on a machine without one: it refuses the plan and says so."""
    loaded = Engine.load(engine[0])
    with pytest.raises(ValueError, match="run on a GPU, not on device cpu: use --device cuda"):
        Session(loaded)
    monkeypatch.setattr(plans, "PLAN_DEVICE", "cpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EngineDirectoryError, match=r"tensorrt_rtx 1\..* does not take .*\.plan, which"):
        Session(loaded)


def test_activations_without_a_type(rtx, tiny_checkpoint, tmp_path):
    options = BuildOptions(target="tensorrt-rtx", dtype="float64")
    with pytest.raises(ValueError, match="no float64 activations: build with --dtype bfloat16"):
        build_engine(tiny_checkpoint("nano"), tmp_path / "engine", options)
    assert list(tmp_path.iterdir()) == []


def test_what_tensorrt_refuses_is_one_error(rtx):
    layers = Layers(rtx, "probe")
    a, b = layers.input("a", "float32", ("T", 4)), layers.input("b", "float16", ("T", 4))
    with pytest.raises(ValueError, match=r"refused probe, SUM: .*type") as caught:
        layers.add(a, b)
    assert "\n" not in str(caught.value)


def test_an_output_of_another_shape(rtx):
    layers = Layers(rtx, "probe")
    a = layers.input("a", "float32", ("T", 4))
    with pytest.raises(ValueError, match=r"output c is .*\[-1, 4\], expected float32 \[-1, 5\]"):
        layers.output("c", layers.relu(a), "float32", ("T", 5))


def test_an_input_may_be_an_output_and_an_output_have_two_names(rtx):
    layers = Layers(rtx, "probe")
    a = layers.input("a", "float32", ("T", 4))
    b = layers.relu(a)
    for name, tensor in (("b", b), ("c", b), ("d", a)):
        layers.output(name, tensor, "float32", ("T", 4))
    assert len(layers.compile([Profile("all", {"T": (1, 2, 4)})])) > 0


def test_plans_are_reproducible(rtx):
    plans = []
    for _ in range(2):
        layers = Layers(rtx, "probe")
        a = layers.input("a", "bfloat16", ("T", 64))
        weight = layers.constant(torch.ones(64, 64, dtype=torch.bfloat16))
        layers.output("b", layers.matmul_transposed(a, weight), "bfloat16", ("T", 64))
        plans.append(bytes(layers.compile([Profile("all", {"T": (1, 2, 4)})])))
    assert plans[0] == plans[1]
