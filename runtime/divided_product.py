"""Matrix products of so few tiles that they leave multiprocessors idle: their depth is divided among these instead."""

from __future__ import annotations

from functools import cache

import torch

Tensor = torch.Tensor

MOST_PARTS = 4
TILE = 128
"""Tokens and features of a tile of a matrix product, about."""


def product_parts(tokens: int, features: int, depth: int, multiprocessors: int) -> int:
    """Into how many parts the depth of a product [tokens, depth] x [features, depth] is divided: as many as give each
    multiprocessor at most one tile, in multiples of 64 elements. 1 for few tokens, whose time is that of the weights.

    H200, 256 tokens, with the norm behind: Qwen3.5-4B's down projection 27.9 us in 3 parts and 31.3 whole, Nano-4B's
    37.6 in 2 and 40.1; the output projections 17.1 and 18.2, 27.1 and 31.5 us.
    """
    if tokens <= TILE:
        return 1
    tiles = -(-tokens // TILE) * -(-features // TILE)
    fitting = [
        parts for parts in range(2, MOST_PARTS + 1) if parts * tiles <= multiprocessors and depth % (64 * parts) == 0
    ]
    return max(fitting, default=1)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def divided_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """fp32 [parts, tokens, features], whose sum is x [tokens, depth] times the transposed weight [features, depth]."""
    (tokens, depth), features = x.shape, weight.shape[0]
    left = x.view(tokens, parts, depth // parts).transpose(0, 1)
    right = weight.view(features, parts, depth // parts).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)
