"""The kernels' own source, compiled for the host and run thread by thread against the references.

What only a GPU can show (memory ordering between processors, copy engines, tensor-core rounding) is left to
test_kernels_gpu.py. Tolerances: window_steps.assert_close.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import geometry as geo
from replayssm.plugins import reference
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, ErrorBit, GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import Emulated
from window_steps import BF16_OUTPUT_ERROR, Steps, assert_close, assert_nan_stays_in_its_row, compare, judge, to_device

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

CASES = {
    "mamba2-decode": (Mamba2Geometry(2, 64, 128, 2), {"max_window": 1}, 90, None),
    "mamba2-decode-long": (
        Mamba2Geometry(2, 80, 256, 1),
        {"buffer_len": 32, "max_window": 1, "state_dtype": "float16", "activation_dtype": "float16"},
        90,
        40,
    ),
    "mamba2-decode-short": (
        Mamba2Geometry(4, 40, 48, 2),
        {"buffer_len": 4, "max_window": 1, "state_dtype": "bfloat16"},
        80,
        None,
    ),
    "mamba2-decode-single": (Mamba2Geometry(1, 96, 16, 1), {"buffer_len": 1, "max_window": 1}, 86, None),
    "mamba2-verify-tiles": (Mamba2Geometry(2, 64, 128, 1), {"max_window": 5}, 90, 32),
    "mamba2-80-fp16-state": (Mamba2Geometry(2, 80, 128, 1), {"max_window": 8, "state_dtype": "float16"}, 90, 40),
    "mamba2-40-sm80-fp16": (
        Mamba2Geometry(1, 40, 64, 1),
        {"buffer_len": 4, "max_window": 2, "state_dtype": "bfloat16", "activation_dtype": "float16"},
        80,
        None,
    ),
    "mamba2-long": (Mamba2Geometry(4, 48, 16, 4), {"buffer_len": 32, "max_window": 16}, 90, None),
    "mamba2-256": (Mamba2Geometry(2, 80, 256, 1), {"buffer_len": 8, "max_window": 9}, 90, None),
    "mamba2-short-buffer": (Mamba2Geometry(2, 96, 48, 1), {"buffer_len": 1, "max_window": 4}, 86, None),
    "mamba2-baseline": (Mamba2Geometry(2, 32, 128, 1), {"buffer_len": 0, "max_window": 3}, 90, None),
    "mamba2-serial": (
        Mamba2Geometry(2, 32, 64, 1),
        {"buffer_len": 8, "max_window": 3, "serial_exact": True, "state_dtype": "float16"},
        90,
        None,
    ),
    "gdn-decode-tiles": (GdnGeometry(1, 2, 128, 128), {"max_window": 1}, 90, 64),
    "gdn-decode-wide": (
        GdnGeometry(1, 1, 256, 40),
        {"buffer_len": 32, "max_window": 1, "activation_dtype": "float16", "u_format": "bfloat16"},
        80,
        None,
    ),
    "gdn-decode-narrow": (GdnGeometry(2, 4, 48, 16), {"buffer_len": 4, "max_window": 1}, 86, None),
    "gdn-verify": (GdnGeometry(1, 2, 32, 32), {"buffer_len": 8, "max_window": 3}, 90, None),
    "gdn-verify-parts": (GdnGeometry(1, 2, 128, 128), {"max_window": 5}, 90, 64),
    "gdn-decode-fp16-state": (GdnGeometry(1, 4, 128, 64), {"max_window": 1, "state_dtype": "float16"}, 90, 32),
    "gdn-long-fp16-state": (
        GdnGeometry(2, 4, 64, 48),
        {"buffer_len": 32, "max_window": 16, "state_dtype": "float16"},
        90,
        None,
    ),
    "gdn-sm80-single-plane": (
        GdnGeometry(1, 1, 128, 64),
        {"buffer_len": 4, "max_window": 6, "activation_dtype": "float16", "u_format": "bfloat16"},
        80,
        None,
    ),
    "gdn-baseline": (GdnGeometry(1, 2, 128, 32), {"buffer_len": 0, "max_window": 3}, 90, None),
    "gdn-serial": (
        GdnGeometry(1, 2, 64, 32),
        {"buffer_len": 8, "max_window": 3, "serial_exact": True, "state_dtype": "float16", "u_format": "exact"},
        90,
        None,
    ),
    "attention": (AttentionGeometry(2, 32), {"max_window": 5, "max_seq_len": 255}, 90, None),
    "attention-128-fp16": (
        AttentionGeometry(1, 128),
        {"max_window": 1, "max_seq_len": 128, "activation_dtype": "float16"},
        90,
        None,
    ),
    "conv": (ConvGeometry(24, 4), {"max_window": 5}, 90, None),
    "conv-fp16": (ConvGeometry(1040, 3), {"max_window": 1, "activation_dtype": "float16"}, 90, None),
}


def make(case: str, seed: int = 0, **changes) -> tuple[Steps, Emulated]:
    geometry, settings, arch, cta_rows = CASES[case]
    return Steps(geometry, ReplaySettings(**{**settings, **changes}), seed=seed), Emulated(arch, cta_rows)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    """Outputs, state and error flags over calls that mix every kind of row, from a poisoned pool."""
    steps, kernels = make(case)
    assert_close(compare(steps, kernels, 12), steps)


@pytest.mark.parametrize("case", ["mamba2-verify-tiles", "gdn-verify", "gdn-serial", "conv"])
def test_matches_the_recurrence(case: str) -> None:
    """Free-running over rejections, flushes and prefills."""
    steps, kernels = make(case, seed=1)
    assert judge(steps, kernels, 24) < BF16_OUTPUT_ERROR


REPEATED = [
    *(name for name in CASES if "decode" in name),
    *("mamba2-verify-tiles", "mamba2-80-fp16-state", "gdn-verify", "gdn-long-fp16-state"),
]


@pytest.mark.parametrize("case", REPEATED)
def test_repeated_step_is_bit_equal(case: str) -> None:
    """Rule 2, also for steps that flush: the same call again changes neither outputs nor state."""
    steps, kernels = make(case, seed=2)
    state = steps.pool()
    for _ in range(10):
        call = steps.next_call(prefill=False)
        first = steps.run(kernels, state, call)
        kept = to_device(state, "cpu")
        second = steps.run(kernels, state, call)
        assert torch.equal(first, second)
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name


def test_result_does_not_depend_on_the_window_class() -> None:
    """A row of one token gives the same bits among short and long windows."""
    decode, _ = make("mamba2-decode", seed=3, max_window=2)
    kernels = Emulated(90)
    verify, _ = make("mamba2-decode", seed=3, max_window=8)
    states = decode.pool(), verify.pool()
    for position in range(20):
        inputs = decode.inputs(1)
        rows = [torch.tensor([value], dtype=torch.int32) for value in (position, 0, 1, 0)]
        outputs = [kernels.mamba2_window(*inputs, *decode.constants, state, *rows, 0) for state in states]
        assert torch.equal(*outputs)


@pytest.mark.parametrize(("case", "parts"), [("gdn-verify-parts", 4), ("gdn-decode-fp16-state", 8)])
def test_result_does_not_depend_on_the_parts_of_a_block(case: str, parts: int) -> None:
    """Blocks that work through one part of the state and through all of a key head's give the same bits."""
    steps, _ = make(case, seed=7)
    _, _, arch, cta_rows = CASES[case]
    states = steps.pool(), steps.pool()
    for _ in range(6):
        call = steps.next_call()
        outputs = [
            steps.run(Emulated(arch, cta_rows, parts=count), state, call)
            for count, state in zip((1, parts), states, strict=True)
        ]
        assert torch.equal(*outputs)
        for name, tensor in states[0].tensors.items():
            assert torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8)), name


