"""The chunked prefill kernels, their source compiled for the host and run thread by thread.

Beside mixed calls against the reference (tolerances: window_steps.assert_close), single prompts are compared with the
fp64 recurrence: outputs are rounded to 16 bits (2^-9 of each at most for bf16), states keep 16 bits of mantissa of
every term (1e-5), which for GDN lies below what a normalised k that rounds the other way does (2^-9 of few elements).
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import launch
from replayssm.plugins.contract import ErrorBit, GdnGeometry, Mamba2Geometry
from replayssm.plugins.geometry import UnsupportedGeometryError
from replayssm.plugins.prefill_geometry import Variant, prefill_config, prefill_config_or_none
from replayssm.plugins.reference import recurrence
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import Emulated
from readout_steps import assert_same_bytes, prefill_steps
from window_steps import BF16_OUTPUT_ERROR, Steps, assert_close, compare, judge, relative_error, to_device

emulation = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

MAMBA2, GDN = Mamba2Geometry(2, 40, 64, 1), GdnGeometry(1, 2, 64, 48)
FP16 = {"state_dtype": "float16", "activation_dtype": "float16"}
NVFP4 = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}
CASES = {
    "mamba2": (MAMBA2, {}, Variant(64, 3)),
    "mamba2-32": (Mamba2Geometry(2, 48, 128, 2), {"state_dtype": "bfloat16", "buffer_len": 32}, Variant(32, 2)),
    "mamba2-fp16": (Mamba2Geometry(1, 16, 48, 1), FP16, Variant(32, 3)),
    "gdn": (GDN, {}, Variant(64, 2)),
    "gdn-32": (GdnGeometry(1, 1, 128, 64), {"u_format": "bfloat16", "buffer_len": 4}, Variant(32, 2)),
    "gdn-fp16": (GdnGeometry(1, 1, 48, 16), FP16, Variant(32, 3)),
    "mamba2-nvfp4": (Mamba2Geometry(2, 48, 64, 2), NVFP4, Variant(32, 2)),
    "gdn-state8": (GdnGeometry(1, 1, 128, 64), {"state_dtype": "float8"}, Variant(32, 2)),
}


class EmulatedPrefill(Emulated):
    """Serves every prefill row by the prefill kernel of one launch geometry."""

    def __init__(self, variant: Variant, cta_rows: int | None = None) -> None:
        super().__init__(90)
        self.variant, self.prefill_rows = variant, cta_rows

    def _prefill_config(self, state, tokens: int, rows: int):
        return prefill_config(
            state.geometry, state.settings, self.arch, cta_rows=self.prefill_rows, variant=self.variant
        )


def make(case: str, seed: int = 0, **changes) -> tuple[Steps, EmulatedPrefill]:
    geometry, settings, variant = CASES[case]
    settings = ReplaySettings(**{"max_window": 3, **settings, **changes})
    return Steps(geometry, settings, seed=seed, longest_prefill=150), EmulatedPrefill(variant)


def prompt(steps: Steps, implementation, tokens: int, spread: float = 1.0):
    """(outputs, final state, inputs) of a fresh prompt in slot 1. spread: factor of the raw gates."""
    inputs = steps.inputs(tokens)
    gate = 1 if steps.geometry.kind == "mamba2" else 3
    inputs[gate].mul_(spread)
    state = steps.pool()
    rows = [torch.tensor([value], dtype=torch.int32) for value in (0, 0, tokens, 1)]
    name = f"{steps.geometry.kind}_window"
    out = getattr(implementation, name)(*inputs, *steps.constants, state, *rows, 0)
    assert int(state.error_flag) == 0
    assert torch.equal(state["checkpoint_position"][1].unique(), torch.tensor([tokens], dtype=torch.int32))
    return out, state["checkpoint"][1], inputs


def expected(steps: Steps, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of the fp64 recurrence."""
    if steps.geometry.kind == "mamba2":
        out, states = recurrence.mamba2_recurrence(*inputs, *steps.constants)
    else:
        out, states = recurrence.gdn_recurrence(*inputs, *steps.constants, None, steps.dtype)
    return out, states[-1]


@emulation
@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    """Outputs, state and error flags over calls that mix every kind of row, from a poisoned pool."""
    steps, kernels = make(case)
    assert_close(compare(steps, kernels, 9), steps)


@emulation
@pytest.mark.parametrize("case", ["mamba2", "gdn"])
def test_matches_the_recurrence(case: str) -> None:
    """Free-running, with histories in the ring before prefills and windows behind them."""
    steps, kernels = make(case, seed=1)
    assert judge(steps, kernels, 14) < BF16_OUTPUT_ERROR


@emulation
@pytest.mark.parametrize(("case", "tokens"), [("mamba2", 64), ("mamba2", 129), ("gdn", 200)])
@pytest.mark.parametrize("spread", [1.0, 40.0], ids=["mild", "steep"])
def test_prompt_matches_the_recurrence(case: str, tokens: int, spread: float) -> None:
    """Steep decays reach sums of several hundred within a chunk, whose differences must stay exact."""
    steps, kernels = make(case, seed=2)
    out, state, inputs = prompt(steps, kernels, tokens, spread)
    wanted_out, wanted_state = expected(steps, inputs)
    assert relative_error(out, wanted_out) < BF16_OUTPUT_ERROR
    assert relative_error(state, wanted_state) < (1e-5 if case.startswith("mamba2") else 1e-4)


