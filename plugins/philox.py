"""Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Counter-based: a number is a function of its counter and key, so that any thread can compute any of them in any order.
Tensors of 32-bit words are int64 here, because torch has no unsigned 32-bit arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Word = torch.Tensor | int


def philox4x32(counter: Sequence[Word], key: Sequence[Word], rounds: int) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (int64 tensors) per counter of four; words of counters and of keys of two broadcast.

    rounds: 7 are the fewest that pass BigCrush, 10 the usual number.
    """
    device = next((word.device for word in counter if isinstance(word, torch.Tensor)), "cpu")
    words = (torch.as_tensor(word, dtype=torch.int64, device=device) for word in counter)
    c0, c1, c2, c3 = torch.broadcast_tensors(*words)
    k0, k1 = key
    for _ in range(rounds):
        # Products wrap modulo 2^64 in int64, which leaves their bits right; masking undoes the arithmetic shift.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3
