"""What `aot_impl` returns, launched as a plan launches it, under the CPU emulation against the references.

Dense tensors in the plugin's order, its scalars, its grid, at most 48 KiB of shared memory: a wrong argument order or
stride shows as a wrong result. On a GPU, `test_tensorrt_ops_gpu` launches the PTX itself.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from replayssm.plugins import tensorrt_ops
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.geometry import EMBEDDED_SHARED_BYTES
from replayssm.plugins.settings import ReplaySettings

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
import embedded_plugins
from emulate import Emulated
from window_steps import Steps, assert_close, compare

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

READOUT = {"readout_dtype": "nvfp4", "state_dtype": "float16", "state_rounding": "stochastic", "rounding_seed": 5}
CASES = {
    "mamba2-fp32-80": (Mamba2Geometry(2, 80, 128, 1), {"max_window": 5}),
    "mamba2-fp16-state": (Mamba2Geometry(4, 64, 128, 2), {"max_window": 1, "state_dtype": "float16"}),
    "mamba2-readout": (Mamba2Geometry(2, 80, 128, 1), {"max_window": 5, **READOUT}),
    "mamba2-prefill": (Mamba2Geometry(2, 80, 128, 1), {"max_window": 5}),
    "gdn": (GdnGeometry(1, 2, 128, 128), {"max_window": 4}),
    "gdn-readout": (GdnGeometry(1, 2, 128, 128), {"max_window": 4, **READOUT}),
    "gdn-prefill": (GdnGeometry(1, 2, 128, 128), {"max_window": 4}),
    "conv": (ConvGeometry(1032, 4), {"max_window": 5}),
    "attention-256": (AttentionGeometry(2, 256), {"max_window": 3, "max_seq_len": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_embedded_kernels_match_the_reference(monkeypatch, case: str) -> None:
    """Prefill cases run windows by one plugin and prefill rows by the other, as an engine with a prefill plan does."""
    emulated, launched = Emulated(), []

    def launch(plugin, arguments):
        config = tensorrt_ops.kernel_config(plugin.spec)
        assert (plugin.kernel, plugin.block, plugin.shared_bytes) == (
            config.kernel,
            (config.threads, 1, 1),
            config.shared_bytes,
        )
        assert plugin.shared_bytes <= EMBEDDED_SHARED_BYTES
        x, y, z = plugin.grid
        emulated._call(config, arguments, y, z, x)
        launched.append(plugin.kernel)

    monkeypatch.setattr(embedded_plugins, "launch_ptx", launch)
    geometry, settings = CASES[case]
    prefill = case.endswith("prefill")
    steps = Steps(geometry, ReplaySettings(**settings), seed=5, longest_prefill=70 if prefill else 20)
    assert_close(compare(steps, embedded_plugins.EmbeddedPlugins(90, prefill), 10), steps)
    assert any("prefill" in kernel for kernel in launched) == prefill
