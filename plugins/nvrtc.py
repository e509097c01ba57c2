"""Runtime compilation of the kernels with NVRTC, and a cache of the results on disk.

Works without a GPU. `compile_kernel` returns PTX for what embeds it (TensorRT plugins) and a cubin for what loads it. A
cache entry is keyed by everything that went in: flattened source, options, architecture and compiler version. Entries
are written to a temporary file and renamed, and carry a checksum, so several processes may share a cache and a damaged
entry is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KERNEL_DIR = Path(__file__).parent / "kernels"
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)
"""Compute capabilities (major * 10 + minor) that the kernels support."""

_INCLUDE = re.compile(r'^#include "([^"]+)"\s*$', re.MULTILINE)
_MAGIC = b"replayssm-kernel-1\n"


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


@dataclass(frozen=True)
class CompiledKernel:
    """Output of one compilation. `kind` is "ptx" (text) or "cubin" (ELF); `log` holds warnings and, for cubins, the
    assembler's resource report."""

    name: str
    arch: int
    kind: str
    image: bytes
    log: str
    key: str


@functools.cache
def kernel_source(name: str, directory: Path = KERNEL_DIR) -> str:
    """Source of `directory`/`name`.cu with its includes spliced in, each file once.

    Files that `directory` lacks come from the package's kernels.
    """
    seen: set[str] = set()

    def splice(file_name: str) -> str:
        if file_name in seen:
            return ""
        seen.add(file_name)
        path = directory / file_name
        if not path.is_file():
            path = KERNEL_DIR / file_name
        if not path.is_file():
            raise ValueError(f"kernel source {file_name!r} does not exist in {directory}")
        text = path.read_text().replace("#pragma once\n", "")
        # `#line` keeps compiler messages pointing at the file that a line came from.
        text = _INCLUDE.sub(lambda match: splice(match[1]) or "\n", text)
        return f'#line 1 "{file_name}"\n{text}'

    return splice(f"{name}.cu")


def cache_dir() -> Path:
    """$REPLAYSSM_CACHE_DIR, else replayssm/kernels below $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("REPLAYSSM_CACHE_DIR"):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "replayssm" / "kernels"


@functools.cache
def compiler_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that is loaded."""
    nvrtc = _nvrtc()
    return tuple(_check(nvrtc.nvrtcVersion()))


def compile_kernel(
    name: str,
    defines: Mapping[str, int | str],
    arch: int,
    kind: str = "cubin",
    cache: Path | None = None,
    source_dir: Path = KERNEL_DIR,
) -> CompiledKernel:
    """Compile `source_dir`/`name`.cu for compute capability `arch`, or fetch it from the cache.

    defines: preprocessor constants. kind: "ptx" or "cubin". cache: its folder, `cache_dir()` by default.
    Raises KernelCompileError with the compiler's log, ValueError for an unknown architecture or kind.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture {arch} is not supported; expected one of {', '.join(map(str, ARCHITECTURES))}")
    if kind not in ("ptx", "cubin"):
        raise ValueError(f'kind must be "ptx" or "cubin", got {kind!r}')
    source = kernel_source(name, source_dir)
    options = kernel_options(defines, arch, kind)
    version = ".".join(map(str, compiler_version()))
    text = "\0".join((name, source, *options, str(arch), kind, version))
    key = hashlib.sha256(text.encode()).hexdigest()
    path = (cache or cache_dir()) / f"{name}-{arch}-{key[:32]}.{kind}"
    cached = _read_entry(path)
    if cached is None:
        cached = _compile(name, source, options, kind)
        _write_entry(path, *cached)
    image, log = cached
    return CompiledKernel(name, arch, kind, image, log, key)


def kernel_options(defines: Mapping[str, int | str], arch: int, kind: str) -> tuple[str, ...]:
    """NVRTC options; PTX targets the virtual architecture and loads on every later GPU.

    A kernel with USE_WGMMA set uses instructions of its own architecture alone.
    """
    suffix = "a" if defines.get("USE_WGMMA") else ""
    target = f"compute_{arch}{suffix}" if kind == "ptx" else f"sm_{arch}{suffix}"
    report = () if kind == "ptx" else ("--ptxas-options=-v",)
    flags = tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))
    return (f"--gpu-architecture={target}", "--std=c++17", "--device-as-default-execution-space", *report, *flags)


def _nvrtc():
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeError("compiling kernels needs the packages cuda-bindings and nvidia-cuda-nvrtc") from error
    return nvrtc


def _check(result: tuple):
    """Values of a cuda.bindings call, or KernelCompileError."""
    code, *values = result
    nvrtc = _nvrtc()
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(code)[1].decode()}")
    return values[0] if len(values) == 1 else values


def _compile(name: str, source: str, options: tuple[str, ...], kind: str) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        text = bytes(log).rstrip(b"\0").decode(errors="replace")
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelCompileError(f"{name}.cu does not compile with {' '.join(options)}:\n{text}")
        size, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            if kind == "ptx"
            else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        image = bytearray(_check(size(program)))
        _check(get(program, image))
        return bytes(image), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read_entry(path: Path) -> tuple[bytes, str] | None:
    """(image, log) of a cache entry; None if it is absent or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not content.startswith(_MAGIC) or len(content) < len(_MAGIC) + 40:
        return None
    digest, body = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != digest:
        return None
    log_size = int.from_bytes(body[:8], "little")
    return body[8 + log_size :], body[8 : 8 + log_size].decode()


def _write_entry(path: Path, image: bytes, log: str) -> None:
    """Best effort: a read-only cache costs recompilation, not correctness."""
    encoded = log.encode()
    body = len(encoded).to_bytes(8, "little") + encoded + image
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".kernel-")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