@pytest.mark.parametrize("case", ["mamba2-baseline", "gdn-baseline"])
def test_serial_exact_equals_the_baseline(case: str) -> None:
    exact = {"u_format": "exact"} if case.startswith("gdn") else {}
    baseline, kernels = make(case, seed=4, state_dtype="bfloat16", max_window=1, **exact)
    serial, _ = make(case, seed=4, state_dtype="bfloat16", max_window=1, buffer_len=4, serial_exact=True, **exact)
    states = baseline.pool(), serial.pool()
    for _ in range(14):
        call = baseline.next_call(odd_rows=False, prefill=False)
        outputs = [baseline.run(kernels, state, call) for state in states]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("case", ["mamba2-verify-tiles", "gdn-verify", "conv"])
def test_invalid_rows_raise_bits_and_harm_nobody(case: str) -> None:
    """Every error bit alone, beside a valid row whose output stays as it is without them."""
    steps, kernels = make(case, seed=5)
    limit = steps.settings.max_seq_len
    recurrent = case != "conv"
    bad_rows = {  # (seq_len, start, length, slot)
        ErrorBit.SLOT_OUT_OF_RANGE: (3, 2, 2, steps.slots),
        ErrorBit.WINDOW_OUT_OF_RANGE: (0, 3, 2, 1),
        ErrorBit.POSITION_PAST_LIMIT: (limit - 1, 2, 2, 1),
    }
    if recurrent:
        bad_rows[ErrorBit.SEQ_LEN_BELOW_CHECKPOINT] = (5, 2, 2, 1)
        bad_rows[ErrorBit.HISTORY_OUT_OF_RANGE] = (900, 2, 2, 1)
    for bit, bad in bad_rows.items():
        state = steps.pool()
        if recurrent:
            state["checkpoint_position"].fill_(limit - 1 if bit == ErrorBit.POSITION_PAST_LIMIT else 12)
        before = to_device(state, "cpu")
        inputs = steps.inputs(4)
        rows = [torch.tensor(pair, dtype=torch.int32) for pair in zip((0, 0, 2, 0), bad, strict=True)]
        tail = (0,) if recurrent else ()
        name = {"mamba2": "mamba2_window", "gdn": "gdn_window"}.get(steps.geometry.kind, "causal_conv1d_window")
        out = getattr(kernels, name)(*inputs, *steps.constants, state, *rows, *tail)
        assert int(state.error_flag) == bit, ErrorBit.describe(bit)
        assert torch.isfinite(out).all()
        assert out[:2].any()
        assert not out[2:].any()
        for part, tensor in state.tensors.items():
            assert torch.equal(tensor[1:].view(torch.uint8), before[part][1:].view(torch.uint8)), part


