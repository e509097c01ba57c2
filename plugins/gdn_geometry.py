"""Launch geometry of the GDN decode and verify kernel, whose blocks work through several parts of a row's state."""

from __future__ import annotations

from replayssm.plugins.contract import GdnGeometry, ReplaySettings
from replayssm.plugins.geometry import RESERVED_BYTES, architecture, round_up

MAX_BLOCK_HEADS = 4
"""Heads whose gates and window matrices a GDN block keeps in shared memory."""


def registers_wanted(settings: ReplaySettings, arch: int, stages: int) -> int:
    """As geometry.REGISTERS_WANTED. More with copies ahead, where the kernel keeps its queries from part to part."""
    if stages > 1:
        return 168
    if settings.max_window > 8:
        return 216
    return 104 if settings.buffer_len <= 16 and arch < 100 else 160


def parts_defines(
    geometry: GdnGeometry, settings: ReplaySettings, arch: int, cta_rows: int, embedded: bool
) -> dict[str, int]:
    """How a block of gdn_window works through several parts of a row's state, `cta_rows` of a head each.

    MAX_PARTS: whole heads of one key head. STAGES: parts whose copies are under way, 2 where two blocks still fit a
    multiprocessor. U_REPLACES_QUERIES: u takes the queries' place, if that lets one more block fit. On GPUs later than
    Hopper the flush would spill then.
    """
    plain = {"MAX_PARTS": 1, "STAGES": 1, "U_REPLACES_QUERIES": 0}
    if embedded:
        return plain
    limits, heads = architecture(arch), geometry.num_v_heads // geometry.num_k_heads
    most = max(count for count in range(1, MAX_BLOCK_HEADS + 1) if heads % count == 0)
    ahead = {"MAX_PARTS": most * (geometry.head_v_dim // cta_rows), "STAGES": 2, "U_REPLACES_QUERIES": 0}

    def blocks(chosen: dict[str, int]) -> int:
        return limits.shared_per_sm // (shared_bytes(geometry, settings, cta_rows, **chosen) + RESERVED_BYTES)

    if blocks(ahead) < 2:
        return {**ahead, "STAGES": 1}
    # Only where gdn_replay.cuh keeps the queries in registers, which it does if they are at most 64 numbers.
    window, columns = settings.max_window, geometry.head_k_dim
    tiles = 1 if window <= 4 else 2 * (round_up(window, 8) // 8)
    direct = settings.state_dtype == settings.activation_dtype or _scaled_queries(settings)
    kept = window > 1 and tiles * columns // (8 if direct else 4) <= 64
    replacing = {**ahead, "U_REPLACES_QUERIES": 1}
    return replacing if kept and arch < 100 and blocks(replacing) > blocks(ahead) else ahead


def _scaled_queries(settings: ReplaySettings) -> bool:
    """Whether the kernel keeps a copy of bf16 queries in the format of an fp16 state."""
    return settings.state_dtype == "float16" and settings.activation_dtype == "bfloat16"


def shared_bytes(
    geometry: GdnGeometry,
    settings: ReplaySettings,
    cta_rows: int,
    MAX_PARTS: int = 1,
    STAGES: int = 1,
    U_REPLACES_QUERIES: int = 0,
) -> int:
    """sizeof(Shared) of gdn_window, which checks it at compile time; keywords as the kernel's constants."""
    columns, window = geometry.head_k_dim, settings.max_window
    history, window_rows = round_up(max(settings.buffer_len, window), 8), round_up(window, 8)
    padded, row = round_up(cta_rows, 16), (columns + 8) * 2
    warps, heads = padded // 16, max(1, MAX_PARTS * cta_rows // geometry.head_v_dim)
    tiles = 1 if window <= 4 else 2 * (window_rows // 8)
    queries, u = 2 * window * row, warps * settings.u_planes[0] * history * 32
    matrices = 2 * window * window_rows * 4 if window > 1 else 16
    gates = round_up((round_up(history, 16) + 3 * window_rows + 1) * 4, 16)
    total = (
        STAGES * padded * columns * (4 if settings.state_dtype == "float32" else 2)
        + max(history * row, heads * (round_up(history, 16) // 16) * tiles * 512)
        + (max(queries, u) + 16 if U_REPLACES_QUERIES else queries + u)
        + (queries if _scaled_queries(settings) else 16)
        + heads * (matrices + gates)
    )
    return round_up(round_up(total, 8) + 8 * warps * STAGES, 128)
