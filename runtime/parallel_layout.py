"""Tensor parallelism as a transformation of a network: what one rank of `ranks` runs, and which part of each weight.

A network is traced once, for one device. `shard` finds how its values divide over the ranks and rewrites it:

    recurrence, attention   by heads, with their groups or key heads, repeated where there are fewer than ranks
    MLPs and experts        by width
    embedding, output head  by tokens of the vocabulary, where their number allows it
    residual stream, norms, routers, latent projections of experts      on every rank

Projections into a divided part keep their rows of it, projections out of one their columns; what these compute are
terms of a sum over the ranks, and an `all_reduce` follows where a sum is needed that terms do not give: products with
whole weights and sums of terms come before it, so a mixture of experts with its shared expert takes one. The output
head's logits stay divided: whoever needs them whole joins them. Ranks thus hold equal residual streams, bit for bit,
and route alike.

Operator of a divided network beside those of every network: `all_reduce`(x). Its `embedding` has the attribute `start`,
the first token of the rank's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from replayssm.plugins.contract import NVFP4_BLOCK, ConvGeometry, Geometry
from replayssm.plugins.network import LAYER_STRIDE, Network, Node, StateSpec, TensorSpec, WeightSpec
from replayssm.runtime.functional_ops import scale_count

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of one dimension, ascending; their parts stand one after the other on a rank."""

GROUPED = {"mamba2": ("nheads", "ngroups"), "gdn": ("num_v_heads", "num_k_heads")}
"""Kind of recurrent state -> fields of its geometry: heads, and what a number of neighbouring heads share."""

HEAD_INPUTS = {"mamba2_window": (0, 1, 4, 5, 6), "gdn_window": (2, 3, 4, 5, 6)}
GROUP_INPUTS = {"mamba2_window": (2, 3), "gdn_window": (0, 1)}
"""Operator -> its inputs with a dimension of heads, and those with one of groups."""


@dataclass(frozen=True)
class Cut:
    """The part of a weight that a rank reads: `ranges` of dimension `dim`."""

    dim: int
    ranges: Ranges

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of `weight`, contiguous; a view where it is rows of one range. No more of a file is read."""
        parts = [weight.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, self.dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return tuple(_size(self.ranges) if index == self.dim else size for index, size in enumerate(whole))


@dataclass(frozen=True)
class Shard:
    """What a rank runs. cuts: of the network's weights, None for those that every rank reads whole. first_token: of the
    rank's part of the logits, None where every rank has all of them."""

    network: Network
    cuts: Mapping[str, Cut | None]
    first_token: int | None


