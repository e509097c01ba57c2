"""The readout kernels' own source, compiled for the host and run thread by thread against the references."""

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import Emulated
from readout_steps import assert_same_bytes, exact_steps, format_settings
from window_steps import Steps, assert_close, assert_nan_stays_in_its_row, compare, to_device

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

STOCHASTIC = {"state_rounding": "stochastic", "rounding_seed": 11}
CASES = {
    "mamba2-fp16sr-nvfp4": (
        Mamba2Geometry(4, 32, 64, 1),
        {"buffer_len": 4, "state_dtype": "float16", "readout_dtype": "nvfp4", **STOCHASTIC},
        90,
    ),
    "mamba2-fp32-nvfp4-verify-tiles": (
        Mamba2Geometry(2, 80, 128, 1),
        {"max_window": 5, "buffer_len": 8, "readout_dtype": "nvfp4"},
        90,
    ),
    "mamba2-fp8sr-nvfp4-sm80": (
        Mamba2Geometry(2, 40, 32, 1),
        {"max_window": 9, "buffer_len": 20, "activation_dtype": "float16", "state_dtype": "float8"}
        | {"readout_dtype": "nvfp4", **STOCHASTIC},
        80,
    ),
    "mamba2-bf16-fp8": (
        Mamba2Geometry(3, 24, 64, 1),
        {"max_window": 2, "buffer_len": 4, "state_dtype": "bfloat16", "readout_dtype": "float8"},
        90,
    ),
    "mamba2-40-rows-decode": (
        Mamba2Geometry(4, 40, 96, 1),
        {"buffer_len": 5, "activation_dtype": "float16", "state_dtype": "float16"}
        | {"readout_dtype": "nvfp4", **STOCHASTIC},
        90,
    ),
    "mamba2-24-rows-verify": (
        Mamba2Geometry(4, 24, 128, 2),
        {"max_window": 5, "buffer_len": 6, "state_dtype": "float16", "readout_dtype": "nvfp4", **STOCHASTIC},
        80,
    ),
    "mamba2-256-columns": (
        Mamba2Geometry(1, 24, 256, 1),
        {"buffer_len": 4, "activation_dtype": "float16", "state_dtype": "bfloat16", "readout_dtype": "nvfp4"},
        90,
    ),
    "mamba2-fp8": (Mamba2Geometry(2, 16, 32, 1), {"max_window": 1, "buffer_len": 4, "state_dtype": "float8"}, 90),
    "gdn-fp16sr-nvfp4-verify": (
        GdnGeometry(1, 2, 64, 40),
        {"max_window": 3, "buffer_len": 8, "state_dtype": "float16", "readout_dtype": "nvfp4", **STOCHASTIC},
        90,
    ),
    "gdn-nvfp4-verify5": (
        GdnGeometry(1, 2, 64, 128),
        {"max_window": 5, "buffer_len": 13, "state_dtype": "float16", "readout_dtype": "nvfp4", **STOCHASTIC},
        90,
    ),
    "gdn-fp8sr-nvfp4-verify4": (
        GdnGeometry(1, 1, 128, 32),
        {"max_window": 4, "buffer_len": 9, "state_dtype": "float8", "readout_dtype": "nvfp4", **STOCHASTIC},
        90,
    ),
    "gdn-nvfp4-verify8": (
        GdnGeometry(2, 2, 96, 16),
        {"max_window": 8, "buffer_len": 20, "activation_dtype": "float16", "u_format": "bfloat16"}
        | {"state_dtype": "float8", "readout_dtype": "nvfp4", **STOCHASTIC},
        80,
    ),
    "gdn-fp8-nvfp4-checkpoint": (
        GdnGeometry(1, 4, 32, 32),
        {"buffer_len": 3, "state_dtype": "float8", "readout_dtype": "nvfp4", "u_source": "checkpoint"},
        90,
    ),
    "gdn-fp16sr-fp8-checkpoint": (
        GdnGeometry(1, 2, 32, 16),
        {"max_window": 2, "buffer_len": 4, "activation_dtype": "float16", "state_dtype": "float16"}
        | {"readout_dtype": "float8", "u_source": "checkpoint", **STOCHASTIC},
        90,
    ),
    "gdn-bf16sr": (GdnGeometry(1, 2, 32, 16), {"max_window": 6, "state_dtype": "bfloat16", **STOCHASTIC}, 80),
}


@pytest.mark.parametrize("activations", ["bfloat16", "float16"])
@pytest.mark.parametrize("geometry", [Mamba2Geometry(8, 64, 128, 2), GdnGeometry(2, 4, 64, 64)])
def test_every_combination_has_a_kernel_or_a_reason(geometry, activations: str) -> None:
    """Which of them compute what the reference computes is tested on a GPU."""
    refused = {}
    for formats in format_settings():
        settings = ReplaySettings(**formats, activation_dtype=activations)
        try:
            kernel = geo.window_config(geometry, settings, 90).kernel
        except geo.UnsupportedGeometryError as error:
            refused[tuple(formats.values())] = str(error)
        else:
            assert kernel.endswith("_readout") == geo.uses_readout(settings), formats
    expected = {("float64", "nearest", "same"): "the checkpoint is float64"}
    expected |= {("float64", "nearest", readout): "the checkpoint is float64" for readout in ("float8", "nvfp4")}
    if activations == "float16":
        expected["bfloat16", "stochastic", "same"] = "choose bfloat16 activations, state_dtype 'float16' or a readout"
    assert refused.keys() == expected.keys()
    for formats, reason in expected.items():
        assert reason in refused[formats]


