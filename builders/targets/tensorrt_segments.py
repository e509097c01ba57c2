"""Cuts a network at its stateful operators.

TensorRT-RTX has no plugin layers, so our kernels run between plans. The pieces between two stateful operators become
*segments*; the values that cross a cut are a segment's inputs and outputs. A segment that only splits and reshapes
needs no plan: the kernels take strided views.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.plugins.network import Network

VIEW_OPERATORS = ("split", "reshape")


@dataclass(frozen=True)
class Segment:
    """Nodes [start, stop) of a network.

    inputs: values that the nodes read and something before them defined, weights not among them.
    outputs: values that they define and that something after them, or the caller, reads.
    is_view: nothing but splits and reshapes.
    """

    start: int
    stop: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_view: bool


def cut(network: Network) -> list[Segment | int]:
    """Segments and, between them, the indices of stateful nodes, in the order in which they run."""
    steps: list[Segment | int] = []
    start = 0
    for index, node in enumerate(network.nodes):
        if node.state is not None:
            if start < index:
                steps.append(_segment(network, start, index))
            steps.append(index)
            start = index + 1
    if start < len(network.nodes):
        steps.append(_segment(network, start, len(network.nodes)))
    return steps


def _segment(network: Network, start: int, stop: int) -> Segment:
    nodes = network.nodes[start:stop]
    defined = {name: None for node in nodes for name in node.outputs}
    read = {name: None for node in nodes for name in node.inputs}
    wanted = {name for node in network.nodes[stop:] for name in node.inputs} | set(network.outputs.values())
    return Segment(
        start,
        stop,
        tuple(name for name in read if name not in defined and name not in network.weights),
        tuple(name for name in defined if name in wanted),
        all(node.op in VIEW_OPERATORS for node in nodes),
    )
