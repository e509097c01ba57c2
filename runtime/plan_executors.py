"""What runs a network by its plans, as `runtime.executor.Executor` does with PyTorch.

Inputs are staged into tensors of the plan's buckets; outputs are copies of the plan's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from replayssm.plugins.contract import PAD_SLOT_ID
from replayssm.plugins.launch import known_prefill_rows
from replayssm.plugins.manifest import EngineDirectoryError
from replayssm.plugins.network import Network, TensorSpec
from replayssm.plugins.state import LayerState, torch_dtype
from replayssm.plugins.tensorrt_ops import ERROR_FLAG, OUTPUT_SUFFIX, output_tensor, state_tensors
from replayssm.runtime.executor import STATEFUL_OPERATORS
from replayssm.runtime.functional_ops import OPERATORS, attribute_dtypes
from replayssm.runtime.plan_calls import Bucket, choose_bucket, max_tokens, row_groups, run_in_parts
from replayssm.runtime.plans import PlanRuntime

Tensor = torch.Tensor

_PADDING = {"state_batch_indices": PAD_SLOT_ID}


def plan_executor(
    runtime: PlanRuntime, network: Network, states: Mapping[str, LayerState], weights: Mapping[str, Tensor]
) -> PlanExecutor | PhaseExecutor | SegmentExecutor:
    """What runs `network`: its one plan, one for windows and one for prefill rows, or its segments with the
    operators of `plugins` between them."""
    described = runtime.description["networks"][network.name]
    if isinstance(described, list):
        return SegmentExecutor(runtime, network, described, states, weights)
    window = PlanExecutor(runtime, network, described["file"], described["aliases"], states)
    if "prefill_file" not in described:
        return window
    prefill = PlanExecutor(runtime, network, described["prefill_file"], described["aliases"], states)
    settings = next((state.settings for state in states.values()), None)
    return PhaseExecutor(window, prefill, settings.max_window if settings else 1)


class _Staged:
    """Calls padded to their buckets: what both executors share."""

    captures_prompts = False

    def __init__(
        self,
        runtime: PlanRuntime,
        network: Network,
        states: Mapping[str, LayerState],
        profiles: Sequence[Mapping[str, Any]],
    ) -> None:
        self.runtime, self._network, self._states, self._profiles = runtime, network, states, profiles
        read = {name for node in network.nodes for name in node.inputs} | set(network.outputs.values())
        self._inputs = {name: spec for name, spec in network.inputs.items() if name in read}
        self._outputs = {public: network.spec(name) for public, name in network.outputs.items()}
        self._buffers: dict[Bucket, dict[str, Tensor]] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest call."""
        return max_tokens(self._profiles)

    @property
    def leading(self) -> dict[str, str]:
        """First dimension of every output: "T" or "R"."""
        return {public: spec.shape[0] for public, spec in self._outputs.items()}

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the network over `inputs`, one tensor for each of `network.inputs`; logits_indices None wants all tokens.

        More tokens than a profile holds run as several calls of whole rows. Raises ValueError for a row of too many.
        """
        if inputs["logits_indices"] is None:
            tokens = inputs["token_ids"]
            inputs = {**inputs, "logits_indices": torch.arange(len(tokens), device=tokens.device)}
        if len(inputs["token_ids"]) > self.max_tokens and len(inputs["seq_lens"]) > 1:
            groups = row_groups(inputs, self.max_tokens)
            return run_in_parts(inputs, groups, [self] * len(groups), self.leading)
        sizes = {"T": len(inputs["token_ids"]), "R": len(inputs["logits_indices"]), "B": len(inputs["seq_lens"])}
        bucket = choose_bucket(self._profiles, sizes)
        outputs = self._run(bucket, self._staged(bucket, inputs))
        # Copies, because the next call of this bucket writes to the same buffers.
        return {public: outputs[public][: sizes[spec.shape[0]]].clone() for public, spec in self._outputs.items()}

    def _staged(self, bucket: Bucket, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = self._buffers[bucket] = {
                name: torch.zeros(bucket.shape(spec.shape), dtype=torch_dtype(spec.dtype), device=self.runtime.device)
                for name, spec in self._inputs.items()
            }
        for name, buffer in buffers.items():
            count = len(inputs[name])
            buffer[:count].copy_(inputs[name])
            if count < len(buffer):
                # Padding tokens are token 0 at position 0, which no row owns; padding rows have no slot.
                buffer[count:].fill_(_PADDING.get(name, 0))
        return buffers

    def _run(self, bucket: Bucket, values: dict[str, Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError


class PhaseExecutor:
    """Runs a network that has one plan for windows and one for prefill rows, over the same state.

    A mixed call runs its prefill rows by the prefill plan, then the others by the window plan, on one stream. Whether
    there are any, the caller says by `launch.prefill_rows`, or more tokens than windows can have prove it; otherwise
    the window plan serves all, as `plugins.launch` does, and nothing waits for the device.
    """

    captures_prompts = False

    def __init__(self, window: PlanExecutor, prefill: PlanExecutor, max_window: int) -> None:
        self.window, self.prefill, self._max_window = window, prefill, max_window
        self.runtime, self.aliases = window.runtime, window.aliases

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest call."""
        return self.prefill.max_tokens

    @property
    def phases(self) -> tuple[PlanExecutor, ...]:
        return self.window, self.prefill

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exist = known_prefill_rows()
        if exist is None:
            exist = len(inputs["token_ids"]) > len(inputs["seq_lens"]) * self._max_window
        if not exist:
            return self.window(inputs)
        lengths = inputs["window_lens"].tolist()
        long = [row for row, length in enumerate(lengths) if length > self._max_window]
        short = [row for row, length in enumerate(lengths) if length <= self._max_window]
        if not short:
            return self.prefill(inputs)
        return run_in_parts(inputs, (long, short), (self.prefill, self.window), self.window.leading)


