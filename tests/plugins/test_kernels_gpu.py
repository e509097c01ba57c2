"""The kernels on a GPU, against the references, the fp64 recurrence and themselves. Skipped where there is no GPU.

Tolerances are those of window_steps.assert_close; what must be equal is compared bit for bit.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replayssm.plugins import cuda_ops, geometry, launch, torch_ops
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, ErrorBit, GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from shapes import NANO, QWEN4B, QWEN122B, SUPER
from window_steps import BF16_OUTPUT_ERROR, Steps, assert_close, compare, judge, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


FULL = {
    f"{name}-{label}": (geometry, settings)
    for name, geometry in (("nano4b", NANO), ("super120b", SUPER), ("qwen4b", QWEN4B), ("qwen122b", QWEN122B))
    for label, settings in (
        ("decode", {"max_window": 1}),
        ("verify5", {"max_window": 5}),
        ("verify8-fp16", {"max_window": 8, "state_dtype": "float16"}),
        ("decode-L4", {"max_window": 1, "buffer_len": 4}),
        ("verify3-L8", {"max_window": 3, "buffer_len": 8}),
        ("verify16-L32-bf16", {"max_window": 16, "buffer_len": 32, "state_dtype": "bfloat16"}),
    )
}
ODD = {
    "mamba2-40": (Mamba2Geometry(1, 40, 64, 1), {"buffer_len": 4, "max_window": 2, "activation_dtype": "float16"}),
    "mamba2-48": (Mamba2Geometry(8, 48, 16, 8), {"buffer_len": 8, "max_window": 3}),
    "mamba2-96": (Mamba2Geometry(6, 96, 128, 2), {"buffer_len": 32, "max_window": 4, "state_dtype": "float16"}),
    "mamba2-256": (Mamba2Geometry(4, 64, 256, 1), {"buffer_len": 16, "max_window": 9}),
    "mamba2-short": (Mamba2Geometry(2, 16, 48, 1), {"buffer_len": 1, "max_window": 16, "state_dtype": "bfloat16"}),
    "gdn-64": (GdnGeometry(2, 8, 64, 64), {"buffer_len": 4, "max_window": 6, "activation_dtype": "float16"}),
    "gdn-256": (GdnGeometry(1, 3, 256, 64), {"buffer_len": 8, "max_window": 2, "u_format": "bfloat16"}),
    "gdn-decode-256": (GdnGeometry(1, 3, 256, 64), {"buffer_len": 8, "max_window": 1, "u_format": "bfloat16"}),
    "gdn-decode-40": (
        GdnGeometry(2, 2, 48, 40),
        {"buffer_len": 32, "max_window": 1, "activation_dtype": "float16"},
    ),
    "gdn-40": (GdnGeometry(1, 1, 16, 40), {"buffer_len": 32, "max_window": 16}),
    "mamba2-baseline": (SUPER, {"buffer_len": 0, "max_window": 1}),
    "mamba2-snapshots": (Mamba2Geometry(4, 80, 128, 1), {"buffer_len": 0, "max_window": 5, "state_dtype": "float16"}),
    "mamba2-serial": (Mamba2Geometry(4, 64, 128, 1), {"max_window": 3, "serial_exact": True}),
    "gdn-baseline": (QWEN4B, {"buffer_len": 0, "max_window": 1}),
    "gdn-snapshots": (GdnGeometry(2, 4, 128, 128), {"buffer_len": 0, "max_window": 5, "state_dtype": "bfloat16"}),
    "gdn-serial": (GdnGeometry(2, 4, 128, 128), {"max_window": 3, "serial_exact": True, "u_format": "exact"}),
    "attention-128": (AttentionGeometry(8, 128), {"max_window": 5, "max_seq_len": 999}),
    "attention-256": (AttentionGeometry(2, 256), {"max_window": 1, "max_seq_len": 200}),
    "attention-64": (AttentionGeometry(1, 64), {"max_window": 4, "max_seq_len": 300, "activation_dtype": "float16"}),
    "conv-nano": (ConvGeometry(96 * 80 + 2 * 8 * 128, 4), {"max_window": 5}),
    "conv-qwen": (ConvGeometry(8192, 4), {"max_window": 1, "activation_dtype": "float16"}),
    "conv-short": (ConvGeometry(1048, 2), {"max_window": 16}),
}
CASES = {**FULL, **ODD}


def make(case: str, **options) -> Steps:
    geometry, settings = CASES[case]
    changes = options.pop("settings", {})
    return Steps(geometry, ReplaySettings(**{**settings, **changes}), device="cuda:0", **options)


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case: str) -> None:
    """Outputs, state and error flags over calls that mix every kind of row, from a poisoned pool."""
    steps = make(case, rows=4 if case in ODD else 3)
    assert_close(compare(steps, launch, 24 if case in ODD else 8), steps)


def test_rows_of_decode_that_share_the_blocks_of_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows have them: pairs of decode rows, and pairs with a prompt, padding or an invalid row."""
    monkeypatch.setattr(launch, "PAIRED_CONV_ROWS", 2)
    steps = make("conv-qwen", rows=4)
    assert launch.conv_rows(steps.rows, allocate_state(steps.geometry, steps.settings, 1)) == 2
    assert_close(compare(steps, launch, 24), steps)


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("super120b-decode", 60),
        ("nano4b-verify5", 60),
        ("qwen122b-decode", 60),
        ("qwen4b-verify5", 60),
        ("mamba2-48", 1500),
        ("gdn-40", 1500),
        ("conv-short", 200),
    ],
)
def test_matches_the_recurrence(case: str, count: int) -> None:
    """Free-running over rejections, flushes and prefills."""
    assert judge(make(case, seed=1), launch, count) < BF16_OUTPUT_ERROR


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith(("conv", "attention"))])
def test_repeated_step_is_bit_equal(case: str) -> None:
    """Rule 2, also for steps that flush: the same call again changes neither outputs nor state."""
    steps = make(case, seed=2)
    if steps.settings.is_baseline:
        pytest.skip("not claimed for the baseline")
    state = steps.pool()
    for _ in range(24):
        call = steps.next_call(prefill=False)
        first = steps.run(launch, state, call)
        kept = to_device(state, "cuda")
        assert torch.equal(first, steps.run(launch, state, call))
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name


