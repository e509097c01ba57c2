"""What this machine has, and which targets therefore work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PACKAGES = {
    "replayssm-trt": ("replayssm-trt",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "safetensors": ("safetensors",),
    "nvidia-modelopt": ("nvidia-modelopt",),
    "nvidia-cuda-nvrtc": ("nvidia-cuda-nvrtc",),
    "cuda-bindings": ("cuda-bindings",),
    "tensorrt": ("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx", "tensorrt-rtx-cu13-bindings"),
    "tensorrt-llm": ("tensorrt-llm",),
}
"""Packages that matter, each with the distributions that provide it."""

DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
OLDEST_TENSORRT = (10, 13)
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities that TensorRT-RTX 1.7 compiles for."""


@dataclass(frozen=True)
class Gpu:
    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Status:
    """`works`: usable here and now, with `detail`; `next_step` is what to do to change or improve that."""

    works: bool
    detail: str
    next_step: str = ""


@dataclass(frozen=True)
class Environment:
    python: str
    gpu: tuple[Gpu, ...]
    driver: str | None
    cuda: str | None
    packages: dict[str, str | None]
    quantization: Status
    targets: dict[str, Status]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> Environment:
    """Look at this machine. Never fails because something is missing: that is what it reports."""
    packages = {name: _first_version(distributions) for name, distributions in PACKAGES.items()}
    gpus, cuda = _torch_devices()
    driver = _driver_version()
    return Environment(
        python=platform.python_version(),
        gpu=gpus,
        driver=driver,
        cuda=cuda,
        packages=packages,
        quantization=assess_quantization(packages),
        targets=assess_targets(packages, gpus, driver),
    )


def assess_targets(packages: dict[str, str | None], gpus: tuple[Gpu, ...], driver: str | None) -> dict[str, Status]:
    """Which targets work with these packages and devices. A pure function of what was found."""
    return {
        "torch": _assess_torch(packages, gpus, driver),
        "tensorrt": _assess_tensorrt(packages, gpus),
        "tensorrt-rtx": _assess_tensorrt_rtx(packages["tensorrt-rtx"], gpus),
        "tensorrt-llm": _assess_tensorrt_llm(packages["tensorrt-llm"]),
    }


def _assess_torch(packages: dict[str, str | None], gpus: tuple[Gpu, ...], driver: str | None) -> Status:
    if packages["torch"] is None:
        return Status(False, "torch is not installed", "pip install torch")
    if gpus:
        return Status(True, f"runs on {gpus[0].name}")
    if driver is not None:
        return Status(
            True,
            "runs on the CPU: there is an NVIDIA driver, but this torch build sees no GPU",
            "install a CUDA build of torch",
        )
    return Status(True, "runs on the CPU: no NVIDIA driver found")


def assess_quantization(packages: dict[str, str | None]) -> Status:
    version = packages["nvidia-modelopt"]
    if version is None:
        return Status(False, "modelopt is not installed", _install("quantize"))
    return Status(True, f"modelopt {version}")


def _assess_tensorrt(packages: dict[str, str | None], gpus: tuple[Gpu, ...]) -> Status:
    version = packages["tensorrt"]
    if version is not None and _version_tuple(version) < OLDEST_TENSORRT:
        oldest = ".".join(map(str, OLDEST_TENSORRT))
        return Status(False, f"TensorRT {version} is older than {oldest}", _install("tensorrt"))
    if version is None:
        return Status(False, "TensorRT is not installed", _install("tensorrt"))
    if not gpus:
        return Status(False, f"TensorRT {version} is installed, but torch sees no GPU to build and run plans on")
    return Status(
        True,
        f"TensorRT {version} builds and runs plans on {gpus[0].name}",
        "compare them with `replayssm check ENGINE`",
    )


def _assess_tensorrt_rtx(version: str | None, gpus: tuple[Gpu, ...]) -> Status:
    if version is None:
        return Status(False, "TensorRT-RTX is not installed", _install("tensorrt-rtx"))
    if not any(gpu.compute_capability in RTX_CAPABILITIES for gpu in gpus):
        return Status(False, f"TensorRT-RTX {version} compiles plans here, which an RTX GPU runs")
    return Status(True, f"TensorRT-RTX {version} compiles and runs plans", "compare them with `replayssm check ENGINE`")


def _assess_tensorrt_llm(version: str | None) -> Status:
    found = f"TensorRT-LLM {version} is installed" if version else "TensorRT-LLM is not installed"
    detail = f"{found}; it runs no plans, and a module of this project decodes inside of it"
    return Status(False, detail, "see docs/trtllm.md and `replayssm trtllm-module --check`")


def _install(extra: str) -> str:
    return f"pip install '.[{extra}]' in the project's folder"


def own_version() -> str:
    """Version of this project as installed; sources that are only on Python's path have none."""
    return _first_version(("replayssm-trt",)) or "not installed"


def _first_version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _driver_version() -> str | None:
    """Version of the loaded NVIDIA kernel driver, from the file that it publishes."""
    try:
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", DRIVER_VERSION_FILE.read_text())
    except OSError:
        return None
    return match.group(1) if match else None


def _torch_devices() -> tuple[tuple[Gpu, ...], str | None]:
    """(GPUs that torch can use, CUDA version that torch was built for)."""
    if importlib.util.find_spec("torch") is None:
        return (), None
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            gpus.append(Gpu(properties.name, capability, properties.total_memory))
    return tuple(gpus), torch.version.cuda