@pytest.mark.parametrize("case", ["mamba2-verify-tiles", "gdn-verify"])
def test_nan_stays_in_its_row(case: str) -> None:
    assert_nan_stays_in_its_row(*make(case, seed=6))


@pytest.mark.parametrize("heads", [4, 20])
def test_attention_does_not_depend_on_tiles_or_the_order_of_rows(heads: int, monkeypatch) -> None:
    """Tiles of 8 and of 16 queries, and rows in any order: every output is the same sums in the same order. Contexts of
    some tiles of keys, and windows that take two tiles of 8 and more heads than one holds."""
    geometry = AttentionGeometry(2, 48)
    state = allocate_state(geometry, ReplaySettings(max_window=3, max_seq_len=160), 3)
    for cache in state.tensors.values():
        cache.normal_()
    q, k, v = (torch.randn(5, count, 48).bfloat16() for count in (heads, 2, 2))
    index = [torch.tensor(values, dtype=torch.int32) for values in ([150, 20], [0, 3], [3, 2], [2, 0])]
    outs = []
    for queries, rows in ((8, index), (16, index), (8, [values.flip(0) for values in index])):
        monkeypatch.setattr(geo, "attention_queries", lambda *call, queries=queries: queries)
        outs.append(Emulated(90).attention_window(q, k, v, to_device(state, "cpu"), *rows, 48**-0.5))
    assert torch.isfinite(outs[0]).all()
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    expected = reference.attention_window(q, k, v, state, *index, 48**-0.5)
    assert torch.allclose(outs[0].float(), expected.float(), rtol=2**-7, atol=2**-9), "a unit of bf16"
