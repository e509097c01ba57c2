"""Runs the plans of the TensorRT targets with the call signature of `Executor`. Nothing else here imports TensorRT.

A plan has one execution context per *bucket* of sizes, whose shapes are set once: an embedded plugin leaks a CUDA
module whenever a context's shapes change (NVIDIA/TensorRT#4849). Calls are padded to their bucket with rows of no slot
and tokens of no row. All buffers are torch's and stay where they are, so that `cuda_graphs` can capture a call.
Contexts share one scratch buffer because they run one after the other on the caller's stream, and state is bound in
place: each part's input and output name get one address.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from replayssm.plugins import tensorrt_ops
from replayssm.plugins.contract import PAD_SLOT_ID
from replayssm.plugins.launch import known_prefill_rows
from replayssm.plugins.manifest import EngineDirectoryError
from replayssm.plugins.network import Network, TensorSpec
from replayssm.plugins.state import LayerState, torch_dtype
from replayssm.plugins.tensorrt_ops import OUTPUT_SUFFIX, PLANS_FILE, PLANS_VERSION
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.executor import STATEFUL_OPERATORS
from replayssm.runtime.functional_ops import OPERATORS, attribute_dtypes
from replayssm.runtime.plan_calls import Bucket, choose_bucket, max_tokens, row_groups, run_in_parts

Tensor = torch.Tensor

PLAN_DEVICE = "cuda"
"""Type of the device that plans run on."""

_PADDING = {"state_batch_indices": PAD_SLOT_ID}


class PlanRuntime:
    """The plans of an engine directory on one device, and what their executors share.

    Raises ValueError where TensorRT is missing or the device is no GPU, and EngineDirectoryError for plans that this
    TensorRT or this GPU does not take.
    """

    def __init__(self, directory: Path, target: str, device: torch.device) -> None:
        self.directory, self.device = directory, device
        self.module = tensorrt_ops.load_module(target)
        if device.type != PLAN_DEVICE:
            raise ValueError(
                f"the plans of {directory} run on a GPU, not on device {device}: use --device cuda, on a machine that "
                "has one"
            )
        self.description = self.describe(directory)
        self.profiles = self.description["profiles"]
        self._check_device()
        self._logger = _logger(self.module)
        self._runtime = self.module.Runtime(self._logger)
        self.plans = {file: self._load(file, profiles) for file, profiles in self._files().items()}
        size = max((plan.engine.device_memory_size_v2 for plan in self.plans.values()), default=0)
        self.scratch = torch.empty(max(size, 256), dtype=torch.uint8, device=device)

    def executor(
        self, network: Network, states: Mapping[str, LayerState], weights: Mapping[str, Tensor]
    ) -> PlanExecutor | PhaseExecutor | SegmentExecutor:
        """What runs `network`: its one plan, one for windows and one for prefill rows, or its segments with the
        operators of `plugins` between them."""
        described = self.description["networks"][network.name]
        if isinstance(described, list):
            return SegmentExecutor(self, network, described, states, weights)
        window = PlanExecutor(self, network, described["file"], described["aliases"], states)
        if "prefill_file" not in described:
            return window
        prefill = PlanExecutor(self, network, described["prefill_file"], described["aliases"], states)
        settings = next((state.settings for state in states.values()), None)
        return PhaseExecutor(window, prefill, settings.max_window if settings else 1)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes: of the plan files, of the contexts' shared scratch buffer, and of what is in use on the GPU."""
        files = sum((self.directory / file).stat().st_size for file in self.plans)
        return {"plans": files, "scratch": self.scratch.nbytes, "device_in_use": self.used_bytes()}

    def used_bytes(self) -> int:
        """Memory of the device that anything uses, beside what torch keeps free for itself."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return total - free - unused

    @staticmethod
    def describe(directory: Path) -> dict[str, Any]:
        """The content of PLANS_FILE. Raises EngineDirectoryError if it is not of this version."""
        path = directory / PLANS_FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            version, symbols = value["version"], {"T", "R", "B"}
            known = version == PLANS_VERSION and all(set(p["sizes"]) == symbols for p in value["profiles"])
            known = known and isinstance(value["networks"], dict) and {"module", "version"} <= value["compiler"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineDirectoryError(f"{path} does not describe plans ({error!r}): build the engine again") from error
        if not known:
            raise EngineDirectoryError(
                f"{path} has version {version!r}, this replayssm runs version {PLANS_VERSION}: build the engine again"
            )
        return value

    def _check_device(self) -> None:
        built_for = self.description.get("arch")
        if built_for is None or self.device.type != "cuda":
            return
        major, minor = torch.cuda.get_device_capability(self.device)
        if built_for != major * 10 + minor:
            raise EngineDirectoryError(
                f"the plans of {self.directory} are for compute capability {built_for / 10}, this GPU has "
                f"{major}.{minor}: build the engine on a GPU like the one that runs it"
            )

    def _files(self) -> dict[str, list[dict[str, Any]]]:
        """Every plan's file and its profiles."""
        files: dict[str, list[dict[str, Any]]] = {}
        for described in self.description["networks"].values():
            for step in described if isinstance(described, list) else [described]:
                split = "prefill_file" in step
                if "file" in step:
                    files[step["file"]] = self.profiles[:-1] if split else self.profiles
                if split:
                    files[step["prefill_file"]] = self.profiles[-1:]
        return files

    def _load(self, file: str, profiles: list[dict[str, Any]]) -> Plan:
        path = self.directory / file
        with open(path, "rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            compiler = self.description["compiler"]
            raise EngineDirectoryError(
                f"{self.module.__name__} {self.module.__version__} does not take {path}, which {compiler['module']} "
                f"{compiler['version']} wrote ({self._logger.summary}): build the engine again on this machine"
            )
        if engine.num_optimization_profiles != len(profiles) or engine.num_aux_streams:
            raise EngineDirectoryError(
                f"{path} has {engine.num_optimization_profiles} profiles and {engine.num_aux_streams} auxiliary "
                f"streams, expected {len(profiles)} and none: build the engine again"
            )
        return Plan(self, path, engine, profiles)


def _logger(module: Any) -> Any:
    """A logger that keeps the last errors and prints nothing."""

    class Collector(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                self.errors = [*self.errors[-2:], message]

        @property
        def summary(self) -> str:
            return "; ".join(self.errors) or "no reason given"

    return Collector()


class Plan:
    """One deserialized plan, and its contexts by bucket."""

    def __init__(self, runtime: PlanRuntime, path: Path, engine: Any, profiles: list[dict[str, Any]]) -> None:
        self.runtime, self.path, self.engine, self.profiles = runtime, path, engine, profiles
        self.contexts: dict[Bucket, Context] = {}

    def check(self, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> None:
        """Raise EngineDirectoryError unless the plan has exactly these inputs and outputs."""
        modes, engine = self.runtime.module.TensorIOMode, self.engine
        expected = {name: (modes.INPUT, spec) for name, spec in inputs.items()}
        expected |= {name: (modes.OUTPUT, spec) for name, spec in outputs.items()}
        names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        if names != expected.keys():
            different = ", ".join(sorted(names ^ expected.keys())[:4])
            raise EngineDirectoryError(f"{self.path} differs from its network in {different}: build the engine again")
        types = self.runtime.module.DataType
        for name, (mode, spec) in expected.items():
            dtype = getattr(types, tensorrt_ops.DATA_TYPES[spec.dtype])
            shape = tuple(-1 if isinstance(size, str) else size for size in spec.shape)
            found = engine.get_tensor_mode(name), engine.get_tensor_dtype(name), tuple(engine.get_tensor_shape(name))
            if found != (mode, dtype, shape):
                raise EngineDirectoryError(
                    f"{self.path}: tensor {name} is {found[1]} {list(found[2])}, expected {spec.dtype} {list(shape)}: "
                    "the plan was built for other sizes; build the engine again, or leave out options that change them"
                )

    def check_aliases(self, aliases: Mapping[str, str], declared: bool) -> None:
        """Raise EngineDirectoryError if TensorRT itself says that an output lies elsewhere than its input."""
        query = getattr(self.engine, "get_aliased_input_tensor", None)  # from 10.15 on
        for output, source in aliases.items() if declared and query is not None else ():
            found = query(output)
            # For plugins the documentation promises no answer; a wrong one would be an error.
            if found and found != source:
                raise EngineDirectoryError(
                    f"{self.path}: TensorRT aliases {output} with {found} instead of {source}: build the engine again"
                )

    def layers(self) -> list[Any]:
        """What the engine inspector says about each layer: objects with Inputs and Outputs, or only names."""
        form = self.runtime.module.LayerInformationFormat.JSON
        return json.loads(self.engine.create_engine_inspector().get_engine_information(form))["Layers"]

    def context(
        self,
        bucket: Bucket,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        bound: Mapping[str, int],
    ) -> Context:
        """The context of a bucket, with buffers for `outputs` and the addresses `bound`."""
        if bucket not in self.contexts:
            self.contexts[bucket] = Context(self, bucket, inputs, outputs, bound)
        return self.contexts[bucket]


class Context:
    """An execution context whose shapes never change. outputs: its own buffers, overwritten by every run."""

    def __init__(
        self,
        plan: Plan,
        bucket: Bucket,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        bound: Mapping[str, int],
    ) -> None:
        runtime, self._plan = plan.runtime, plan
        self._device = runtime.device
        strategy = runtime.module.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = plan.engine.create_execution_context(strategy)
        if self._context is None:
            raise InferenceError(f"{plan.path}: TensorRT made no execution context: is the GPU's memory full?")
        self._context.set_device_memory(runtime.scratch.data_ptr(), runtime.scratch.nbytes)
        self._require(self._context.set_optimization_profile_async(bucket.profile, self._stream), "profile", bucket)
        for name, spec in inputs.items():
            if any(isinstance(size, str) for size in spec.shape):
                self._require(self._context.set_input_shape(name, bucket.shape(spec.shape)), name, bucket)
        self.outputs = {
            name: torch.zeros(bucket.shape(spec.shape), dtype=torch_dtype(spec.dtype), device=self._device)
            for name, spec in outputs.items()
        }
        for name, address in {**bound, **{name: out.data_ptr() for name, out in self.outputs.items()}}.items():
            self._require(self._context.set_tensor_address(name, address), name, bucket)
        unknown = self._context.infer_shapes()
        self._require(not unknown, f"shapes of {', '.join(unknown)}", bucket)

    def run(self, addresses: Mapping[str, int] | None = None) -> None:
        """Run on the current stream, with these addresses beside those bound before. Graphs can capture it."""
        for name, address in (addresses or {}).items():
            self._context.set_tensor_address(name, address)
        if not self._context.execute_async_v3(self._stream):
            raise InferenceError(f"{self._plan.path}: TensorRT did not run the plan; start again with a new session")

    def address(self, name: str) -> int:
        return self._context.get_tensor_address(name)

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def _require(self, success: bool, what: str, bucket: Bucket) -> None:
        if not success:
            raise EngineDirectoryError(
                f"{self._plan.path}: TensorRT refused {what} of a call with {dict(bucket.sizes)}: "
                "build the engine again"
            )


class _Staged:
    """Calls padded to their buckets: what both executors share."""

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
            for tensor, described_as in tensorrt_ops.state_tensors(
                name, state.geometry, state.settings, state.slots
            ).items():
                specs[tensor] = TensorSpec(*described_as)
                part = tensor.removeprefix(f"{name}.")
                value = state.error_flag if part == tensorrt_ops.ERROR_FLAG else state[part]
                self.bound[tensor] = self.bound[tensor + OUTPUT_SUFFIX] = value
        if self.aliases != {name + OUTPUT_SUFFIX: name for name in specs}:
            raise EngineDirectoryError(f"{runtime.directory}: the plan's state is not the network's: build it again")
        self._names = {public: tensorrt_ops.output_tensor(public, network.inputs) for public in network.outputs}
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
