"""Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and the bits that rounding takes.

Counter-based: a number is a function of its counter and key, so that any thread can compute any of them in any order.
Tensors of 32-bit words are int64 here, because torch has no unsigned 32-bit arithmetic.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 7

Word = torch.Tensor | int


def _multiply(word: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32 bits of a product; in halves, because int64 does not hold 64 unsigned bits."""
    low = word * (constant & 0xFFFF)
    high = word * (constant >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (int64 tensors) per counter; the counter's words broadcast against each other."""
    device = next((word.device for word in counter if isinstance(word, torch.Tensor)), "cpu")
    words = (torch.as_tensor(word, dtype=torch.int64, device=device) for word in counter)
    c0, c1, c2, c3 = torch.broadcast_tensors(*words)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


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
    outputs = torch.stack(philox4x32((group, head, position, layer), (seed, 0)), dim=-1)
    octets = torch.stack([(outputs >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    pairs = octets | octets.roll(-1, -1) << 8
    # [..., heads, rows, 64 columns, lane, block of the four, column within the lane's four]
    by_lane = pairs.reshape(*outputs.shape[:-2], rows, calls, 4, 4, 4)
    in_order = by_lane.transpose(-3, -2).flatten(-4)
    return in_order[..., :columns].to(torch.int32)
