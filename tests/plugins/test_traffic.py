"""The traffic model against a simulation that counts every row and state it touches, call by call."""

from __future__ import annotations

import pytest

from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.traffic import slot_bytes, traffic_per_token

NANO = Mamba2Geometry(nheads=96, headdim=80, dstate=128, ngroups=8)
QWEN = GdnGeometry(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128)
MAMBA_ROW = 96 * 80 * 2 + 8 * 128 * 2 + 96 * 4
GDN_ROW = 16 * 128 * 2 + 32 * 128 * 4 + 32 * 4


def simulate(state: int, copy: int, row: int, buffer_len: int, window: int, accepted: int) -> float:
    """Bytes per token over 1,000 flushes, by walking through the calls."""
    history = moved = tokens = flushes = 0
    while flushes < 1000:
        if history > 0 and history + window > buffer_len:
            moved += history * row + state  # fold: history rows and checkpoint in
            moved += state + copy  # checkpoint and copy out
            history, flushes = 0, flushes + 1
        else:
            moved += copy or state
        moved += history * row + window * row
        history += accepted
        tokens += accepted
    return moved / tokens


@pytest.mark.parametrize(("geometry", "row"), [(NANO, MAMBA_ROW), (QWEN, GDN_ROW)])
@pytest.mark.parametrize("readout", ["same", "nvfp4"])
@pytest.mark.parametrize(
    ("buffer_len", "draft_len", "accepted"), [(16, 4, 3), (16, 4, 1), (32, 7, 8), (8, 7, 2), (4, 7, 3)]
)
def test_replay_traffic_equals_simulation(geometry, row, readout, buffer_len, draft_len, accepted) -> None:
    settings = ReplaySettings(buffer_len=buffer_len, max_window=1 + draft_len, readout_dtype=readout)
    state = geometry.state_shape[0] * geometry.state_shape[1] * geometry.state_shape[2] * 4
    copy = 0 if readout == "same" else state // 8 + state // 64 + geometry.state_shape[0] * geometry.state_shape[1]
    traffic = traffic_per_token([geometry], settings, draft_len, accepted)
    # The simulation starts with an empty ring once in 1,000 flushes, hence one part in a thousand.
    assert traffic.replay == pytest.approx(simulate(state, copy, row, buffer_len, 1, 1), rel=1e-3)
    expected = simulate(state, copy, row, buffer_len, 1 + draft_len, accepted)
    assert traffic.replay_speculation == pytest.approx(expected, rel=1e-3)
    assert traffic.plain == 2 * state
    assert traffic.snapshot_speculation == pytest.approx((2 + draft_len) * state / accepted)


def test_nano_traffic_in_numbers() -> None:
    """One Nano-4B layer, L = 16, worked by hand: 16 reads and 1 write of 3,932,160 bytes, 152 ring rows of 17,792."""
    traffic = traffic_per_token([NANO], ReplaySettings(buffer_len=16), 0, 1.0)
    assert traffic.replay == (17 * 3_932_160 + (136 + 16) * 17_792) / 16
    assert traffic.plain == 2 * 3_932_160


def test_convolution_counts_alike_everywhere_and_attention_not_at_all() -> None:
    settings = ReplaySettings(max_window=5)
    traffic = traffic_per_token([ConvGeometry(100, 4), AttentionGeometry(2, 8)], settings, 4, 2.0)
    assert traffic.plain == traffic.replay == 4 * 200
    assert traffic.snapshot_speculation == traffic.replay_speculation == 8 * 200 / 2


