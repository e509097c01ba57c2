"""What the launcher does before a kernel runs: argument checks and order, without a GPU."""

import ctypes
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replayssm.plugins import arguments, cuda_ops, launch
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.geometry import KernelConfig
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state

sys.path += [str(Path(__file__).parent / "emulation"), str(Path(__file__).parents[1] / "gpu")]
from emulate import emulated
from window_steps import Steps, assert_close, compare

SETTINGS = ReplaySettings(max_window=2, max_seq_len=64)
MAMBA2, GDN = Mamba2Geometry(4, 16, 32, 2), GdnGeometry(2, 4, 32, 16)


def index(rows: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(rows, dtype=torch.int32) for _ in range(4))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def mamba2_inputs(tokens: int = 3) -> dict[str, torch.Tensor]:
    return {
        "x": bf16(tokens, 4, 16),
        "dt": bf16(tokens, 4),
        "B": bf16(tokens, 2, 32),
        "C": bf16(tokens, 2, 32),
        "A_log": torch.zeros(4),
        "D": torch.zeros(4),
        "dt_bias": torch.zeros(4),
    }


def mamba2_arguments(inputs: dict, state: LayerState | None = None, rows=None, out=None) -> list:
    state = state or allocate_state(MAMBA2, SETTINGS, 3)
    out = bf16(3, 4, 16) if out is None else out
    return arguments.mamba2_arguments(*inputs.values(), state, rows or index(), 7, out)


def test_order_is_inputs_scalars_outputs() -> None:
    state, inputs, out = allocate_state(MAMBA2, SETTINGS, 3), mamba2_inputs(), bf16(3, 4, 16)
    values = mamba2_arguments(inputs, state, out=out)
    kinds = "".join("s" if isinstance(value, int) else "p" for value in values)
    assert kinds == "p" * 17 + "s" * 14 + "p" * 7
    parts = [*state.tensors.values(), state.error_flag]
    assert all(a is b for a, b in zip(values[-6:], parts, strict=True))
    assert values[-7] is out
    scalars = [value for value in values if isinstance(value, int)]
    assert scalars == [3, 3, 64, 7, 0, 64, 4, 64, 64, *(part.stride(0) for part in state.tensors.values())]


def test_strided_tokens_pass_their_stride() -> None:
    inputs = mamba2_inputs()
    inputs["x"] = bf16(3, 200)[:, 16:80].unflatten(1, (4, 16))
    inputs["dt"] = bf16(3, 9)[:, 5:]
    scalars = [value for value in mamba2_arguments(inputs) if isinstance(value, int)]
    assert scalars[5:7] == [200, 9]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", bf16(3, 4, 8), r"x must be \[3, 4, 16\]"),
        ("x", torch.zeros(3, 4, 16), "x must be .* of torch.bfloat16, got .* torch.float32"),
        ("x", bf16(3, 16, 4).transpose(1, 2), "x: all dimensions but the first must be dense"),
        ("x", bf16(3, 68)[:, 4:].unflatten(1, (4, 16)), "x: tokens must start on 16-byte boundaries"),
        ("B", bf16(3, 65)[:, :64].unflatten(1, (2, 32)), "B: tokens must start on 16-byte boundaries"),
        ("dt", bf16(2, 4), r"dt must be \[3, 4\]"),
        ("A_log", bf16(4), "A_log must be a dense .* of torch.float32"),
        ("D", torch.zeros(8)[::2], r"D must be a dense \[4\]"),
    ],
)
def test_bad_tensors_are_named(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mamba2_arguments({**mamba2_inputs(), name: value})


def test_bad_rows_outputs_and_state_are_named() -> None:
    rows = list(index())
    rows[2] = rows[2].long()
    with pytest.raises(ValueError, match="window_lens must be a dense int32"):
        mamba2_arguments(mamba2_inputs(), rows=tuple(rows))
    rows[2] = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"window_lens .* \[2\], got \[3\]"):
        mamba2_arguments(mamba2_inputs(), rows=tuple(rows))
    with pytest.raises(ValueError, match="out must be a dense"):
        mamba2_arguments(mamba2_inputs(), out=bf16(3, 4, 32)[..., :16])
    state = allocate_state(MAMBA2, SETTINGS, 3)
    state.tensors["ring_x"] = state["ring_x"].transpose(1, 2)
    with pytest.raises(ValueError, match="state part ring_x must be dense within a slot"):
        mamba2_arguments(mamba2_inputs(), state)


def test_slots_may_be_strided() -> None:
    """A pool that interleaves layers: every second slot of a larger tensor."""
    state = allocate_state(MAMBA2, SETTINGS, 6)
    for name, tensor in state.tensors.items():
        state.tensors[name] = tensor[::2]
    scalars = [value for value in mamba2_arguments(mamba2_inputs(), state) if isinstance(value, int)]
    assert scalars[9] == 2 * 4 * 16 * 32


def test_serial_kernels_take_parts_of_both_modes() -> None:
    baseline = allocate_state(GDN, ReplaySettings(buffer_len=0, max_window=2), 3)
    inputs = (bf16(3, 2, 32), bf16(3, 2, 32), bf16(3, 4, 16), bf16(3, 4), bf16(3, 4), torch.zeros(4), torch.zeros(4))
    values = arguments.gdn_arguments(*inputs, baseline, index(), 0, bf16(3, 4, 16))
    assert values[7] is baseline["checkpoint"]
    assert values[8:12] == [None] * 4
    assert values[12] is baseline["snapshots"]


