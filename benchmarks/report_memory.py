"""The report's tables that are computed from sizes rather than measured."""

from __future__ import annotations

from report_lines import NAMES, WINDOW, table

from replayssm.builders.config import published, weight_bytes
from replayssm.builders.inspection import geometries
from replayssm.plugins.contract import ReplaySettings
from replayssm.plugins.traffic import slot_bytes, traffic_per_token

PUBLISHED_SESSIONS = {"super120b": (213, 694), "qwen122b": (233, 702)}
"""Sequences that fit with four drafts: standard, replay."""
H200_BYTES, RESERVE_BYTES, HELD_TOKENS = 139 * 2**30, 6 * 2**30, 1024


def sessions_table() -> str:
    """Computed, not measured: whole slots of the published shapes beside their weights."""
    rows = []
    for name, (standard, replay) in PUBLISHED_SESSIONS.items():
        config = published(f"{name}-nvfp4")
        free = H200_BYTES - RESERVE_BYTES - weight_bytes(config, mtp=False)["total"]
        sizes = [
            slot_bytes(geometries(config), ReplaySettings(length, WINDOW)).total(HELD_TOKENS) for length in (0, 16)
        ]
        ours = [free // size for size in sizes]
        rows.append(
            [
                NAMES[name],
                f"{standard} to {replay} ({replay / standard:.2f}x)",
                f"{ours[0]} to {ours[1]} ({ours[1] / ours[0]:.2f}x)",
                *(f"{size / 2**20:.0f}" for size in sizes),
            ]
        )
    head = [
        "model, NVFP4 weights, four drafts",
        "published, one B300",
        "ours, one H200",
        "MiB each: snapshots",
        "replay",
    ]
    return table(head, rows)


def traffic(name: str) -> dict[str, float]:
    """MiB of state that a token of one sequence moves at the least, by way of decoding; drafts of 4, half accepted."""
    replay, low = (
        traffic_per_token(
            geometries(published(name)), ReplaySettings(16, WINDOW, **formats).with_u_format(), WINDOW - 1, 3.0
        )
        for formats in ({}, {"state_dtype": "float16", "readout_dtype": "nvfp4"})
    )
    moved = {
        "state rewritten every token": replay.plain,
        "replay": replay.replay,
        "replay, fp16 with nvfp4 readout": low.replay,
        "drafts, state snapshots": replay.snapshot_speculation,
        "drafts, replay": replay.replay_speculation,
        "drafts, replay, fp16 with nvfp4 readout": low.replay_speculation,
    }
    return {label: value / 2**20 for label, value in moved.items()}


def traffic_table() -> str:
    moved = {name: traffic(name) for name in NAMES}
    rows = [[NAMES[name], *(f"{value:.1f}" for value in values.values())] for name, values in moved.items()]
    return table(["MiB of state per token", *next(iter(moved.values()))], rows)
