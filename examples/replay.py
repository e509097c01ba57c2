"""Batched replay decoding in PyTorch, for accuracy studies of state formats on a GPU.

The recurrences as an engine runs them: a checkpoint of some format that is rewritten every L tokens, a ring of the
tokens since, outputs from the readout and the ring. All rows advance together, right-aligned, so that every prompt ends
in the same step and all rows flush in the same steps; the prompts are folded exactly, as prefill does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from examples import scans
from examples.state_formats import Store

BUFFER_LEN = 16
CHUNK_ROWS = {"cuda": 1024, "cpu": 8}
"""Rows whose states one function takes: one shape for a compiled one, whatever the batch; what a CPU's cache holds."""


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of at most CHUNK_ROWS rows of every tensor."""
    count = CHUNK_ROWS[tensors[0].device.type]
    for start in range(0, tensors[0].shape[0], count):
        yield tuple(tensor[start : start + count] for tensor in tensors)


def products(S: Tensor, vectors: Tensor) -> Tensor:
    """S [rows, groups, heads per group, P, N] times vectors [rows, groups, count, N]: [..., P] with count in front."""
    if S.device.type == "cpu":
        out = S.flatten(2, 3) @ vectors.transpose(-1, -2)
        return out.movedim(-1, 0).unflatten(-1, (-1, S.shape[-2]))
    return torch.stack([(S * vectors[:, :, i, None, None]).sum(-1) for i in range(vectors.shape[2])])


def ring_products(keys: Tensor, values: Tensor, weights: Tensor, vectors: Tensor) -> Tensor:
    """sum_j weights_j (key_j . vector) value_j: keys [rows, groups, L, N], values [rows, heads, L, P], weights [rows,
    heads, L], vectors [rows, groups, N] -> [rows, heads, P]. On a GPU as sums: products of one column are slow there.
    """
    on_cpu = keys.device.type == "cpu"
    scores = (keys @ vectors[..., None])[..., 0] if on_cpu else (keys * vectors[:, :, None]).sum(-1)
    mixed = (weights.unflatten(1, (keys.shape[1], -1)) * scores[:, :, None]).flatten(1, 2)
    return (mixed[:, :, None] @ values)[:, :, 0] if on_cpu else (mixed[..., None] * values).sum(2)


class ReplayCore:
    """State of one layer for `rows` sequences: fp32 values of checkpoint and readout, and the ring.

    shape: (heads, groups, P, N); keys are shared by heads / groups heads. `fill` [1] counts the ring's tokens.
    """

    def __init__(self, rows: int, shape: tuple[int, int, int, int], fill: Tensor, wrap: Callable) -> None:
        self.heads, self.groups, self.P, self.N = shape
        device = fill.device
        self.fill, self.products, self.ring_products = fill, wrap(products), wrap(ring_products)
        self.checkpoint = torch.zeros(rows, self.heads, self.P, self.N, device=device)
        self.readout = self.checkpoint
        self.log_decay = torch.zeros(rows, self.heads, BUFFER_LEN, device=device)
        self.values = torch.zeros(rows, self.heads, BUFFER_LEN, self.P, device=device)
        self.keys = torch.zeros(rows, self.groups, BUFFER_LEN, self.N, device=device)

    def grouped(self, tensor: Tensor) -> Tensor:
        """[rows, heads, ...] as [rows, groups, heads per group, ...]."""
        return tensor.unflatten(1, (self.groups, -1))

    def read(self, S: Tensor, vectors: Tensor) -> Tensor:
        """S times vectors [rows, groups, count, N]: [count, rows, heads, P]."""
        parts = [self.products(*part) for part in row_chunks(self.grouped(S), vectors)]
        return torch.cat(parts, 1).flatten(2, 3)

    def replayed(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """`ring_products` of the ring."""
        return self.ring_products(self.keys, self.values, weights, vectors)

    def decays(self, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        """Append a token's log decay [rows, heads]: (decay of the checkpoint, decay of every token of the ring)."""
        self.log_decay.index_copy_(2, self.fill, log_decay[..., None])
        # Entries that are not in use are zero.
        cumulative = self.log_decay.cumsum(-1)
        total = cumulative[..., -1:]
        return total.exp(), (total - cumulative).exp()

    def flush(self, store: Store | None, bits: Tensor | None) -> None:
        """Fold the ring; store rounds (None: keeps fp32)."""
        cumulative = self.log_decay.cumsum(-1)
        total = cumulative[..., -1:]
        weighted = (self.values * (total - cumulative).exp()[..., None]).transpose(-1, -2)
        for checkpoint, readout, decay, left, keys in row_chunks(
            self.checkpoint, self.readout, total.exp(), weighted, self.keys
        ):
            left = self.grouped(left).flatten(2, 3)
            update = (left @ keys).view_as(checkpoint)
            self.put(checkpoint, readout, torch.addcmul(update, checkpoint, decay[..., None]), store, bits)
        self.clear()

    def put(self, checkpoint: Tensor, readout: Tensor, S: Tensor, store: Store | None, bits: Tensor | None) -> None:
        """Write what a flush stores of S into rows of both."""
        if store is not None and store.readout is not None:
            readout.copy_(store.readout(S))
        if store is not None:
            S = store.checkpoint(S, bits) if store.form.stochastic else store.checkpoint(S)
        checkpoint.copy_(S)

    def start(self, S: Tensor, store: Store, bits: Tensor | None) -> None:
        """Begin decoding from the exact state S."""
        self.readout = torch.empty_like(self.checkpoint) if store.readout is not None else self.checkpoint
        for parts in row_chunks(self.checkpoint, self.readout, S):
            self.put(*parts, store, bits)
        self.clear()

    def clear(self) -> None:
        self.log_decay.zero_()
        self.values.zero_()


class Mamba2Core(ReplayCore):
    def step(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        """y [rows, H, P] of a token: x [rows, H, P], dt [rows, H], B, C [rows, G, N], A, D [H], all fp32."""
        decay, weights = self.decays(dt * A)
        self.values.index_copy_(2, self.fill, (x * dt[..., None])[:, :, None])
        self.keys.index_copy_(2, self.fill, B[:, :, None])
        y = decay * self.read(self.readout, C[:, :, None])[0]
        return y + self.replayed(C, weights) + D[:, None] * x


class GdnCore(ReplayCore):
    u_from_checkpoint = False
    u_in_one_number = False

    def step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """o [rows, Hv, dv] of a token: q (scaled), k [rows, Hk, dk] normalised, v [rows, Hv, dv], g, beta [rows,
        Hv]."""
        decay, weights = self.decays(g)
        at_k, at_q = self.read(self.readout, torch.stack((k, q), 2))
        if self.u_from_checkpoint:
            (at_k,) = self.read(self.checkpoint, k[:, :, None])
        u = beta[..., None] * (v - decay * at_k - self.replayed(k, weights))
        # The ring keeps u as a pair of bf16 numbers, or the first of them.
        high = u.to(torch.bfloat16).float()
        u = high if self.u_in_one_number else high + (u - high).to(torch.bfloat16).float()
        self.values.index_copy_(2, self.fill, u[:, :, None])
        self.keys.index_copy_(2, self.fill, k[:, :, None])
        return decay * at_q + self.replayed(q, weights)


def normalized(t: Tensor, dtype: torch.dtype) -> Tensor:
    """L2-normalised and rounded to the activations' format, in fp32."""
    return scans.l2_normalize(t.float()).to(dtype).float()


def softplus(x: Tensor) -> Tensor:
    return F.softplus(x.float())
