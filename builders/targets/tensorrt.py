"""The targets `tensorrt`, one plan per network, and `tensorrt-rtx`, a network cut at its stateful operators.

`tensorrt` embeds our kernels as plugin layers and compiles on the GPU that will run the plan. This was written against
NVIDIA's documentation and headers; no plan has been built with it yet. A call of decoding, verifying and prefill rows
runs once, by the profile that covers it: a plan after the other would read the weights twice. `prefill_plan` accepts
that, and a second copy of the weights, for the chunked prefill kernels.

No state is updated by a native layer. Besides what `plugins.tensorrt_ops` says of it, RTX 1.7's compiler crashes on a
KV-cache update whose values come through a cast from another one; cutting networks at stateful operators avoids both.

TensorRT-RTX has no plugin layers. It compiles on a machine without a GPU and finishes on the GPU that loads the plan.
Every segment between two stateful operators is a plan; the weights of the stateful operators lie beside the plans.
Segments are compiled one after the other and hold their weights, most of them views of the checkpoint's files, only
while they are.

Both describe in `plans.json` what a runtime needs, and give a plan one optimization profile per phase, so that phases
share their weights. What exists more than once: a table that two plans read, such as a tied output head cut from its
embedding, or the embedding and head that a draft head shares; and rope tables, once per plan that rotates.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from replayssm.builders.parameters import WeightRecipe
from replayssm.builders.targets import torch as torch_target
from replayssm.builders.targets.tensorrt_layers import Layers, Profile, Tensor
from replayssm.builders.targets.tensorrt_operators import Lowering
from replayssm.builders.targets.tensorrt_segments import Segment, cut
from replayssm.plugins import tensorrt_ops
from replayssm.plugins.manifest import Limits
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import torch_dtype
from replayssm.plugins.tensorrt_ops import ALIASES, OUTPUT_SUFFIX, PLANS_FILE, PLANS_VERSION, PluginSpec, load_module

PLANS_FOLDER = "plans"
PREFILL_TOKENS = 256
"""Tokens of one prefill chunk, as `runtime.session` cuts prompts."""

Read = Callable[[str], torch.Tensor]
Progress = Callable[[int, str], None]


def write_tensorrt(
    directory: Path,
    networks: Mapping[str, Network],
    plan: Mapping[str, WeightRecipe],
    read: Read,
    progress: Progress,
    limits: Limits,
    replay: ReplaySettings,
    alias: str = "declared",
    prefill_plan: bool = False,
) -> dict[str, str]:
    """Write one plan per network and their description below `directory`, for the GPU of this machine.

    plan, read, progress: as for the torch target. alias: whether TensorRT knows that state is updated in place.
    prefill_plan: a second plan per network for prefill rows. Returns the plugins that are embedded, by kernel.
    """
    if alias not in ALIASES:
        raise ValueError(f"alias must be one of {', '.join(ALIASES)}, got {alias!r}")
    load_module("tensorrt")
    require_dtype("tensorrt", replay.activation_dtype)
    arch = _build_arch()
    options = PlanOptions(limits, replay, alias, arch, formats_to_unpack(plan, arch), prefill_plan)
    torch_target.write_networks(directory, networks)
    write_plans(directory, networks, _loader(plan, read), options, _once_per_weight(plan, progress))
    phases = (False, True) if prefill_plan else (False,)
    specs = [plugin_specs(network, options, phase) for network in networks.values() for phase in phases]
    every = {spec for found in specs for spec in found.values()}
    return {tensorrt_ops.kernel_config(spec).kernel: tensorrt_ops.plugin_name(spec) for spec in every}


@dataclass(frozen=True)
class PlanOptions:
    """What plans are built for. arch: compute capability (major * 10 + minor); unpacked: weight formats without
    products there; prefill_plan: prefill rows get a plan of their own. The plans of tensorrt-rtx know only `limits` and
    `replay`."""

    limits: Limits
    replay: ReplaySettings
    alias: str = "declared"
    arch: int = 0
    unpacked: tuple[str, ...] = ()
    prefill_plan: bool = False


def write_plans(
    directory: Path,
    networks: Mapping[str, Network],
    read: Read,
    options: PlanOptions,
    report: Callable[[set[str], str], None] = lambda weights, plan: None,
) -> None:
    """Write one plan per network, or one for windows and one for prefill rows, and their description.

    read: engine weight name -> tensor. report: called with the names of a plan's weights and its own.
    """
    module, phases = load_module("tensorrt"), profiles(options.limits)
    call = partial(tensorrt_ops.plugin_call, _plugin_module(module))
    kinds = {"file": (phases, False)}
    if options.prefill_plan:
        kinds = {"file": (phases[:-1], False), "prefill_file": (phases[-1:], True)}
    specs = {
        (name, kind): plugin_specs(network, options, prefill)
        for name, network in networks.items()
        for kind, (_, prefill) in kinds.items()
    }
    (directory / PLANS_FOLDER).mkdir()
    described: dict[str, dict[str, Any]] = {name: {} for name in networks}
    for (name, kind), plugins in specs.items():
        title = name if kind == "file" else f"{name}-prefill"
        layers, network = Layers(module, title, options.arch), networks[name]
        aliases = emit_network(layers, network, plugins, read, call, options.unpacked, _positions(options.replay))
        file = f"{PLANS_FOLDER}/{title}.plan"
        (directory / file).write_bytes(layers.compile(kinds[kind][0]))
        del layers  # with its weights, before the next plan's are read
        described[name] |= {kind: file, "aliases": aliases}
        report(set(network.weights), title)
    more = {"alias": options.alias, "arch": options.arch, "unpacked": options.unpacked}
    _describe(directory, module, phases, described, {**more, "prefill_plan": options.prefill_plan})


def _loader(plan: Mapping[str, WeightRecipe], read: Read) -> Read:
    """Engine weights by name, views of the checkpoint's files where they are stored as the engine wants them."""
    return lambda name: plan[name].load(read, allow_view=True)


