"""Launch geometry: which rows a thread block owns, and the constants stamped into each kernel.

`TABLE` holds what was measured; everything else follows from the rules in `_default_cta_rows`. A geometry that no
kernel fits raises `UnsupportedGeometryError`, and the operators then run their PyTorch reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry, conv_ring_len
from replayssm.plugins.settings import ReplaySettings

FORMATS = {"float32": 0, "float16": 1, "bfloat16": 2}
"""FORMAT_* of kernels/primitives.cuh."""

STATE_FORMATS = {**FORMATS, "float8": 3}
"""The same of a checkpoint; FORMAT_FP8 is in kernels/formats.cuh."""

RESERVED_BYTES = 1024
"""Shared memory that the driver adds to every block's."""

EMBEDDED_SHARED_BYTES = 48 * 1024
"""Shared memory that a kernel embedded in a TensorRT plugin may use."""

CONV_CHUNK = 64
"""Tokens of a long convolution window that one thread walks."""

MAX_HISTORY = 32
MAX_WINDOW = 16


class UnsupportedGeometryError(ValueError):
    """No kernel covers these sizes or settings; the message says which and why."""


class Architecture(NamedTuple):
    """What the launch geometry depends on. Bytes of shared memory per multiprocessor and per block.

    multiprocessors, l2_mib: of the largest GPU of the architecture that serves models.
    """

    shared_per_sm: int
    shared_per_block: int
    bulk_copy: bool
    multiprocessors: int
    l2_mib: int


ARCHITECTURES = {
    80: Architecture(164 * 1024, 163 * 1024, False, 108, 40),
    86: Architecture(100 * 1024, 99 * 1024, False, 84, 6),
    89: Architecture(100 * 1024, 99 * 1024, False, 142, 96),
    90: Architecture(228 * 1024, 227 * 1024, True, 132, 60),
    100: Architecture(228 * 1024, 227 * 1024, True, 148, 126),
    103: Architecture(228 * 1024, 227 * 1024, True, 160, 126),
    120: Architecture(100 * 1024, 99 * 1024, True, 188, 128),
    121: Architecture(100 * 1024, 99 * 1024, True, 48, 24),
}


@dataclass(frozen=True)
class KernelConfig:
    """One compiled variant and how it is launched. The grid is (blocks_x, rows, 1).

    shared_bytes: dynamic shared memory of a block; the kernels use no static shared memory. overlaps: launched so that
    it may start while the kernel before it ends (programmatic dependent launch); it waits for that kernel by itself.
    resident_blocks: of a multiprocessor, which get the shared memory that they need and leave the rest to the first-
    level cache; 0: as many as fit, at its cost.
    """

    kernel: str
    defines: tuple[tuple[str, int], ...]
    blocks_x: int
    threads: int
    shared_bytes: int
    overlaps: bool = False
    resident_blocks: int = 0


# (kernel, state bytes of a row, rows of a head): rows per block, also of the decode kernels. H200, batch 256, L = 16,
# desynchronised rings, commit b716b55: microseconds at window 1 and window 5, by rows per block.
TABLE: dict[tuple[str, int, int], int] = {
    ("mamba2_window", 512, 80): 80,  # nano4b fp32: 40 rows 385, 477; 80 rows 320, 399
    ("mamba2_window", 512, 64): 64,  # super120b fp32: 32 rows 389, 484; 64 rows 334, 415
    ("mamba2_window", 256, 80): 80,  # nano4b fp16: 40 rows 321, 393; 80 rows 257, 322
    ("mamba2_window", 256, 64): 64,  # super120b fp16: 32 rows 283, 357; 64 rows 265, 330
    # The next at commit 7549be2, where 16-bit states were measured at 64 rows only.
    # qwen122b fp32: window 5 492, 466, 503 at 32, 64, 128 rows; gdn_decode at window 1 295, 291, 299
    ("gdn_window", 512, 128): 64,
    ("gdn_window", 256, 128): 64,  # qwen122b fp16: 225, 387; bf16: 214, 369
}

WAVES = 0.6
"""Blocks there must be for each that can run at once, before blocks are made larger. H200, windows of 5, fp32, by parts
that a block works through, 1, 2, 4 and 8: qwen122b, batch 256: 591, 457, 374, 375 us (with 8 tokens of history: 313 at
4, 303 at 8); batch 64: 155, 124, 106, 108. At 2 and 4, batch 16: qwen122b 40, 39; qwen4b 26, 22."""

