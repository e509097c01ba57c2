"""The state contract: geometries and the exact content of one slot.

Everything that both the offline and the online side must agree on about recurrent state is decided here and in
`plugins.settings`, and nowhere else. Neither needs torch nor CUDA, so that a checkpoint can be inspected anywhere.

A *slot* holds one sequence. Every stateful layer owns a list of *parts*, tensors whose leading dimension is the slot;
`state_parts` returns them, `runtime` allocates exactly them, and byte counts are sums over them.

State formats
-------------
S is the state of one layer and slot, [heads, rows, columns] in fp32; rows and columns are P x N (Mamba2) or dv x dk
(Gated DeltaNet). A *row tile* is rows / row_tiles neighbouring rows of one head. `plugins.reference.formats` is the
executable form of what follows; every operation in it is one IEEE fp32 operation rounded to nearest, or exact, so that
a kernel stores the same bytes for the same S.

*Checkpoint*, what the next flush starts from:

    checkpoint        [heads, rows, columns] in float32, bfloat16, float16 or e4m3
    checkpoint_scale  float8 only: uint8 [heads, rows], a power of two per row: e = 1 to 254 is 2^(e - 127), 255 is NaN

For float8, with E the largest fp32 exponent field of a row's elements: e = 255 and every element 0x7f if E = 255 (a
value that is not finite), else e = max(E - 7, 1); an element is e4m3(S 2^(127 - e)), which lies below 256 and is
therefore never clamped. e4m3 has an exponent of its own over 15 binades, so finer blocks would gain no precision.

`state_rounding` "nearest" rounds ties to even (conversion to float16 and bfloat16 overflows to infinity).
"stochastic" rounds a magnitude a, the scaled one of float8, up or down with 16 random bits r:

    M = 2^-14 (float16), 2^-6 (float8), 0 (bfloat16): the smallest normal number, where subnormals need one
    d = 13    (float16), 20   (float8), 16 (bfloat16): bits of an fp32 mantissa that the format drops
    z = a + M if a < M else a                     one fp32 addition; exact unless a has bits below M 2^-23
    t = (bits(z) + (r >> 3 | r << 4 | 8 | r)) with its d low bits cleared: r >> 3 for d = 13, r << 4 | 8 for d = 20, r
        for d = 16, added to the fp32 bit pattern
    result = float(t) - M if a < M else float(t), with the sign of S; exact in the format, infinite on overflow

A number that the format holds never changes, others go up with the probability of their dropped fraction (exactly for
13 and 16 bits; float8 resolves 2^-16 of it, centred). Values that are not finite are converted as in "nearest".

r is 16 bits of Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; seven rounds are the
fewest that pass BigCrush):

    key     (rounding_seed, 0)
    counter (row G + 4 (column // 64) + column % 16 // 4, head, position, layer),  G = 4 ceil(columns / 64)
    r = byte i + 256 byte (i + 1) % 16 of the output (four little-endian words),  i = column // 16 % 4 * 4 + column % 4

row is the row within the head, position the new c (where the stored state stands), layer the operator's scalar. One
call serves 16 elements: 4 neighbouring columns of each of four 16-column blocks, which two words of an nvfp4 readout
hold. Every r is uniform; neighbours share the byte that weighs least in one of them, which correlates their roundings
by less than 2^-8.

*Readout*, what outputs are computed from where `readout_dtype` is not "same"; written from the same fp32 S as the
checkpoint, rounded to nearest, and never read by a flush:

    float8  readout              [heads, rows, columns] e4m3
            readout_scale        uint8 [heads, rows]: both exactly as a float8 checkpoint rounded to nearest
    nvfp4   readout              uint8 [heads, rows, columns / 2]: e2m1 codes
            readout_block_scale  e4m3 [heads, rows, columns / 16]: a scale per 16 neighbouring columns of a row
            readout_scale        uint8 [heads, rows]: e, a power of two per row T = 2^(e - 127); 255 is NaN

    E of a row as above; e = 255 if E = 255, else min(max(E - 10, 27), 227)
    block scale b = e4m3(max(largest magnitude of the block * (2^(127 - e) * fp32(1/6)), 2^-6)), 2^-6 to 352
    code = e2m1(fp16(S * (2^(127 - e) * fp32(1 / float(b))) * 2^-14) * 2^14), with the sign bit of S
    value = e2m1(code) * float(b) * T, exact in fp32; a row whose e is 255 has codes 0 and b = 2^-6

fp16 and e2m1 round to nearest, ties to even. 2^-14 makes fp16's subnormals what e2m1's are, so that a code is three
bits of an fp16 number; a kernel converts two of them with one instruction. Block scales stay among e4m3's normal
numbers, so that what is rounded lies below 6.4 and needs no clamping; blocks below some 2^-14 of their row's largest
element are coarser for it. What owns the one further scale is the row, whose largest magnitude those who fold it know.

Codes lie in 32-bit little-endian words of 8. Word j of lane t (t = 0 to 3, J = columns / 32 words a lane) lies at byte
4 (J t + j) of the row and holds columns 32 j + 4 t + i as code i and 32 j + 16 + 4 t + i as code 4 + i (i = 0 to 3),
which are what lane t of a quad feeds to two 16-column matrix steps. Bits of code 0 to 7, sign and lowest of the three
magnitude bits:

    sign       15  31  18   2   0  16   1  17
    magnitude   9  25  12  28   3  19   6  22

so that `v & M`, `rotate_right(v, 3) & M`, `(v & 0x00390039) * (2^6 + 2^15) & M`, `(v & 0x01c201c2) * (2^3 + 2^14) & M`
with M = 0x8e008e00 are the pairs of codes (0, 1), (2, 3), (4, 5), (6, 7) as half2, times 2^-14. A blob of a slot
(`plugins.slot_blob`) has the usual order instead: byte k of a row holds columns 2 k (low nibble) and 2 k + 1.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from replayssm.plugins.integers import require_positive
from replayssm.plugins.settings import ReplaySettings

PAD_SLOT_ID = -1
"""`state_batch_indices` value of a padding row."""

MAX_ROW_TILE_BYTES = 24 * 1024
"""Largest fp32 row tile: two tiles and their staging fit the 48 KiB that an embedded plugin kernel may use."""

ELEMENT_BITS = {
    "float64": 64,
    "float32": 32,
    "int32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "uint8": 8,
}
"""Bits of one element, by torch's dtype name."""

