"""The readout kernels on a GPU, against the references, to the byte, and against themselves."""

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import geometry as geo
from replayssm.plugins import launch
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from readout_steps import assert_same_bytes, exact_steps, format_settings
from shapes import NANO, QWEN4B, QWEN122B, SUPER
from window_steps import Steps, assert_close, compare, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP16 = {"state_dtype": "float16", "state_rounding": "stochastic", "rounding_seed": 5}
FP8 = {"state_dtype": "float8", "state_rounding": "stochastic"}
CASES = {
    "super120b-decode": (SUPER, {"readout_dtype": "nvfp4", **FP16}),
    "nano4b-verify5": (NANO, {"max_window": 5, "readout_dtype": "nvfp4", **FP16}),
    "super120b-verify5": (SUPER, {"max_window": 5, "readout_dtype": "nvfp4", **FP16}),
    "nano4b-decode": (NANO, {"readout_dtype": "nvfp4", **FP16}),
    "qwen122b-decode": (QWEN122B, {"readout_dtype": "nvfp4", **FP16}),
    "qwen4b-verify5": (QWEN4B, {"max_window": 5, "readout_dtype": "nvfp4", **FP16}),
    "qwen122b-verify5": (QWEN122B, {"max_window": 5, "readout_dtype": "nvfp4", **FP16}),
    "qwen4b-verify5-u16": (QWEN4B, {"max_window": 5, "u_format": "bfloat16", "readout_dtype": "nvfp4", **FP16}),
    "qwen122b-verify5-u16": (QWEN122B, {"max_window": 5, "u_format": "bfloat16", "readout_dtype": "nvfp4", **FP16}),
    "gdn-fp8-verify4": (GdnGeometry(1, 2, 128, 64), {"max_window": 4, "readout_dtype": "nvfp4", **FP8}),
    "gdn-verify8": (
        GdnGeometry(2, 4, 96, 64),
        {"max_window": 8, "buffer_len": 20, "activation_dtype": "float16", "u_format": "bfloat16"}
        | {"readout_dtype": "nvfp4", **FP16},
    ),
    "mamba2-fp8-nvfp4": (Mamba2Geometry(8, 64, 128, 2), {"readout_dtype": "nvfp4", **FP8}),
    "mamba2-fp32-fp8": (Mamba2Geometry(8, 80, 128, 2), {"max_window": 5, "readout_dtype": "float8"}),
    "mamba2-fp8": (Mamba2Geometry(8, 64, 128, 2), {"max_window": 2, **FP8}),
    "mamba2-fp16sr": (Mamba2Geometry(8, 64, 128, 2), {"max_window": 2, **FP16}),
    "mamba2-256-bf16": (
        Mamba2Geometry(4, 64, 256, 1),
        {"max_window": 9, "buffer_len": 32, "state_dtype": "bfloat16", "readout_dtype": "nvfp4"},
    ),
    "mamba2-odd-fp16": (
        Mamba2Geometry(3, 40, 96, 1),
        {"max_window": 4, "buffer_len": 8, "activation_dtype": "float16", "readout_dtype": "nvfp4", **FP16},
    ),
    "mamba2-odd-decode": (
        Mamba2Geometry(3, 40, 96, 1),
        {"buffer_len": 8, "activation_dtype": "float16", "readout_dtype": "nvfp4", **FP16},
    ),
    "gdn-fp8-checkpoint": (
        GdnGeometry(2, 8, 128, 64),
        {"readout_dtype": "nvfp4", "u_source": "checkpoint", "max_window": 3, **FP8},
    ),
    "gdn-fp16-fp8": (
        GdnGeometry(2, 4, 64, 40),
        {"max_window": 16, "buffer_len": 32, "readout_dtype": "float8", "state_dtype": "float16"},
    ),
    "gdn-bf16sr": (
        GdnGeometry(1, 3, 64, 64),
        {"buffer_len": 4, "state_dtype": "bfloat16", "state_rounding": "stochastic", "u_format": "bfloat16"},
    ),
}