def _plugin_module(module: ModuleType) -> ModuleType:
    return importlib.import_module(f"{module.__name__}.plugin")


def _build_arch() -> int:
    """Compute capability (major * 10 + minor) of the GPU that plans are built on and for."""
    if not torch.cuda.is_available():
        raise ValueError(
            "the tensorrt target times kernels on the GPU that it builds for, and this machine has none: "
            "use --target torch, or tensorrt-rtx, which compiles without one"
        )
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def formats_to_unpack(plan: Mapping[str, WeightRecipe], arch: int) -> tuple[str, ...]:
    """Weight formats of `plan` that GPUs of this architecture have no products for; a warning says what they cost."""
    formats = []
    for name, dtype, oldest, growth in (("nvfp4", "uint8", 100, 4), ("fp8", "float8_e4m3fn", 89, 2)):
        # Block scales of NVFP4 weights are float8 too.
        held = sum(r.nbytes for n, r in plan.items() if r.dtype == dtype and n.endswith(".weight"))
        if held and arch < oldest:
            warnings.warn(
                f"compute capability {arch / 10} has no {name} products: {held / 1e9:.2f} GB of weights become "
                f"{growth * held / 1e9:.2f} GB in the plan",
                stacklevel=2,
            )
            formats.append(name)
    return tuple(formats)


def plugin_specs(network: Network, options: PlanOptions, prefill: bool = False) -> dict[str, PluginSpec]:
    """What each stateful node's plugin is compiled for, by state name. UnsupportedGeometryError where none fits.

    prefill: for the plan of prefill rows alone.
    """
    specs = {}
    for node in network.nodes:
        if node.state is None:
            continue
        state = network.states[node.state]
        heads, scale = 0, 0.0
        if node.op == "attention_window":
            heads, scale = network.spec(node.inputs[0]).shape[1], node.attributes["scale"]
        slots = options.limits.max_batch_size
        sizes = (state.geometry, state.settings(options.replay), slots, options.arch)
        chunked = prefill and node.op in ("mamba2_window", "gdn_window")
        spec = PluginSpec(*sizes, state.layer, heads, scale, options.alias, chunked)
        tensorrt_ops.kernel_config(spec)
        specs[node.state] = spec
    return specs


