"""Allocation of slots: the tensors behind the contract's parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import torch

from replayssm.plugins.contract import (
    AnyGeometry,
    ErrorBit,
    GdnGeometry,
    Geometry,
    geometry_from_json,
    geometry_to_json,
    state_parts,
)
from replayssm.plugins.settings import ReplaySettings


@dataclass
class LayerState:
    """State of one stateful layer for a pool of slots.

    tensors: part name -> [slots, *part.shape]; operators update them in place.
    error_flag: int32 [1], shared by the layers of a session; operators OR `ErrorBit`s into it for invalid rows.
    spec: geometry and settings as one string, which with `flat()` makes the state an operator's arguments.
    """

    geometry: Geometry
    settings: ReplaySettings
    tensors: dict[str, torch.Tensor]
    error_flag: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))

    spec: str = field(init=False)

    def __post_init__(self) -> None:
        self.spec = state_spec(self.geometry, self.settings)

    @classmethod
    def from_flat(cls, spec: str, tensors: Sequence[torch.Tensor], error_flag: torch.Tensor) -> LayerState:
        """The state that `spec` describes over tensors in `state_parts` order."""
        geometry, settings, names = _parse_spec(spec)
        return cls(geometry, settings, dict(zip(names, tensors, strict=True)), error_flag)

    def expect(self, kind: type[AnyGeometry]) -> AnyGeometry:
        """The geometry, which must be a `kind`: ValueError for the state of another operator."""
        if not isinstance(self.geometry, kind):
            raise ValueError(f"expected the state of a {kind.__name__}, got that of a {type(self.geometry).__name__}")
        return self.geometry

    def flat(self) -> list[torch.Tensor]:
        """All tensors, in `state_parts` order."""
        return list(self.tensors.values())

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.tensors[part]

    @property
    def slots(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@lru_cache(maxsize=256)
def state_spec(geometry: Geometry, settings: ReplaySettings) -> str:
    """Canonical JSON of what a state was allocated for."""
    return json.dumps({"geometry": geometry_to_json(geometry), "settings": asdict(settings)}, sort_keys=True)


@lru_cache(maxsize=256)
def _parse_spec(spec: str) -> tuple[Geometry, ReplaySettings, tuple[str, ...]]:
    """(geometry, settings, part names) of a spec."""
    value = json.loads(spec)
    geometry, settings = geometry_from_json(value["geometry"]), ReplaySettings(**value["settings"])
    return geometry, settings, tuple(part.name for part in state_parts(geometry, settings))


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of its own name, such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """A torch dtype's own name, the inverse of `torch_dtype`."""
    return str(dtype).removeprefix("torch.")


def allocate_state(
    geometry: Geometry,
    settings: ReplaySettings,
    slots: int,
    device: torch.device | str = "cpu",
    error_flag: torch.Tensor | None = None,
) -> LayerState:
    """Zeroed state for `slots` slots on `device`. A fresh sequence never reads what a slot held before.

    settings: of the layer (`ReplaySettings.of_layer`).
    """
    if settings.readout_layers:
        raise ValueError("readout_layers are for an engine: a layer's state has settings.of_layer(its number)")
    if isinstance(geometry, GdnGeometry) and settings.serial_exact and settings.u_format != "exact":
        raise ValueError(
            f"serial_exact rebuilds a GDN state from its ring of u, which u_format {settings.u_format!r} rounds: "
            "choose u_format 'exact', which takes 4 bytes an element too"
        )
    tensors = {
        part.name: torch.zeros((slots, *part.shape), dtype=torch_dtype(part.dtype), device=device)
        for part in state_parts(geometry, settings)
    }
    if error_flag is None:
        error_flag = torch.zeros(1, dtype=torch.int32, device=device)
    return LayerState(geometry, settings, tensors, error_flag)


def raise_on_error(error_flag: torch.Tensor) -> None:
    """Raise RuntimeError, and clear the flag, if an operator met an invalid row. Synchronises with the device."""
    flag = int(error_flag.item())
    if flag:
        error_flag.zero_()
        raise RuntimeError(f"invalid row in an operator call: {ErrorBit.describe(flag)}")


