"""Launch geometry of the prefill kernels (`kernels/*_prefill.cu`), beside `plugins.geometry` for all others."""

from __future__ import annotations

from functools import cache

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry, ReplaySettings
from replayssm.plugins.geometry import KernelConfig, UnsupportedGeometryError, round_up

MAX_COLUMNS = 128
"""State columns that a warp of 16 rows holds in registers."""

VARIANTS = ((64, 3, 4), (64, 2, 4), (32, 3, 2), (32, 2, 2))
"""(tokens of a chunk, chunks in shared memory, preparing warps), the first that fits is taken."""


@cache
def prefill_config(
    geometry: Mamba2Geometry | GdnGeometry,
    settings: ReplaySettings,
    arch: int,
    embedded: bool = False,
    cta_rows: int | None = None,
    variant: tuple[int, int, int] | None = None,
) -> KernelConfig:
    """Kernel of a layer's prefill rows.

    embedded: restrict shared memory to what a TensorRT plugin may use. cta_rows, variant (of `VARIANTS`): overrides.
    Raises UnsupportedGeometryError where prefill rows stay with the window kernel, which walks them token by token.
    """
    heads, rows, columns = geometry.state_shape
    _check(geometry, settings, columns)
    limits = geo.architecture(arch)
    capacity = min(limits.shared_per_block, geo.EMBEDDED_SHARED_BYTES) if embedded else limits.shared_per_block
    candidates = [count for count in geo.row_candidates(rows, geometry.row_tiles) if cta_rows in (None, count)]
    fitting = [
        (one, count)
        for one in ([variant] if variant else VARIANTS)
        for count in sorted(candidates, reverse=True)
        if _shared_bytes(geometry, count, *one) <= capacity
    ]
    if not fitting:
        raise UnsupportedGeometryError(
            f"{geometry.kind}_prefill: no block of {cta_rows or candidates} rows of {rows} x {columns} fits {capacity} "
            "bytes of shared memory"
        )
    (chunk, stages, preparing_warps), count = fitting[0]
    state_warps = round_up(count, 16) // 16
    defines = {
        **geo.geometry_defines(geometry),
        "ROW_TILES": geometry.row_tiles,
        "CTA_ROWS": count,
        "BUFFER_LEN": settings.buffer_len,
        "MAX_WINDOW": settings.max_window,
        "STATE_FORMAT": geo.FORMATS[settings.state_dtype],
        "ACTIVATION_FORMAT": geo.FORMATS[settings.activation_dtype],
        "BULK_COPY": 0,
        "AHEAD_ROWS": 0,
        "CHUNK": chunk,
        "STAGES": stages,
        "PREPARING_WARPS": preparing_warps,
        "MIN_CTAS": 1,
        "SHARED_BYTES": _shared_bytes(geometry, count, chunk, stages, preparing_warps),
    }
    if geometry.kind == "gdn":
        defines |= {"U_PLANES": settings.u_planes[0], "U_EXACT": 0}
    threads = 32 * (state_warps + preparing_warps)
    blocks = heads * (rows // count)
    return KernelConfig(
        f"{geometry.kind}_prefill", tuple(sorted(defines.items())), blocks, threads, defines["SHARED_BYTES"]
    )


@cache
def prefill_config_or_none(
    geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, arch: int
) -> KernelConfig | None:
    """`prefill_config`, None where the window kernel walks prefill rows."""
    try:
        return prefill_config(geometry, settings, arch)
    except UnsupportedGeometryError:
        return None


def _check(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, columns: int) -> None:
    if settings.is_baseline or settings.serial_exact:
        raise UnsupportedGeometryError("the baseline and serial-exact mode walk prefill rows token by token")
    geo.window_config(geometry, settings, 90)  # raises for what the window kernel does not cover either
    if columns > MAX_COLUMNS:
        raise UnsupportedGeometryError(f"{geometry.kind}_prefill holds at most {MAX_COLUMNS} columns, got {columns}")


def _shared_bytes(
    geometry: Mamba2Geometry | GdnGeometry, cta_rows: int, chunk: int, stages: int, preparing_warps: int
) -> int:
    """sizeof(Shared) of the kernel, which checks it at compile time."""
    columns, is_gdn = geometry.state_shape[2], geometry.kind == "gdn"
    stride = columns if columns % 64 == 0 else columns + 8
    tokens = 2 * stages * round_up(chunk * stride * 2, 128)
    fragments = (chunk // 16) * (chunk // 16 + 1)
    matrices = (2 if is_gdn else 1) * 2 * fragments * 32 * 16
    values = round_up(cta_rows, 16) // 16 * chunk * 16 * 2
    gates = 2 * ((3 if is_gdn else 2) * chunk * 4 + 16)
    total = tokens + matrices + values + gates + 8 * chunk + (0 if is_gdn else 4 * chunk)
    return round_up(total, 128)
