"""The state contract: geometry, replay settings and the exact content of one slot.

Everything that both the offline and the online side must agree on about recurrent state is decided here and nowhere
else. The module needs neither torch nor CUDA, so that a checkpoint can be inspected anywhere.

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
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, TypeGuard, TypeVar

PAD_SLOT_ID = -1
"""`state_batch_indices` value of a padding row."""

MAX_ROW_TILE_BYTES = 24 * 1024
"""Largest fp32 row tile: two tiles and their staging fit the 48 KiB that an embedded plugin kernel may use."""

MAX_SIZE = 2**31 - 1
"""Largest size or position: kernels take them as int32."""

MAX_BUFFER_LEN = 4096
"""Largest L and largest window. Far below it, a ring already outgrows the state it saves writing."""

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

ACTIVATION_DTYPES = ("bfloat16", "float16", "float32", "float64")
STATE_DTYPES = ("float32", "bfloat16", "float16", "float8", "float64")
ROUNDINGS = ("nearest", "stochastic")
READOUT_DTYPES = ("same", "float8", "nvfp4")
U_SOURCES = ("readout", "checkpoint")
U_FORMATS = ("bfloat16x2", "bfloat16", "exact")
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


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether `value` is an integer from `least` to `most`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _require_integer(name: str, value: object, least: int, most: int) -> None:
    if not is_integer(value, least, most):
        raise ValueError(f"{name} must be an integer between {least} and {most}, got {_short(value)}")


def _require_positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        _require_integer(f"{owner}.{name}", value, 1, MAX_SIZE)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


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
        _require_positive("Mamba2Geometry", **asdict(self))
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
        _require_positive("GdnGeometry", **asdict(self))
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
        _require_positive("ConvGeometry", **asdict(self))


@dataclass(frozen=True)
class AttentionGeometry:
    """Sizes of a position-addressed attention KV cache."""

    num_kv_heads: int
    head_dim: int

    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        _require_positive("AttentionGeometry", **asdict(self))


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


@dataclass(frozen=True)
class ReplaySettings:
    """How recurrent state is kept.

    buffer_len: L, the number of tokens after which the history is folded into the checkpoint. 0 selects the
        baseline: the state is rewritten for every token, and speculation stores snapshots.
    max_window: tokens of the longest decode or verify window (1 + draft length). Longer windows are prefill.
    max_seq_len: tokens of one sequence, the capacity of the attention KV cache.
    state_dtype: format of the checkpoint.
    state_rounding: how the checkpoint is rounded, "nearest" or "stochastic".
    rounding_seed: key of the random bits of stochastic rounding, 0 to 2^31 - 1.
    readout_dtype: format of the copy that only outputs read; "same" reads the checkpoint itself.
    readout_layers: (layer, readout_dtype) of layers whose readout has another format, numbered as in the model. For an
        engine; a layer's own state has none (`of_layer`).
    u_source: where a Gated DeltaNet token reads the S k of its u, which enters later updates: the "readout", as the
        outputs, or the "checkpoint", which then is read for every token too. Mamba2 has no such product.
    activation_dtype: dtype of x, B, k and of the convolution ring.
    u_format: how a GDN token's u is kept in the ring. "bfloat16x2" is a high and a low half (4 bytes an element),
        "bfloat16" the high half alone, "exact" the accumulation dtype (for verification).
    serial_exact: outputs come from the state rebuilt token by token and rounded to `state_dtype` after each, which
        makes them bit-equal to the baseline.
    """

    buffer_len: int = 16
    max_window: int = 1
    max_seq_len: int = 4096
    state_dtype: str = "float32"
    readout_dtype: str = "same"
    activation_dtype: str = "bfloat16"
    u_format: str = "bfloat16x2"
    serial_exact: bool = False
    state_rounding: str = "nearest"
    rounding_seed: int = 0
    u_source: str = "readout"
    readout_layers: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        _require_positive("ReplaySettings", max_window=self.max_window, max_seq_len=self.max_seq_len)
        _require_integer("buffer_len", self.buffer_len, 0, MAX_BUFFER_LEN)
        _require_integer("rounding_seed", self.rounding_seed, 0, MAX_SIZE)
        if self.max_window > MAX_BUFFER_LEN:
            raise ValueError(f"max_window must be at most {MAX_BUFFER_LEN}, got {_short(self.max_window)}")
        for name, allowed in (
            ("state_dtype", STATE_DTYPES),
            ("readout_dtype", READOUT_DTYPES),
            ("activation_dtype", ACTIVATION_DTYPES),
            ("u_format", U_FORMATS),
            ("state_rounding", ROUNDINGS),
            ("u_source", U_SOURCES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"ReplaySettings.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if self.max_seq_len + self.max_window > MAX_SIZE:
            raise ValueError(f"max_seq_len must leave positions within int32, got {self.max_seq_len}")
        reason = self._contradiction()
        if reason:
            raise ValueError(reason)
        object.__setattr__(self, "readout_layers", self._checked_layers())

    def _checked_layers(self) -> tuple[tuple[int, str], ...]:
        """`readout_layers` in ascending order, whatever kinds of sequences it was given as."""
        try:
            pairs = sorted((layer, dtype) for layer, dtype in self.readout_layers)
        except (TypeError, ValueError):
            raise ValueError(
                "ReplaySettings.readout_layers must be pairs of a layer and its readout_dtype, got "
                f"{_short(self.readout_layers)}"
            ) from None
        for layer, dtype in pairs:
            if not is_integer(layer, 0, MAX_SIZE):
                raise ValueError(f"ReplaySettings.readout_layers: a layer is a number from 0 on, got {_short(layer)}")
            try:
                self._with_readout(dtype)
            except ValueError as error:
                raise ValueError(f"readout_layers, layer {layer}: {error}") from None
        for (layer, dtype), (following, other) in pairwise(pairs):
            if layer == following:
                raise ValueError(
                    f"ReplaySettings.readout_layers names layer {layer} twice, as {dtype} and {other}: keep one of them"
                )
        return tuple(pairs)

    def _with_readout(self, dtype: str) -> ReplaySettings:
        # Without a copy there is one state that u can be read from.
        source = "readout" if dtype == "same" else self.u_source
        return replace(self, readout_dtype=dtype, u_source=source, readout_layers=())

    def of_layer(self, layer: int) -> ReplaySettings:
        """Settings of one layer's state: with its own `readout_dtype`, without `readout_layers`."""
        if not self.readout_layers:
            return self
        return self._with_readout(dict(self.readout_layers).get(layer, self.readout_dtype))

    def _contradiction(self) -> str:
        """Why two settings do not go together, and what to choose; empty if all do."""
        copy = self.readout_dtype != "same"
        if self.is_baseline and copy:
            return (
                "buffer_len 0 rewrites the state for every token, so a readout copy would be rewritten too and "
                "save nothing: choose readout_dtype 'same' or a buffer_len above 0"
            )
        if self.serial_exact and copy:
            return "serial_exact reads the checkpoint itself: choose readout_dtype 'same'"
        if self.readout_dtype == self.state_dtype:
            return (
                f"a {self.readout_dtype} readout of a {self.state_dtype} checkpoint reads as many bytes and costs "
                "memory: choose readout_dtype 'same' or 'nvfp4', or a wider state_dtype"
            )
        if self.state_rounding == "stochastic" and self.state_dtype in ("float32", "float64"):
            return (
                f"state_dtype {self.state_dtype} keeps what the flush computes, so there is nothing to round "
                "stochastically: choose state_rounding 'nearest' or a state_dtype of 16 or 8 bits"
            )
        if self.state_rounding == "nearest" and self.rounding_seed:
            return "rounding_seed changes nothing unless state_rounding is 'stochastic'"
        if self.u_source == "checkpoint" and not copy:
            return "without a readout copy everything reads the checkpoint: leave u_source at 'readout'"
        return ""

    @property
    def is_baseline(self) -> bool:
        return self.buffer_len == 0

    @property
    def ring_len(self) -> int:
        """R. A window never overwrites a row of the history it still needs, because both fit (design section 2)."""
        return 0 if self.is_baseline else max(self.buffer_len, self.max_window) + self.max_window

    @property
    def snapshots(self) -> int:
        """State snapshots that the baseline keeps for one verify window."""
        return self.max_window if self.is_baseline and self.max_window > 1 else 0

    @property
    def rounding_scalars(self) -> tuple[int, ...]:
        """int32 scalars that kernels take right behind `layer`: the seed, where the rounding is stochastic."""
        return (self.rounding_seed,) if self.state_rounding == "stochastic" else ()

    @property
    def scalar_dtype(self) -> str:
        """dtype of dt, g and of accumulation: fp32, or fp64 where everything is fp64."""
        return "float64" if self.activation_dtype == "float64" else "float32"

    @property
    def u_planes(self) -> tuple[int, str]:
        """(planes, dtype) of `ring_u`."""
        if self.u_format == "exact":
            return 1, self.scalar_dtype
        return (2 if self.u_format == "bfloat16x2" else 1), "bfloat16"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Legal but unhelpful choices, in words."""
        if 0 < self.buffer_len < self.max_window:
            return (
                f"buffer_len {self.buffer_len} is shorter than max_window {self.max_window}: "
                f"every full verify window folds its history first; choose a buffer_len of {self.max_window} or more",
            )
        return ()


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
