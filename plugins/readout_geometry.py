"""Launch geometry of the readout kernels (`kernels/*_readout.cu`), beside `plugins.geometry` for all others.

They serve settings whose outputs read a low-precision copy of the state, or an fp8 checkpoint. A warp owns `CTA_ROWS`
rows of a head and works alone; the warps of a block belong to one group.
"""

from __future__ import annotations

from functools import cache

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry, ReplaySettings
from replayssm.plugins.geometry import KernelConfig, UnsupportedGeometryError, round_up

READOUTS = {"same": 0, "float8": 1, "nvfp4": 2}
"""READOUT_* of kernels/formats.cuh."""

WARPS = 4
"""Warps of a block where the heads of a group allow as many."""

REGISTERS_WANTED = 128
"""Registers per thread, where nothing else is said."""

REGISTERS_OF_MAMBA2 = 80
"""The same, of nvfp4 readouts. H200, batch 256, fp16 stochastic, by blocks of a multiprocessor: decode of super120b 5:
97.3 us, 6: 90.2, 7: 92.5 (spilling); nano4b 86.7, 83.9, 88.4."""

REGISTERS_OF_GDN = 96
"""The same, H200, qwen4b, by blocks of a multiprocessor: decode 4: 69.5 us, 5: 68.7, 6: 73.2 (spilling in the flush);
without a flush 47.2, 45.0, 45.1."""

REGISTERS_OF_WINDOWS = 80
"""The same, of windows of kernels/gdn_readout_tiled.cuh. H200, windows of five of qwen4b, rows that fold first, by
blocks of a multiprocessor 5: 105.7 us, 6: 106.1; without a flush 59.5 and 57.4; every row folding 224.1 and 238.1."""

AHEAD_ROWS_OF_WINDOWS = 24
"""Rows by which a block of kernels/gdn_readout_tiled.cuh asks ahead for checkpoint positions. H200, windows of five, 24
and not at all: qwen4b 113.3 and 114.3 us, without a flush 62.4 and 63.1; qwen122b 215.6 both, 119.8 and 122.4."""