def shard(network: Network, rank: int, ranks: int) -> Shard:
    """The part of rank `rank` of `ranks`. Raises ValueError, saying what does not divide, where there is none."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must lie in [0, {ranks}), got {rank}")
    try:
        return _Rewriting(network, _Division(network, rank, ranks)).result()
    except ValueError as error:
        raise ValueError(f"network {network.name!r} cannot be divided over {ranks} ranks: {error}") from error


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _joined(ranges: Iterator[tuple[int, int]]) -> Ranges:
    """Ranges with neighbours made one."""
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def _scaled(what: str, ranges: Ranges, factor: int, divisor: int) -> Ranges:
    """Ranges in units of `divisor / factor` elements."""
    for bound in (bound for pair in ranges for bound in pair):
        if bound * factor % divisor:
            sizes = [(stop - start) * factor for start, stop in ranges]
            raise ValueError(f"{what} comes in pieces of {divisor}, a rank would get {sum(sizes)} elements")
    return _joined((start * factor // divisor, stop * factor // divisor) for start, stop in ranges)


class _Division:
    """How the values of a network divide: `ranges` of dimension 1 by name; a value without is on every rank.

    Operators that mix heads say how theirs divide, and MLPs their widths; what lies between such operators and the
    projections around them follows.
    """

    def __init__(self, network: Network, rank: int, ranks: int) -> None:
        self.network, self.rank, self.ranks = network, rank, ranks
        self.ranges: dict[str, Ranges] = {}
        self.weights: dict[str, Ranges] = {}
        self.vocab: Ranges | None = None
        for node in network.nodes:
            self._begin(node)
        logits = network.outputs.get("logits")
        if logits is not None and network.spec(logits).shape[1] % ranks == 0:
            self.vocab = self.even("the vocabulary", network.spec(logits).shape[1])
            self.ranges[logits] = self.vocab
        known = -1
        while known != len(self.ranges):
            known = len(self.ranges)
            for node in network.nodes:
                self._follow(node)

    def even(self, what: str, count: int) -> Ranges:
        if count % self.ranks:
            raise ValueError(f"{what} must be a multiple of the {self.ranks} ranks, got {count}")
        share = count // self.ranks
        return ((self.rank * share, (self.rank + 1) * share),)

    def groups(self, what: str, count: int) -> Ranges:
        """Groups of the rank's heads: its share of them, or the one that all its heads belong to."""
        if count % self.ranks == 0:
            return self.even(what, count)
        if self.ranks % count:
            raise ValueError(f"{what} must divide, or be a multiple of, the {self.ranks} ranks, got {count}")
        group = self.rank * count // self.ranks
        return ((group, group + 1),)

    def set(self, name: str, ranges: Ranges) -> None:
        known = (self.weights if name in self.network.weights else self.ranges).setdefault(name, ranges)
        if known != ranges:
            raise ValueError(f"{name!r} would have to be divided as {known} and as {ranges}")

    def _begin(self, node: Node) -> None:
        shape = self.network.spec(node.outputs[0]).shape
        if node.op in HEAD_INPUTS:
            geometry = self.network.states[node.state].geometry
            heads, groups = (getattr(geometry, name) for name in GROUPED[geometry.kind])
            own = self.even(f"the heads of {node.state!r}", heads)
            for index in HEAD_INPUTS[node.op]:
                self.set(node.inputs[index], own)
            for index in GROUP_INPUTS[node.op]:
                self.set(node.inputs[index], self.groups(f"the groups of heads of {node.state!r}", groups))
            self.set(node.outputs[0], own)
        elif node.op == "attention_window":
            own = self.even(f"the query heads of {node.state!r}", shape[1])
            kv = self.groups(f"the key heads of {node.state!r}", self.network.states[node.state].geometry.num_kv_heads)
            for name, ranges in zip((*node.inputs[:3], node.outputs[0]), (own, kv, kv, own), strict=True):
                self.set(name, ranges)
        elif node.op in ("silu", "squared_relu"):
            width = self.even(f"the width of the MLP at {self._weight_behind(node.inputs[0])!r}", shape[1])
            self.set(node.outputs[0], width)

    def _weight_behind(self, name: str) -> str:
        """What errors call a value: the weight of the operator that computes it, or else its own name."""
        inputs = [node.inputs for node in self.network.nodes if name in node.outputs]
        return next((each for names in inputs for each in names if each in self.network.weights), name)

    def _follow(self, node: Node) -> None:
        """Ranges that some values of `node` give others of it."""
        op, spec = node.op, self.network.spec
        if op in ("silu", "squared_relu", "sigmoid"):
            self._equal(node.inputs[0], node.outputs[0])
        elif op == "multiply" and spec(node.inputs[0]).shape == spec(node.inputs[1]).shape:
            self._equal(*node.inputs, node.outputs[0])
        elif op in ("rope", "rms_norm") and len(spec(node.outputs[0]).shape) == 3:
            self._equal(node.inputs[0], node.outputs[0])
        elif op == "gated_rms_norm":
            self._equal(*node.inputs[:2], node.outputs[0])
            self._follow_norm(node)
        elif op == "causal_conv1d_window":
            self._equal(node.inputs[0], node.outputs[0])
            if node.outputs[0] in self.ranges:
                for name in node.inputs[1 : 3 if node.attributes["bias"] else 2]:
                    self.set(name, self.ranges[node.outputs[0]])
        elif op == "reshape":
            source, target = node.inputs[0], node.outputs[0]
            for first, second in ((source, target), (target, source)):
                if first in self.ranges:
                    units = [math.prod(spec(name).shape[2:]) for name in (first, second)]
                    self.set(second, _scaled(f"a row of {second!r}", self.ranges[first], *units))
        elif op == "split":
            self._follow_split(node)

    def _equal(self, *names: str) -> None:
        for ranges in [self.ranges[name] for name in names if name in self.ranges]:
            for name in names:
                self.set(name, ranges)

    def _follow_norm(self, node: Node) -> None:
        ranges, weight = self.ranges.get(node.outputs[0]), node.inputs[2]
        if ranges is not None:
            group = node.attributes["group_size"]
            _scaled(f"the gated norm {weight!r}", ranges, 1, group)
            if self.network.weights[weight].shape[0] != group:
                self.set(weight, ranges)

    def _follow_split(self, node: Node) -> None:
        source, targets = node.inputs[0], node.outputs
        if len(self.network.spec(source).shape) == 3:
            return self._equal(source, *targets)
        if all(name in self.ranges for name in targets):
            starts = [sum(node.attributes["sizes"][:index]) for index in range(len(targets))]
            pairs = zip(starts, targets, strict=True)
            self.set(source, _joined((start + a, start + b) for start, name in pairs for a, b in self.ranges[name]))
        return None


