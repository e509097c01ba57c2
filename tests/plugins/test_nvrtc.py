"""Compilation of kernels and its cache, without a GPU."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from replayssm.plugins import nvrtc

SOURCE = """#include "value.cuh"
extern "C" __global__ void probe(const float* input, int scale, float* output) {
    output[threadIdx.x] = VALUE * scale * input[threadIdx.x];
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a small kernel and a header; unique per test, so that in-memory caches do not interfere."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "probe.cu").write_text(SOURCE)
    (folder / "value.cuh").write_text("#pragma once\n#define VALUE FACTOR\n")
    return folder


def compile_probe(sources: Path, cache: Path, factor: int = 2, arch: int = 90, kind: str = "cubin"):
    return nvrtc.compile_kernel("probe", {"FACTOR": factor}, arch, kind, cache=cache, source_dir=sources)


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("probe-*"))


def test_cubin_and_ptx(sources: Path, tmp_path: Path) -> None:
    cubin = compile_probe(sources, tmp_path)
    assert cubin.image.startswith(b"\x7fELF")
    assert "registers" in cubin.log
    ptx = compile_probe(sources, tmp_path, kind="ptx").image.decode()
    assert ".target sm_90" in ptx
    assert ".visible .entry probe(" in ptx


def test_second_compilation_reads_the_cache(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_probe(sources, tmp_path)

    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_compile", refuse)
    assert compile_probe(sources, tmp_path) == first


def test_key_covers_defines_architecture_kind_and_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        compile_probe(sources, tmp_path).key,
        compile_probe(sources, tmp_path, factor=3).key,
        compile_probe(sources, tmp_path, arch=80).key,
        compile_probe(sources, tmp_path, kind="ptx").key,
    }
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: (99, 9))
    keys.add(compile_probe(sources, tmp_path).key)
    assert len(keys) == 5
    assert len(entries(tmp_path)) == 5


def test_key_covers_headers(sources: Path, tmp_path: Path) -> None:
    before = compile_probe(sources, tmp_path)
    (sources / "value.cuh").write_text("#define VALUE (FACTOR + 1)\n")
    nvrtc.kernel_source.cache_clear()
    assert compile_probe(sources, tmp_path).key != before.key


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_damaged_entry_is_compiled_again(sources: Path, tmp_path: Path, damage: str) -> None:
    good = compile_probe(sources, tmp_path)
    (entry,) = entries(tmp_path)
    content = bytearray(entry.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[-1] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"something else entirely, long enough to hold a header and a checksum")
    entry.write_bytes(content)
    again = compile_probe(sources, tmp_path)
    assert again.key == good.key
    assert again.image == good.image
    assert len(entry.read_bytes()) > len(good.image)


def _compile_in_process(arguments: tuple[Path, Path]) -> bytes:
    sources, cache = arguments
    return compile_probe(sources, cache).image


def test_processes_share_a_cache(sources: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(3) as pool:
        images = list(pool.map(_compile_in_process, [(sources, tmp_path)] * 6))
    assert len(set(images)) == 1
    assert len(entries(tmp_path)) == 1
    assert not list(tmp_path.glob(".kernel-*"))


def test_unwritable_cache_only_costs_the_cache(sources: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert compile_probe(sources, blocked / "cache").image.startswith(b"\x7fELF")


def test_compiler_log_names_file_and_line(sources: Path, tmp_path: Path) -> None:
    (sources / "value.cuh").write_text("#define VALUE FACTOR\n\nint broken = undeclared;\n")
    with pytest.raises(nvrtc.KernelCompileError, match=r"value\.cuh\(3\).*undeclared"):
        compile_probe(sources, tmp_path)
    assert not entries(tmp_path)


def test_bad_requests(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture 75"):
        compile_probe(sources, tmp_path, arch=75)
    with pytest.raises(ValueError, match='"ptx" or "cubin"'):
        compile_probe(sources, tmp_path, kind="fatbin")
    with pytest.raises(ValueError, match=r"nowhere\.cu"):
        nvrtc.compile_kernel("nowhere", {}, 90, cache=tmp_path)


def test_cache_dir_from_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    assert nvrtc.cache_dir() == tmp_path
    monkeypatch.delenv("REPLAYSSM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.cache_dir() == tmp_path / "replayssm" / "kernels"
