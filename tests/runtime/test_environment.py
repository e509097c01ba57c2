"""The doctor's judgement is a pure function of what was found, so every machine can be described here."""

from __future__ import annotations

import json

from replayssm.runtime import environment
from replayssm.runtime.environment import PACKAGES, Gpu, assess_quantization, assess_targets, examine

NOTHING = dict.fromkeys(PACKAGES)
H200 = (Gpu("NVIDIA H200", "9.0", 150_000_000_000),)


def test_cpu_machine_runs_the_torch_target() -> None:
    status = assess_targets(NOTHING | {"torch": "2.13.0"}, (), None)["torch"]
    assert status.works
    assert "no NVIDIA driver" in status.detail


def test_driver_without_usable_gpu_names_the_way_out() -> None:
    status = assess_targets(NOTHING | {"torch": "2.13.0+cpu"}, (), "580.1.2")["torch"]
    assert status.works
    assert status.next_step == "install a CUDA build of torch"


def test_gpu_is_named() -> None:
    assert assess_targets(NOTHING | {"torch": "2.13.0"}, H200, "580.1.2")["torch"].detail == "runs on NVIDIA H200"


def test_missing_torch_is_reported() -> None:
    assert not assess_targets(NOTHING, H200, "580.1.2")["torch"].works


def test_missing_modelopt_names_the_extra() -> None:
    assert assess_quantization(NOTHING).next_step == "pip install '.[quantize]' in the project's folder"
    assert assess_quantization(NOTHING | {"nvidia-modelopt": "0.47.0"}).works


def test_tensorrt_versions_are_compared_as_numbers() -> None:
    """10.9 is older than 10.13, though not as text."""
    from replayssm.plugins.tensorrt_ops import OLDEST_VERSIONS

    assert OLDEST_VERSIONS["tensorrt"] == environment.OLDEST_TENSORRT
    status = assess_targets(NOTHING | {"tensorrt": "10.9.0.34"}, H200, "580.1.2")["tensorrt"]
    assert not status.works
    assert "older than 10.13" in status.detail


def test_plans_need_a_gpu_that_runs_them() -> None:
    found = NOTHING | {"tensorrt": "11.4.0.106", "tensorrt-rtx": "1.7.1.116"}
    assert assess_targets(NOTHING, (), None)["tensorrt-rtx"].next_step.startswith("pip install '.[tensorrt-rtx]'")
    assert {name: s.works for name, s in assess_targets(found, (), None).items() if "tensorrt" in name} == {
        "tensorrt": False,
        "tensorrt-rtx": False,
        "tensorrt-llm": False,
    }
    assert "trtllm-module" in assess_targets(found, (), None)["tensorrt-llm"].next_step
    targets = assess_targets(found, H200, "580.1.2")
    assert targets["tensorrt"].works
    assert "replayssm check" in targets["tensorrt"].next_step
    assert not targets["tensorrt-rtx"].works, "it compiles for no H200"
    rtx = (Gpu("NVIDIA GeForce RTX 5090", "12.0", 32 << 30),)
    assert assess_targets(found, rtx, "580.1.2")["tensorrt-rtx"].works


def test_driver_version_is_read_from_the_kernel_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    monkeypatch.setattr(environment, "DRIVER_VERSION_FILE", path)
    assert examine().driver == "580.159.04"


def test_report_of_this_machine_is_json() -> None:
    report = json.loads(json.dumps(examine().to_json()))
    assert {"gpu", "driver", "packages", "targets"} <= report.keys()
    assert report["packages"]["torch"]


def test_sources_without_an_installation_have_a_name_for_their_version(monkeypatch) -> None:
    def absent(name: str) -> str:
        raise environment.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.importlib.metadata, "version", absent)
    assert environment.own_version() == "not installed"