class _Rewriting:
    """The network of a rank, node by node. `terms` are values whose sum over the ranks is the value meant."""

    def __init__(self, network: Network, division: _Division) -> None:
        self.old, self.division = network, division
        self.new = Network(network.name, dict(network.inputs))
        self.cuts: dict[str, Cut | None] = {}
        self.terms: set[str] = set()
        self.made: dict[str, str] = {}

    def result(self) -> Shard:
        for node in self.old.nodes:
            self._declare(node)
            {"embedding": self._embedding, "linear": self._linear, "moe": self._moe}.get(node.op, self._other)(node)
        self.new.outputs = {public: self._whole(name) for public, name in self.old.outputs.items()}
        for name, spec in self.old.weights.items():
            cut = self.cuts.get(name)
            self.new.weights[name] = spec if cut is None else WeightSpec(spec.dtype, cut.shape(spec.shape))
            self.cuts.setdefault(name, None)
        self.new.validate()
        logits = self.division.ranges.get(self.old.outputs.get("logits", ""))
        return Shard(self.new, self.cuts, None if logits is None else logits[0][0])

    # What operators become

    def _embedding(self, node: Node) -> None:
        if self.division.vocab is None:
            return self._whole_weights(node)
        self._cut_projection(node.inputs[1:], node.attributes, -2, self.division.vocab)
        attributes = {**node.attributes, "start": self.division.vocab[0][0]}
        self._emit(replace(node, attributes=attributes), terms=True)
        return None

    def _linear(self, node: Node) -> None:
        x, out = node.inputs[0], node.outputs[0]
        columns, rows = self.division.ranges.get(x), self.division.ranges.get(out)
        if columns is not None and rows is not None:
            raise ValueError(f"{out!r} would be divided, but its input {x!r} is already")
        if columns is not None:
            self._cut_projection(node.inputs[1:], node.attributes, -1, columns)
            return self._emit(node, terms=True)
        if rows is not None:
            self._cut_projection(node.inputs[1:], node.attributes, -2, rows)
            return self._emit(self._with_whole_inputs(node))
        # A product with whole weights is linear, so it may stand before the sum, unless its input is rounded first.
        if x in self.terms and node.attributes["activations"] is None:
            self._mark_whole(node.inputs[1:])
            return self._emit(node, terms=True)
        return self._whole_weights(node)

    def _moe(self, node: Node) -> None:
        self._mark_divided(node.inputs[:3])
        tensors, projections = list(node.inputs[3:]), node.attributes["projections"]
        for index, attributes in enumerate(projections):
            count = 1 + scale_count(**attributes)
            names, tensors = tensors[:count], tensors[count:]
            dim = -1 if index == len(projections) - 1 else -2
            shape = self.old.weights[names[0]].shape
            width = shape[dim] * (2 if dim == -1 and attributes["format"] == "nvfp4" else 1)
            self._cut_projection(names, attributes, dim, self.division.even(f"the width of {names[0]!r}", width))
        self._emit(self._with_whole_inputs(node), terms=True)

    def _other(self, node: Node) -> None:
        ranges, out = self.division.ranges, node.outputs[0]
        if node.op == "add" and all(name in self.terms for name in node.inputs):
            return self._emit(node, terms=True)
        if node.op == "multiply" and node.inputs[0] in self.terms and out not in ranges:
            self._mark_divided(node.inputs[1:])
            return self._emit(replace(node, inputs=(node.inputs[0], self._whole(node.inputs[1]))), terms=True)
        if not all(name in ranges for name in node.outputs):
            self._mark_divided(node.inputs)
            if any(name in ranges for name in node.outputs):
                raise ValueError(f"only a part of the outputs of {out!r} would be divided")
            return self._whole_weights(node)
        for name, part in self.division.weights.items():
            if name in node.inputs:
                self._cut(name, Cut(0, part))
        self._mark_whole(name for name in node.inputs if name not in self.division.weights)
        return self._emit(self._with_own_sizes(self._with_whole_inputs(node)))

    def _with_own_sizes(self, node: Node) -> Node:
        if node.op == "reshape":
            return replace(node, attributes={"shape": list(self.new.values[node.outputs[0]].shape)})
        if node.op == "split":
            return replace(node, attributes={"sizes": [self.new.values[name].shape[-1] for name in node.outputs]})
        if node.state is not None:
            spec = self.old.states[node.state]
            layer = spec.layer + self.division.rank * LAYER_STRIDE
            self.new.states[node.state] = StateSpec(self._geometry(node, spec.geometry), layer)
        return node

    def _geometry(self, node: Node, geometry: Geometry) -> Geometry:
        ranges = self.division.ranges
        if isinstance(geometry, ConvGeometry):
            return replace(geometry, conv_dim=_size(ranges[node.outputs[0]]))
        if geometry.kind in GROUPED:
            heads, groups = GROUPED[geometry.kind]
            group_input = node.inputs[GROUP_INPUTS[node.op][0]]
            return replace(geometry, **{heads: _size(ranges[node.outputs[0]]), groups: _size(ranges[group_input])})
        return replace(geometry, num_kv_heads=_size(ranges[node.inputs[1]]))

    # Values

    def _declare(self, node: Node) -> None:
        for name in node.outputs:
            spec, ranges = self.old.values[name], self.division.ranges.get(name)
            if ranges is not None:
                spec = TensorSpec(spec.dtype, (spec.shape[0], _size(ranges), *spec.shape[2:]))
            self.new.values[name] = spec

    def _emit(self, node: Node, terms: bool = False) -> None:
        if node.state is not None and node.state not in self.new.states:
            self.new.states[node.state] = self.old.states[node.state]
        self.new.nodes.append(node)
        if terms:
            self.terms.update(node.outputs)

    def _whole(self, name: str) -> str:
        """The value that all ranks agree on: the sum of `name`'s terms."""
        if name not in self.terms:
            return name
        if name not in self.made:
            self.made[name] = f"{name}.all_reduce"
            self.new.values[self.made[name]] = self.old.values[name]
            self.new.nodes.append(Node("all_reduce", (name,), (self.made[name],)))
        # Terms are summed in place, so nothing may read them afterwards.
        self.terms.discard(name)
        return self.made[name]

    def _with_whole_inputs(self, node: Node) -> Node:
        return replace(node, inputs=tuple(self.made.get(name) or self._whole(name) for name in node.inputs))

    def _mark_divided(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.division.ranges:
                raise ValueError(f"{name!r} is divided, but an operator needs all of it")

    # Weights

    def _whole_weights(self, node: Node) -> None:
        self._mark_whole(node.inputs)
        self._emit(self._with_whole_inputs(node))

    def _mark_whole(self, names: Sequence[str] | Iterator[str]) -> None:
        for name in names:
            if name in self.old.weights:
                self._cut(name, None)

    def _cut(self, name: str, cut: Cut | None) -> None:
        known = self.cuts.setdefault(name, cut)
        if known != cut:
            raise ValueError(f"weight {name!r} would have to be read as {known} and as {cut}")

    def _cut_projection(self, names: Sequence[str], attributes: Mapping, dim: int, ranges: Ranges) -> None:
        """Rows (dim -2) or columns (dim -1) of a projection whose tensors are `names`: the weight, then its scales."""
        weight, *scales = names
        rank = len(self.old.weights[weight].shape)
        packed = attributes["format"] == "nvfp4" and dim == -1
        if packed:
            blocks = _scaled(f"a row of the NVFP4 weight {weight!r}", ranges, 1, NVFP4_BLOCK)
            self._cut(scales[0], Cut(rank + dim, blocks))
            ranges = _scaled(weight, ranges, 1, 2)
        elif attributes["format"] == "nvfp4":
            self._cut(scales[0], Cut(rank + dim, ranges))
        self._cut(weight, Cut(rank + dim, ranges))
        # The other scales are one number for a matrix.
        self._mark_whole(scales[1:] if attributes["format"] == "nvfp4" else scales)
