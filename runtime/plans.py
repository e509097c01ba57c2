"""Loads and runs the plans of the TensorRT targets; nothing else here touches the library.

A plan has one execution context per *bucket* of sizes, whose shapes are set once: an embedded plugin leaks a CUDA
module whenever a context's shapes change (NVIDIA/TensorRT#4849). Calls are padded to their bucket with rows of no slot
and tokens of no row. All buffers are torch's and stay where they are, so that `cuda_graphs` can capture a call.
Contexts share one scratch buffer because they run one after the other on the caller's stream, and state is bound in
place: each part's input and output name get one address.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from replayssm.plugins import tensorrt_ops
from replayssm.plugins.manifest import EngineDirectoryError
from replayssm.plugins.network import TensorSpec
from replayssm.plugins.state import torch_dtype
from replayssm.plugins.tensorrt_ops import PLANS_FILE, PLANS_VERSION, error_logger
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.plan_calls import Bucket

Tensor = torch.Tensor

PLAN_DEVICE = "cuda"
"""Type of the device that plans run on."""


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
        self._logger = error_logger(self.module)
        self._runtime = self.module.Runtime(self._logger)
        self.plans = {file: self._load(file, profiles) for file, profiles in self._files().items()}
        size = max((plan.engine.device_memory_size_v2 for plan in self.plans.values()), default=0)
        self.scratch = torch.empty(max(size, 256), dtype=torch.uint8, device=device)

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
            compiler, reasons = self.description["compiler"], "; ".join(list(self._logger.errors)[-3:])
            raise EngineDirectoryError(
                f"{self.module.__name__} {self.module.__version__} does not take {path}, which {compiler['module']} "
                f"{compiler['version']} wrote ({reasons or 'no reason given'}): build the engine again on this machine"
            )
        if engine.num_optimization_profiles != len(profiles) or engine.num_aux_streams:
            raise EngineDirectoryError(
                f"{path} has {engine.num_optimization_profiles} profiles and {engine.num_aux_streams} auxiliary "
                f"streams, expected {len(profiles)} and none: build the engine again"
            )
        return Plan(self, path, engine, profiles)


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
