"""The chunked prefill kernels on a GPU; skipped where there is none. Tolerances: window_steps and, for states against
the fp64 recurrence, the 16 bits of mantissa that the kernels keep of every term."""

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import launch
from replayssm.plugins.arguments import gdn_arguments, mamba2_arguments
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.geometry import row_candidates
from replayssm.plugins.prefill_geometry import prefill_config
from replayssm.plugins.reference import recurrence
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from readout_steps import assert_same_bytes, prefill_steps
from shapes import NANO, QWEN4B, QWEN122B, SUPER
from window_steps import BF16_OUTPUT_ERROR, Steps, assert_close, compare, judge, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NVFP4 = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}
CASES = {
    "nano4b": (NANO, {}),
    "super120b-fp16-state": (SUPER, {"state_dtype": "float16"}),
    "qwen4b": (QWEN4B, {}),
    "qwen122b-bf16-state": (QWEN122B, {"state_dtype": "bfloat16"}),
    "mamba2-40-fp16": (Mamba2Geometry(1, 40, 64, 1), {"activation_dtype": "float16", "buffer_len": 4}),
    "mamba2-16": (Mamba2Geometry(8, 48, 16, 8), {"buffer_len": 32}),
    "mamba2-96": (Mamba2Geometry(6, 96, 112, 2), {}),
    "gdn-64-fp16": (GdnGeometry(2, 8, 64, 64), {"activation_dtype": "float16", "state_dtype": "float16"}),
    "nano4b-nvfp4": (NANO, NVFP4),
    "qwen4b-nvfp4": (QWEN4B, NVFP4),
    "super120b-state8": (SUPER, {"state_dtype": "float8", "state_rounding": "stochastic"}),
    "qwen4b-readout8": (QWEN4B, {"readout_dtype": "float8"}),
    "gdn-40": (GdnGeometry(1, 1, 16, 40), {"u_format": "bfloat16"}),
}
STOCHASTIC8 = {"state_dtype": "float8", "state_rounding": "stochastic"}
STORED = {
    "super120b-nvfp4": (SUPER, NVFP4),
    "qwen4b-nvfp4": (QWEN4B, NVFP4),
    "nano4b-state8": (NANO, {**STOCHASTIC8, "buffer_len": 4}),
    "qwen122b-readout8": (QWEN122B, {**NVFP4, "readout_dtype": "float8"}),
    "mamba2-fp32-nvfp4": (Mamba2Geometry(6, 96, 64, 2), {"readout_dtype": "nvfp4"}),
    "mamba2-fp16sr": (Mamba2Geometry(1, 40, 96, 1), {**NVFP4, "readout_dtype": "same", "activation_dtype": "float16"}),
    "gdn-bf16-fp8": (
        GdnGeometry(2, 8, 64, 64),
        {"state_dtype": "bfloat16", "readout_dtype": "float8", "u_source": "checkpoint"},
    ),
    "gdn-fp8-nvfp4": (GdnGeometry(1, 3, 128, 40), {**STOCHASTIC8, "readout_dtype": "nvfp4", "max_window": 6}),
}


def make(case: str, **options) -> Steps:
    geometry, settings = CASES[case]
    settings = ReplaySettings(**{"max_window": 3, **settings})
    return Steps(geometry, settings, device="cuda:0", longest_prefill=options.pop("longest_prefill", 300), **options)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    steps = make(case, rows=3)
    torch.set_num_threads(8)
    worst = compare(steps, launch, 10)
    torch.set_num_threads(1)
    assert_close(worst, steps)


@pytest.mark.parametrize("case", ["nano4b", "qwen4b", "mamba2-16", "gdn-40"])
def test_matches_the_recurrence(case: str) -> None:
    assert judge(make(case, seed=1, longest_prefill=100), launch, 24) < BF16_OUTPUT_ERROR


def prompts(geometry, lengths: list[int], slots: list[int], device="cuda:0"):
    """(operator inputs without state, index tensors) of fresh ragged prompts."""
    steps = Steps(geometry, ReplaySettings(max_window=1), device=device, seed=3)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    index = [torch.tensor(v, dtype=torch.int32, device=device) for v in ([0] * len(lengths), starts, lengths, slots)]
    return steps, steps.inputs(sum(lengths)), tuple(index)


