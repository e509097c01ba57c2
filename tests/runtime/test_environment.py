"""The doctor's judgement is a pure function of what was found, so every machine can be described here."""

from __future__ import annotations

import json

import pytest

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


@pytest.mark.parametrize(("version", "word"), [("10.9.0.34", "older than 10.15"), ("11.4.0.106", "does not run them")])
def test_tensorrt_versions_are_compared_as_numbers(version: str, word: str) -> None:
    """10.9 is older than 10.15, though not as text."""
    status = assess_targets(NOTHING | {"tensorrt": version}, H200, "580.1.2")["tensorrt"]
    assert not status.works
    assert word in status.detail


def test_tensorrt_rtx_compiles_but_does_not_run() -> None:
    assert assess_targets(NOTHING, (), None)["tensorrt-rtx"].next_step.startswith("pip install '.[tensorrt-rtx]'")
    status = assess_targets(NOTHING | {"tensorrt-rtx": "1.7.1.116"}, (), None)["tensorrt-rtx"]
    assert not status.works
    assert "compiles plans" in status.detail


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
