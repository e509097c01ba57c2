"""Op by op: every operator of an engine's networks as a network of its own, run by a plan and by the torch target.

Where a whole model is off, this names the operator. `scripts.check` has the small plans built; here they are run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

from replayssm.plugins.contract import PAD_SLOT_ID
from replayssm.plugins.network import CALL_INPUTS, Network, Node
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state, raise_on_error, torch_dtype
from replayssm.runtime.executor import Executor
from replayssm.runtime.findings import SAFETY, Finding, operator_error, quantized_activations, relative_error
from replayssm.runtime.plan_executors import plan_executor
from replayssm.runtime.plans import PlanRuntime

Tensor = torch.Tensor

STATE_ERROR = 2.0**-12
"""Relative error of fp32 state after the same inputs: sums in another order, and u as a pair of bf16 halves (2^-16)."""

STATELESS_CALLS = 2


def isolate(networks: Mapping[str, Network]) -> dict[str, Network]:
    """One network per different operator call: same attributes, geometry, dtypes and sizes are one.

    Integer values inside a network, an expert's number say, come from the operator that makes them. Names are
    "<number>-<operator>", which file names can be.
    """
    found: dict[str, Network] = {}
    seen = set()
    for network in networks.values():
        producers = {name: node for node in network.nodes for name in node.outputs}
        for node in network.nodes:
            before = [
                producers[name]
                for name in node.inputs
                if name in producers and network.spec(name).dtype in ("int32", "int64")
            ]
            nodes = [*dict.fromkeys(map(id, before)), id(node)]
            by_id = {id(item): item for item in (*before, node)}
            alone = _network(network, [by_id[key] for key in nodes], f"{len(found):02d}-{node.op}")
            key = _signature(alone)
            if key not in seen:
                seen.add(key)
                found[alone.name] = alone
    return found


def _network(network: Network, nodes: Sequence[Node], name: str) -> Network:
    own = {output for node in nodes for output in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in own)
    alone = Network(name, inputs={key: network.inputs[key] for key in network.inputs if key in CALL_INPUTS})
    alone.inputs |= {key: network.spec(key) for key in read if key not in network.weights}
    alone.weights = {key: network.weights[key] for key in read if key in network.weights}
    alone.states = {node.state: network.states[node.state] for node in nodes if node.state is not None}
    alone.nodes, alone.values = list(nodes), {key: network.values[key] for key in own}
    alone.outputs = {key: key for key in nodes[-1].outputs}
    return alone


def _signature(network: Network) -> str:
    """What the operator is, without names."""
    names = [*network.inputs, *network.weights, *network.values]
    number = {name: index for index, name in enumerate(names)}
    nodes = [
        (node.op, node.attributes, [str(network.spec(key)) for key in node.inputs], [number[k] for k in node.inputs])
        for node in network.nodes
    ]
    states = [asdict(state.geometry) for state in network.states.values()]
    return json.dumps([nodes, states], sort_keys=True, default=str)


def random_weights(network: Network, seed: int) -> dict[str, Tensor]:
    """Weights that no operator is out of range with: scales are small and positive, packed bytes are random."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, spec in network.weights.items():
        dtype = torch_dtype(spec.dtype)
        if spec.dtype == "uint8":
            weights[name] = torch.randint(0, 256, spec.shape, dtype=dtype, generator=generator)
        elif name.endswith("input_scale"):
            # As calibration on values up to 4 gives it; one for all experts, because plans take the largest of theirs.
            largest = 6 * 448 if name.replace("input_scale", "weight_scale_2") in network.weights else 448
            weights[name] = torch.full(spec.shape, 4 / largest, dtype=dtype)
        elif name.endswith(("_scale", "_scale_2")):
            weights[name] = (0.05 + 0.1 * torch.rand(spec.shape, generator=generator)).to(dtype)
        else:
            width = spec.shape[-1] if len(spec.shape) > 1 else 1
            weights[name] = (torch.randn(spec.shape, generator=generator) / width**0.5).to(dtype)
    return weights