REGISTERS_PER_SM = 65536
REGISTERS_WANTED = {"mamba2_window": 96, "mamba2_decode": 96, "gdn_decode": 96}
"""Registers per thread below which a kernel would spill (104 where nothing is said); limits how many blocks are asked
for."""

REGISTERS_OF_SMALL_DECODE = {4: 80, 2: 72}
"""The same for Mamba2 decode kernels of at most 128 columns and 16 tokens of history, by bytes of a state element;
small tiles gain from more blocks. H200, batch 256, by blocks per multiprocessor: 16-bit states super120b 5: 206 us,
6: 188, 7: 175, 8: 176; nano4b 4: 190, 5: 177, 6: 168 with spills. fp32 nano4b 4: 263.2, 5: 260.9; super120b 5: 278.2,
6: 278.1 (a flush of every row 570 and 566)."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def architecture(arch: int) -> Architecture:
    """The entry of compute capability `arch`; an unknown, newer GPU gets the one below it."""
    known = [number for number in ARCHITECTURES if number <= arch]
    if not known:
        raise UnsupportedGeometryError(f"the kernels need compute capability 8.0 or later, got {arch / 10}")
    return ARCHITECTURES[max(known)]


def compile_target(arch: int) -> int:
    """Architecture to compile for: the GPU's own, or the nearest older one of the same major version."""
    known = [number for number in ARCHITECTURES if number <= arch and number // 10 == arch // 10]
    if not known:
        raise UnsupportedGeometryError(f"no kernel target for compute capability {arch / 10}")
    return max(known)


@cache
def window_config(
    geometry: Mamba2Geometry | GdnGeometry,
    settings: ReplaySettings,
    arch: int,
    embedded: bool = False,
    cta_rows: int | None = None,
    ahead_rows: int | None = None,
) -> KernelConfig:
    """Decode and verify kernel of a layer, or the serial kernel where the settings ask for it.

    embedded: restrict shared memory to what a TensorRT plugin may use. cta_rows, ahead_rows: overrides, for
    measurements.
    """
    heads, rows, columns = geometry.state_shape
    serial = settings.is_baseline or settings.serial_exact
    _check(geometry, settings, rows, columns)
    if uses_readout(settings):
        from replayssm.plugins import readout_geometry  # which needs this module

        return readout_geometry.readout_config(geometry, settings, arch, embedded, cta_rows, ahead_rows=ahead_rows)
    limits = architecture(arch)
    capacity = min(limits.shared_per_block, EMBEDDED_SHARED_BYTES) if embedded else limits.shared_per_block
    kind = geometry.kind
    kernel = f"{kind}_serial" if serial else f"{kind}_window"
    if kernel == "mamba2_window" and settings.max_window == 1 and settings.state_dtype in FORMATS:
        kernel = "mamba2_decode"
    if kernel == "gdn_window" and settings.max_window == 1 and settings.state_dtype == "float32":
        kernel = "gdn_decode"
    candidates = row_candidates(rows, geometry.row_tiles)
    wanted = (
        cta_rows
        or TABLE.get((f"{kind}_window", columns * _state_bytes(settings), rows))
        or _default_cta_rows(kernel, candidates, columns * 4)
    )
    fitting = [
        count
        for count in candidates
        if count <= wanted and _shared_bytes(kernel, geometry, settings, count) <= capacity
    ]
    if not fitting or (cta_rows is not None and cta_rows not in fitting):
        raise UnsupportedGeometryError(
            f"{kernel}: no block of {cta_rows or f'at most {wanted}'} rows of {rows} x {columns} fits {capacity} bytes "
            f"of shared memory in whole row tiles ({geometry.row_tiles}) and multiples of 8 rows"
        )
    count = max(fitting)
    shared = _shared_bytes(kernel, geometry, settings, count)
    gdn = {}
    if kernel == "gdn_window":
        from replayssm.plugins import gdn_geometry  # which needs this module

        gdn = gdn_geometry.parts_defines(geometry, settings, arch, count, embedded)
        shared = gdn_geometry.shared_bytes(geometry, settings, count, **gdn)
    threads = 32 * (round_up(count, 16) // 16)
    registers = REGISTERS_WANTED.get(kernel, 104)
    if kernel == "mamba2_decode" and columns <= 128 and settings.buffer_len <= 16:
        registers = REGISTERS_OF_SMALL_DECODE[_state_bytes(settings)]
    if gdn:
        registers = gdn_geometry.registers_wanted(settings, arch, gdn["STAGES"])
    min_ctas = max(
        1, min(limits.shared_per_sm // (shared + RESERVED_BYTES), REGISTERS_PER_SM // (threads * registers), 16)
    )
    blocks = heads * (rows // count)
    if kernel == "gdn_window":  # qwen122b, windows of 5: 378 us at 0, 381 with what the next block needs asked for
        ahead_rows = 0
    elif ahead_rows is None:
        tile_bytes = count * columns * _state_bytes(settings)
        fp32_decode = kernel == "mamba2_decode" and _state_bytes(settings) == 4
        ahead_rows = _ahead_rows(limits, min_ctas, blocks, tile_bytes, beyond=not fp32_decode)
    defines = {
        **geometry_defines(geometry),
        "ROW_TILES": geometry.row_tiles,
        "CTA_ROWS": count,
        "BUFFER_LEN": settings.buffer_len,
        "MAX_WINDOW": settings.max_window,
        "STATE_FORMAT": FORMATS[settings.state_dtype],
        "ACTIVATION_FORMAT": FORMATS[settings.activation_dtype],
        "BULK_COPY": int(limits.bulk_copy),
        "MIN_CTAS": min_ctas,
        "AHEAD_ROWS": ahead_rows,
        "SHARED_BYTES": shared,
    }
    defines |= gdn
    if geometry.kind == "gdn":
        defines["U_PLANES"] = settings.u_planes[0]
        defines["U_EXACT"] = int(settings.u_format == "exact")
    if serial:
        defines["BASELINE"] = int(settings.is_baseline)
    # The architectures that have the one have the other.
    overlaps = kernel in ("mamba2_decode", "gdn_decode", "gdn_window") and limits.bulk_copy
    return KernelConfig(kernel, tuple(sorted(defines.items())), blocks, threads, shared, overlaps)


@cache
def conv_config(
    geometry: ConvGeometry, settings: ReplaySettings, has_bias: bool, weight_dtype: str, rows: int = 1
) -> KernelConfig:
    """Convolution kernel: a thread owns 8 channels of `rows` rows and walks their windows."""
    if settings.activation_dtype not in ("bfloat16", "float16") or weight_dtype not in FORMATS:
        raise UnsupportedGeometryError(
            f"causal_conv1d_window: activations {settings.activation_dtype} with weights {weight_dtype} have no kernel"
        )
    if geometry.conv_dim % 8 or not 2 <= geometry.conv_kernel <= 8:
        raise UnsupportedGeometryError(
            f"causal_conv1d_window: needs channels in multiples of 8 and 2 to 8 taps, got {geometry}"
        )
    threads = 128
    defines = {
        "CHANNELS": geometry.conv_dim,
        "TAPS": geometry.conv_kernel,
        "CONV_RING_LEN": conv_ring_len(geometry, settings.max_window),
        "MAX_WINDOW": settings.max_window,
        "ACTIVATION_FORMAT": FORMATS[settings.activation_dtype],
        "CHUNK": CONV_CHUNK,
        "ROWS": rows,
        "WEIGHT_FORMAT": FORMATS[weight_dtype],
        "HAS_BIAS": int(has_bias),
        "BULK_COPY": 0,
    }
    blocks = -(-geometry.conv_dim // (8 * threads))
    return KernelConfig("causal_conv1d_window", tuple(sorted(defines.items())), blocks, threads, 0)


@cache
def attention_config(
    geometry: AttentionGeometry, settings: ReplaySettings, query_heads: int, queries: int = 16
) -> KernelConfig:
    """Attention kernel: blocks are (token, KV head and tile of query heads); `blocks_x` is left to the call.

    queries: of a tile, 8 or 16. Results depend on how many warps share a tile's positions, not on the tile.
    """
    if settings.activation_dtype not in ("bfloat16", "float16"):
        raise UnsupportedGeometryError(f"attention_window: activations {settings.activation_dtype} have no kernel")
    if geometry.head_dim % 16 or geometry.head_dim > 256 or query_heads % geometry.num_kv_heads:
        raise UnsupportedGeometryError(
            f"attention_window: needs a head_dim in 16s up to 256 and query heads in groups, got {query_heads} for "
            f"{geometry}"
        )
    # Small blocks, of which many run at once. H200, batch 256, head_dim 256, context 130, with 1, 2 and 4 warps: decode
    # 44, 46, 48 us, windows of 5 98, 94, 99.
    warps = 4 if geometry.head_dim <= 128 else 2
    shared = _attention_shared_bytes(geometry.head_dim, queries, warps)
    defines = {
        "KV_HEADS": geometry.num_kv_heads,
        "GROUP": query_heads // geometry.num_kv_heads,
        "HEAD_DIM": geometry.head_dim,
        "QUERIES": queries,
        "WARPS": warps,
        "ACTIVATION_FORMAT": FORMATS[settings.activation_dtype],
        "SHARED_BYTES": shared,
        "BULK_COPY": 0,
    }
    return KernelConfig("attention_window", tuple(sorted(defines.items())), 1, 32 * warps, shared)


def attention_queries(query_heads: int, geometry: AttentionGeometry, tokens: int, rows: int) -> int:
    """Queries of a tile for `rows` rows of `tokens` tokens together: 8 if as many hold what a row has on average."""
    return 8 if tokens * query_heads <= 8 * rows * geometry.num_kv_heads else 16


def attention_tiles(config: KernelConfig) -> int:
    """Blocks per token of an attention kernel: KV heads times tiles of query heads."""
    defines = dict(config.defines)
    return defines["KV_HEADS"] * -(-defines["GROUP"] // defines["QUERIES"])


def _attention_shared_bytes(head_dim: int, queries: int, warps: int) -> int:
    """sizeof(Shared) of the attention kernel, which checks it at compile time."""
    stride = (head_dim + 8) * 2
    tiles, sums = warps * 2 * 16 * stride, warps * queries * (head_dim + 4) * 4  # keys and values
    return round_up(max(tiles, sums) + queries * stride + 2 * warps * queries * 4 + 4, 16)


def uses_readout(settings: ReplaySettings) -> bool:
    """Whether a layer runs a readout kernel: its outputs read a copy of the state, or a checkpoint of fp8 or stochastic
    rounding."""
    if settings.is_baseline or settings.serial_exact:
        return False
    return settings.readout_dtype != "same" or settings.state_dtype == "float8" or bool(settings.rounding_scalars)


def _check(geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, rows: int, columns: int) -> None:
    reasons = []
    if settings.activation_dtype not in ("bfloat16", "float16"):
        reasons.append(f"activations are {settings.activation_dtype}")
    readout = uses_readout(settings)
    if settings.state_dtype not in (STATE_FORMATS if readout else FORMATS):
        reasons.append(f"the checkpoint is {settings.state_dtype}")
    if settings.state_rounding != "nearest" and not readout:
        reasons.append(f"the checkpoint is rounded {settings.state_rounding}")
    if geometry.kind == "gdn" and settings.u_format == "exact" and not (settings.is_baseline or settings.serial_exact):
        reasons.append("u is exact")
    if settings.buffer_len > MAX_HISTORY or settings.max_window > MAX_WINDOW:
        reasons.append(
            f"buffer_len {settings.buffer_len} or max_window {settings.max_window} exceeds {MAX_HISTORY} or "
            f"{MAX_WINDOW}"
        )
    shared_bf16 = (settings.state_dtype, settings.readout_dtype) == ("bfloat16", "same")
    if readout and shared_bf16 and settings.activation_dtype != "bfloat16":
        reasons.append(
            f"a bfloat16 checkpoint is multiplied by activations of {settings.activation_dtype} (choose bfloat16 "
            "activations, state_dtype 'float16' or a readout)"
        )
    if columns % 16 or columns > 256 or rows % 8:
        reasons.append(f"the state is {rows} x {columns} (needs rows in 8s and columns in 16s, at most 256)")
    if reasons:
        raise UnsupportedGeometryError(f"{geometry.kind}_window has no kernel: {'; '.join(reasons)}")


def window_blocks(config: KernelConfig, rows: int, arch: int) -> int:
    """Blocks along x of a call of `rows` rows: as few, working through as many parts of the state each, as still fill
    the GPU."""
    defines = dict(config.defines)
    blocks, parts = config.blocks_x, defines.get("MAX_PARTS", 1)
    enough = WAVES * architecture(arch).multiprocessors * defines.get("MIN_CTAS", 1)
    while parts > 1 and blocks // parts * rows < enough:
        parts = max(count for count in range(1, parts) if parts % count == 0)
    return blocks // parts


def _state_bytes(settings: ReplaySettings) -> int:
    return 4 if settings.state_dtype == "float32" else 2


def row_candidates(rows: int, row_tiles: int) -> list[int]:
    """Rows that one block may own: whole tiles, in multiples of 8 rows."""
    tile = rows // row_tiles
    counts = [tile * tiles for tiles in range(1, row_tiles + 1) if row_tiles % tiles == 0]
    return [count for count in counts if count % 8 == 0]


def _default_cta_rows(kernel: str, candidates: list[int], row_bytes: int) -> int:
    """Blocks of at most 40 KiB of fp32 state, so that several share a multiprocessor; serial blocks own one head."""
    if kernel.endswith("serial"):
        return max(candidates, default=8)
    return max((count for count in candidates if count * row_bytes <= 40 * 1024), default=min(candidates, default=8))


def _ahead_rows(limits: Architecture, ctas_per_sm: int, blocks_per_row: int, tile_bytes: int, beyond: bool) -> int:
    """Rows of the batch by which a block looks ahead: those whose blocks run at once, or just beyond them.

    0 where their tiles, passing through the second-level cache, would fill most of it. H200, batch 256, fp32,
    desynchronised: qwen122b 297 us at 0, 292 at 4, 291 at 7, 293 at 8. Mamba2 decode gains nothing beyond: super120b
    278.1 at 6 and 7, 280.0 at 10, and a flush of every row 566, 569 and 575; nano4b 260.9 at 6, 261.1 at 8, 261.7 at
    10, and 532, 537 and 542.
    """
    at_once = limits.multiprocessors * ctas_per_sm
    ahead = -(-at_once * 5 // (blocks_per_row * 4)) if beyond else at_once // blocks_per_row
    return ahead if ahead * blocks_per_row * tile_bytes <= limits.l2_mib << 19 else 0


def geometry_defines(geometry: Mamba2Geometry | GdnGeometry) -> dict[str, int]:
    if isinstance(geometry, Mamba2Geometry):
        return {
            "NHEADS": geometry.nheads,
            "HEADDIM": geometry.headdim,
            "DSTATE": geometry.dstate,
            "NGROUPS": geometry.ngroups,
        }
    return {
        "NUM_K_HEADS": geometry.num_k_heads,
        "NUM_V_HEADS": geometry.num_v_heads,
        "HEAD_K_DIM": geometry.head_k_dim,
        "HEAD_V_DIM": geometry.head_v_dim,
    }


def _shared_bytes(kernel: str, geometry: Mamba2Geometry | GdnGeometry, settings: ReplaySettings, cta_rows: int) -> int:
    """sizeof(Shared) of the kernel, which checks it at compile time."""
    if kernel.endswith("serial"):
        return 0
    columns, window = geometry.state_shape[2], settings.max_window
    history = round_up(max(settings.buffer_len, window), 8)
    window_rows, padded = round_up(window, 8), round_up(cta_rows, 16)
    row, values = (columns + 8) * 2, (padded + 8) * 2
    tile = padded * columns * _state_bytes(settings)
    decays = (history + 2 * window_rows + 1) * 4
    if kernel == "mamba2_decode":
        parked = padded * 16 if _state_bytes(settings) == 2 else 8
        partials = min(-(-columns // 32), padded // 16) * (history + 1) * 4
        overlaid = _state_bytes(settings) == 4  # B of a fold takes the place of x then
        folded = history * (columns * 2 if overlaid and columns % 64 == 0 else row)
        parts = (max(history * values + partials, folded), 16) if overlaid else (history * values + partials, folded)
        total = tile + round_up(parts[0], 16) + parts[1] + columns * 2 + 4 + parked
    elif kernel == "mamba2_window":
        tokens = history + window_rows
        coefficients = window_rows * (tokens + 4) * 4
        total = (
            tile + tokens * row + window * row + tokens * values + coefficients + decays + (history + window_rows) * 4
        )
    elif kernel == "gdn_decode":
        warps = padded // 16
        partials = min(-(-columns // 32), warps) * 2 * round_up(history, 16) * 4
        u = warps * settings.u_planes[0] * history * 32
        total = tile + u + history * row + warps * 4 * columns + partials + 8
    else:
        from replayssm.plugins import gdn_geometry  # which needs this module

        return gdn_geometry.shared_bytes(geometry, settings, cta_rows)
    return round_up(round_up(total, 8) + 8, 128)
