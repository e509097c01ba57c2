"""Interpreter of a `plugins.network.Network` with PyTorch, on the CPU or on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from replayssm.plugins import torch_ops
from replayssm.plugins.fp8_experts import ARCHITECTURES as FP8_ARCHITECTURES
from replayssm.plugins.launch import device_arch
from replayssm.plugins.network import Network, Node
from replayssm.plugins.state import LayerState, torch_dtype
from replayssm.runtime import fusion
from replayssm.runtime.functional_ops import (
    OPERATORS,
    WEIGHT_OPERATORS,
    attribute_dtypes,
    scale_count,
    unpack,
)
from replayssm.runtime.fused_operators import FUSED_OPERATORS

Tensor = torch.Tensor
Step = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(function, argument registers, result registers, registers that nothing reads afterwards)."""


class NetworkExecutor(Protocol):
    """What runs a network over its states: an `Executor`, or plans (`plan_executors`).

    captures_prompts: whether a CUDA graph can hold a call with prefill rows. max_tokens: most tokens of a row, None for
    any number.
    """

    captures_prompts: bool

    @property
    def max_tokens(self) -> int | None: ...

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Executor:
    """Runs one network over packed tokens.

    network: the network; `inputs` and `outputs` of a call carry its public names.
    weights: engine weight name -> tensor. Memory-mapped tensors stay mapped on the CPU; others are moved to `device`.
    states: state name -> LayerState on `device`, updated in place.
    unpack_weights: dequantize NVFP4 and FP8 weights into the activation dtype once, here, instead of at every use.
        Costs 2 bytes a weight in bf16 (4 in fp32) where NVFP4 keeps 0.5625 and FP8 1, and saves most of the time of a
        step on the CPU, so it defaults to on there and to off on CUDA.
    unpacked: weights by name as executors hold them where that is not as the engine does: dequantized, joined by
        `fusion`, or on a GPU. Executors of one engine share it, so that a weight is kept once.
    fuse: run what `fusion` makes of the network: fewer operators, and kernels for what lies between the products.
        By default on CUDA only, because joined products differ from single ones in the last bits.
    emulate_activation_quantization: round inputs of quantized linear operators as the checkpoint's recipe says, which
        hardware with such products does. Off, activations keep their precision.
    fp8_products: in a fused network, round inputs of FP8 linear operators so and multiply in FP8, which is faster from
        some 256 tokens on and needs a GPU of compute capability 8.9 or later.
    fp8_experts: in a fused network, multiply NVFP4 experts in FP8 where the recipe rounds what they read to NVFP4
        (`plugins.fp8_experts`); on GPUs without those kernels, and on the CPU, with activations of 16 bits.
    operators: further stateless operators of the network, by name.

    A call does not wait for the device, so that CUDA graphs can capture it, with prefill rows (`captures_prompts`) and
    without. Raises ValueError where weights or states do not fit the network.
    """

    captures_prompts = True
    max_tokens = None

    def __init__(
        self,
        network: Network,
        weights: Mapping[str, Tensor],
        states: Mapping[str, LayerState],
        device: torch.device | str = "cpu",
        *,
        unpack_weights: bool | None = None,
        unpacked: dict[str, Tensor] | None = None,
        fuse: bool | None = None,
        emulate_activation_quantization: bool = False,
        fp8_products: bool = False,
        fp8_experts: bool = False,
        operators: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.network = network
        self.device = torch.device(device)
        self._emulate = emulate_activation_quantization
        self._unpack = self.device.type == "cpu" if unpack_weights is None else unpack_weights
        self._unpacked = {} if unpacked is None else unpacked
        self._weights = weights
        self._states = _checked_states(network, states)
        self._register_of: dict[str, int] = {}
        self._constants: list[Tensor | None] = []
        self._inputs = {name: self._register(name) for name in network.inputs}
        nodes = [self._unpack_node(node) for node in network.nodes] if self._unpack else network.nodes
        fuse = self.device.type == "cuda" if fuse is None else fuse
        self._operators = {**(FUSED_OPERATORS if fuse else OPERATORS), **(operators or {})}
        if fuse:
            fp8_experts = fp8_experts and self.device.type == "cuda" and device_arch(self.device) in FP8_ARCHITECTURES
            nodes = fusion.fuse(network, nodes, not self._emulate, fp8_products, self._load, fp8_experts)
        self._steps = self._compile(nodes)
        self._outputs = {public: self._register_of[name] for public, name in network.outputs.items()}

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the network over `inputs`, one tensor on `device` for each of `network.inputs`.

        logits_indices None wants all tokens.
        """
        missing = self._inputs.keys() - inputs.keys()
        if missing:
            raise ValueError(f"network {self.network.name!r} also needs the inputs {', '.join(sorted(missing))}")
        registers = self._constants.copy()
        for name, register in self._inputs.items():
            registers[register] = inputs[name]
        for function, arguments, results, expired in self._steps:
            value = function(*[registers[register] for register in arguments])
            if len(results) == 1:
                registers[results[0]] = value
            else:
                for index, register in enumerate(results):
                    registers[register] = value[index]
            for register in expired:
                registers[register] = None
        return {public: registers[register] for public, register in self._outputs.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as this executor holds them."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._constants if tensor is not None)

    def _register(self, name: str, constant: Tensor | None = None) -> int:
        register = self._register_of.setdefault(name, len(self._constants))
        if register == len(self._constants):
            self._constants.append(constant)
        return register

    def _argument(self, name: str) -> int:
        """Register of an operator's input; a weight is loaded when the first operator names it."""
        if name in self._register_of:
            return self._register_of[name]
        if name in self._unpacked:
            return self._register(name, self._unpacked[name])
        weight = self._load(name).to(self.device)
        if self.device.type != "cpu" or name not in self.network.weights:
            self._unpacked[name] = weight
        return self._register(name, weight)

    def _load(self, name: str) -> Tensor:
        if parts := fusion.joined_parts(name, self.network):
            return self._joined(parts)
        if (made := fusion.derived(name, lambda source: self._load(source).to(self.device))) is not None:
            return made
        if name not in self._weights:
            raise ValueError(f"network {self.network.name!r} needs the weight {name!r}, which the engine lacks")
        weight, spec = self._weights[name], self.network.weights[name]
        if tuple(weight.shape) != spec.shape or weight.dtype != torch_dtype(spec.dtype):
            raise ValueError(
                f"weight {name!r} is {weight.dtype} {list(weight.shape)}, but the network needs "
                f"{spec.dtype} {list(spec.shape)}: the engine's weights and networks do not belong together"
            )
        return weight

    def _joined(self, names: list[str]) -> Tensor:
        """Weights [n, k] one below the other, filled part by part: at most one part is there twice."""
        joined, filled = None, 0
        for name in names:
            part = self._unpacked[name] if name in self._unpacked else self._load(name)
            if joined is None:
                rows = sum(self.network.weights[each].shape[0] for each in names)
                joined = torch.empty(rows, part.shape[1], dtype=part.dtype, device=self.device)
            joined[filled : filled + len(part)] = part
            filled += len(part)
        return joined

    def _compile(self, nodes: list[Node]) -> list[Step]:
        last_use = {name: index for index, node in enumerate(nodes) for name in (*node.outputs, *node.inputs)}
        kept = set(self.network.outputs.values())
        computed = {name for node in nodes for name in node.outputs}
        steps = []
        for index, node in enumerate(nodes):
            arguments = tuple(self._argument(name) for name in node.inputs)
            results = tuple(self._register(name) for name in node.outputs)
            names = dict.fromkeys((*node.inputs, *node.outputs))
            expired = [name for name in names if last_use[name] == index and name in computed - kept]
            expired = tuple(self._register_of[name] for name in expired)
            steps.append((self._bind(node), arguments, results, expired))
        return steps

    def _bind(self, node: Node) -> Callable[..., Any]:
        attributes = attribute_dtypes(node.attributes)
        if node.state is not None:
            layer = self.network.states[node.state].layer
            return partial(STATEFUL_OPERATORS[node.op], self._states[node.state], layer, attributes)
        if node.op not in self._operators:
            raise ValueError(
                f"operator {node.op!r} is unknown; known are {', '.join([*self._operators, *STATEFUL_OPERATORS])}"
            )
        if node.op in ("linear", "moe"):
            attributes["emulate"] = self._emulate
        if node.op == "embedding":
            attributes["dtype"] = torch_dtype(self.network.spec(node.outputs[0]).dtype)
        function = self._operators[node.op]
        return partial(function, **attributes) if attributes else function

    def _unpack_node(self, node: Node) -> Node:
        """The same operator over dense weights, which are dequantized into `unpacked` unless they are there already."""
        if node.op not in WEIGHT_OPERATORS:
            return node
        first = WEIGHT_OPERATORS[node.op]
        inputs, rest = list(node.inputs[:first]), list(node.inputs[first:])
        dtype = torch_dtype(self.network.spec(node.outputs[0] if node.op == "embedding" else inputs[0]).dtype)
        projections = []
        for projection in node.attributes.get("projections", [node.attributes]):
            format, activations = projection["format"], projection["activations"] if self._emulate else None
            count = 1 + scale_count(format, projection["activations"])
            (name, *scales), rest = rest[:count], rest[count:]
            if format != "dense" and name not in self._unpacked:
                weight, *values = (self._load(tensor).to(self.device) for tensor in (name, *scales))
                self._unpacked[name] = unpack(weight, values, format, dtype)
            inputs += [name, scales[-1]] if activations else [name]
            projections.append({"format": "dense", "activations": activations})
        changed = {"projections": projections} if "projections" in node.attributes else projections[0]
        return replace(node, inputs=tuple(inputs), attributes={**node.attributes, **changed})


def _checked_states(network: Network, states: Mapping[str, LayerState]) -> Mapping[str, LayerState]:
    for name, spec in network.states.items():
        if name not in states:
            raise ValueError(f"network {network.name!r} needs the state {name!r}, which was not allocated")
        if states[name].geometry != spec.geometry:
            raise ValueError(f"state {name!r} has {states[name].geometry}, but the network needs {spec.geometry}")
    return states


# Stateful operators: the node's inputs end with the four row descriptions, and the state comes before those.


def _mamba2_window(state: LayerState, layer: int, attributes: dict[str, Any], *tensors: Tensor) -> Tensor:
    return torch_ops.mamba2_window(*tensors[:-4], state, *tensors[-4:], layer)


def _gdn_window(state: LayerState, layer: int, attributes: dict[str, Any], *tensors: Tensor) -> Tensor:
    return torch_ops.gdn_window(*tensors[:-4], state, *tensors[-4:], layer)


def _causal_conv1d_window(state: LayerState, layer: int, attributes: dict[str, Any], *tensors: Tensor) -> Tensor:
    x, weight, *bias = tensors[:-4]
    return torch_ops.causal_conv1d_window(x, weight, bias[0] if bias else None, state, *tensors[-4:])


def _attention_window(state: LayerState, layer: int, attributes: dict[str, Any], *tensors: Tensor) -> Tensor:
    return torch_ops.attention_window(*tensors[:-4], state, *tensors[-4:], attributes["scale"])


STATEFUL_OPERATORS = {
    "mamba2_window": _mamba2_window,
    "gdn_window": _gdn_window,
    "causal_conv1d_window": _causal_conv1d_window,
    "attention_window": _attention_window,
}
