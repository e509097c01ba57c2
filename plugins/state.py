"""Allocation of slots: the tensors behind the contract's parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from replayssm.plugins.contract import ErrorBit, Geometry, ReplaySettings, state_parts


@dataclass
class LayerState:
    """State of one stateful layer for a pool of slots.

    tensors: part name -> [slots, *part.shape]; operators update them in place.
    error_flag: int32 [1], shared by the layers of a session; operators OR `ErrorBit`s into it for invalid rows.
    """

    geometry: Geometry
    settings: ReplaySettings
    tensors: dict[str, torch.Tensor]
    error_flag: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))

    def __getitem__(self, part: str) -> torch.Tensor:
        return self.tensors[part]

    @property
    def slots(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of its own name, such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def allocate_state(
    geometry: Geometry,
    settings: ReplaySettings,
    slots: int,
    device: torch.device | str = "cpu",
    error_flag: torch.Tensor | None = None,
) -> LayerState:
    """Zeroed state for `slots` slots on `device`. A fresh sequence never reads what a slot held before."""
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
