"""The random bits that rounding takes."""

from __future__ import annotations

import torch

from replayssm.plugins.philox import philox4x32

ROUNDS = 7


def rounding_bits(
    shape: tuple[int, int, int],
    seed: int,
    layer: int,
    position: int | torch.Tensor,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The 16 random bits r of every element of a state [heads, rows, columns] (contract, "State formats"), int32.

    position: the new c, where the rounded state stands; a tensor [...] gives bits [..., heads, rows, columns].
    """
    heads, rows, columns = shape
    calls = -(-columns // 64)
    if isinstance(position, torch.Tensor):
        device, position = position.device, position[..., None, None]
    head = torch.arange(heads, device=device)[:, None]
    group = torch.arange(rows * calls * 4, device=device)
    outputs = torch.stack(philox4x32((group, head, position, layer), (seed, 0), ROUNDS), dim=-1)
    octets = torch.stack([(outputs >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    pairs = octets | octets.roll(-1, -1) << 8
    # [..., heads, rows, 64 columns, lane, block of the four, column within the lane's four]
    by_lane = pairs.reshape(*outputs.shape[:-2], rows, calls, 4, 4, 4)
    in_order = by_lane.transpose(-3, -2).flatten(-4)
    return in_order[..., :columns].to(torch.int32)
