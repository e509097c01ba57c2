"""The `tensorrt-rtx` target: a network cut at its stateful operators, every segment a plan.

TensorRT-RTX compiles on a machine without a GPU and finishes on the GPU that loads the plan. What joins the segments
is described in `plans.json`; the weights of the stateful operators lie beside the plans. Each plan has an optimization
profile per phase, so its weights exist once. Segments are compiled one after the other and hold their weights, most of
them views of the checkpoint's files, only while they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch

from replayssm.builders.parameters import WeightRecipe
from replayssm.builders.targets import torch as torch_target
from replayssm.builders.targets.tensorrt_layers import Layers, Profile, load_module
from replayssm.builders.targets.tensorrt_operators import Lowering
from replayssm.builders.targets.tensorrt_segments import Segment, cut
from replayssm.plugins.contract import ReplaySettings
from replayssm.plugins.manifest import Limits
from replayssm.plugins.network import Network

PLANS_FILE = "plans.json"
PLANS_FOLDER = "plans"
PLANS_VERSION = 1
PREFILL_TOKENS = 256
"""Tokens of one prefill chunk, as `runtime.session` cuts prompts."""

Read = Callable[[str], torch.Tensor]
Progress = Callable[[int, str], None]


def write_rtx(
    directory: Path,
    networks: Mapping[str, Network],
    plan: Mapping[str, WeightRecipe],
    read: Read,
    progress: Progress,
    limits: Limits,
    replay: ReplaySettings,
) -> None:
    """Write the plans of `networks`, their description and the weights of the stateful operators below `directory`.

    plan, read, progress: as for the torch target; progress is called after each plan.
    """
    module = load_module("tensorrt-rtx")
    require_dtype("tensorrt-rtx", replay.activation_dtype)
    phases = profiles(limits)
    torch_target.write_networks(directory, networks)
    (directory / PLANS_FOLDER).mkdir()
    described, stateful = {}, {}
    report = _once_per_weight(plan, progress)
    for network in networks.values():
        described[network.name] = _write_plans(directory, module, network, plan, read, report, phases, replay)
        for node in network.nodes:
            if node.state is not None:
                stateful |= {name: plan[name] for name in node.inputs if name in network.weights}
    torch_target.write_weights(directory, stateful, read, progress)
    content = {
        "version": PLANS_VERSION,
        "compiler": {"module": module.__name__, "version": module.__version__},
        "profiles": [{"name": phase.name, "sizes": phase.sizes} for phase in phases],
        "networks": described,
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


def _write_plans(
    directory: Path,
    module: ModuleType,
    network: Network,
    plan: Mapping[str, WeightRecipe],
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
        layers = emit_segment(
            Layers(module, name), network, step, lambda weight: plan[weight].load(read, allow_view=True), replay
        )
        (directory / file).write_bytes(layers.compile(phases))
        steps.append({"kind": "plan", "file": file, **described})
        report({name for node in network.nodes[step.start : step.stop] for name in node.inputs}, name)
    return steps


def _once_per_weight(plan: Mapping[str, WeightRecipe], progress: Progress) -> Callable[[set[str], str], None]:
    """Progress of plans in bytes of weights that no earlier plan held."""
    left = dict(plan)

    def report(names: set[str], plan_name: str) -> None:
        progress(sum(left.pop(name).nbytes for name in names & left.keys()), plan_name)

    return report


def emit_segment(layers: Layers, network: Network, segment: Segment, read: Read, replay: ReplaySettings) -> Layers:
    """Emit a segment with its inputs and outputs into `layers`, under the names of the network's values."""
    lowering = Lowering(network, layers, read, replay.max_seq_len)
    for name in segment.inputs:
        spec = network.spec(name)
        lowering.values[name] = layers.input(name, spec.dtype, spec.shape)
    lowering.emit(network.nodes[segment.start : segment.stop])
    for name in segment.outputs:
        spec = network.spec(name)
        layers.output(name, lowering.values[name], spec.dtype, spec.shape)
    return layers
