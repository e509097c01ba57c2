"""Every kernel compiles for every architecture, within the resources that the launch geometry promises."""

import re
import sys
from pathlib import Path

import pytest

from replayssm.plugins import geometry as geo
from replayssm.plugins import nvrtc
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry
from replayssm.plugins.prefill_geometry import VARIANTS, prefill_config
from replayssm.plugins.settings import ReplaySettings

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import kernel_parameters
from shapes import NANO, QWEN122B, SUPER

NVFP4 = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}

OLDEST_DRIVER_PTX = (9, 0)
"""PTX version of CUDA 13.0, the oldest whose drivers are supported."""


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def window_variants() -> list[tuple[str, geo.KernelConfig, int]]:
    """Decode and verify of both operators on all architectures; formats, classes and modes where they matter most."""
    variants = []
    for arch in geo.ARCHITECTURES:
        for geometry in (SUPER, QWEN122B):
            for window in (1, 8):
                variants.append((geometry, ReplaySettings(max_window=window), arch, False))
    for arch in (80, 90):
        for geometry in (NANO, QWEN122B):
            variants.append((geometry, ReplaySettings(max_window=8, state_dtype="float16"), arch, False))
            variants.append((geometry, ReplaySettings(max_window=16, buffer_len=32), arch, False))
            variants.append((geometry, ReplaySettings(max_window=5, state_dtype="bfloat16"), arch, True))
    fp16 = {"activation_dtype": "float16"}
    variants.append((NANO, ReplaySettings(max_window=1, **fp16), 90, True))
    for geometry in (NANO, SUPER):
        variants.append((geometry, ReplaySettings(max_window=1, state_dtype="float16"), 90, False))
    variants.append((NANO, ReplaySettings(max_window=1, buffer_len=32), 90, False))
    variants.append((QWEN122B, ReplaySettings(max_window=1, **fp16), 90, True))
    variants.append((SUPER, ReplaySettings(buffer_len=0), 90, False))
    variants.append((SUPER, ReplaySettings(serial_exact=True, max_window=5), 90, False))
    variants.append((QWEN122B, ReplaySettings(buffer_len=0, max_window=5), 90, False))
    variants.append((QWEN122B, ReplaySettings(serial_exact=True, u_format="exact"), 90, False))
    named = []
    for geometry, settings, arch, embedded in variants:
        config = geo.window_config(geometry, settings, arch, embedded)
        formats = f"{settings.state_dtype}-{settings.activation_dtype}"
        name = f"{config.kernel}-sm{arch}-W{settings.max_window}-L{settings.buffer_len}-{formats}"
        named.append(pytest.param(config, arch, id=f"{name}{'-embedded' if embedded else ''}"))
    return named


def resources(log: str) -> dict[str, int]:
    """Numbers of the assembler's report."""
    found = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "stack": r"(\d+) bytes stack frame",
    }
    numbers = {name: int(re.search(pattern, log)[1]) for name, pattern in found.items()}
    static = re.search(r"(\d+) bytes smem", log)
    return {**numbers, "static_shared": int(static[1]) if static else 0}


@pytest.mark.parametrize(("config", "arch"), window_variants())
def test_window_kernels_compile_without_spills(config: geo.KernelConfig, arch: int, kernel_cache: Path) -> None:
    compiled = nvrtc.compile_kernel(config.kernel, dict(config.defines), arch, cache=kernel_cache)
    used = resources(compiled.log)
    assert used["spill_stores"] == used["spill_loads"] == used["stack"] == 0
    assert used["static_shared"] == 0, "the launch geometry accounts for dynamic shared memory only"
    assert used["registers"] * config.threads <= geo.REGISTERS_PER_SM
    assert "warning" not in compiled.log