def emit_network(
    layers: Layers,
    network: Network,
    specs: Mapping[str, PluginSpec],
    read: Read,
    plugin_call: Callable[[PluginSpec, list[Tensor]], Any],
    unpacked: Sequence[str] = (),
    positions: int = 1,
) -> dict[str, str]:
    """Emit a whole network with a plugin layer for every stateful node.

    State parts are inputs "<state>.<part>" [slots, ...], error flags "<state>.error_flag" [1]; what a plugin writes in
    place is the output "<input>.out". Returns output -> input of those: a runtime binds both to one address.
    positions: bound of the rope tables where no state says it.
    """
    positions = max((_positions(spec.settings) for spec in specs.values()), default=positions)
    lowering = Lowering(network, layers, read, positions, unpacked)
    read_inputs = {name for node in network.nodes for name in node.inputs}
    for name, spec in network.inputs.items():
        if name in read_inputs:
            lowering.values[name] = layers.input(name, spec.dtype, spec.shape)
    aliases: dict[str, str] = {}
    for node in network.nodes:
        if node.state is None:
            lowering.emit([node])
            continue
        spec = specs[node.state]
        parts = tensorrt_ops.state_tensors(node.state, spec.geometry, spec.settings, spec.slots)
        state = [layers.input(name, *described) for name, described in parts.items()]
        own, rows = [lowering[name] for name in node.inputs[:-4]], [lowering[name] for name in node.inputs[-4:]]
        if node.op == "causal_conv1d_window" and not node.attributes["bias"]:
            dtype = torch_dtype(network.spec(node.inputs[1]).dtype)
            zeros = partial(torch.zeros, spec.geometry.conv_dim, dtype=dtype)
            own.append(lowering.once(("zeros", spec.geometry.conv_dim), zeros))
        outputs = layers.plugin(plugin_call(spec, [*own, *state, *rows]), node.state, spec.alias == "declared")
        lowering.values[node.outputs[0]] = outputs[0]
        for (name, described), value in zip(parts.items(), outputs[1:], strict=True):
            layers.output(f"{name}{OUTPUT_SUFFIX}", value, *described)
            aliases[f"{name}{OUTPUT_SUFFIX}"] = name
    for public, name in network.outputs.items():
        spec = network.spec(name)
        tensor = tensorrt_ops.output_tensor(public, network.inputs)
        layers.output(tensor, lowering.result(name), spec.dtype, spec.shape)
    return aliases


def write_rtx(
    directory: Path,
    networks: Mapping[str, Network],
    plan: Mapping[str, WeightRecipe],
    read: Read,
    progress: Progress,
    limits: Limits,
    replay: ReplaySettings,
) -> dict[str, str]:
    """Write the plans of `networks`, their description and the weights of the stateful operators below `directory`.

    plan, read, progress: as for the torch target; progress is called after each plan. Returns no kernels: none are
    embedded.
    """
    load_module("tensorrt-rtx")
    require_dtype("tensorrt-rtx", replay.activation_dtype)
    torch_target.write_networks(directory, networks)
    report = _once_per_weight(plan, progress)
    write_rtx_plans(directory, networks, _loader(plan, read), PlanOptions(limits, replay), report)
    stateful = {
        name: plan[name]
        for network in networks.values()
        for node in network.nodes
        if node.state is not None
        for name in node.inputs
        if name in network.weights
    }
    torch_target.write_weights(directory, stateful, read, progress)
    return {}


