"""How many bytes of recurrent state one generated token moves, and how large a slot is.

The model counts what a kernel must at least move through device memory for the recurrent layers of one sequence:
checkpoint, readout copy, ring rows and convolution rows. Activations, weights and the attention cache are left out,
because all four ways of decoding move the same of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from replayssm.plugins.contract import (
    AttentionGeometry,
    ConvGeometry,
    GdnGeometry,
    Geometry,
    RecurrentGeometry,
    checkpoint_parts,
    readout_parts,
    state_parts,
)
from replayssm.plugins.settings import ReplaySettings


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of one sequence over all layers. `kv_per_token` counts attention caches per held token.

    state: checkpoints with their scales.  readout: low-precision copies with theirs.  ring: R rows of every SSM ring.
    conv: convolution rings.  positions: the checkpoint positions.  snapshots: what the baseline keeps for a verify
    window.
    """

    state: int
    readout: int
    ring: int
    conv: int
    positions: int
    snapshots: int
    kv_per_token: int

    @property
    def recurrent(self) -> int:
        """Everything but the attention cache."""
        return self.state + self.readout + self.ring + self.conv + self.positions + self.snapshots

    def total(self, tokens: int) -> int:
        """Bytes of a sequence that holds `tokens` tokens."""
        return self.recurrent + tokens * self.kv_per_token


@dataclass(frozen=True)
class Traffic:
    """Bytes of recurrent state moved per generated token of one sequence."""

    plain: float
    replay: float
    snapshot_speculation: float
    replay_speculation: float


def _by_layer(
    geometries: Iterable[Geometry], settings: ReplaySettings, layers: Iterable[int] | None
) -> Iterator[tuple[Geometry, ReplaySettings]]:
    """Each geometry with the settings of its layer."""
    if layers is None:
        if settings.readout_layers:
            raise ValueError("readout_layers need the numbers of the layers that the geometries belong to")
        return ((geometry, settings) for geometry in geometries)
    pairs = zip(geometries, layers, strict=True)
    return ((geometry, settings.of_layer(layer)) for geometry, layer in pairs)


def slot_bytes(
    geometries: Iterable[Geometry], settings: ReplaySettings, layers: Iterable[int] | None = None
) -> SlotBytes:
    """Exact size of one slot of the layers `geometries`; `layers` are their numbers, for `settings.readout_layers`."""
    sums = dict.fromkeys(("state", "readout", "ring", "conv", "positions", "snapshots"), 0)
    kv_per_token = 0
    for geometry, own in _by_layer(geometries, settings, layers):
        for part in state_parts(geometry, own):
            if isinstance(geometry, AttentionGeometry):
                kv_per_token += part.nbytes // own.max_seq_len
            elif isinstance(geometry, ConvGeometry):
                sums["conv"] += part.nbytes
            else:
                sums[_PART_GROUPS.get(part.name, part.name.partition("_")[0])] += part.nbytes
    return SlotBytes(**sums, kv_per_token=kv_per_token)


_PART_GROUPS = {"checkpoint": "state", "checkpoint_scale": "state", "checkpoint_position": "positions"}


def traffic_per_token(
    geometries: Iterable[Geometry],
    settings: ReplaySettings,
    draft_len: int,
    acceptance_length: float,
    layers: Iterable[int] | None = None,
) -> Traffic:
    """Traffic of plain and replay decode, and of verifying `draft_len` drafts with either form of state.

    acceptance_length: mean tokens that one verify call yields, the bonus token included (1 <= it <= 1 + draft_len).
    layers: as in `slot_bytes`.
    The rings in use are desynchronised, so a decode step sees every fill level equally often. Snapshot speculation
    is counted in its cheapest form: the next call reads the accepted snapshot in place, without a commit copy.
    """
    if draft_len < 0:
        raise ValueError(f"draft_len must be >= 0, got {draft_len}")
    if not 1 <= acceptance_length <= 1 + draft_len:
        raise ValueError(
            f"acceptance_length must lie between 1 and 1 + draft_len = {1 + draft_len}, got {acceptance_length}"
        )
    window = 1 + draft_len
    plain = replay = snapshot = speculation = 0.0
    for geometry, own in _by_layer(geometries, settings, layers):
        if isinstance(geometry, AttentionGeometry):
            continue
        if isinstance(geometry, ConvGeometry):
            row = _row_bytes(state_parts(geometry, own))
            decode = geometry.conv_kernel * row
            verify = (geometry.conv_kernel - 1 + window) * row / acceptance_length
            plain, replay = plain + decode, replay + decode
            snapshot, speculation = snapshot + verify, speculation + verify
            continue
        state = _state_bytes(geometry, own)
        plain += 2 * state
        snapshot += (1 + window) * state / acceptance_length
        replay += _replay_layer(geometry, own, 1, 1.0)
        speculation += _replay_layer(geometry, own, window, acceptance_length)
    return Traffic(plain, replay, snapshot, speculation)


def _replay_layer(geometry: RecurrentGeometry, settings: ReplaySettings, window: int, accepted: float) -> float:
    """Bytes per token of one layer over a whole flush cycle of windows that each yield `accepted` tokens.

    Call k of a cycle finds a history of k * accepted tokens; the first call after the history plus window exceeds L
    folds it: it reads the history and the checkpoint, writes the state in all its forms, and has then an empty history
    and all it needs. Every other call reads what outputs and u are computed from.
    """
    state = _state_bytes(geometry, settings)
    if settings.is_baseline:
        return (2 if window == 1 else 1 + window) * state / accepted
    copy = sum(part.nbytes for part in readout_parts(geometry, settings.readout_dtype))
    row = _row_bytes(geometry.ring_parts(settings))
    calls = max(1, math.floor((settings.buffer_len - window) / accepted) + 1)
    read_rows = accepted * calls * (calls + 1) / 2
    u_from_checkpoint = isinstance(geometry, GdnGeometry) and settings.u_source == "checkpoint"
    read = copy + state if u_from_checkpoint else copy or state
    fold = state + state + copy
    return ((calls - 1) * read + fold + (read_rows + calls * window) * row) / (calls * accepted)


def _state_bytes(geometry: RecurrentGeometry, settings: ReplaySettings) -> int:
    return sum(part.nbytes for part in checkpoint_parts(geometry, settings))


def _row_bytes(ring: Iterable) -> int:
    """Bytes of one token's row over all ring parts."""
    return sum(part.nbytes // part.shape[0] for part in ring)