@cache
def readout_config(
    geometry: Mamba2Geometry | GdnGeometry,
    settings: ReplaySettings,
    arch: int,
    embedded: bool = False,
    cta_rows: int | None = None,
    cta_warps: int | None = None,
    min_ctas: int | None = None,
    ahead_rows: int | None = None,
    resident: int | None = None,
) -> KernelConfig:
    """Decode and verify kernel of a layer whose outputs read a copy of the state.

    embedded: restrict shared memory to what a TensorRT plugin may use. cta_rows (of a warp), cta_warps, min_ctas,
    ahead_rows, resident (KernelConfig.resident_blocks): overrides, for measurements and tests.
    """
    heads, rows, columns = geometry.state_shape
    kernel = f"{geometry.kind}_readout"
    if columns % 32:
        raise UnsupportedGeometryError(f"{kernel} needs state columns in 32s, got {columns}")
    limits = geo.architecture(arch)
    capacity = min(limits.shared_per_block, geo.EMBEDDED_SHARED_BYTES) if embedded else limits.shared_per_block
    fitting = [
        (count, warps)
        for warps in ([cta_warps] if cta_warps else range(1, WARPS + 1))
        for count in geo.row_candidates(rows, geometry.row_tiles)
        if count <= (cta_rows or _default_rows(geometry, settings, arch, embedded))
        and cta_rows in (None, count)
        and geometry.heads_per_group * (rows // count) % warps == 0
        and _shared_bytes(geometry, settings, count, warps) <= capacity
    ]
    if not fitting:
        raise UnsupportedGeometryError(
            f"{kernel}: no block of whole row tiles ({geometry.row_tiles} of {rows} x {columns}) fits {capacity} bytes "
            "of shared memory"
        )
    # The rows that were asked for matter most, then that few blocks stage the same group.
    count, warps = max(fitting, key=lambda one: (one[1] > 1, *one))
    shared, threads = _shared_bytes(geometry, settings, count, warps), 32 * warps
    tiled = _is_tiled(geometry, settings, count)
    if min_ctas is None:
        # A quarter of a multiprocessor's registers serves a quarter of its warps.
        per_quarter = geo.REGISTERS_PER_SM // 4 // (32 * _registers_wanted(geometry, settings, arch, tiled))
        min_ctas = max(1, min(4 * per_quarter // warps, limits.shared_per_sm // (shared + geo.RESERVED_BYTES), 16))
    blocks = heads * (rows // count) // warps
    defines = {
        **geo.geometry_defines(geometry),
        "ROW_TILES": geometry.row_tiles,
        "CTA_ROWS": count,
        "CTA_WARPS": warps,
        "BUFFER_LEN": settings.buffer_len,
        "MAX_WINDOW": settings.max_window,
        "STATE_FORMAT": geo.STATE_FORMATS[settings.state_dtype],
        "STOCHASTIC": int(settings.state_rounding == "stochastic"),
        "READOUT_FORMAT": READOUTS[settings.readout_dtype],
        "ACTIVATION_FORMAT": geo.FORMATS[settings.activation_dtype],
        "BULK_COPY": int(limits.bulk_copy),
        "MIN_CTAS": min_ctas,
        # Elsewhere it gains nothing. H200, decode of qwen4b, readout of row 42 further on asked for: 60.5 us, 59.9
        # without; its history too: 64.0.
        "AHEAD_ROWS": (AHEAD_ROWS_OF_WINDOWS if ahead_rows is None else ahead_rows) if tiled else 0,
        "SHARED_BYTES": shared,
    }
    if geometry.kind == "gdn":
        defines |= {
            "U_PLANES": settings.u_planes[0],
            "U_EXACT": 0,
            "U_FROM_CHECKPOINT": int(settings.u_source == "checkpoint"),
        }
    overlaps = limits.bulk_copy  # the architectures that have the one have the other
    if resident is None:
        # H200, rows that fold first, all shared memory and only what blocks need: decode of qwen4b 54.2 us and 51.6,
        # qwen122b 100.0 and 95.7; windows of GDN 103.3 and 103.6.
        resident = 0 if tiled else min_ctas
    return KernelConfig(kernel, tuple(sorted(defines.items())), blocks, threads, shared, overlaps, resident)


def _is_tiled(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, cta_rows: int) -> bool:
    """Whether kernels/gdn_readout_tiled.cuh serves it (TILED_WINDOW)."""
    windows = settings.readout_dtype == "nvfp4" and 1 < settings.max_window <= 8
    return geometry.kind == "gdn" and windows and settings.u_source == "readout" and cta_rows % 16 == 0


def _registers_wanted(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, arch: int, tiled: bool) -> int:
    """Registers per thread: as few as keep the nvfp4 kernels from spilling, which is all that is measured."""
    if arch >= 100 or (geometry.kind == "gdn" and arch < 90):
        return 160
    if arch != 90 or settings.readout_dtype != "nvfp4":
        return REGISTERS_WANTED
    if geometry.kind == "mamba2":
        # Windows of parts of 80 rows spill: H200, nano4b, 6 blocks 172.1 us, 5 blocks 161.7.
        return 96 if settings.max_window > 1 and geometry.state_shape[1] > 64 else REGISTERS_OF_MAMBA2
    if tiled:
        return REGISTERS_OF_WINDOWS
    return REGISTERS_OF_GDN if settings.max_window == 1 else REGISTERS_WANTED


def _default_rows(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, arch: int, embedded: bool) -> int:
    """Rows of a warp: a head of Mamba2; of GDN, whose heads are larger and whose warps do more for each row, less.

    Windows of kernels/gdn_readout_tiled.cuh take a head where a group has one for every warp. H200, windows of five, 64
    and 128 rows, rows that fold first: qwen122b 208.7 and 195.1 us, without a flush 112.4 and 106.2; qwen4b, where that
    leaves two warps a block, 104.5 and 105.4, 57.1 and 61.7.
    """
    rows = geometry.state_shape[1]
    if geometry.kind == "mamba2":
        return 96
    tiled = _is_tiled(geometry, settings, rows) and geometry.heads_per_group >= WARPS
    return rows if tiled and rows <= 128 and settings.buffer_len <= 16 and arch == 90 and not embedded else 64


def _shared_bytes(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, cta_rows: int, warps: int) -> int:
    """sizeof(Shared) of the kernel, which checks it at compile time."""
    rows, columns = geometry.state_shape[1:]
    window, nvfp4 = settings.max_window, settings.readout_dtype == "nvfp4"
    tokens = round_up(max(settings.buffer_len, window), 16)
    padded = round_up(cta_rows, 16)
    element = 2 if settings.readout_dtype == "same" and settings.state_dtype != "float8" else 1
    code_stride, scale_bytes = (columns // 2, columns // 16) if nvfp4 else (element * columns + 16, 0)
    state_rows = warps * cta_rows + cta_rows % 16
    readout = round_up(state_rows * code_stride, 128) + round_up(state_rows * scale_bytes, 128)
    fold_keys = tokens // 16 * columns // 32 * 1024
    stage = rows // geometry.row_tiles * columns * 4
    key = (columns + 16) * 2
    own = (padded + 8) * 2
    if geometry.kind == "mamba2":
        folded = tokens * (columns + 8) * 2
        queries = 0 if nvfp4 and window == 1 else window
        scores = min(warps, columns // 32) * tokens * (1 if window == 1 else round_up(window, 8))
        area = round_up(round_up(queries * key + 16, 16) + scores * 4 + (queries + 1) * 4, 16)
        total = round_up(max(readout, folded, stage), 128) + tokens * (warps * cta_rows + 8) * 2
        total += max(area, fold_keys)
        return round_up(round_up(total, 8) + 8, 128)
    tiled = _is_tiled(geometry, settings, cta_rows)
    staged = warps * (padded * (2 * window + 1) if window > 1 else padded * 8 + padded // 32 * 16) * 4
    area = 16 if tiled else round_up(max(staged, fold_keys), 16)
    total = area + round_up(max(warps * settings.u_planes[0] * tokens * own, stage - area), 16)
    total += (tokens + 2 * window) * (columns + 8) * 2 + 2 * window * key
    total += warps * (min(window + 1, 8) * (cta_rows + 8) if tiled else window * cta_rows) * 2
    if tiled:  # window_coefficients
        parts = rows // cta_rows
        total += (warps // parts if warps % parts == 0 else warps) * 512
    total += warps * cta_rows * scale_bytes if nvfp4 and not tiled else 16
    gates = tokens + 3 * window + 1 + (window * window if window > 1 else 1)
    total += _block_heads(rows // cta_rows, warps) * gates * 4
    if tiled:
        return round_up(round_up(total, 8) + warps * cta_rows * 4, 128)
    return round_up(total + (warps * 2 * window * round_up(window, 8) * 4 if window > 1 else 4), 128)


def _block_heads(parts: int, warps: int) -> int:
    """Heads of `parts` parts each that `warps` neighbouring parts may belong to."""
    if warps % parts == 0:
        return warps // parts
    return 1 if parts % warps == 0 else (warps + parts - 2) // parts + 1
