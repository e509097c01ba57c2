"""Launch geometry: coverage of the target models, limits, and refusals."""

import pytest

from replayssm.builders.inspection import recurrent_geometry
from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.settings import ReplaySettings

TARGETS = {name: recurrent_geometry(name) for name in ("nano4b", "super120b", "qwen4b", "qwen122b")}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("arch", geo.ARCHITECTURES)
@pytest.mark.parametrize("window", [1, 5, 8, 16])
def test_targets_fit_every_architecture(name: str, arch: int, window: int) -> None:
    geometry = TARGETS[name]
    for state_dtype in ("float32", "float16", "bfloat16"):
        settings = ReplaySettings(max_window=window, state_dtype=state_dtype)
        config = geo.window_config(geometry, settings, arch)
        defines = dict(config.defines)
        heads, rows, _ = geometry.state_shape
        assert config.blocks_x * defines["CTA_ROWS"] == heads * rows
        assert defines["CTA_ROWS"] % (rows // geometry.row_tiles) == 0, "a block owns whole tiles"
        assert config.threads == 32 * -(-defines["CTA_ROWS"] // 16)
        assert config.shared_bytes <= geo.architecture(arch).shared_per_block
        assert defines["BULK_COPY"] == (arch >= 90)


@pytest.mark.parametrize("name", TARGETS)
def test_embedded_variants_stay_within_48_kib(name: str) -> None:
    for window in (1, 5, 8):
        config = geo.window_config(TARGETS[name], ReplaySettings(max_window=window), 90, embedded=True)
        assert config.shared_bytes <= 48 * 1024


def test_blocks_grow_with_the_batch() -> None:
    """A small call spreads a row's state over many blocks; a large one gives each as much as shares a key head."""
    config = geo.window_config(TARGETS["qwen122b"], ReplaySettings(max_window=5), 90)
    blocks = [geo.window_blocks(config, rows, 90) for rows in (1, 16, 64, 256, 512)]
    assert blocks[0] == config.blocks_x
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[-1] * dict(config.defines)["MAX_PARTS"] == config.blocks_x
    assert all(config.blocks_x % count == 0 for count in blocks)
    mamba = geo.window_config(TARGETS["super120b"], ReplaySettings(max_window=5), 90)
    assert geo.window_blocks(mamba, 512, 90) == mamba.blocks_x


def test_unknown_architectures_fall_back_to_an_older_one() -> None:
    assert geo.compile_target(87) == 86
    assert geo.architecture(110) == geo.architecture(103)
    with pytest.raises(geo.UnsupportedGeometryError, match=r"8\.0 or later"):
        geo.architecture(75)
    with pytest.raises(geo.UnsupportedGeometryError, match=r"11\.0"):
        geo.compile_target(110)


@pytest.mark.parametrize(
    ("geometry", "settings", "reason"),
    [
        (Mamba2Geometry(2, 64, 128, 1), {"activation_dtype": "float32"}, "activations are float32"),
        (Mamba2Geometry(2, 64, 48, 1), {"readout_dtype": "nvfp4"}, "columns in 32s"),
        (Mamba2Geometry(2, 64, 128, 1), {"buffer_len": 64}, "buffer_len 64"),
        (Mamba2Geometry(2, 64, 128, 1), {"max_window": 17}, "max_window 17"),
        (Mamba2Geometry(2, 60, 128, 1), {}, "60 x 128"),
        (Mamba2Geometry(2, 64, 40, 1), {}, "64 x 40"),
        (GdnGeometry(1, 2, 128, 128), {"u_format": "exact"}, "u is exact"),
    ],
)
def test_refusals_say_why(geometry, settings: dict, reason: str) -> None:
    with pytest.raises(geo.UnsupportedGeometryError, match=reason):
        geo.window_config(geometry, ReplaySettings(**settings), 90)


def test_override_must_be_whole_tiles_that_fit() -> None:
    geometry, settings = TARGETS["qwen4b"], ReplaySettings()
    assert dict(geo.window_config(geometry, settings, 90, cta_rows=32).defines)["CTA_ROWS"] == 32
    with pytest.raises(geo.UnsupportedGeometryError, match="48 rows"):
        geo.window_config(geometry, settings, 90, cta_rows=48)
    with pytest.raises(geo.UnsupportedGeometryError, match="128 rows"):
        geo.window_config(geometry, settings, 90, embedded=True, cta_rows=128)


def test_modes_select_kernels() -> None:
    geometry, gdn = TARGETS["super120b"], TARGETS["qwen4b"]
    assert geo.window_config(gdn, ReplaySettings(), 90).kernel == "gdn_decode"
    assert geo.window_config(gdn, ReplaySettings(state_dtype="float16"), 90).kernel == "gdn_window"
    assert geo.window_config(geometry, ReplaySettings(), 90).kernel == "mamba2_decode"
    assert geo.window_config(geometry, ReplaySettings(max_window=2), 90).kernel == "mamba2_window"
    assert geo.window_config(geometry, ReplaySettings(buffer_len=0), 90).kernel == "mamba2_serial"
    serial = geo.window_config(geometry, ReplaySettings(serial_exact=True), 90)
    assert (serial.kernel, dict(serial.defines)["BASELINE"]) == ("mamba2_serial", 0)


def test_convolution() -> None:
    config = geo.conv_config(ConvGeometry(10240, 4), ReplaySettings(), True, "bfloat16")
    assert config.blocks_x * config.threads * 8 >= 10240
    with pytest.raises(geo.UnsupportedGeometryError, match="multiples of 8"):
        geo.conv_config(ConvGeometry(12, 4), ReplaySettings(), True, "bfloat16")


@pytest.mark.parametrize("head_dim", [32, 128, 144, 256])
@pytest.mark.parametrize("queries", [8, 16])
def test_attention_fits_a_plugin(head_dim: int, queries: int) -> None:
    config = geo.attention_config(AttentionGeometry(2, head_dim), ReplaySettings(), 16, queries)
    assert dict(config.defines)["WARPS"] == config.threads // 32 == (4 if head_dim <= 128 else 2)
    assert config.shared_bytes <= geo.EMBEDDED_SHARED_BYTES
    assert geo.attention_tiles(config) == 2


def test_attention_tiles_hold_what_a_row_has_on_average() -> None:
    queries = [geo.attention_queries(8, AttentionGeometry(2, 64), tokens, 3) for tokens in (1, 6, 7)]
    assert queries == [8, 8, 16]
    assert geo.attention_tiles(geo.attention_config(AttentionGeometry(2, 64), ReplaySettings(), 34, 16)) == 4