def make(case: str, seed: int = 0) -> tuple[Steps, Emulated]:
    geometry, settings, arch = CASES[case]
    return Steps(geometry, ReplaySettings(**settings), seed=seed), Emulated(arch)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    """Outputs, state and error flags over calls that mix every kind of row, from a poisoned pool."""
    steps, kernels = make(case)
    assert_close(compare(steps, kernels, 12), steps)


@pytest.mark.parametrize("case", CASES)
def test_stores_the_references_bytes(case: str) -> None:
    """Rounding, scales, codes and random bits, where the fold itself is exact."""
    steps, kernels = make(case, seed=1)
    expected, mine = exact_steps(steps, kernels)
    assert_same_bytes(mine, expected)


def test_fp32_checkpoint_keeps_what_fp32_keeps() -> None:
    """A fold keeps 24 bits of its terms: a sum of some 8 is off by 2^-24 of each, 5e-7 in all; 16 bits make 3e-6."""
    steps, kernels = make("mamba2-fp32-nvfp4-verify-tiles", seed=5)
    assert 0 < compare(steps, kernels, 12, prefill=False)["checkpoint"] < 5e-7


@pytest.mark.parametrize("case", CASES)
def test_repeated_step_is_bit_equal(case: str) -> None:
    """Rule 2, also for steps that flush: the same call again changes neither outputs nor state."""
    steps, kernels = make(case, seed=2)
    state, flushes = steps.pool(), 0
    for _ in range(12):
        call = steps.next_call(prefill=False)
        before = state["checkpoint_position"].clone()
        first = steps.run(kernels, state, call)
        now = state["checkpoint_position"]
        flushes += int(((before != now) & (now > 0)).any())
        kept = to_device(state, "cpu")
        assert torch.equal(first, steps.run(kernels, state, call))
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name
    assert flushes


@pytest.mark.parametrize("case", ["gdn-nvfp4-verify5", "mamba2-fp8"])
def test_rows_may_come_in_any_order(case: str) -> None:
    """A row's number means nothing: the caller puts those first that fold (plugins/row_order.py)."""
    results = []
    for turned in (False, True):
        steps, kernels = make(case, seed=7)
        state, outputs = steps.pool(), []
        for _ in range(8):
            call = steps.next_call()
            if turned:
                call = dataclasses.replace(call, rows=[values.flip(0) for values in call.rows])
            outputs.append(steps.run(kernels, state, call))
        results.append([*outputs, *(tensor.view(torch.uint8) for tensor in state.tensors.values())])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_rejected_tokens_leave_no_trace() -> None:
    """Rule 1: outputs of accepted tokens do not depend on the rejected ones that shared their windows."""
    for case in ("mamba2-fp32-nvfp4-verify-tiles", "gdn-fp16sr-nvfp4-verify", "gdn-nvfp4-verify5"):
        outputs = []
        for scale in (1.0, 50.0):
            steps, kernels = make(case, seed=3)
            state, kept = steps.pool(), []
            for _ in range(8):
                call = steps.next_call(odd_rows=False, prefill=False)
                for start, length, accepted in zip(call.starts, call.lengths, call.accepted, strict=True):
                    for tensor in call.inputs:
                        tensor[start + accepted : start + length] *= scale
                out = steps.run(kernels, state, call)
                kept += [out[s : s + n].clone() for s, n in zip(call.starts, call.accepted, strict=True)]
            outputs.append(torch.cat(kept))
        assert torch.equal(*outputs), case


def test_corrupted_readout_never_reaches_the_checkpoint() -> None:
    """Mamba2: later checkpoints are the same to the bit, whatever the readout held (outputs are not)."""
    states, outputs = [], []
    for corrupt in (False, True):
        steps, kernels = make("mamba2-fp16sr-nvfp4", seed=4)
        state, kept = steps.pool(), []
        for number in range(40):
            call = steps.next_call(odd_rows=False, prefill=number == 3)
            if corrupt:
                state["readout"].random_(0, 256, generator=torch.Generator().manual_seed(number))
            kept.append(steps.run(kernels, state, call))
        states.append(state)
        outputs.append(torch.cat(kept))
    for name in ("checkpoint", "checkpoint_position", "ring_x"):
        first, second = (state[name].view(torch.uint8) for state in states)
        assert torch.equal(first, second), name
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("case", ["mamba2-fp16sr-nvfp4", "gdn-fp16sr-nvfp4-verify", "gdn-nvfp4-verify8"])
def test_nan_stays_in_its_row(case: str) -> None:
    assert_nan_stays_in_its_row(*make(case, seed=6))


def test_result_does_not_depend_on_the_window_class() -> None:
    """A decode row gives the same bits in the decode kernel and among verify rows."""
    geometry, settings, arch = CASES["mamba2-fp16sr-nvfp4"]
    classes = [Steps(geometry, ReplaySettings(**settings, max_window=window), seed=3) for window in (1, 8)]
    states, kernels = [steps.pool() for steps in classes], Emulated(arch)
    for position in range(20):
        inputs = classes[0].inputs(1)
        rows = [torch.tensor([value], dtype=torch.int32) for value in (position, 0, 1, 0)]
        outputs = [kernels.mamba2_window(*inputs, *classes[0].constants, state, *rows, 0) for state in states]
        assert torch.equal(*outputs)
