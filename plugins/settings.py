"""How an engine keeps recurrent state: what `build` asks for and the manifest records.

The formats that the names below stand for are specified in `plugins.contract`. The module needs neither torch nor CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from replayssm.plugins.integers import MAX_SIZE, is_integer, require_integer, require_positive, short

MAX_BUFFER_LEN = 4096
"""Largest L and largest window. Far below it, a ring already outgrows the state it saves writing."""

ACTIVATION_DTYPES = ("bfloat16", "float16", "float32", "float64")
STATE_DTYPES = ("float32", "bfloat16", "float16", "float8", "float64")
ROUNDINGS = ("nearest", "stochastic")
READOUT_DTYPES = ("same", "float8", "nvfp4")
U_SOURCES = ("readout", "checkpoint")
U_FORMATS = ("bfloat16x2", "bfloat16", "exact")


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
        require_positive("ReplaySettings", max_window=self.max_window, max_seq_len=self.max_seq_len)
        require_integer("buffer_len", self.buffer_len, 0, MAX_BUFFER_LEN)
        require_integer("rounding_seed", self.rounding_seed, 0, MAX_SIZE)
        if self.max_window > MAX_BUFFER_LEN:
            raise ValueError(f"max_window must be at most {MAX_BUFFER_LEN}, got {short(self.max_window)}")
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
                f"{short(self.readout_layers)}"
            ) from None
        for layer, dtype in pairs:
            if not is_integer(layer, 0, MAX_SIZE):
                raise ValueError(f"ReplaySettings.readout_layers: a layer is a number from 0 on, got {short(layer)}")
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

    def with_u_format(self, u_format: str | None = None) -> ReplaySettings:
        """The same with this `u_format`, or with what suits the others if it is None.

        "exact" where activations have more than 16 bits or the engine is serial-exact: there the pair's 2^-17 would be
        the largest error. The high half alone where u's S k is read from an nvfp4 copy, whose e2m1 codes are off by up
        to a quarter: the low half, 2^-9 of u and below, would keep nothing but that. The pair everywhere else.
        """
        if u_format is not None:
            return replace(self, u_format=u_format)
        reads_nvfp4 = self.readout_dtype == "nvfp4" and self.u_source == "readout"
        wide = self.serial_exact or self.activation_dtype in ("float32", "float64")
        return replace(self, u_format="exact" if wide else "bfloat16" if reads_nvfp4 else "bfloat16x2")

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
                f"buffer_len {self.buffer_len} is shorter than a verify window of {self.max_window} tokens (1 + drafts)"
                f", so every full one folds its history first: choose {self.max_window} or more",
            )
        return ()