class Calls:
    """Random calls over the slots of one engine: prefill, decode and verify windows, a padding row, all packed."""

    def __init__(self, settings: ReplaySettings, slots: int, most_tokens: int, seed: int) -> None:
        self.settings, self.slots, self.most = settings, slots, most_tokens
        self.random, self.positions = random.Random(seed), [0] * slots
        self.generator = torch.Generator().manual_seed(seed)
        self.count = 0

    def inputs(self, network: Network, device: torch.device) -> dict[str, Tensor]:
        """The next call's inputs; sequences move on by a random part of their windows."""
        settings, limit = self.settings, self.settings.max_window
        rows, total = [], 0
        for slot in self.random.sample(range(self.slots), self.random.randint(1, self.slots)):
            length = self.random.randint(1, limit)
            if self.count % 4 == 0 and not rows:
                length = limit + self.random.randint(1, 24)
            length = min(length, settings.max_seq_len - self.positions[slot], self.most - total)
            if length > 0:
                rows.append((slot, self.positions[slot], length))
                total += length
        if len(rows) < self.slots and self.count % 3 == 1:
            rows.append((PAD_SLOT_ID, 0, 0))
        self.count += 1
        for slot, _, length in rows:
            if slot >= 0:
                self.positions[slot] += length if length > limit else self.random.randint(0, length)
                if self.positions[slot] + limit >= settings.max_seq_len:
                    self.positions[slot] = 0
        return self._packed(network, rows, device)

    def _packed(self, network: Network, rows: list[tuple[int, int, int]], device: torch.device) -> dict[str, Tensor]:
        starts, tokens = [], 0
        for _, _, length in rows:
            starts.append(tokens)
            tokens += length
        wanted = sorted(self.random.sample(range(tokens), self.random.randint(1, tokens)))
        numbers = {
            "token_ids": [self.random.randrange(2) for _ in range(tokens)],
            "positions": [position + i for _, position, length in rows for i in range(length)],
            "seq_lens": [position for _, position, _ in rows],
            "window_starts": starts,
            "window_lens": [length for _, _, length in rows],
            "state_batch_indices": [slot for slot, _, _ in rows],
            "logits_indices": wanted,
        }
        inputs = {}
        sizes = {"T": tokens, "R": len(wanted), "B": len(rows)}
        for name, spec in network.inputs.items():
            if name in numbers:
                value = torch.tensor(numbers[name], dtype=torch_dtype(spec.dtype))
            else:
                shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
                value = torch.randn(shape, generator=self.generator).to(torch_dtype(spec.dtype))
            inputs[name] = value.to(device)
        return inputs


def check_operators(
    networks: Mapping[str, Network],
    weights: Mapping[str, Mapping[str, Tensor]],
    runtime: PlanRuntime,
    settings: ReplaySettings,
    slots: int,
    seed: int = 0,
) -> Iterator[Finding]:
    """Run each of `networks`, whose plans `runtime` holds, against the torch target on the same random calls.

    weights: those of each network. Stateful operators run until their history was folded twice.
    """
    for name, network in networks.items():
        yield _check_operator(name, network, weights[name], runtime, settings, slots, seed)


def _check_operator(
    name: str,
    network: Network,
    weights: Mapping[str, Tensor],
    runtime: PlanRuntime,
    settings: ReplaySettings,
    slots: int,
    seed: int,
) -> Finding:
    def states() -> dict[str, LayerState]:
        return {
            key: allocate_state(state.geometry, state.settings(settings), slots, runtime.device)
            for key, state in network.states.items()
        }

    title = f"operator {name}"
    ours, reference = states(), states()
    emulate = not runtime.description.get("unpacked")
    oracle = Executor(network, weights, reference, runtime.device, emulate_activation_quantization=emulate)
    plan = plan_executor(runtime, network, ours, weights)
    calls = Calls(settings, slots, plan.max_tokens, seed)
    dtype = settings.activation_dtype
    bound = SAFETY * operator_error(dtype, quantized_activations(network))
    count = 2 * (settings.buffer_len + settings.max_window) if ours else STATELESS_CALLS
    worst, state_error, worst_part = 0.0, 0.0, ""
    for _ in range(count):
        inputs = calls.inputs(network, runtime.device)
        got, expected = plan(inputs), oracle(inputs)
        worst = max(worst, *(relative_error(got[key], expected[key]) for key in expected))
        for key, state in reference.items():
            raise_on_error(ours[key].error_flag)
            raise_on_error(state.error_flag)
            for part, tensor in state.tensors.items():
                error = _part_error(ours[key][part], tensor, dtype)
                if error > state_error:
                    state_error, worst_part = error, part
    measured = {"relative_error": worst, "bound": bound, "calls": count}
    detail = f"{_described(network)}: off by {worst:.2g} of the norm in {count} calls, at most {bound:.2g} is rounding"
    if ours:
        measured |= {"state_error": state_error, "state_part": worst_part}
        if state_error > 1:
            detail += f"; its state {worst_part} is off by {state_error:.2g} times what rounding explains"
    return Finding(title, worst <= bound and state_error <= 1, detail, measured)


def _part_error(value: Tensor, expected: Tensor, dtype: str) -> float:
    """Error of a state part over what rounding explains; positions and packed bytes must be equal."""
    if not value.is_floating_point() or value.dtype.itemsize == 1:
        return 0.0 if torch.equal(value.view(torch.uint8), expected.view(torch.uint8)) else float("inf")
    bound = STATE_ERROR if value.dtype == torch.float32 else SAFETY * operator_error(dtype)
    return relative_error(value[None], expected[None]) / bound


def _described(network: Network) -> str:
    node = network.nodes[-1]
    shapes = " ".join("x".join(map(str, network.spec(name).shape)) for name in node.inputs if name not in CALL_INPUTS)
    return f"{node.op} of {shapes}"
