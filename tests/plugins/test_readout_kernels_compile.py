"""The readout kernels compile for every architecture, within the resources that the launch geometry promises."""

import re
import sys
from pathlib import Path

import pytest

from replayssm.plugins import geometry as geo
from replayssm.plugins import nvrtc
from replayssm.plugins.settings import ReplaySettings

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import kernel_parameters
from shapes import NANO, QWEN122B, SUPER

STOCHASTIC = {"state_dtype": "float16", "state_rounding": "stochastic"}
NVFP4 = {**STOCHASTIC, "readout_dtype": "nvfp4"}


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def variants() -> list:
    """What is fast everywhere; the other formats on the oldest and on one architecture with all instructions."""
    chosen = [(SUPER, NVFP4 | {"max_window": 1 if arch % 20 else 5}, arch, False) for arch in geo.ARCHITECTURES]
    chosen += [(QWEN122B, NVFP4 | {"max_window": 5 if arch % 20 else 1}, arch, False) for arch in geo.ARCHITECTURES]
    chosen.append((QWEN122B, NVFP4, 90, False))
    for arch, geometry in ((80, NANO), (90, QWEN122B)):
        chosen.append((geometry, {"readout_dtype": "float8", "max_window": 2}, arch, False))
        chosen.append((geometry, {"state_dtype": "float8"}, arch, False))
        chosen.append((geometry, STOCHASTIC, arch, False))
    chosen += [(geometry, NVFP4 | {"max_window": 5}, 90, True) for geometry in (NANO, SUPER, QWEN122B)]
    return [
        pytest.param(
            geometry,
            ReplaySettings(**settings),
            arch,
            embedded,
            id=f"{geometry.kind}-{geometry.state_shape[1]}-sm{arch}-{'-'.join(str(v) for v in settings.values())}"
            f"{'-embedded' if embedded else ''}",
        )
        for geometry, settings, arch, embedded in chosen
    ]


def spills(log: str) -> int:
    return sum(map(int, re.findall(r"(\d+) bytes spill", log)))


@pytest.mark.parametrize(("geometry", "settings", "arch", "embedded"), variants())
def test_readout_kernels_compile(geometry, settings, arch: int, embedded: bool, kernel_cache: Path) -> None:
    """Without spills in registers where the readout is nvfp4, which is what these kernels are fast at."""
    config = geo.window_config(geometry, settings, arch, embedded)
    defines = dict(config.defines)
    assert config.kernel == f"{geometry.kind}_readout"
    heads, rows, _ = geometry.state_shape
    parts = defines["CTA_WARPS"]
    assert config.blocks_x * defines["CTA_ROWS"] * parts == heads * rows
    assert geometry.heads_per_group * rows // defines["CTA_ROWS"] % parts == 0, "a block stays within a group"
    limits = geo.architecture(arch)
    assert config.shared_bytes <= (geo.EMBEDDED_SHARED_BYTES if embedded else limits.shared_per_block)
    compiled = nvrtc.compile_kernel(config.kernel, defines, arch, cache=kernel_cache)
    assert int(re.search(r"Used (\d+) registers", compiled.log)[1]) * config.threads <= geo.REGISTERS_PER_SM
    assert not re.search(r"[1-9]\d* bytes smem", compiled.log), "the launch geometry counts dynamic shared memory only"
    assert "warning" not in compiled.log
    if settings.readout_dtype == "nvfp4":
        assert spills(compiled.log) <= SPILLED.get((geometry, settings.max_window), 0)


@pytest.mark.parametrize("geometry", [SUPER, QWEN122B], ids=["mamba2", "gdn"])
@pytest.mark.parametrize("formats", [{"state_dtype": "bfloat16", "state_rounding": "stochastic"}, NVFP4])
def test_stores_are_put_together_from_words(geometry, formats, kernel_cache: Path) -> None:
    """ptxas 13.0 exchanges two of four 16-bit numbers that it sees put together into one of 64 bits (on an H200)."""
    config = geo.window_config(geometry, ReplaySettings(**formats), 90)
    ptx = nvrtc.compile_kernel(config.kernel, dict(config.defines), 90, "ptx", kernel_cache).image.decode()
    assert "st.global.u64" in ptx
    assert not re.search(r"bfi\.b64[^;]*, 16, \d+;", ptx)


SPILLED = {(NANO, 5): 56, (QWEN122B, 5): 12}
"""Bytes that a variant may spill: one or two registers, which a fold or a row's beginning reads again once or twice."""


@pytest.mark.parametrize(
    "settings",
    [NVFP4, {"state_dtype": "float8", "readout_dtype": "nvfp4"}, {"readout_dtype": "float8"}, STOCHASTIC],
    ids=["fp16-nvfp4", "fp8-nvfp4", "fp32-fp8", "fp16"],
)
@pytest.mark.parametrize("geometry", [SUPER, QWEN122B], ids=["mamba2", "gdn"])
def test_parameters_are_inputs_scalars_and_the_same_parts_as_outputs(geometry, settings) -> None:
    config = geo.window_config(geometry, ReplaySettings(**settings), 90)
    declared = kernel_parameters(config.kernel, config.defines)
    kinds = "".join("p" if "*" in parameter else "s" for parameter in declared)
    assert re.fullmatch("p+s+p+", kinds)
    names = [parameter.split()[-1].lstrip("*") for parameter in declared]
    inputs = [name.removesuffix("_in") for name in names if name.endswith("_in")]
    assert names[-len(inputs) :] == inputs
    assert ("rounding_seed" in names) == ("state_rounding" in settings)