NVFP4_BLOCK = 16
NVFP4_WORD_COLUMNS = 32
"""Columns that one word of each of the four lanes covers; an nvfp4 readout has whole words."""


class ErrorBit:
    """Bits of the device error flag that an operator raises for an invalid row (design rule 8)."""

    SLOT_OUT_OF_RANGE = 1
    SEQ_LEN_BELOW_CHECKPOINT = 2
    WINDOW_OUT_OF_RANGE = 4
    POSITION_PAST_LIMIT = 8
    HISTORY_OUT_OF_RANGE = 16

    MESSAGES: ClassVar[dict[int, str]] = {
        1: "a row named a slot outside the pool",
        2: "a row's seq_len lies below its checkpoint: rolling back that far needs a snapshot",
        4: "a row's window reaches outside the packed tokens or is negative",
        8: "a row's window ends past max_seq_len",
        16: "a row's seq_len lies further past its checkpoint than any sequence of windows leads: tokens were skipped",
    }

    @classmethod
    def describe(cls, flag: int) -> str:
        """All messages of `flag`, joined; empty for 0."""
        return "; ".join(text for bit, text in cls.MESSAGES.items() if flag & bit)


def _require_multiple(owner: str, larger: str, large: int, smaller: str, small: int) -> None:
    if large % small:
        raise ValueError(f"{owner}: {larger} ({large}) must be a multiple of {smaller} ({small})")


