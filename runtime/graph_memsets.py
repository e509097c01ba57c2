"""Memset nodes of captured graphs become kernel nodes.

Matrix products of cuBLAS zero their counters by memsets of four bytes, some forty in a verify step. Between kernels
such a node costs 8 us and now and then 40 (H200, CUDA 13.0), because it does not run where kernels run; a kernel that
writes the same bytes costs 1 us.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from replayssm.plugins import launch
from replayssm.plugins.geometry import KernelConfig

THREADS, MAX_BLOCKS = 256, 1024
CONFIG = KernelConfig("fill_words", (("THREADS", THREADS),), 0, THREADS, 0)
_REPEAT = {1: 0x01010101, 2: 0x00010001, 4: 1}
"""By what a memset's value is multiplied to fill a word of four bytes, by the value's own size."""


def replace_memsets(graph: int, device: torch.device, driver: Any = None, function: Any = None) -> int:
    """Replace the memset nodes of the captured graph (a cudaGraph_t) before it is instantiated; returns how many.

    Nodes of several rows, or of bytes that are no whole words, stay. driver, function: what speaks to CUDA and the
    kernel, for tests.
    """
    if driver is None:
        from cuda.bindings import driver
    function = launch.load_kernel(CONFIG, device).function if function is None else function
    graph = driver.CUgraph(graph)
    kinds = driver.CUgraphNodeType
    nodes = _listed(driver.cuGraphGetNodes, driver, graph)
    found = [(node, _checked(driver, driver.cuGraphNodeGetType(node))[0]) for node in nodes]
    # CUDA takes no node out of a graph that allocates memory.
    if any(kind in (kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE) for _, kind in found):
        return 0
    memsets = [node for node, kind in found if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET]
    return sum(_replace(driver, graph, node, function) for node in memsets)


def _replace(driver: Any, graph: Any, node: Any, function: Any) -> bool:
    memset = _checked(driver, driver.cuGraphMemsetNodeGetParams(node))[0]
    nbytes, place = memset.elementSize * memset.width, int(memset.dst)
    if memset.height > 1 or nbytes % 4 or place % 4 or nbytes // 4 >= 2**31:
        return False
    value = ctypes.c_int32(memset.value * _REPEAT[memset.elementSize]).value
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX = max(1, min(MAX_BLOCKS, -(-nbytes // 4 // THREADS)))
    params.blockDimX = THREADS
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.sharedMemBytes = 0
    params.kernelParams = ((value, nbytes // 4, place), (ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p))
    before = _listed(driver.cuGraphNodeGetDependencies, driver, node)
    behind = _listed(driver.cuGraphNodeGetDependentNodes, driver, node)
    kernel = _checked(driver, driver.cuGraphAddKernelNode(graph, before, len(before), params))[0]
    if behind:
        nodes = [kernel] * len(behind)
        _checked(driver, driver.cuGraphAddDependencies(graph, nodes, behind, None, len(behind)))
    _checked(driver, driver.cuGraphDestroyNode(node))
    return True


def _listed(call: Any, driver: Any, owner: Any) -> list[Any]:
    """All that a call lists which wants to know how many: the count is its last value, the list its first."""
    count = _checked(driver, call(owner))[-1]
    return list(_checked(driver, call(owner, count))[0]) if count else []


def _checked(driver: Any, result: tuple) -> list[Any]:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver refused to edit a captured graph: {code}")
    return values
