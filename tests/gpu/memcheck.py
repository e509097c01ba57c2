"""A few steps of every kernel, small enough to run under compute-sanitizer. Fails if a result is wrong."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from packed_products import check_everything
from window_steps import Steps, assert_close, compare

from replayssm.plugins import launch
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings

# Short buffers, so that a few steps flush.
DECODE = {"buffer_len": 2, "max_window": 1}
READOUT = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}
CASES = [
    (Mamba2Geometry(4, 64, 128, 2), ReplaySettings(**DECODE)),
    (Mamba2Geometry(2, 80, 128, 1), ReplaySettings(**DECODE, state_dtype="float16")),
    (Mamba2Geometry(2, 40, 48, 1), ReplaySettings(**DECODE, state_dtype="bfloat16", activation_dtype="float16")),
    (Mamba2Geometry(2, 80, 128, 1), ReplaySettings(buffer_len=6, max_window=5, state_dtype="float16")),
    (Mamba2Geometry(2, 40, 48, 1), ReplaySettings(buffer_len=4, max_window=9, activation_dtype="float16")),
    (GdnGeometry(1, 2, 128, 128), ReplaySettings(**DECODE)),
    (GdnGeometry(1, 2, 128, 128), ReplaySettings(buffer_len=6, max_window=5)),
    (GdnGeometry(1, 2, 64, 40), ReplaySettings(buffer_len=8, max_window=5, state_dtype="bfloat16")),
    (Mamba2Geometry(2, 64, 128, 1), ReplaySettings(buffer_len=0, max_window=2)),
    (GdnGeometry(1, 2, 128, 64), ReplaySettings(buffer_len=0, max_window=2)),
    (Mamba2Geometry(2, 32, 64, 1), ReplaySettings(buffer_len=4, max_window=2, serial_exact=True)),
    (ConvGeometry(1048, 4), ReplaySettings(max_window=2)),
    (AttentionGeometry(2, 64), ReplaySettings(max_window=3, max_seq_len=200)),
    (AttentionGeometry(1, 256), ReplaySettings(max_window=1, max_seq_len=100, activation_dtype="float16")),
    (Mamba2Geometry(4, 80, 128, 1), ReplaySettings(buffer_len=4, max_window=2, **READOUT)),
    (Mamba2Geometry(4, 64, 128, 1), ReplaySettings(buffer_len=4, **READOUT)),
    (Mamba2Geometry(3, 40, 64, 1), ReplaySettings(max_window=5, state_dtype="float8", state_rounding="stochastic")),
    (
        GdnGeometry(1, 2, 64, 40),
        ReplaySettings(buffer_len=8, max_window=3, state_dtype="float8", readout_dtype="nvfp4"),
    ),
    (
        GdnGeometry(1, 2, 128, 64),
        ReplaySettings(buffer_len=4, max_window=3, **{**READOUT, "state_dtype": "float8"}),
    ),
    (GdnGeometry(1, 4, 128, 128), ReplaySettings(buffer_len=2, state_dtype="float16", readout_dtype="float8")),
    (GdnGeometry(1, 2, 128, 128), ReplaySettings(buffer_len=4, max_window=2, **READOUT)),
    (GdnGeometry(1, 2, 64, 128), ReplaySettings(buffer_len=13, max_window=5, **READOUT)),
]

PREFILL_CASES = [
    (Mamba2Geometry(2, 80, 128, 1), ReplaySettings(max_window=2)),
    (Mamba2Geometry(1, 40, 48, 1), ReplaySettings(max_window=2, activation_dtype="float16", state_dtype="float16")),
    (GdnGeometry(1, 2, 128, 128), ReplaySettings(max_window=2)),
    (GdnGeometry(1, 1, 64, 40), ReplaySettings(max_window=2, state_dtype="bfloat16")),
]

SEVERAL_PARTS = [
    (GdnGeometry(1, 4, 128, 128), ReplaySettings(buffer_len=6, max_window=5)),
    (GdnGeometry(1, 4, 128, 64), ReplaySettings(**DECODE, state_dtype="float16")),
]


def check(geometry, settings: ReplaySettings, **options) -> None:
    steps = Steps(geometry, settings, device="cuda:0", **options)
    worst = compare(steps, launch, 12 if settings.buffer_len == 2 else 6)
    print(geometry, {name: f"{error:.1e}" for name, error in worst.items()}, flush=True)
    assert_close(worst, steps)


if __name__ == "__main__":
    for geometry, settings in CASES:
        check(geometry, settings)
    for geometry, settings in PREFILL_CASES:
        check(geometry, settings, rows=2, longest_prefill=200)
    # As large batches have them, whose blocks work through several parts of a state.
    launch.geo.window_blocks = lambda config, rows, arch: config.blocks_x // dict(config.defines).get("MAX_PARTS", 1)
    for geometry, settings in SEVERAL_PARTS:
        check(geometry, settings)
    launch.PAIRED_CONV_ROWS = 2  # two rows of decode share a block
    check(ConvGeometry(1048, 4), ReplaySettings(max_window=1))
    check_everything("cuda:0")
    print("packed products", flush=True)
    # Kernels between products and around captured steps: their tests are as small.
    tests = Path(__file__).parents[1] / "plugins"
    files = [str(tests / f"test_{name}.py") for name in ("elementwise", "row_order", "step_ends", "routing", "state")]
    sys.exit(pytest.main([*files, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]))
