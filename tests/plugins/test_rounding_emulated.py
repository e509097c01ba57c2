"""Functions of the kernels that round a state, compiled for the host, against the reference in every bit."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import nvrtc
from replayssm.plugins.reference.formats import round_stochastic

sys.path.append(str(Path(__file__).parent / "emulation"))
from emulate import PRIMITIVES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

SOURCE = """
#include "state_formats.cuh"

extern "C" void round_all(const float* s, float down, const u32* words, u32* codes, int calls) {
    for (int n = 0; n < calls; n++)
        for (int i = 0; i < 4; i++)
            codes[4 * n + i] = round_stochastic_e4m3(s + 16 * n + 4 * i, down, *(const u32(*)[4])(words + 4 * n), i);
}
"""


@pytest.fixture(scope="module")
def round_all(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounding")
    (folder / "rounding.cu").write_text(SOURCE)
    device = (nvrtc.KERNEL_DIR / "primitives.cuh").read_text().replace("#pragma once\n", "")
    host = PRIMITIVES.read_text().replace("#pragma once\n", "")
    defines = "#define STATE_FORMAT 3\n#define STOCHASTIC 1\n#define ACTIVATION_FORMAT 2\n#define COLUMNS 128\n"
    source = nvrtc.kernel_source("rounding", folder)
    assert device in source
    (folder / "rounding.cpp").write_text(defines + source.replace(device, host))
    library = folder / "rounding.so"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", str(folder / "rounding.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(library)).round_all


@pytest.mark.parametrize("exponent", [-30, 0, 12])
def test_four_fp8_codes_at_once(round_all, exponent: int) -> None:
    """Numbers down to fp8's subnormal ones, and those that the last random bit pushes up or just not."""
    random, calls = torch.Generator().manual_seed(exponent), 2000
    words = torch.randint(0, 256, (calls, 16), generator=random).to(torch.uint8)
    r = words.int() + 256 * words.roll(-1, 1).int()
    x = torch.randn(calls, 16, generator=random) * torch.exp2(torch.randint(-14, 6, (calls, 16), generator=random))
    at_the_edge = (1 << 20) - (r << 4 | 8) - torch.randint(0, 2, r.shape, generator=random)
    x[::2] = torch.copysign((at_the_edge.int() | 0x3F800000).view(torch.float32), x)[::2]
    codes = torch.empty(calls, 16, dtype=torch.uint8)
    s, down = (x * 2.0**exponent).contiguous(), 2.0 ** (-120 - exponent)
    round_all(
        ctypes.c_void_p(s.data_ptr()),
        ctypes.c_float(down),
        ctypes.c_void_p(words.data_ptr()),
        ctypes.c_void_p(codes.data_ptr()),
        calls,
    )
    assert torch.equal(codes, round_stochastic(x, r, torch.float8_e4m3fn).view(torch.uint8))
