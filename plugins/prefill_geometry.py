"""Launch geometry of the prefill kernels (`kernels/*_prefill.cu`), beside `plugins.geometry` for all others."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.geometry import KernelConfig, UnsupportedGeometryError, round_up
from replayssm.plugins.readout_geometry import READOUTS
from replayssm.plugins.settings import ReplaySettings

MAX_COLUMNS = 128
"""State columns that a warp of 16 rows holds in registers."""


class Variant(NamedTuple):
    """chunk: tokens that are computed at once. stages: chunks of them in shared memory, 3 if copies may take as long as
    a chunk."""

    chunk: int
    stages: int

    @property
    def preparing_warps(self) -> int:
        """Beside those that hold the state."""
        return self.chunk // 16


VARIANTS = (Variant(64, 3), Variant(64, 2), Variant(32, 3), Variant(32, 2))
"""The first that fits is taken. TensorRT plugins, with 48 KiB, get chunks of 32 tokens."""


@cache
def prefill_config(
    geometry: Mamba2Geometry | GdnGeometry,
    settings: ReplaySettings,
    arch: int,
    embedded: bool = False,
    cta_rows: int | None = None,
    variant: Variant | None = None,
    prompts: int = 1,
) -> KernelConfig:
    """Kernel of a layer's prefill rows.

    embedded: restrict shared memory to what a TensorRT plugin may use. cta_rows, variant: overrides. prompts: about as
    many prefill rows as the call has, which decides how many state rows a block owns. Results do not depend on it.
    Raises UnsupportedGeometryError where prefill rows stay with the window kernel, which walks them token by token.
    """
    heads, headdim, columns = geometry.state_shape
    _check(geometry, settings, columns)
    limits = geo.architecture(arch)
    capacity = min(limits.shared_per_block, geo.EMBEDDED_SHARED_BYTES) if embedded else limits.shared_per_block
    staged = geo.uses_readout(settings)
    candidates = [count for count in geo.row_candidates(headdim, geometry.row_tiles) if cta_rows in (None, count)]
    chosen = next(
        (one for one in ([variant] if variant else VARIANTS) if _fitting(geometry, staged, candidates, one, capacity)),
        None,
    )
    if chosen is None:
        raise UnsupportedGeometryError(
            f"{geometry.kind}_prefill: no block of {cta_rows or candidates} rows of {headdim} x {columns} fits "
            f"{capacity} bytes of shared memory"
        )
    fitting = _fitting(geometry, staged, candidates, chosen, capacity)
    # Of equals the smallest that is no waste. H200, qwen4b, 4,096 tokens of one prompt: 303 us at 32 rows, 318 at 64.
    count = min(
        fitting,
        key=lambda count: (_cost(count, heads * (headdim // count) * prompts, limits), max(count, 32), -count),
    )
    swizzle, shared_bytes = fitting[count]
    defines = {
        **geo.geometry_defines(geometry),
        "ROW_TILES": geometry.row_tiles,
        "CTA_ROWS": count,
        "BUFFER_LEN": settings.buffer_len,
        "MAX_WINDOW": settings.max_window,
        "STATE_FORMAT": geo.STATE_FORMATS[settings.state_dtype],
        "ACTIVATION_FORMAT": geo.FORMATS[settings.activation_dtype],
        "BULK_COPY": 0,
        "AHEAD_ROWS": 0,
        "CHUNK": chosen.chunk,
        "STAGES": chosen.stages,
        "SWIZZLE": int(swizzle),
        "MIN_CTAS": 1,
        "SHARED_BYTES": shared_bytes,
    }
    if staged:
        stochastic = int(settings.state_rounding == "stochastic")
        defines |= {"READOUT_FORMAT": READOUTS[settings.readout_dtype], "STOCHASTIC": stochastic}
    if geometry.kind == "gdn":
        defines |= {"U_PLANES": settings.u_planes[0], "U_EXACT": 0}
    threads = 32 * (_state_warps(count) + chosen.preparing_warps)
    blocks = heads * (headdim // count)
    return KernelConfig(f"{geometry.kind}_prefill", tuple(sorted(defines.items())), blocks, threads, shared_bytes)


@cache
def prefill_config_or_none(
    geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, arch: int, prompts: int = 1
) -> KernelConfig | None:
    """`prefill_config`, None where the window kernel walks prefill rows."""
    try:
        return prefill_config(geometry, settings, arch, prompts=prompts)
    except UnsupportedGeometryError:
        return None


def _check(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, columns: int) -> None:
    if settings.is_baseline or settings.serial_exact:
        raise UnsupportedGeometryError("the baseline and serial-exact mode walk prefill rows token by token")
    geo.window_config(geometry, settings, 90)  # raises for what the window kernel does not cover either
    if columns > MAX_COLUMNS:
        raise UnsupportedGeometryError(f"{geometry.kind}_prefill holds at most {MAX_COLUMNS} columns, got {columns}")


def _fitting(
    geometry: Mamba2Geometry | GdnGeometry, staged: bool, candidates: list[int], variant: Variant, capacity: int
) -> dict[int, tuple[bool, int]]:
    """Rows of a block -> (swizzle, bytes) of shared memory, without a swizzle where that fits. staged: at the end the
    state's rows go through it in fp32."""
    found = {}
    for count in candidates:
        for swizzle in (False, True) if geometry.state_shape[2] % 64 == 0 else (False,):
            nbytes = _shared_bytes(geometry, count, variant, swizzle)
            stage = 16 * _state_warps(count) * geometry.state_shape[2] * 4 if staged else 0
            if stage <= nbytes <= capacity:
                found[count] = (swizzle, nbytes)
                break
    return found


def _state_warps(cta_rows: int) -> int:
    return round_up(cta_rows, 16) // 16


def _cost(cta_rows: int, blocks: int, limits: geo.Architecture) -> float:
    """Relative time of all blocks: waves of one block per multiprocessor. A chunk takes longer where state warps share
    one of the four schedulers, but less than in proportion, because they fill each other's waits."""
    waves = -(-blocks // limits.multiprocessors)
    sharing = -(-_state_warps(cta_rows) // 4)
    return waves * (1 + 0.7 * (sharing - 1))


def _shared_bytes(geometry: Mamba2Geometry | GdnGeometry, cta_rows: int, variant: Variant, swizzle: bool) -> int:
    """sizeof(Shared) of the kernel, which checks it at compile time."""
    columns, is_gdn = geometry.state_shape[2], geometry.kind == "gdn"
    chunk, stages = variant
    stride = columns if swizzle else columns + 8
    tokens = 2 * stages * round_up(chunk * stride * 2, 128)
    fragments = (chunk // 16) * (chunk // 16 + 1)
    matrices = (2 if is_gdn else 1) * 2 * fragments * 32 * 16
    values = _state_warps(cta_rows) * chunk * 16 * 2
    gates = 3 * ((3 if is_gdn else 2) * chunk * 4 + 16)
    prefix = 2 * (8 * chunk + (0 if is_gdn else 4 * chunk))
    return round_up(tokens + matrices + values + gates + prefix, 128)
