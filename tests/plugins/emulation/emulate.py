"""Compiles a kernel for the host against primitives.h beside this file, and calls it like a GPU would.

The emulated operators have the reference's names, so they can stand wherever an implementation is tested.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

import torch

from replayssm.plugins import arguments, launch, nvrtc
from replayssm.plugins import geometry as geo
from replayssm.plugins.geometry import KernelConfig

PRIMITIVES = Path(__file__).parent / "primitives.h"


def kernel_parameters(kernel: str, defines: tuple[tuple[str, int], ...] = ()) -> list[str]:
    """Declarations of a kernel's parameters, in order, such as "const float* A_log".

    defines: of the variant, for kernels whose state parts depend on it.
    """
    source = re.sub(r"//[^\n]*", "", nvrtc.kernel_source(kernel))
    match = re.search(rf"KERNEL\([^)]*\)\s*{kernel}\((.*?)\)\s*\{{", source, re.DOTALL)
    declared = match[1]
    if re.search(r"\b[A-Z_]+_(IN|OUT|STRIDES|SCALARS)\b", declared):
        macros = "\n".join(re.findall(r"^#(?:define|if|elif|else|endif)(?:.*\\\n)*.*$", source, re.MULTILINE))
        text = "\n".join(f"#define {name} {value}" for name, value in defines) + f"\n{macros}\nDECLARED {declared}"
        done = subprocess.run(["g++", "-E", "-P", "-x", "c++", "-"], input=text, capture_output=True, text=True)
        declared = done.stdout.split("DECLARED")[1]
    return [" ".join(parameter.split()) for parameter in declared.split(",")]


def emulated_source(config: KernelConfig) -> str:
    device = (nvrtc.KERNEL_DIR / "primitives.cuh").read_text().replace("#pragma once\n", "")
    host = PRIMITIVES.read_text().replace("#pragma once\n", "")
    source = nvrtc.kernel_source(config.kernel)
    assert device in source
    parameters = kernel_parameters(config.kernel, config.defines)
    names = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters)
    defines = "\n".join(f"#define {name} {value}" for name, value in config.defines)
    return f"""{defines}
{source.replace(device, host)}
extern "C" void emulate(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, unsigned seed,
                        {", ".join(parameters)}) {{
    emulation::body = [=] {{ {config.kernel}({names}); }};
    emulation::run_grid(grid_x, grid_y, grid_z, threads, shared_bytes, seed);
}}
"""


@cache
def _build_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="replayssm-emulation-"))


@cache
def emulated(config: KernelConfig):
    """The emulated kernel's entry. Raises RuntimeError with the host compiler's messages."""
    source = emulated_source(config)
    path = _build_dir() / f"{config.kernel}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.cpp"
    path.write_text(source)
    library = path.with_suffix(".so")
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"the host compiler refuses {config.kernel}:\n{done.stderr[:4000]}")
    return ctypes.CDLL(str(library)).emulate


class Emulated:
    """Operators that run the kernels of compute capability `arch` on the CPU.

    cta_rows overrides the launch geometry. parts: of a state that a block of gdn_window works through; one, and as many
    as it may, in turns if it is not given.
    """

    def __init__(self, arch: int = 90, cta_rows: int | None = None, parts: int | None = None) -> None:
        self.arch, self.cta_rows, self.parts, self.seed = arch, cta_rows, parts, 0

    def _call(self, config: KernelConfig, values: list, rows: int, grid_z: int = 1, grid_x: int = 0) -> None:
        self.seed += 1
        packed = [
            ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in values
        ]
        emulated(config)(
            grid_x or config.blocks_x,
            rows,
            grid_z,
            config.threads,
            config.shared_bytes,
            ctypes.c_uint(self.seed),
            *packed,
        )

    def _window_config(self, state) -> KernelConfig:
        return geo.window_config(state.geometry, state.settings, self.arch, cta_rows=self.cta_rows, ahead_rows=1)

    def mamba2_window(self, x, dt, B, C, A_log, D, dt_bias, state, *rest):
        *index, layer = rest
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        build = partial(arguments.mamba2_arguments, x, dt, B, C, A_log, D, dt_bias, state, tuple(index), layer, out)
        self._call_window(state, x, index, build)
        return out

    def gdn_window(self, q, k, v, a, b, A_log, dt_bias, state, *rest):
        *index, layer = rest
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        build = partial(arguments.gdn_arguments, q, k, v, a, b, A_log, dt_bias, state, tuple(index), layer, out)
        self._call_window(state, v, index, build)
        return out

    def _prefill_config(self, state, tokens: int, rows: int) -> KernelConfig | None:
        return launch.prefill_kernel(state, tokens, rows, self.arch)

    def _call_window(self, state, packed, index, build) -> None:
        """As `launch` does it."""
        rows = index[0].shape[0]
        config = self._window_config(state)
        prefill = self._prefill_config(state, packed.shape[0], rows)
        values = build(skip_prefill=prefill is not None)
        parts = self.parts or (dict(config.defines).get("MAX_PARTS", 1) if self.seed % 2 else 1)
        self._call(config, values, rows, grid_x=config.blocks_x // parts)
        if prefill is not None:
            self._call(prefill, values, rows)

    def causal_conv1d_window(self, x, weight, bias, state, *index):
        dtype = str(weight.dtype).removeprefix("torch.")
        # Small as tests are, two rows a block where there are two.
        together = 2 if index[0].shape[0] % 2 == 0 and state.settings.max_window == 1 else 1
        config = geo.conv_config(state.geometry, state.settings, bias is not None, dtype, together)
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        values = arguments.conv_arguments(x, weight, bias, state, index, out)
        chunks = launch.conv_chunks(x.shape[0], index[0].shape[0], state)
        self._call(config, values, index[0].shape[0] // together, chunks)
        return out

    def attention_window(self, q, k, v, state, *rest):
        *index, scale = rest
        queries = geo.attention_queries(q.shape[1], state.geometry, q.shape[0], index[0].shape[0])
        config = geo.attention_config(state.geometry, state.settings, q.shape[1], queries)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)
        values = arguments.attention_arguments(q, k, v, state, tuple(index), scale, out)
        self._call(config, values, geo.attention_tiles(config), grid_x=q.shape[0])
        return out
