"""The plugins' PTX on a GPU: what `aot_impl` returns, loaded and launched by the driver, against the references."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from embedded_plugins import EmbeddedPlugins
from window_steps import Steps, assert_close, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

READOUT = {"readout_dtype": "nvfp4", "state_dtype": "float16", "state_rounding": "stochastic", "rounding_seed": 5}
CASES = {
    # Head and state sizes are those of the published models, so the blocks are too; fewer heads, for the reference.
    "mamba2-nano-decode": (Mamba2Geometry(12, 80, 128, 2), {"max_window": 1}),
    "mamba2-nano-verify5": (Mamba2Geometry(12, 80, 128, 2), {"max_window": 5}),
    "mamba2-super-decode-fp16": (Mamba2Geometry(16, 64, 128, 2), {"max_window": 1, "state_dtype": "float16"}),
    "mamba2-super-verify8": (Mamba2Geometry(16, 64, 128, 2), {"max_window": 8}),
    "gdn-decode": (GdnGeometry(2, 8, 128, 128), {"max_window": 1}),
    "gdn-verify5": (GdnGeometry(2, 8, 128, 128), {"max_window": 5}),
    "gdn-verify4-fp16": (GdnGeometry(4, 8, 128, 128), {"max_window": 4, "state_dtype": "float16"}),
    "mamba2-nano-verify5-readout": (Mamba2Geometry(12, 80, 128, 2), {"max_window": 5, **READOUT}),
    "mamba2-super-decode-readout": (Mamba2Geometry(16, 64, 128, 2), {"max_window": 1, **READOUT}),
    "gdn-verify4-readout": (GdnGeometry(2, 8, 128, 128), {"max_window": 4, **READOUT}),
    "conv-nano": (ConvGeometry(96 * 80 + 2 * 8 * 128, 4), {"max_window": 5}),
    "conv-qwen-decode": (ConvGeometry(8192, 4), {"max_window": 1}),
    "attention-128-verify5": (AttentionGeometry(8, 128), {"max_window": 5, "max_seq_len": 700}),
    "attention-256-decode": (AttentionGeometry(2, 256), {"max_window": 1, "max_seq_len": 200}),
}


@pytest.mark.parametrize("case", CASES)
def test_embedded_kernels_match_the_reference(case: str) -> None:
    geometry, settings = CASES[case]
    steps = Steps(geometry, ReplaySettings(**settings), seed=11, device="cuda:0")
    major, minor = torch.cuda.get_device_capability()
    assert_close(compare(steps, EmbeddedPlugins(10 * major + minor), 12), steps)


PREFILL_CASES = {
    "mamba2-nano": (Mamba2Geometry(12, 80, 128, 2), {"max_window": 5}),
    "mamba2-super-fp16": (Mamba2Geometry(16, 64, 128, 2), {"max_window": 1, "state_dtype": "float16"}),
    "gdn": (GdnGeometry(2, 8, 128, 128), {"max_window": 4}),
}


@pytest.mark.parametrize("case", PREFILL_CASES)
def test_embedded_prefill_kernels_match_the_reference(case: str) -> None:
    """Prompts of up to 150 tokens in calls that also have windows, padding and idle rows."""
    geometry, settings = PREFILL_CASES[case]
    steps = Steps(geometry, ReplaySettings(**settings), seed=12, device="cuda:0", longest_prefill=150)
    major, minor = torch.cuda.get_device_capability()
    assert_close(compare(steps, EmbeddedPlugins(10 * major + minor, prefill=True), 9), steps)
