"""The engine of one rank of a tensor-parallel group, and the operators through which ranks meet.

An engine directory knows nothing of ranks: `rank_engine` divides its networks when it is loaded, and a weight is cut
when an executor asks for it, so that a rank reads its own parts of the mapped files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.runtime.engine import Engine
from replayssm.runtime.parallel_layout import Cut, shard

Tensor = torch.Tensor


@dataclass
class RankEngine(Engine):
    """What rank `rank` of `ranks` runs: networks and weights of its part; sizes and bytes are its own."""

    rank: int = 0
    ranks: int = 1

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
    return RankEngine(**values, rank=rank, ranks=ranks)


def collectives(group: dist.ProcessGroup | None = None) -> dict[str, Callable[..., Any]]:
    """The operators of `parallel_layout` over a process group; None is the default one, which may be made later."""

    def all_reduce(x: Tensor) -> Tensor:
        x = x.contiguous()
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