@pytest.mark.parametrize("case", ["qwen4b-decode", "qwen122b-verify5", "qwen4b-verify8-fp16", "gdn-64"])
def test_result_does_not_depend_on_the_parts_of_a_block(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that work through one part of the state and through all of a key head's give the same bits."""
    steps = make(case, seed=7)
    states = steps.pool(), steps.pool()
    for _ in range(12):
        call, outputs = steps.next_call(), []
        for state, many in zip(states, (False, True), strict=True):

            def blocks(config, rows, arch, many=many) -> int:
                return config.blocks_x // (dict(config.defines).get("MAX_PARTS", 1) if many else 1)

            monkeypatch.setattr(launch.geo, "window_blocks", blocks)
            outputs.append(steps.run(launch, state, call))
        assert torch.equal(*outputs)
        for name, tensor in states[0].tensors.items():
            assert torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8)), name


@pytest.mark.parametrize("case", ["super120b-decode", "qwen4b-decode", "nano4b-verify5"])
def test_replayed_graph_equals_eager(case: str) -> None:
    """One captured step, its positions advanced on the device, against eager steps with the same inputs."""
    steps = make(case, slots=3, rows=3, seed=3, settings={"max_seq_len": 20_000})
    call = steps.next_call(odd_rows=False, prefill=False)
    call.rows[0].zero_()
    states = steps.pool(), steps.pool()
    outputs = []
    for state, graphed in zip(states, (True, False), strict=True):
        seq_lens = call.rows[0].clone()
        rows = [seq_lens, *call.rows[1:]]
        advance = call.rows[2].clamp(max=1)

        def step(state=state, rows=rows, seq_lens=seq_lens, advance=advance) -> torch.Tensor:
            out = steps.run(launch, state, type(call)(call.inputs, rows, *([None] * 4)))
            seq_lens.add_(advance)
            return out

        if graphed:
            out = step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            for _ in range(10_000):
                graph.replay()
        else:
            for _ in range(10_001):
                out = step()
        torch.cuda.synchronize()
        outputs.append(out.clone())
        assert int(state.error_flag) == 0
    assert torch.equal(*outputs)
    for name, tensor in states[0].tensors.items():
        assert torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8)), name


