"""The engine of one rank of a tensor-parallel group, and the operators through which ranks meet.

An engine directory knows nothing of ranks: `rank_engine` divides its networks when it is loaded, and a weight is cut
when an executor asks for it, so that a rank reads its own parts of the mapped files.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.runtime.engine import Engine
from replayssm.runtime.parallel_layout import Cut, shard
from replayssm.runtime.sampling import VocabularyPart

Tensor = torch.Tensor

ONE_SHOT_BYTES = 4 << 20
"""For `collectives`: the sums of a decode step of 512 rows and 4,096 columns in bf16."""

ONE_SHOT_RANKS = (2, 4, 8)
"""That PyTorch has kernels for."""


@dataclass
class RankEngine(Engine):
    """What rank `rank` of `ranks` runs: networks and weights of its part; sizes and bytes are its own."""

    rank: int = 0
    ranks: int = 1
    vocabulary_part: VocabularyPart | None = None

    @property
    def weight_bytes(self) -> int:
        specs = {name: spec for network in self.networks.values() for name, spec in network.weights.items()}
        return sum(math.prod(spec.shape) * ELEMENT_BITS[spec.dtype] // 8 for spec in specs.values())


class WeightParts(Mapping):
    """Weights by name, each cut when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor], cuts: Mapping[str, Cut | None]) -> None:
        self._weights, self._cuts = weights, cuts

    def __getitem__(self, name: str) -> Tensor:
        cut, weight = self._cuts[name], self._weights[name]
        if cut is None:
            return weight
        part = cut(weight)
        # A view would keep all of a weight that was made on the device.
        return part.clone() if weight.is_cuda and part.data_ptr() == weight.data_ptr() else part

    def __iter__(self) -> Iterator[str]:
        return iter(self._cuts)

    def __len__(self) -> int:
        return len(self._cuts)


def rank_engine(
    engine: Engine, rank: int, ranks: int, operators: Mapping[str, Callable[..., Any]] | None = None
) -> Engine:
    """The engine of rank `rank` of `ranks`; `engine` itself where there is one rank.

    operators: how ranks meet; None: `collectives` of torch.distributed's default group.
    Raises ValueError for plans, and for networks that do not divide.
    """
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, got {ranks}")
    if ranks == 1:
        return engine
    if engine.has_plans:
        raise ValueError(
            f"{engine.directory} holds {engine.manifest.target} plans, which run on one GPU: build it with --target "
            "torch, or leave out --tensor-parallel-size"
        )
    return _divided(engine, rank, ranks, collectives() if operators is None else operators)


def _divided(engine: Engine, rank: int, ranks: int, operators: Mapping[str, Callable[..., Any]]) -> RankEngine:
    shards = {name: shard(network, rank, ranks) for name, network in engine.networks.items()}
    cuts: dict[str, Cut | None] = {}
    for part in shards.values():
        for name, cut in part.cuts.items():
            if cuts.setdefault(name, cut) != cut:
                raise ValueError(f"networks would need different parts of weight {name!r}")
    values = {item.name: getattr(engine, item.name) for item in fields(Engine)}
    values |= {
        "networks": {name: part.network for name, part in shards.items()},
        "weights": WeightParts(engine.weights, cuts),
        "resident_weights": {},
        "operators": operators,
    }
    first = shards["main"].first_token
    part = None if first is None else VocabularyPart(first, operators["all_gather"])
    return RankEngine(**values, rank=rank, ranks=ranks, vocabulary_part=part)


class OneShotSums:
    """Sums over the GPUs of one machine where each reads what it lacks from the others' memory, in one kernel.

    PyTorch's symmetric memory does it, with smaller gaps around its kernels than NCCL: a decode step of a 4B model over
    two H200s is 1.5 to 5 % shorter. Ranks whose memory the others cannot reach leave all sums to the group's
    backend, which the ranks agree on.
    """

    def __init__(self, group: dist.ProcessGroup | None, limit: int) -> None:
        self._group, self._limit = group, limit
        self._buffer: Tensor | None = None
        self._is_tried = False

    def take(self, x: Tensor) -> bool:
        """Whether the sum of `x`, contiguous, is for this class: the same on all ranks."""
        if not x.is_cuda or x.dtype != torch.bfloat16 or not 0 < x.nbytes <= self._limit:
            return False
        if x.nbytes % 16 or x.storage_offset() * x.itemsize % 16:
            return False
        if not self._is_tried:
            self._is_tried = True
            self._buffer = self._agreed_buffer(x.device)
        return self._buffer is not None

    def __call__(self, x: Tensor) -> Tensor:
        name = (self._group or dist.group.WORLD).group_name
        place = self._buffer[: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(place, x, "sum", name)

    def _agreed_buffer(self, device: torch.device) -> Tensor | None:
        """Memory that all ranks reach, None where one of them does not; never first asked for in a capture."""
        buffer = None
        if dist.get_world_size(self._group) in ONE_SHOT_RANKS:
            # Rendezvous would also set up multicast, which these sums do not use.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            with contextlib.suppress(ImportError, RuntimeError):
                import torch.distributed._symmetric_memory as symmetric_memory

                memory = symmetric_memory.empty(self._limit // 2, dtype=torch.bfloat16, device=device)
                symmetric_memory.rendezvous(memory, group=(self._group or dist.group.WORLD).group_name)
                buffer = memory
        agreed = torch.tensor([buffer is not None], dtype=torch.int32, device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group)
        return buffer if bool(agreed) else None


def collectives(
    group: dist.ProcessGroup | None = None, one_shot_bytes: int = ONE_SHOT_BYTES
) -> dict[str, Callable[..., Any]]:
    """`all_reduce`(x), and `all_gather`(x) along the last dimension, over a process group.

    group: None is the default one, which may be made later. one_shot_bytes: between GPUs, sums of tensors of at most
    so many bytes are taken by `OneShotSums`; 0 leaves all to NCCL.
    """
    one_shot = OneShotSums(group, one_shot_bytes)

    def all_reduce(x: Tensor) -> Tensor:
        x = x.contiguous()
        if one_shot.take(x):
            return one_shot(x)
        dist.all_reduce(x, group=group)
        return x

    # torch 2.13 renames the latter to the former.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_gather(x: Tensor) -> Tensor:
        ranks = dist.get_world_size(group)
        parts = x.new_empty(ranks, *x.shape)
        gather(parts.flatten(0, 1), x.contiguous(), group=group)
        return parts.movedim(0, -2).flatten(-2)

    return {"all_reduce": all_reduce, "all_gather": all_gather}
