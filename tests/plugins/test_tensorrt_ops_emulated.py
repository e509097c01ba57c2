"""The kernels that plugins embed, launched as a plan launches them, under the CPU emulation against the references.

Dense tensors in the plugin's order, its scalars, its grid, at most 48 KiB of shared memory: a wrong argument order or
stride shows as a wrong result.
"""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from replayssm.plugins import tensorrt_ops
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry, ReplaySettings
from replayssm.plugins.geometry import EMBEDDED_SHARED_BYTES
from replayssm.plugins.tensorrt_ops import PluginSpec

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import Emulated
from window_steps import Steps, assert_close, compare

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

MATH = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b), min=min)


class Embedded:
    """The operators, each call a launch with what `tensorrt_ops` gives to TensorRT."""

    def __init__(self) -> None:
        self.emulated = Emulated()

    def _launch(self, state, own, rows, **more):
        spec = PluginSpec(state.geometry, state.settings, state.slots, 90, **more)
        operator = spec.signature
        own = [tensor.contiguous() for tensor in own]
        like = own[operator.inputs.index(operator.like)]
        out, count = torch.zeros_like(like), rows[0].shape[0]
        state_tensors = [*state.flat(), state.error_flag]
        inputs = [*own, *state_tensors, *rows]
        # A plan binds packed bytes as INT8.
        types = [str(tensor.dtype).removeprefix("torch.").replace("uint8", "int8") for tensor in inputs]
        assert types == list(tensorrt_ops.tensor_types(spec).values())
        config = tensorrt_ops.kernel_config(spec)
        assert config.shared_bytes <= EMBEDDED_SHARED_BYTES
        x, y, z = tensorrt_ops.grid(spec, like.shape[0], count, MATH)
        values = [*inputs, *tensorrt_ops.scalars(spec, like.shape[0], count), out, *state_tensors]
        self.emulated._call(config, values, y, z, x)
        return out

    def mamba2_window(self, *arguments):
        *own, state, _, _, _, _, layer = arguments
        return self._launch(state, own, arguments[-5:-1], layer=layer)

    gdn_window = mamba2_window

    def causal_conv1d_window(self, x, weight, bias, state, *rows):
        return self._launch(state, (x, weight, bias), rows)

    def attention_window(self, q, k, v, state, *rest):
        *rows, scale = rest
        return self._launch(state, (q, k, v), rows, query_heads=q.shape[1], scale=scale)


CASES = {
    "mamba2-fp32-80": (Mamba2Geometry(2, 80, 128, 1), {"max_window": 5}),
    "mamba2-fp16-state": (Mamba2Geometry(4, 64, 128, 2), {"max_window": 1, "state_dtype": "float16"}),
    "gdn": (GdnGeometry(1, 2, 128, 128), {"max_window": 4}),
    "conv": (ConvGeometry(1032, 4), {"max_window": 5}),
    "attention-256": (AttentionGeometry(2, 256), {"max_window": 3, "max_seq_len": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_embedded_kernels_match_the_reference(case: str) -> None:
    geometry, settings = CASES[case]
    steps = Steps(geometry, ReplaySettings(**settings), seed=5)
    assert_close(compare(steps, Embedded(), 10), steps)