def test_blocks_get_the_shared_memory_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it where nothing is said, which leaves the least first-level cache."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    percents = {
        blocks: launch._carveout(KernelConfig("any", (), 1, 128, 30 * 1024, False, blocks)) for blocks in (0, 3, 6, 8)
    }
    assert percents == {0: 100, 3: 41, 6: 82, 8: 100}  # of 228 KiB, 31 KiB a block with what the driver adds


def test_attention_and_convolution() -> None:
    state = allocate_state(AttentionGeometry(2, 32), SETTINGS, 3)
    q, k = bf16(3, 6, 32), bf16(3, 2, 32)
    values = arguments.attention_arguments(q, k, k, state, index(), 0.5, q.clone())
    scalars = [value for value in values if isinstance(value, int)]
    assert scalars == [3, 3, 64, 2, 0x3F000000, 192, 64, 64, 0, 4096]
    with pytest.raises(ValueError, match=r"k must be \[3, 2, 32\]"):
        arguments.attention_arguments(q, q, k, state, index(), 0.5, q.clone())
    conv = allocate_state(ConvGeometry(16, 4), SETTINGS, 3)
    with pytest.raises(ValueError, match=r"weight must be a dense \[16, 4\]"):
        arguments.conv_arguments(bf16(3, 16), bf16(4, 16), None, conv, index(), bf16(3, 16))


def test_long_convolutions_are_cut_into_chunks() -> None:
    state = allocate_state(ConvGeometry(16, 4), SETTINGS, 3)
    assert launch.conv_chunks(3, 3, state) == 1
    assert launch.conv_chunks(4096, 1, state) == 64
    # A long prompt among many short or padding rows is cut too, where the caller knows of prompts.
    assert launch.conv_chunks(512, 8, state) == 1
    with launch.prefill_rows(True):
        assert [launch.conv_chunks(512, rows, state) for rows in (1, 8, 512)] == [8, 4, 1]
    with launch.prefill_rows(False):
        assert launch.conv_chunks(512, 8, state) == 1


def test_many_rows_of_decode_share_the_blocks_of_a_convolution() -> None:
    windows = [allocate_state(ConvGeometry(16, 4), replace(SETTINGS, max_window=length), 3) for length in (1, 5)]
    assert [[launch.conv_rows(rows, state) for rows in (1, 64, 256, 257)] for state in windows] == [
        [1, 1, 2, 1],
        [1] * 4,
    ]


@pytest.fixture
def emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run under emulation on CPU tensors; everything between operator and driver call is the real code."""

    def run(config, values, device, blocks_y, blocks_z=1, blocks_x=None) -> None:
        packed = [
            ctypes.c_int(value)
            if isinstance(value, int)
            else ctypes.c_void_p(None if value is None else value.data_ptr())
            for value in values
        ]
        grid = (blocks_x or config.blocks_x, blocks_y, blocks_z)
        emulated(config)(*grid, config.threads, config.shared_bytes, ctypes.c_uint(1), *packed)

    monkeypatch.setattr(launch, "device_arch", lambda device: 90)
    monkeypatch.setattr(launch, "launch", run)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
@pytest.mark.parametrize(
    "geometry",
    [MAMBA2, GDN, ConvGeometry(24, 4), AttentionGeometry(2, 32)],
    ids=lambda geometry: geometry.kind,
)
def test_cuda_operators_end_to_end(geometry, emulated_device: None) -> None:
    steps = Steps(geometry, SETTINGS)
    assert_close(compare(steps, cuda_ops, 8), steps)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
def test_cuda_operators_copy_what_is_not_aligned(emulated_device: None) -> None:
    """Slices that start off a 16-byte boundary, bf16 constants and int64 rows give the same as clean tensors."""
    steps = Steps(MAMBA2, SETTINGS)
    call = steps.next_call(odd_rows=False, prefill=False)
    clean = steps.run(cuda_ops, steps.pool(), call)
    tokens = call.inputs[0].shape[0]
    padded = torch.zeros(tokens, 1 + 4 * 16, dtype=torch.bfloat16)
    padded[:, 1:] = call.inputs[0].flatten(1)
    call.inputs[0] = padded[:, 1:].unflatten(1, (4, 16))
    call.rows = [row.long() for row in call.rows]
    steps.constants = [constant.double() for constant in steps.constants]
    assert torch.equal(steps.run(cuda_ops, steps.pool(), call), clean)


def test_cuda_operators_fall_back_to_the_reference(emulated_device: None) -> None:
    settings = ReplaySettings(max_window=2, max_seq_len=64, activation_dtype="float32")
    steps = Steps(Mamba2Geometry(2, 8, 16, 1), settings)
    with pytest.warns(UserWarning, match="activations are float32"):
        worst = compare(steps, cuda_ops, 6)
    assert max(worst.values()) == 0.0


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("width", "start"), [(772, 0), (776, 4), (776, 8)])
def test_tokens_that_kernels_cannot_read_where_they_lie_are_copied(tokens, width, start):
    """Slices of projections whose width, or start, is no multiple of 16 bytes; a single token's too."""
    x = torch.randn(tokens, width).bfloat16()[:, start : start + 512]
    rows = cuda_ops._token_rows(x, torch.bfloat16)
    assert torch.equal(rows, x)
    assert rows.stride(0) % 8 == 0
    assert rows.data_ptr() % 16 == 0
    assert (rows.data_ptr() == x.data_ptr()) == (width == 776 and start == 8)
