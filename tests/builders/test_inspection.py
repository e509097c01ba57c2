"""Figures of the published models, as literal numbers."""

from __future__ import annotations

import pytest

from replayssm.builders.config import published
from replayssm.builders.inspection import inspect_model, parse_size
from replayssm.plugins.settings import ReplaySettings

GIB = 2**30
# Per recurrent layer: fp32 state bytes, ring bytes of one token; layers; KV bytes per token of the model. The GDN ring
# row holds u as a bf16 pair: k 4,096 + u 4 bytes an element + g 4 bytes a head.
PUBLISHED_FIGURES = {
    "nano4b": (3_932_160, 17_792, 21, 16_384),
    "super120b": (4_194_304, 18_944, 40, 8_192),
    "qwen4b": (2_097_152, 16 * 128 * 2 + 32 * 128 * 4 + 32 * 4, 24, 32_768),
    "qwen122b": (4_194_304, 16 * 128 * 2 + 64 * 128 * 4 + 64 * 4, 36, 24_576),
}


@pytest.mark.parametrize("name", PUBLISHED_FIGURES)
def test_published_state_sizes(name: str) -> None:
    state, ring_row, layers, kv = PUBLISHED_FIGURES[name]
    report = inspect_model(published(name), ReplaySettings(16, 5), name=name, memory_bytes=139 * GIB).to_json()
    assert report["state_bytes_per_sequence"] == layers * state
    assert report["ring_bytes_per_sequence"] == layers * ring_row * 21
    assert report["kv_bytes_per_token"] == kv
    assert report["readout_bytes_per_sequence"] == 0
    assert report["traffic_bytes_per_token"]["plain"] > 2 * layers * state


def test_max_batch_is_the_largest_that_fits() -> None:
    report = inspect_model(
        published("nano4b"), ReplaySettings(), name="nano", memory_bytes=139 * GIB, reserve_bytes=6 * GIB
    )
    free = 133 * GIB - report.weights["total"]
    per_sequence = report.slot.total(report.settings.max_seq_len)
    assert report.max_batch * per_sequence <= free < (report.max_batch + 1) * per_sequence


def test_weights_that_do_not_fit_leave_no_batch() -> None:
    report = inspect_model(published("super120b"), ReplaySettings(), name="super", memory_bytes=139 * GIB)
    assert report.max_batch == 0
    quantized = inspect_model(
        published("super120b"), ReplaySettings(), name="super", weights="nvfp4", memory_bytes=139 * GIB
    )
    assert quantized.max_batch > 0


def test_default_acceptance_is_half_of_the_drafts() -> None:
    report = inspect_model(published("qwen4b"), ReplaySettings(16, 5), name="qwen", memory_bytes=GIB)
    assert (report.draft_len, report.acceptance_length) == (4, 3.0)


def test_layers_are_counted_by_kind() -> None:
    report = inspect_model(published("super120b"), ReplaySettings(), name="super", memory_bytes=GIB)
    assert report.layers == {"mamba2": 40, "moe": 40, "attention": 8}


@pytest.mark.parametrize(
    ("text", "size"),
    [("139GiB", 139 * GIB), ("80 GB", 80_000_000_000), ("1.5k", 1500), ("512", 512), ("2TiB", 2 << 40)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "3x", "1 2"])
def test_unreadable_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