def _row_tiles(rows: int, columns: int) -> int:
    """Fewest equal row tiles of a [rows, columns] fp32 matrix that obey MAX_ROW_TILE_BYTES."""
    largest = min(rows, MAX_ROW_TILE_BYTES // (4 * columns))
    return next((rows // height for height in range(largest, 0, -1) if rows % height == 0), rows)


@dataclass(frozen=True)
class Mamba2Geometry:
    """Sizes of a Mamba2 mixer. The state of one sequence is [nheads, headdim, dstate]."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int

    kind: ClassVar[str] = "mamba2"

    def __post_init__(self) -> None:
        require_positive("Mamba2Geometry", **asdict(self))
        _require_multiple("Mamba2Geometry", "nheads", self.nheads, "ngroups", self.ngroups)

    @property
    def heads_per_group(self) -> int:
        return self.nheads // self.ngroups

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, rows, columns) of the state; rows are independent of each other."""
        return (self.nheads, self.headdim, self.dstate)

    @property
    def row_tiles(self) -> int:
        """Tiles per head that own one entry of `checkpoint_position` each."""
        return _row_tiles(self.headdim, self.dstate)

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C."""
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate

    def ring_parts(self, settings: ReplaySettings) -> tuple[Part, ...]:
        length, act = settings.ring_len, settings.activation_dtype
        return (
            Part("ring_x", (length, self.nheads, self.headdim), act),
            Part("ring_B", (length, self.ngroups, self.dstate), act),
            Part("ring_dt", (length, self.nheads), settings.scalar_dtype),
        )


@dataclass(frozen=True)
class GdnGeometry:
    """Sizes of a Gated DeltaNet mixer. The state of one sequence is [num_v_heads, head_v_dim, head_k_dim]."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    kind: ClassVar[str] = "gdn"

    def __post_init__(self) -> None:
        require_positive("GdnGeometry", **asdict(self))
        _require_multiple("GdnGeometry", "num_v_heads", self.num_v_heads, "num_k_heads", self.num_k_heads)

    @property
    def heads_per_group(self) -> int:
        """Value heads that share one key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, rows, columns) of the state; rows are independent of each other."""
        return (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    @property
    def row_tiles(self) -> int:
        """Tiles per head that own one entry of `checkpoint_position` each."""
        return _row_tiles(self.head_v_dim, self.head_k_dim)

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def ring_parts(self, settings: ReplaySettings) -> tuple[Part, ...]:
        length = settings.ring_len
        planes, u_dtype = settings.u_planes
        return (
            Part("ring_k", (length, self.num_k_heads, self.head_k_dim), settings.activation_dtype),
            Part("ring_u", (length, self.num_v_heads, planes, self.head_v_dim), u_dtype),
            Part("ring_g", (length, self.num_v_heads), settings.scalar_dtype),
        )


@dataclass(frozen=True)
class ConvGeometry:
    """Sizes of a depthwise causal convolution over `conv_dim` channels."""

    conv_dim: int
    conv_kernel: int

    kind: ClassVar[str] = "conv"

    def __post_init__(self) -> None:
        require_positive("ConvGeometry", **asdict(self))


@dataclass(frozen=True)
class AttentionGeometry:
    """Sizes of a position-addressed attention KV cache."""

    num_kv_heads: int
    head_dim: int

    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        require_positive("AttentionGeometry", **asdict(self))


RecurrentGeometry = Mamba2Geometry | GdnGeometry
Geometry = Mamba2Geometry | GdnGeometry | ConvGeometry | AttentionGeometry
AnyGeometry = TypeVar("AnyGeometry", bound=Geometry)
GEOMETRIES: dict[str, type] = {cls.kind: cls for cls in (Mamba2Geometry, GdnGeometry, ConvGeometry, AttentionGeometry)}


@dataclass(frozen=True)
class Part:
    """One tensor of a slot: `shape` excludes the leading slot dimension, `dtype` is torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * ELEMENT_BITS[self.dtype] // 8


def conv_ring_len(geometry: ConvGeometry, max_window: int) -> int:
    """R_conv: the taps behind a window and the window itself."""
    return geometry.conv_kernel - 1 + max_window


def checkpoint_parts(geometry: RecurrentGeometry, settings: ReplaySettings, copies: int = 0) -> tuple[Part, ...]:
    """The state S and, for float8, the scales of its rows. copies: of that many snapshots instead of the checkpoint."""
    name, leading = ("snapshots", (copies,)) if copies else ("checkpoint", ())
    heads, rows, columns = geometry.state_shape
    if settings.state_dtype != "float8":
        return (Part(name, (*leading, heads, rows, columns), settings.state_dtype),)
    return (
        Part(name, (*leading, heads, rows, columns), "float8_e4m3fn"),
        Part(f"{name}_scale", (*leading, heads, rows), "uint8"),
    )


def readout_parts(geometry: RecurrentGeometry, readout_dtype: str) -> tuple[Part, ...]:
    """Parts of the readout copy; nothing for "same"."""
    if readout_dtype == "same":
        return ()
    heads, rows, columns = geometry.state_shape
    if readout_dtype == "float8":
        return (Part("readout", (heads, rows, columns), "float8_e4m3fn"), Part("readout_scale", (heads, rows), "uint8"))
    if columns % NVFP4_WORD_COLUMNS:
        raise ValueError(f"an nvfp4 readout needs state columns in multiples of {NVFP4_WORD_COLUMNS}, got {columns}")
    return (
        Part("readout", (heads, rows, columns // 2), "uint8"),
        Part("readout_block_scale", (heads, rows, columns // NVFP4_BLOCK), "float8_e4m3fn"),
        Part("readout_scale", (heads, rows), "uint8"),
    )


def state_parts(geometry: Geometry, settings: ReplaySettings) -> tuple[Part, ...]:
    """All parts that one stateful layer keeps per slot, in the order operators and kernels take them."""
    if isinstance(geometry, ConvGeometry):
        length = conv_ring_len(geometry, settings.max_window)
        return (Part("conv_ring", (length, geometry.conv_dim), settings.activation_dtype),)
    if isinstance(geometry, AttentionGeometry):
        shape = (settings.max_seq_len, geometry.num_kv_heads, geometry.head_dim)
        return tuple(Part(name, shape, settings.activation_dtype) for name in ("k_cache", "v_cache"))
    checkpoint, *checkpoint_scale = checkpoint_parts(geometry, settings)
    if settings.is_baseline:
        copies = settings.snapshots
        return (checkpoint, *checkpoint_scale, *(checkpoint_parts(geometry, settings, copies) if copies else ()))
    heads = geometry.state_shape[0]
    return (
        checkpoint,
        Part("checkpoint_position", (heads, geometry.row_tiles), "int32"),
        *checkpoint_scale,
        *readout_parts(geometry, settings.readout_dtype),
        *geometry.ring_parts(settings),
    )


def geometry_to_json(geometry: Geometry) -> dict[str, Any]:
    return {"kind": geometry.kind, **asdict(geometry)}


def geometry_from_json(value: dict[str, Any]) -> Geometry:
    fields = dict(value)
    kind = fields.pop("kind", None)
    if kind not in GEOMETRIES:
        raise ValueError(f"unknown geometry kind {kind!r}; this version knows {', '.join(GEOMETRIES)}")
    return GEOMETRIES[kind](**fields)
