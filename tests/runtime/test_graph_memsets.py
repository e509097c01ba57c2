"""Memset nodes of a graph become kernels that write the same bytes, between the same neighbours."""

# ruff: noqa: N802 - names of the CUDA driver
from __future__ import annotations

import shutil
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replayssm.plugins import nvrtc
from replayssm.runtime.graph_memsets import CONFIG, replace_memsets

sys.path.append(str(Path(__file__).parents[1] / "plugins" / "emulation"))
from emulate import Emulated

MEMSET, KERNEL, ALLOC, FREE = "memset", "kernel", "alloc", "free"


class Driver:
    """A graph of named nodes and edges, with the calls of cuda.bindings.driver that edit one."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUgraphNodeType = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_MEMSET=MEMSET, CU_GRAPH_NODE_TYPE_MEM_ALLOC=ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE=FREE
    )
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self, nodes, edges):
        self.nodes, self.edges, self._names = dict(nodes), set(edges), count()

    def CUgraph(self, graph):
        return graph

    @staticmethod
    def _list(values, wanted, *more):
        return (0, sorted(values)[:wanted], *more, len(values))

    def cuGraphGetNodes(self, graph, wanted=0):
        return self._list(self.nodes, wanted)

    def cuGraphNodeGetType(self, node):
        return 0, MEMSET if hasattr(self.nodes[node], "width") else self.nodes[node] or KERNEL

    def cuGraphMemsetNodeGetParams(self, node):
        return 0, self.nodes[node]

    def cuGraphNodeGetDependencies(self, node, wanted=0):
        return self._list([a for a, b in self.edges if b == node], wanted, "edge data")

    def cuGraphNodeGetDependentNodes(self, node, wanted=0):
        return self._list([b for a, b in self.edges if a == node], wanted, "edge data")

    def cuGraphAddKernelNode(self, graph, before, many, params):
        name = f"new{next(self._names)}"
        self.nodes[name] = params
        self.edges |= {(one, name) for one in before}
        assert many == len(before)
        return 0, name

    def cuGraphAddDependencies(self, graph, first, second, data, many):
        assert many == len(first) == len(second)
        self.edges |= set(zip(first, second, strict=True))
        return (0,)

    def cuGraphDestroyNode(self, node):
        del self.nodes[node]
        self.edges = {edge for edge in self.edges if node not in edge}
        return (0,)


def memset(**fields):
    return SimpleNamespace(**{"dst": 1024, "elementSize": 1, "width": 4, "height": 1, "value": 0, **fields})


def test_nodes_keep_their_neighbours():
    nodes = {
        "a": None,
        "b": None,
        "c": None,
        "d": None,
        "m": memset(),
        "n": memset(elementSize=2, width=600, value=0x8001),
    }
    driver = Driver(nodes, [("a", "m"), ("b", "m"), ("m", "c"), ("m", "d"), ("n", "d"), ("a", "b")])
    assert replace_memsets(1, torch.device("cuda"), driver, "fill") == 2
    assert sorted(driver.nodes) == ["a", "b", "c", "d", "new0", "new1"]
    edges = {("a", "new0"), ("b", "new0"), ("new0", "c"), ("new0", "d"), ("new1", "d"), ("a", "b")}
    assert driver.edges == edges
    first, second = driver.nodes["new0"], driver.nodes["new1"]
    assert (first.func, first.gridDimX, first.kernelParams[0]) == ("fill", 1, (0, 1, 1024))
    assert (second.gridDimX, second.kernelParams[0]) == (2, (0x80018001 - 2**32, 300, 1024))


@pytest.mark.parametrize("fields", [{"width": 5}, {"height": 2}, {"dst": 1026}])
def test_what_is_no_row_of_words_stays(fields):
    driver = Driver({"m": memset(**fields)}, [])
    assert replace_memsets(1, torch.device("cuda"), driver, "fill") == 0
    assert list(driver.nodes) == ["m"]


def test_a_graph_that_allocates_stays():
    driver = Driver({"m": memset(), "n": FREE}, [])
    assert replace_memsets(1, torch.device("cuda"), driver, "fill") == 0
    assert list(driver.nodes) == ["m", "n"]


def test_an_error_of_the_driver_is_raised():
    driver = Driver({"m": memset()}, [])
    driver.cuGraphDestroyNode = lambda node: (1,)
    with pytest.raises(RuntimeError, match="refused to edit a captured graph: 1"):
        replace_memsets(1, torch.device("cuda"), driver, "fill")


@pytest.mark.parametrize("arch", [80, 121])
def test_the_kernel_compiles(tmp_path, arch):
    assert nvrtc.compile_kernel(CONFIG.kernel, dict(CONFIG.defines), arch, cache=tmp_path).image


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
@pytest.mark.parametrize(("words", "blocks"), [(1, 1), (1000, 2), (1024, 4)])
def test_the_kernel_writes_its_words_and_no_others(words, blocks):
    out = torch.full((words + 3,), 7, dtype=torch.int32)
    Emulated()._call(CONFIG, [-5, words, out[1:]], 1, grid_x=blocks)
    assert out.tolist() == [7, *[-5] * words, 7, 7]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_gives_the_same_without_memsets():
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    x, weight = torch.randn(1280, 3136, device=device).bfloat16(), torch.randn(12544, 3136, device=device).bfloat16()
    counters = torch.ones(300, dtype=torch.int32, device=device)

    def body():
        counters.zero_()
        return x @ weight.t()

    expected = body()
    counters.fill_(3)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = body()
    assert replace_memsets(graph.raw_cuda_graph(), device) >= 1, "zero_ is a memset"
    graph.instantiate()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
        assert not counters.any()
        counters.fill_(3)