@pytest.mark.parametrize("case", ["super120b-decode", "nano4b-verify5", "qwen4b-decode", "qwen122b-verify5"])
def test_order_of_blocks_does_not_matter(case: str) -> None:
    """Blocks that run in another order and after random delays leave the same bits: none reads what another writes."""
    steps = make(case, slots=40, rows=24, seed=5)
    name = {"mamba2": "mamba2_window", "gdn": "gdn_window"}[steps.geometry.kind]
    config = geometry.window_config(steps.geometry, steps.settings, launch.device_arch(steps.device))
    states = [steps.pool() for _ in range(3)]
    for number in range(20):
        call = steps.next_call(prefill=False)
        outputs = []
        for order, state in enumerate(states):
            # Few different orders, because each is another compilation.
            disturbed = (*config.defines, ("DISTURB", 100 * (number % 3) + order)) if order else config.defines
            run = partial(getattr(launch, name), config=replace(config, defines=disturbed))
            outputs.append(steps.run(SimpleNamespace(**{name: run}), state, call))
        for output, state in zip(outputs[1:], states[1:], strict=True):
            assert torch.equal(output, outputs[0])
            for part, tensor in state.tensors.items():
                assert torch.equal(tensor.view(torch.uint8), states[0][part].view(torch.uint8)), part


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("batch", [0, 1, 257, 1024])
def test_rows_do_not_depend_on_the_batch(batch: int, window: int) -> None:
    """A row among many gives the bits that it gives alone."""
    geometry, settings = Mamba2Geometry(16, 64, 128, 2), ReplaySettings(max_window=window)
    steps = Steps(geometry, settings, slots=1025, rows=1, device="cuda:0")
    state = allocate_state(geometry, settings, 1025, "cuda:0")
    for part in ("checkpoint", "ring_x", "ring_B"):
        state[part].normal_()
    state["ring_dt"].uniform_(0, 0.1)
    positions = torch.arange(1025, device="cuda:0", dtype=torch.int32) % 17
    state["checkpoint_position"].copy_((100 - positions)[:, None, None])
    alone = to_device(state, "cuda:0")
    slots = torch.randperm(1025, device="cuda:0")[:batch].to(torch.int32)
    lens = torch.ones_like(slots)
    starts = torch.arange(batch, device="cuda:0", dtype=torch.int32)
    seq_lens = torch.full_like(slots, 100)
    inputs = steps.inputs(max(batch, 1))
    out = launch.mamba2_window(*inputs, *steps.constants, state, seq_lens, starts, lens, slots, 0)
    assert int(state.error_flag) == 0
    if not batch:
        assert not out.any()
        return
    for row in {0, batch // 2, batch - 1}:
        own = slice(row, row + 1)
        one = launch.mamba2_window(
            *(tensor[own] for tensor in inputs),
            *steps.constants,
            alone,
            seq_lens[own],
            starts[:1],
            lens[own],
            slots[own],
            0,
        )
        assert torch.equal(one[0], out[row])
        slot = int(slots[row])
        assert torch.equal(alone["checkpoint"][slot], state["checkpoint"][slot])


def test_offsets_beyond_int32() -> None:
    """2100 slots of 4 MiB: the last one's elements lie past 2^31."""
    settings = ReplaySettings(max_window=1)
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of free memory")
    steps = Steps(SUPER, settings, slots=2100, rows=1, device="cuda:0")
    state = allocate_state(SUPER, settings, 2100, "cuda:0")
    for name, part in state.tensors.items():
        if part.is_floating_point():
            part[0].uniform_(0, 0.1) if name == "ring_dt" else part[0].normal_()
    state["checkpoint_position"][0] = 84
    for part in state.tensors.values():
        part[2099] = part[0]
    inputs = steps.inputs(1)
    outputs = []
    for slot in (0, 2099):
        rows = [torch.tensor([value], dtype=torch.int32, device="cuda:0") for value in (100, 0, 1, slot)]
        outputs.append(launch.mamba2_window(*inputs, *steps.constants, state, *rows, 0))
    assert torch.equal(*outputs)
    for name, part in state.tensors.items():
        assert torch.equal(part[0], part[2099]), name
        assert name == "checkpoint_position" or not part[1:2099].any(), name


@pytest.mark.parametrize("case", ["mamba2-48", "gdn-64", "conv-short", "attention-64"])
def test_operators_serve_cuda_tensors(case: str) -> None:
    """The torch.library operators run the kernels."""
    cuda_ops.register()
    steps = make(case, seed=4)
    states = steps.pool(), steps.pool()
    for _ in range(6):
        call = steps.next_call()
        assert torch.equal(steps.run(torch_ops, states[0], call), steps.run(launch, states[1], call))
        for name, tensor in states[0].tensors.items():
            assert torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8)), name


def test_operator_without_a_kernel_runs_the_reference() -> None:
    """Activations in fp32 have no kernel: a warning, and the reference's result."""
    cuda_ops.register()
    settings = ReplaySettings(max_window=2, activation_dtype="float32")
    steps = Steps(Mamba2Geometry(2, 8, 16, 1), settings, device="cuda:0")
    with pytest.warns(UserWarning, match="activations are float32"):
        worst = compare(steps, torch_ops, 4)
    assert max(worst.values()) == 0.0


@pytest.mark.parametrize("case", ["super120b-verify5", "qwen4b-verify5"])
def test_nan_stays_in_its_row_and_invalid_rows_are_flagged(case: str) -> None:
    steps = make(case, seed=6)
    state = steps.pool()
    call = steps.next_call(odd_rows=False, prefill=False)
    clean = steps.run(launch, to_device(state, "cuda:0"), call)
    own = slice(call.starts[1], call.starts[1] + call.lengths[1])
    for tensor in call.inputs:
        tensor[own] = torch.nan
    call.rows[3][2] = steps.slots
    dirty = steps.run(launch, state, call)
    assert int(state.error_flag) == ErrorBit.SLOT_OUT_OF_RANGE
    bad = slice(call.starts[2], call.starts[2] + call.lengths[2])
    assert dirty[own].isnan().all()
    assert not dirty[bad].any()
    dirty[own], dirty[bad] = clean[own], clean[bad]
    assert torch.equal(dirty, clean)