@pytest.mark.parametrize("formats", [{}, NVFP4], ids=["fp32", "nvfp4"])
@pytest.mark.parametrize("geometry", [NANO, QWEN4B], ids=["mamba2", "gdn"])
def test_long_prompt_matches_the_recurrence(geometry, formats: dict[str, str]) -> None:
    """4000 tokens: errors do not grow. Some heads, because the recurrence keeps every state. fp16 rounds an element of
    the last state by up to 2^-10 of it."""
    steps, inputs, index = prompts(geometry, [100, 4000], [1, 0])
    state = allocate_state(geometry, ReplaySettings(max_window=1, **formats), 2, "cuda:0")
    out = getattr(launch, f"{geometry.kind}_window")(*inputs, *steps.constants, state, *index, 0)
    heads = slice(2 * geometry.heads_per_group, 2 * geometry.heads_per_group + 2)
    shared = (2, 3) if geometry.kind == "mamba2" else (0, 1)
    own = [part[100:, 2:3] if i in shared else part[100:, heads] for i, part in enumerate(inputs)]
    constants = [constant[heads] for constant in steps.constants]
    if geometry.kind == "mamba2":
        expected, states = recurrence.mamba2_recurrence(*own, *constants)
    else:
        expected, states = recurrence.gdn_recurrence(*own, *constants, None, steps.dtype)
    assert relative_error(out[100:, heads], expected) < BF16_OUTPUT_ERROR
    exact = 1e-5 if geometry.kind == "mamba2" else 1e-4
    assert relative_error(state["checkpoint"][0, heads], states[-1]) < (2.0**-10 if formats else exact)


@pytest.mark.parametrize(
    ("geometry", "formats"),
    [(NANO, {}), (SUPER, {}), (QWEN122B, {}), (NANO, NVFP4), (QWEN4B, NVFP4)],
    ids=["nano4b", "super120b", "qwen122b", "nano4b-nvfp4", "qwen4b-nvfp4"],
)
def test_rows_depend_neither_on_their_batch_nor_on_the_row_tiles(geometry, formats: dict[str, str]) -> None:
    """Ragged prompts in one call give the bits that each gives alone, in blocks of any number of rows."""
    lengths, slots = [500, 64, 777, 65, 2], [4, 0, 3, 1, 2]
    steps, inputs, index = prompts(geometry, lengths, slots)
    settings = ReplaySettings(max_window=1, **formats)
    build = mamba2_arguments if geometry.kind == "mamba2" else gdn_arguments
    like = inputs[0] if geometry.kind == "mamba2" else inputs[2]
    results = []
    for rows in row_candidates(geometry.state_shape[1], geometry.row_tiles):
        config = prefill_config(geometry, settings, launch.device_arch(like.device), cta_rows=rows)
        for single in (False, True):
            state = allocate_state(geometry, settings, 5, "cuda:0")
            out = torch.full(like.shape, torch.nan, dtype=like.dtype, device="cuda:0")
            for i in range(len(lengths)) if single else [slice(None)]:
                one = tuple(part[i : i + 1] if single else part[i] for part in index)
                values = build(*inputs, *steps.constants, state, one, 0, out)
                launch.launch(config, values, like.device, one[0].shape[0])
            results.append((out, state))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        for name, part in results[0][1].tensors.items():
            assert torch.equal(state[name].view(torch.uint8), part.view(torch.uint8)), name


@pytest.mark.parametrize("case", STORED)
def test_formats_are_those_of_one_and_the_same_state(case: str) -> None:
    """Rounding, random bits, scales and codes of fresh rows and of rows that continue a checkpoint or a history."""
    geometry, formats = STORED[case]
    steps = Steps(geometry, ReplaySettings(**{"max_window": 3, **formats}), device="cuda:0", longest_prefill=300)
    expected, mine = prefill_steps(steps, launch)
    assert_same_bytes(mine, expected)


@pytest.mark.parametrize("geometry", [SUPER, QWEN4B], ids=["mamba2", "gdn"])
def test_nan_stays_in_its_row(geometry) -> None:
    steps, inputs, index = prompts(geometry, [200, 90], [0, 1])
    outs = []
    for poisoned in (False, True):
        if poisoned:
            for part in inputs:
                part[:200] = torch.nan
        state = allocate_state(geometry, ReplaySettings(max_window=1), 2, "cuda:0")
        outs.append(getattr(launch, f"{geometry.kind}_window")(*inputs, *steps.constants, state, *index, 0))
    assert outs[1][:200].isnan().all()
    assert torch.equal(outs[0][200:], outs[1][200:])


def test_prefill_is_captured_and_replayed() -> None:
    """A fresh prompt again and again from one graph: the same bits."""
    steps, inputs, index = prompts(QWEN4B, [300], [0])
    state = allocate_state(QWEN4B, ReplaySettings(max_window=1), 1, "cuda:0")
    out = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)

    def run() -> None:
        launch.gdn_window(*inputs, *steps.constants, state, *index, 0, out=out)

    run()
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)