def write_rtx_plans(
    directory: Path,
    networks: Mapping[str, Network],
    read: Read,
    options: PlanOptions,
    report: Callable[[set[str], str], None] = lambda weights, plan: None,
) -> None:
    """As `write_plans`, one plan per segment between stateful operators."""
    module, phases = load_module("tensorrt-rtx"), profiles(options.limits)
    (directory / PLANS_FOLDER).mkdir()
    described = {
        name: _write_segments(directory, module, network, read, report, phases, options.replay)
        for name, network in networks.items()
    }
    _describe(directory, module, phases, described, {})


def _describe(
    directory: Path, module: ModuleType, phases: Sequence[Profile], networks: dict[str, Any], more: dict[str, Any]
) -> None:
    content = {
        "version": PLANS_VERSION,
        "compiler": {"module": module.__name__, "version": module.__version__},
        "profiles": [{"name": phase.name, "sizes": phase.sizes} for phase in phases],
        "networks": networks,
        **more,
    }
    (directory / PLANS_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def require_dtype(target: str, activation_dtype: str) -> None:
    if activation_dtype == "float64":
        raise ValueError(f"the {target} target has no float64 activations: build with --dtype bfloat16 or float32")


def profiles(limits: Limits) -> list[Profile]:
    """One per phase. T, R and B are the packed tokens, wanted logits and rows of a call."""
    batch, verify = limits.max_batch_size, limits.max_batch_size * limits.max_window
    rows = (1, batch, batch)
    phases = [Profile("decode", {"T": rows, "R": rows, "B": rows})]
    if limits.max_draft_len:
        tokens = (1, verify, verify)
        phases.append(Profile("verify", {"T": tokens, "R": tokens, "B": rows}))
    # A chunk of one prompt, beside the windows of all other slots.
    most = verify + PREFILL_TOKENS
    prefill = {"T": (1, PREFILL_TOKENS, most), "R": (1, batch, most), "B": rows}
    return [*phases, Profile("prefill", prefill)]


def _write_segments(
    directory: Path,
    module: ModuleType,
    network: Network,
    read: Read,
    report: Callable[[set[str], str], None],
    phases: list[Profile],
    replay: ReplaySettings,
) -> list[dict]:
    """Compile every segment; returns the steps of the network for `plans.json`."""
    steps: list[dict] = []
    for step in cut(network):
        if isinstance(step, int):
            steps.append({"kind": "stateful", "node": step})
            continue
        described = {"nodes": [step.start, step.stop], "inputs": step.inputs, "outputs": step.outputs}
        if step.is_view:
            steps.append({"kind": "views", **described})
            continue
        name = f"{network.name}-{len(steps):03d}"
        file = f"{PLANS_FOLDER}/{name}.plan"
        layers = Layers(module, name)
        emit_segment(layers, network, step, read, replay)
        (directory / file).write_bytes(layers.compile(phases))
        del layers  # with its weights, before the next segment's are read
        steps.append({"kind": "plan", "file": file, **described})
        report({name for node in network.nodes[step.start : step.stop] for name in node.inputs}, name)
    return steps


def _once_per_weight(plan: Mapping[str, WeightRecipe], progress: Progress) -> Callable[[set[str], str], None]:
    """Progress of plans in bytes of weights that no earlier plan held."""
    left = dict(plan)

    def report(names: set[str], plan_name: str) -> None:
        progress(sum(left.pop(name).nbytes for name in names & left.keys()), plan_name)

    return report


def _positions(replay: ReplaySettings) -> int:
    """Rows of the rope tables: a window's padding tokens may lie behind the last position of a sequence."""
    return replay.max_seq_len + replay.max_window


def emit_segment(layers: Layers, network: Network, segment: Segment, read: Read, replay: ReplaySettings) -> None:
    """Emit a segment with its inputs and outputs into `layers`, under the names of the network's values."""
    lowering = Lowering(network, layers, read, _positions(replay))
    for name in segment.inputs:
        spec = network.spec(name)
        lowering.values[name] = layers.input(name, spec.dtype, spec.shape)
    lowering.emit(network.nodes[segment.start : segment.stop])
    for name in segment.outputs:
        spec = network.spec(name)
        layers.output(name, lowering.result(name), spec.dtype, spec.shape)