def _slot_index(state: LayerState, slots: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Slots as an int64 tensor on the state's device; ValueError if one lies outside the pool."""
    device = next(iter(state.tensors.values())).device
    index = torch.as_tensor(slots, dtype=torch.int64, device=device)
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < state.slots):
        raise ValueError(f"slots must lie in [0, {state.slots}), got {index.tolist()}")
    return index


def copy_slot(state: LayerState, src: int, dst: int) -> None:
    """Make slot `dst` hold what slot `src` holds: forks a sequence, restores a snapshot (design rule 9)."""
    _slot_index(state, [src, dst])
    for tensor in state.tensors.values():
        tensor[dst] = tensor[src]


def set_checkpoint_position(
    state: LayerState, slots: torch.Tensor | Sequence[int], positions: torch.Tensor | Sequence[int]
) -> None:
    """Declare that the checkpoints of `slots` belong to `positions` (both [n]); for states loaded from elsewhere.

    Does nothing where a state keeps no position (baseline, convolution, attention): its content is addressed by
    seq_len alone.
    """
    index = _slot_index(state, slots)
    tensor = state.tensors.get("checkpoint_position")
    if tensor is not None:
        tensor[index] = torch.as_tensor(positions, dtype=tensor.dtype, device=tensor.device)[:, None, None]


def commit(state: LayerState, slots: torch.Tensor | Sequence[int], accepted: torch.Tensor | Sequence[int]) -> None:
    """Keep the first accepted[i] tokens of the last verify window of slots[i] (both [n]); baseline only.

    The baseline leaves the checkpoint as it was when a window has 2 to max_window tokens and stores a snapshot after
    each token instead; this copies the snapshot of the last accepted token back. 0 keeps the old checkpoint. Windows
    of one token have updated the checkpoint already and must not be committed. Does nothing for a state without
    snapshots: replay state, convolution and attention roll back by seq_len alone.
    """
    commit_all([state], slots, accepted)


def commit_all(
    states: Iterable[LayerState], slots: torch.Tensor | Sequence[int], accepted: torch.Tensor | Sequence[int]
) -> None:
    """`commit` for all layers of a pool. Waits for the device only where `slots` or `accepted` are on it."""
    states = [state for state in states if "snapshots" in state.tensors]
    if not states:
        return
    slots, accepted = torch.as_tensor(slots).tolist(), torch.as_tensor(accepted).tolist()
    _check_commit(states[0], slots, accepted)
    width = states[0]["snapshots"].shape[1]
    kept = [(slot * width + count - 1, slot) for slot, count in zip(slots, accepted, strict=True) if count]
    if not kept:
        return
    rows = torch.tensor(kept, dtype=torch.int32).T.contiguous()
    if states[0]["snapshots"].is_cuda:
        rows = rows.pin_memory().to(states[0]["snapshots"].device, non_blocking=True)
    for state in states:
        for part in ("checkpoint", "checkpoint_scale"):
            if part in state.tensors:
                _copy_rows(state[part.replace("checkpoint", "snapshots")].flatten(0, 1), *rows, state[part])


def _copy_rows(source: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, target: torch.Tensor) -> None:
    """target[targets] = source[sources] (both int32 [n]), on a GPU without a copy in between."""
    if source.is_cuda:
        from replayssm.plugins import launch  # which needs this module

        if launch.copy_rows(source, sources, targets, target):
            return
    target[targets.long()] = source[sources.long()]


def _check_commit(state: LayerState, slots: list[int], accepted: list[int]) -> None:
    if slots and not 0 <= min(slots) <= max(slots) < state.slots:
        raise ValueError(f"slots must lie in [0, {state.slots}), got {slots}")
    width = state["snapshots"].shape[1]
    if len(accepted) != len(slots) or (accepted and not 0 <= min(accepted) <= max(accepted) <= width):
        raise ValueError(f"accepted must hold {len(slots)} counts in [0, {width}], got {accepted}")