@pytest.mark.parametrize("arch", geo.ARCHITECTURES)
def test_convolution_compiles_without_spills(arch: int, kernel_cache: Path) -> None:
    config = geo.conv_config(ConvGeometry(10240, 4), ReplaySettings(max_window=5), True, "bfloat16")
    compiled = nvrtc.compile_kernel(config.kernel, dict(config.defines), arch, cache=kernel_cache)
    used = resources(compiled.log)
    assert used["spill_stores"] == used["spill_loads"] == used["stack"] == 0
    config = geo.conv_config(ConvGeometry(8192, 4), ReplaySettings(max_window=1), False, "bfloat16", rows=2)
    compiled = nvrtc.compile_kernel(config.kernel, dict(config.defines), arch, cache=kernel_cache)
    # Eight blocks a multiprocessor are worth some words that pass through the first-level cache.
    assert resources(compiled.log)["spill_stores"] <= 32


@pytest.mark.parametrize(("head_dim", "query_heads"), [(128, 16), (256, 16)])
def test_attention_compiles(head_dim: int, query_heads: int, kernel_cache: Path) -> None:
    config = geo.attention_config(AttentionGeometry(2, head_dim), ReplaySettings(), query_heads)
    for arch in (80, 90):
        compiled = nvrtc.compile_kernel(config.kernel, dict(config.defines), arch, cache=kernel_cache)
        assert resources(compiled.log)["registers"] * config.threads <= geo.REGISTERS_PER_SM


def ptx_parameters(ptx: str, kernel: str) -> list[str]:
    """Parameter types of an entry, in order."""
    signature = re.search(rf"\.entry {kernel}\((.*?)\)", ptx, re.DOTALL)[1]
    return re.findall(r"\.param \.(\w+)", signature)


@pytest.mark.parametrize("geometry", [SUPER, QWEN122B], ids=["mamba2", "gdn"])
def test_ptx_is_what_a_plugin_may_embed(geometry, kernel_cache: Path) -> None:
    """PTX version of the oldest driver; pointers, then int32 scalars, then pointers; nothing else."""
    config = geo.window_config(geometry, ReplaySettings(max_window=8), 90, embedded=True)
    ptx = nvrtc.compile_kernel(config.kernel, dict(config.defines), 90, "ptx", cache=kernel_cache).image.decode()
    major, minor = map(int, re.search(r"\.version (\d+)\.(\d+)", ptx).groups())
    assert (major, minor) <= OLDEST_DRIVER_PTX
    types = ptx_parameters(ptx, config.kernel)
    declared = ["u64" if "*" in parameter else "u32" for parameter in kernel_parameters(config.kernel)]
    assert types == declared
    assert re.fullmatch("p+s+p+", "".join("p" if kind == "u64" else "s" for kind in types))
    assert config.shared_bytes <= 48 * 1024


@pytest.mark.parametrize(
    ("geometry", "window"),
    [(SUPER, 1), (QWEN122B, 1), (QWEN122B, 5)],
    ids=["mamba2_decode", "gdn_decode", "gdn_window"],
)
def test_overlapping_kernels_wait_before_they_touch_memory(geometry, window: int, kernel_cache: Path) -> None:
    """They start while the launch before them writes what they read."""
    config = geo.window_config(geometry, ReplaySettings(max_window=window), 90)
    assert config.overlaps
    assert not geo.window_config(geometry, ReplaySettings(max_window=window), 80).overlaps
    ptx = nvrtc.compile_kernel(config.kernel, dict(config.defines), 90, "ptx", cache=kernel_cache).image.decode()
    entry = ptx[ptx.index(".entry") :]
    touches = re.search(r"\b(ld|st|atom|red|prefetch)\.(?!param)|\bcp\.async", entry)
    assert entry.index("griddepcontrol.wait") < touches.start()


@pytest.mark.parametrize(
    "kernel", ["mamba2_window", "mamba2_decode", "mamba2_serial", "gdn_window", "gdn_decode", "gdn_serial"]
)
def test_state_parts_appear_as_inputs_and_as_outputs(kernel: str) -> None:
    names = [parameter.split()[-1].lstrip("*") for parameter in kernel_parameters(kernel)]
    inputs = [name.removesuffix("_in") for name in names if name.endswith("_in")]
    assert names[-len(inputs) :] == inputs