class PlanExecutor(_Staged):
    """Runs a network that is one plan, its state bound in place."""

    def __init__(
        self,
        runtime: PlanRuntime,
        network: Network,
        file: str,
        aliases: dict[str, str],
        states: Mapping[str, LayerState],
    ) -> None:
        self.plan, self.aliases = runtime.plans[file], aliases
        super().__init__(runtime, network, states, self.plan.profiles)
        specs: dict[str, TensorSpec] = {}
        self.bound: dict[str, Tensor] = {}
        for name, state in states.items():
            for tensor, described_as in state_tensors(name, state.geometry, state.settings, state.slots).items():
                specs[tensor] = TensorSpec(*described_as)
                part = tensor.removeprefix(f"{name}.")
                value = state.error_flag if part == ERROR_FLAG else state[part]
                self.bound[tensor] = self.bound[tensor + OUTPUT_SUFFIX] = value
        if self.aliases != {name + OUTPUT_SUFFIX: name for name in specs}:
            raise EngineDirectoryError(f"{runtime.directory}: the plan's state is not the network's: build it again")
        self._names = {public: output_tensor(public, network.inputs) for public in network.outputs}
        self._own = {self._names[public]: spec for public, spec in self._outputs.items()}
        in_place = {name + OUTPUT_SUFFIX: spec for name, spec in specs.items()}
        self.plan.check({**self._inputs, **specs}, {**self._own, **in_place})
        self.plan.check_aliases(self.aliases, runtime.description.get("alias") == "declared")

    @property
    def phases(self) -> tuple[PlanExecutor, ...]:
        return (self,)

    def _run(self, bucket: Bucket, values: dict[str, Tensor]) -> dict[str, Tensor]:
        addresses = {name: tensor.data_ptr() for name, tensor in {**self.bound, **values}.items()}
        context = self.plan.context(bucket, self._inputs, self._own, addresses)
        context.run()
        return {public: context.outputs[name] for public, name in self._names.items()}


class SegmentExecutor(_Staged):
    """Runs a network whose segments are plans; stateful operators run between them as the torch target's do."""

    def __init__(
        self,
        runtime: PlanRuntime,
        network: Network,
        steps: Sequence[Mapping[str, Any]],
        states: Mapping[str, LayerState],
        weights: Mapping[str, Tensor],
    ) -> None:
        super().__init__(runtime, network, states, runtime.profiles)
        own = {name for node in network.nodes if node.state is not None for name in node.inputs}
        self._weights = {name: weights[name].to(runtime.device) for name in own if name in network.weights}
        self._steps = [self._step(step) for step in steps]

    def _step(self, step: Mapping[str, Any]) -> Callable[[Bucket, dict[str, Tensor]], None]:
        if step["kind"] == "stateful":
            nodes = [self._network.nodes[step["node"]]]
        elif step["kind"] == "views":
            nodes = self._network.nodes[slice(*step["nodes"])]
        else:
            return self._plan_step(step)
        functions = [self._function(node) for node in nodes]

        def run(bucket: Bucket, values: dict[str, Tensor]) -> None:
            for node, function in zip(nodes, functions, strict=True):
                arguments = [self._weights[name] if name in self._weights else values[name] for name in node.inputs]
                result = function(*arguments)
                values.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))

        return run

    def _function(self, node: Any) -> Callable[..., Any]:
        attributes = attribute_dtypes(node.attributes)
        if node.state is None:
            return lambda *arguments: OPERATORS[node.op](*arguments, **attributes)
        state, layer = self._states[node.state], self._network.states[node.state].layer
        return lambda *arguments: STATEFUL_OPERATORS[node.op](state, layer, attributes, *arguments)

    def _plan_step(self, step: Mapping[str, Any]) -> Callable[[Bucket, dict[str, Tensor]], None]:
        plan = self.runtime.plans[step["file"]]
        inputs = {name: self._network.spec(name) for name in step["inputs"]}
        outputs = {name: self._network.spec(name) for name in step["outputs"]}
        plan.check(inputs, outputs)

        def run(bucket: Bucket, values: dict[str, Tensor]) -> None:
            # Kernels return strided views and new tensors, so addresses differ from call to call.
            dense = {name: values[name].contiguous() for name in inputs}
            context = plan.context(bucket, inputs, outputs, {})
            context.run({name: tensor.data_ptr() for name, tensor in dense.items()})
            values.update(context.outputs)

        return run

    def _run(self, bucket: Bucket, values: dict[str, Tensor]) -> dict[str, Tensor]:
        values = dict(values)
        for step in self._steps:
            step(bucket, values)
        return {public: values[name] for public, name in self._network.outputs.items()}