def test_slot_bytes_of_published_nano_layer() -> None:
    """Literal figures: fp32 state 3,932,160 B; ring of 16 rows 284,672 B (notes of the published configuration)."""
    geometries = [NANO, ConvGeometry(NANO.conv_dim, 4), AttentionGeometry(8, 128)]
    size = slot_bytes(geometries, ReplaySettings(buffer_len=15, max_window=1, max_seq_len=1024))
    assert (size.state, size.ring, size.readout, size.snapshots) == (3_932_160, 284_672, 0, 0)
    assert size.conv == 4 * (96 * 80 + 2 * 8 * 128) * 2
    assert size.positions == 96 * 2 * 4
    assert size.kv_per_token == 2 * 8 * 128 * 2
    assert size.total(10) == size.recurrent + 10 * size.kv_per_token
    baseline = slot_bytes(geometries, ReplaySettings(buffer_len=0, max_window=5))
    assert (baseline.ring, baseline.snapshots) == (0, 5 * 3_932_160)
    copy = slot_bytes(geometries, ReplaySettings(readout_dtype="nvfp4")).readout
    assert copy == 96 * 80 * 128 * 9 // 16 + 96 * 80
    elements = 96 * 80 * 128
    small = slot_bytes(geometries, ReplaySettings(state_dtype="float8", readout_dtype="nvfp4"))
    assert (small.state, small.readout) == (elements + 96 * 80, copy)
    copied = slot_bytes(geometries, ReplaySettings(state_dtype="float16", readout_dtype="float8"))
    assert (copied.state, copied.readout) == (2 * elements, elements + 96 * 80)
    snapshots = slot_bytes(geometries, ReplaySettings(buffer_len=0, max_window=3, state_dtype="float8"))
    assert (snapshots.state, snapshots.snapshots) == (elements + 96 * 80, 3 * (elements + 96 * 80))


def test_traffic_of_every_way_to_read_a_state() -> None:
    """One Qwen3.5-4B layer, L = 16, worked by hand: 15 of 16 calls read the readout and, if u reads the checkpoint,
    that too; the other one, which folds, reads and writes the checkpoint and writes the readout."""
    elements, rows = 32 * 128 * 128, 32 * 128
    ring = (136 + 16) * GDN_ROW
    nvfp4, half = elements * 9 // 16 + rows, 2 * elements
    for settings, moved in (
        ({"state_dtype": "float16"}, 17 * half),
        ({"state_dtype": "float8"}, 17 * (elements + rows)),
        ({"state_dtype": "float16", "readout_dtype": "nvfp4"}, 16 * nvfp4 + 2 * half),
        ({"state_dtype": "float16", "readout_dtype": "nvfp4", "u_source": "checkpoint"}, 16 * nvfp4 + 17 * half),
        ({"state_dtype": "float8", "readout_dtype": "nvfp4"}, 16 * nvfp4 + 2 * (elements + rows)),
    ):
        traffic = traffic_per_token([QWEN], ReplaySettings(buffer_len=16, **settings), 0, 1.0)
        assert traffic.replay == (moved + ring) / 16, settings


@pytest.mark.parametrize("acceptance", [0.5, 5.5])
def test_impossible_acceptance_is_refused(acceptance: float) -> None:
    with pytest.raises(ValueError, match="between 1 and 1 \\+ draft_len = 5"):
        traffic_per_token([NANO], ReplaySettings(max_window=5), 4, acceptance)


def test_layers_with_readouts_of_their_own_count_as_such() -> None:
    """A model is the sum of its layers, each with its own settings; numbers are needed to know whose is whose."""
    fields = {"state_dtype": "float16", "max_window": 2}
    mixed = ReplaySettings(**fields, readout_dtype="nvfp4", readout_layers=((5, "float8"),))
    small, large = (ReplaySettings(**fields, readout_dtype=dtype) for dtype in ("nvfp4", "float8"))
    geometries, layers = [QWEN, QWEN, QWEN], [0, 5, 6]
    alone = [small, large, small]
    assert slot_bytes(geometries, mixed, layers).readout == sum(slot_bytes([QWEN], own).readout for own in alone)
    assert traffic_per_token(geometries, mixed, 1, 1.5, layers).replay_speculation == pytest.approx(
        sum(traffic_per_token([QWEN], own, 1, 1.5).replay_speculation for own in alone)
    )
    with pytest.raises(ValueError, match="readout_layers need the numbers of the layers"):
        slot_bytes(geometries, mixed)
