"""Buffers and scalars that the operators prepare once per call, without making a row depend on its batch.

Bit-equality of a row alone and in a batch needs care with two things. Matrix products may depend on the alignment of
their operands, so every row's span starts on a 64-byte boundary. And torch's softplus, sigmoid and silu treat the tail
of a buffer differently from its body by an ulp, which exp and log1p do not: here they are composed of the latter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch

from replayssm.plugins.reference.rows import Row


def tokens_per_boundary(*token_elements: int) -> int:
    """Fewest tokens that fill whole 64-byte lines in buffers of fp32 or wider with these elements per token."""
    return 16 // math.gcd(16, *token_elements)


class Spans:
    """Tokens of several rows, one row after the other, each row starting at a multiple of `boundary` tokens.

    The gap behind a row repeats its last token, so gathers read and scatters write nothing that is not the row's own.

    starts: first buffer index of each row.
    tokens: packed token of each buffer entry (window spans only); slots, positions: owner and absolute position.
    """

    def __init__(self, rows: Sequence[Row], with_history: bool, boundary: int = 1) -> None:
        lengths = [row.length + (row.history if with_history else 0) for row in rows]
        padded = [-(-length // boundary) * boundary for length in lengths]
        self.starts = list(accumulate(padded, initial=0))[:-1]
        first = [row.checkpoint_position if with_history else row.seq_len for row in rows]
        table = torch.tensor(
            [lengths, padded, self.starts, first, [row.slot for row in rows], [row.start for row in rows]],
            dtype=torch.int64,
        ).reshape(6, -1)
        lengths_, padded_, starts_, first_, slots_, tokens_ = table.unbind()
        row_of = torch.repeat_interleave(padded_)
        within = torch.arange(row_of.numel()) - starts_[row_of]
        within = torch.minimum(within, lengths_[row_of] - 1)
        self.slots = slots_[row_of]
        self.positions = first_[row_of] + within
        self.tokens = tokens_[row_of] + within

    @classmethod
    def of_history(cls, row: Row) -> Spans:
        """The history of one row alone."""
        return cls([row._replace(length=0)], with_history=True)

    def gather_ring(self, ring: torch.Tensor) -> torch.Tensor:
        """Rows of `ring` [slots, R, ...] at these positions: [entries, ...]."""
        return ring[self.slots, self.positions % ring.shape[1]]

    def write_ring(self, ring: torch.Tensor, values: torch.Tensor) -> None:
        """Store packed `values` [T, ...] at these positions of `ring` [slots, R, ...]."""
        ring[self.slots, self.positions % ring.shape[1]] = values[self.tokens].to(ring.dtype)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself if it is contiguous and on a 64-byte boundary, else a copy that is."""
    if tensor.is_contiguous() and tensor.data_ptr() % 64 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), linear above 20."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


@lru_cache(maxsize=256)
def _masks(tokens: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(summand mask [tokens, tokens + 1], causal mask [window, tokens + 1]) of `decays`."""
    token = torch.arange(tokens)[:, None]
    source = torch.arange(tokens + 1)[None, :]
    summed = source <= token
    causal = source <= token[tokens - window :] + 1
    return summed, causal


def decays(log_decay: torch.Tensor, window: int) -> torch.Tensor:
    """Decay from every source to every window token: [heads, window, 1 + tokens].

    log_decay [tokens, heads] belongs to consecutive tokens, the last `window` of which are the window. Source 0 is the
    checkpoint before the first token; source 1 + j is token j, whose own decay its contribution does not suffer.
    Sources behind the window token get 0. Each sum runs over its own terms only (stable segment sum): all terms are
    <= 0, so nothing cancels, which differences of one long running sum would.
    """
    tokens = log_decay.shape[0]
    summed, causal = _masks(tokens, window)
    terms = torch.where(summed, log_decay.t()[:, :, None], 0.0)
    decay = terms.cumsum(1)[:, tokens - window :].clamp_(max=0).exp_()
    return decay if window == 1 else torch.where(causal, decay, 0.0)


def require(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless `tensor` has `shape` and, if given, `dtype`."""
    if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
        expected = f"{list(shape)}" + (f" of {dtype}" if dtype is not None else "")
        raise ValueError(f"{name} must be {expected}, got {list(tensor.shape)} of {tensor.dtype}")