def compile_prefill(config: geo.KernelConfig, arch: int, kernel_cache: Path) -> nvrtc.CompiledKernel:
    return nvrtc.compile_kernel(config.kernel, dict(config.defines), arch, cache=kernel_cache)


def assert_prefill_fits(config: geo.KernelConfig, arch: int, kernel_cache: Path) -> None:
    """Blocks of 9 warps and more may spill a few words: 168 registers a thread."""
    used = resources(compile_prefill(config, arch, kernel_cache).log)
    assert used["spill_stores"] <= (0 if config.threads <= 256 else 64)
    assert used["static_shared"] == 0
    assert used["registers"] * config.threads <= geo.REGISTERS_PER_SM


@pytest.mark.parametrize("arch", geo.ARCHITECTURES)
@pytest.mark.parametrize("geometry", [NANO, SUPER, QWEN122B], ids=["nano4b", "super120b", "qwen"])
def test_prefill_compiles_on_every_architecture(geometry, arch: int, kernel_cache: Path) -> None:
    """For one prompt and for many."""
    for prompts in (1, 64):
        config = prefill_config(geometry, ReplaySettings(max_window=5), arch, prompts=prompts)
        assert_prefill_fits(config, arch, kernel_cache)


@pytest.mark.parametrize(
    ("geometry", "arch", "prompts", "embedded"),
    [
        (QWEN122B, 80, 1, False),
        (QWEN122B, 86, 64, True),
        (QWEN122B, 89, 64, False),
        (QWEN122B, 90, 64, False),
        (SUPER, 90, 1, False),
        (QWEN122B, 100, 64, False),
        (SUPER, 103, 64, True),
        (NANO, 120, 1, False),
        (NANO, 121, 1, True),
    ],
)
def test_low_precision_prefill_compiles(geometry, arch: int, prompts: int, embedded: bool, kernel_cache: Path) -> None:
    config = prefill_config(geometry, ReplaySettings(max_window=5, **NVFP4), arch, embedded, prompts=prompts)
    assert {"READOUT_FORMAT", "STOCHASTIC"} <= dict(config.defines).keys()
    assert_prefill_fits(config, arch, kernel_cache)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("geometry", "formats"),
    [
        (NANO, {"activation_dtype": "float16"}),
        (GdnGeometry(1, 2, 64, 48), {"state_dtype": "float16", "u_format": "bfloat16"}),
    ],
    ids=["mamba2", "gdn"],
)
def test_prefill_variants_compile(geometry, formats: dict[str, str], variant, kernel_cache: Path) -> None:
    config = prefill_config(geometry, ReplaySettings(max_window=16, **formats), 90, variant=variant)
    assert compile_prefill(config, 90, kernel_cache).image


@pytest.mark.parametrize("geometry", [NANO, SUPER, QWEN122B], ids=["nano4b", "super120b", "qwen"])
def test_embedded_prefill_fits_a_plugin(geometry, kernel_cache: Path) -> None:
    config = prefill_config(geometry, ReplaySettings(max_window=5), 80, embedded=True)
    assert config.shared_bytes <= 48 * 1024
    used = resources(compile_prefill(config, 80, kernel_cache).log)
    assert used["spill_stores"] == used["static_shared"] == 0


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_prefill_takes_the_arguments_of_the_window_kernel(kind: str) -> None:
    assert kernel_parameters(f"{kind}_prefill") == kernel_parameters(f"{kind}_window")
    formats = {"STATE_FORMAT": 3, "STOCHASTIC": 1, "READOUT_FORMAT": 2}
    own, readout = (kernel_parameters(f"{kind}_{name}", tuple(formats.items())) for name in ("prefill", "readout"))
    assert [part.replace(" *", "* ") for part in own] == [part.replace(" *", "* ") for part in readout]
    assert len(own) > len(kernel_parameters(f"{kind}_prefill")) + 8