def make(case: str, seed: int = 0, rows: int = 4, slots: int = 6, **changes) -> Steps:
    geometry, settings = CASES[case]
    return Steps(geometry, ReplaySettings(**{**settings, **changes}), slots, rows, seed, "cuda:0")


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    """Outputs, state and error flags over calls that mix every kind of row, from a poisoned pool."""
    large = "b-" in case
    steps = make(case, rows=3 if large else 4)
    torch.set_num_threads(4)
    worst = compare(steps, launch, 7 if large else 20)
    torch.set_num_threads(1)
    assert_close(worst, steps)


@pytest.mark.parametrize("formats", format_settings(), ids=lambda formats: "-".join(formats.values()))
@pytest.mark.parametrize("geometry", [Mamba2Geometry(8, 64, 128, 2), GdnGeometry(2, 4, 64, 64)])
def test_every_combination_of_formats(geometry, formats: dict[str, str]) -> None:
    """What the contract takes computes what the reference computes and stores its bytes, or is refused."""
    decode = (formats["state_dtype"] == "float16") == (geometry.kind == "gdn")  # both windows, but not of everything
    settings = ReplaySettings(**formats, max_window=1 if decode else 3)
    if formats["state_dtype"] == "float64":
        with pytest.raises(geo.UnsupportedGeometryError, match="the checkpoint is float64"):
            geo.window_config(geometry, settings, 90)
        return
    torch.set_num_threads(2)
    assert_close(compare(Steps(geometry, settings, 6, 4, 5, "cuda:0"), launch, 6), Steps(geometry, settings))
    if geo.uses_readout(settings):
        expected, mine = exact_steps(Steps(geometry, settings, 6, 4, 6, "cuda:0"), launch)
        assert_same_bytes(mine, expected)
    torch.set_num_threads(1)


WITH_COPY = [
    formats
    for formats in format_settings()
    if formats["readout_dtype"] != "same" and formats["state_dtype"] != "float64"
]


@pytest.mark.parametrize("formats", WITH_COPY, ids=lambda formats: "-".join(formats.values()))
def test_u_from_every_checkpoint(formats: dict[str, str]) -> None:
    """GDN whose u reads the checkpoint, beside outputs that read each of its copies."""
    window = 3 if formats["state_dtype"] == "float16" else 1
    settings = ReplaySettings(**formats, max_window=window, buffer_len=4, u_source="checkpoint")
    steps = Steps(GdnGeometry(1, 2, 64, 32), settings, 6, 4, 7, "cuda:0")
    assert_close(compare(steps, launch, 10), steps)


@pytest.mark.parametrize("case", CASES)
def test_stores_the_references_bytes(case: str) -> None:
    """Rounding, scales, codes and random bits, where the fold itself is exact."""
    torch.set_num_threads(4)
    expected, mine = exact_steps(make(case, seed=1), launch)
    torch.set_num_threads(1)
    assert_same_bytes(mine, expected)


@pytest.mark.parametrize("case", CASES)
def test_repeated_step_is_bit_equal(case: str) -> None:
    """Rule 2, also for steps that flush: the same call again changes neither outputs nor state."""
    steps = make(case, seed=2, buffer_len=4)
    state = steps.pool()
    for _ in range(24):
        call = steps.next_call(prefill=False)
        first = steps.run(launch, state, call)
        kept = to_device(state, "cuda")
        assert torch.equal(first, steps.run(launch, state, call))
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name


@pytest.mark.parametrize("case", ["super120b-decode", "qwen122b-decode"])
def test_replayed_graph_equals_eager(case: str) -> None:
    """One captured step, its positions advanced on the device, against eager steps with the same inputs."""
    steps = make(case, slots=3, rows=3, seed=3)
    call = steps.next_call(odd_rows=False, prefill=False)
    call.rows[0].zero_()
    states = steps.pool(), steps.pool()
    outputs = []
    for state, graphed in zip(states, (True, False), strict=True):
        seq_lens = call.rows[0].clone()
        rows = [seq_lens, *call.rows[1:]]

        def step(state=state, rows=rows, seq_lens=seq_lens) -> torch.Tensor:
            out = steps.run(launch, state, type(call)(call.inputs, rows, *([None] * 4)))
            seq_lens.add_(1)
            return out

        if graphed:
            out = step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            for _ in range(500):
                graph.replay()
        else:
            for _ in range(501):
                out = step()
        torch.cuda.synchronize()
        outputs.append(out.clone())
        assert int(state.error_flag) == 0
    assert torch.equal(*outputs)
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8)), name