@emulation
@pytest.mark.parametrize(
    ("case", "formats"),
    [
        ("mamba2", {"state_dtype": "float8", "state_rounding": "stochastic"}),
        ("gdn", NVFP4),
        ("gdn", {"readout_dtype": "float8"}),
    ],
    ids=["state8", "nvfp4", "readout8"],
)
def test_formats_are_those_of_one_and_the_same_state(case: str, formats: dict[str, str]) -> None:
    """Rounding, random bits, scales and codes of fresh rows and of rows that continue a checkpoint or a history."""
    steps, kernels = make(case, seed=4, **formats)
    steps.longest_prefill = 70
    expected, mine = prefill_steps(steps, kernels)
    assert_same_bytes(mine, expected)


@emulation
def test_equal_keys_do_not_spoil_the_substitution() -> None:
    """One key for all tokens and beta near 1: every entry of the triangular system is as large as it can be."""
    steps, kernels = make("gdn", seed=3)
    original = steps.inputs

    def inputs(tokens: int) -> list[torch.Tensor]:
        made = original(tokens)
        made[1].copy_(made[1][:1].expand_as(made[1]))
        made[3].fill_(-9.0)
        made[4].fill_(6.0)
        return made

    steps.inputs = inputs
    out, state, made = prompt(steps, kernels, 100)
    wanted_out, wanted_state = expected(steps, made)
    assert relative_error(out, wanted_out) < BF16_OUTPUT_ERROR
    assert relative_error(state, wanted_state) < 1e-4


@emulation
@pytest.mark.parametrize(("case", "cta_rows"), [("mamba2-32", 16), ("gdn-32", 32)])
def test_rows_depend_neither_on_their_batch_nor_on_the_row_tiles(case: str, cta_rows: int, monkeypatch) -> None:
    """Three ragged rows in one call give the bits that each gives alone in smaller blocks."""
    geometry = CASES[case][0]
    monkeypatch.setattr(type(geometry), "row_tiles", geometry.state_shape[1] // cta_rows)
    steps, kernels = make(case, seed=4)
    alone = EmulatedPrefill(CASES[case][2], cta_rows)
    lengths, state = [70, 5, 33], steps.pool()
    inputs, starts = steps.inputs(sum(lengths)), [0, 70, 75]
    other = to_device(state, "cpu")
    name = f"{steps.geometry.kind}_window"
    rows = [torch.tensor(values, dtype=torch.int32) for values in ([0, 0, 0], starts, lengths, [2, 0, 1])]
    out = getattr(kernels, name)(*inputs, *steps.constants, state, *rows, 0)
    for start, length, slot in zip(starts, lengths, (2, 0, 1), strict=True):
        own = slice(start, start + length)
        row = [torch.tensor([value], dtype=torch.int32) for value in (0, 0, length, slot)]
        single = getattr(alone, name)(*(part[own] for part in inputs), *steps.constants, other, *row, 0)
        assert torch.equal(single, out[own])
        assert torch.equal(other["checkpoint"][slot], state["checkpoint"][slot])


@emulation
@pytest.mark.parametrize("case", ["mamba2", "gdn"])
def test_invalid_rows_are_left_to_the_window_kernel(case: str) -> None:
    """Long rows that are invalid or padding: zeros, error bits and an untouched state, beside a prompt with NaN."""
    steps, kernels = make(case, seed=5)
    state, inputs = steps.pool(), steps.inputs(36)
    state["checkpoint_position"].fill_(30)
    for part in inputs:
        part[:12] = torch.nan
    before = to_device(state, "cpu")
    columns = ([0, 5, 60], [0, 12, 24], [12, 12, 12], [1, 2, -1])
    out = getattr(kernels, f"{steps.geometry.kind}_window")(
        *inputs, *steps.constants, state, *(torch.tensor(values, dtype=torch.int32) for values in columns), 0
    )
    assert int(state.error_flag) == ErrorBit.SEQ_LEN_BELOW_CHECKPOINT
    assert out[:12].isnan().all()
    assert not out[12:].any()
    for name, part in state.tensors.items():
        kept = [slot for slot in range(steps.slots) if slot != 1]
        assert torch.equal(part[kept].view(torch.uint8), before[name][kept].view(torch.uint8)), name


def test_a_second_launch_only_where_a_row_must_be_prefill() -> None:
    state = allocate_state(MAMBA2, ReplaySettings(max_window=5), 1)
    assert launch.prefill_kernel(state, 40, 8, 90) is None
    assert launch.prefill_kernel(state, 41, 8, 90).kernel == "mamba2_prefill"
    with launch.prefill_rows(True):
        assert launch.prefill_kernel(state, 40, 8, 90).kernel == "mamba2_prefill"
        with launch.prefill_rows(False):
            assert launch.prefill_kernel(state, 41, 8, 90) is None
    assert launch.prefill_kernel(state, 40, 8, 90) is None
    stored = allocate_state(MAMBA2, ReplaySettings(max_window=5, **NVFP4), 1)
    assert launch.prefill_kernel(stored, 41, 8, 90).kernel == "mamba2_prefill", "whatever the state's format"
    assert prefill_config_or_none(MAMBA2, ReplaySettings(max_window=5, serial_exact=True), 90) is None
    assert prefill_config_or_none(Mamba2Geometry(4, 64, 256, 1), ReplaySettings(), 90) is None
    with pytest.raises(UnsupportedGeometryError, match="at most 128 columns, got 256"):
        prefill_config(Mamba2Geometry(4, 64, 256, 1), ReplaySettings(), 90)
