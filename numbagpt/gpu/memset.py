"""The memsets of a recorded graph, made kernels.

The driver hands a graph that is one line of kernels to the GPU as a whole, in some microseconds
whatever its length. A memset among them has to be prepared by the host at every launch, and there
are a hundred in a training step: cuBLASLt zeroes a counter ahead of most products. On an H200 with
its CPU waiting between steps, launching GPT-2 124M's forward and backward pass at B=16 takes the
host 185 µs with the memsets and 14 with kernels in their place. The GPU takes the same time, or a
little less.
"""

import functools

import numpy as np
from cuda.bindings import driver
from numba import cuda, int64, uint32, void

from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.recording import check, record

THREADS = 256
_Kind = driver.CUgraphNodeType


@kernel(void(uint32[::1], int64), max_threads=THREADS)
def clear_kernel(out, N):
    """out[i] = 0. One thread per element; writes 4 N bytes."""
    i = int64(cuda.grid(1))
    if i < N:
        out[i] = uint32(0)


def clear(out) -> None:
    """Queue setting every element of a uint32 array to zero."""
    clear_kernel[ceil_div(out.size, THREADS), THREADS](out, out.size)


def memsets_as_kernels(graph: driver.CUgraph) -> driver.CUgraph:
    """The same work with a kernel in place of each memset to zero; the caller destroys it.

    graph   as `record` made it: one stream's work, a line in which each node waits for the one
            before. It is destroyed, or given back as it is where that is not so or where there is
            no memset.

    Raises GraphError if the driver refuses.
    """
    nodes = _in_line(graph)
    kinds = [check(driver.cuGraphNodeGetType(node)) for node in nodes]
    if _Kind.CU_GRAPH_NODE_TYPE_MEMSET not in kinds or not set(kinds) <= set(_COPIERS):
        return graph
    _load_clear_kernel()
    line = check(driver.cuGraphCreate(0))
    last: list[driver.CUgraphNode] = []
    try:
        for node, kind in zip(nodes, kinds, strict=True):
            last = [_COPIERS[kind](line, last, node)]
    except BaseException:
        driver.cuGraphDestroy(line)
        raise
    driver.cuGraphDestroy(graph)
    return line


@functools.cache
def _load_clear_kernel() -> None:
    """Compile and load the kernel, which recording its launch cannot."""
    clear(cuda.device_array(1, np.uint32))


def _in_line(graph: driver.CUgraph) -> list[driver.CUgraphNode]:
    """The graph's nodes in the order of their dependencies; none if they are not one line.

    A product that cuBLASLt adds up in two kernels may let the second begin before the first has
    ended, an edge of another kind. The copy has none of these: its nodes wait for the whole of the
    one before, which is always right. Drivers that do not tell us of such edges refuse to list any.
    """
    *_, count = driver.cuGraphGetNodes(graph)
    nodes = check(driver.cuGraphGetNodes(graph, count))
    *_, count = driver.cuGraphGetEdges(graph)
    status, before, after, *_ = driver.cuGraphGetEdges(graph, count)
    if status != driver.CUresult.CUDA_SUCCESS:
        return []
    following = {int(a): b for a, b in zip(before, after, strict=True)}
    later = {int(b) for b in after}
    line = [node for node in nodes if int(node) not in later]
    if len(line) != 1 or len(following) != len(after) or len(later) != len(after):
        return []
    while int(line[-1]) in following:
        line.append(following[int(line[-1])])
    return line


def _add_kernel(line, last, node):
    parameters = check(driver.cuGraphKernelNodeGetParams(node))
    new = check(driver.cuGraphAddKernelNode(line, last, len(last), parameters))
    check(driver.cuGraphKernelNodeCopyAttributes(new, node))  # clusters, for one
    return new


def _add_copy(line, last, node):
    parameters = check(driver.cuGraphMemcpyNodeGetParams(node))
    context = check(driver.cuCtxGetCurrent())
    return check(driver.cuGraphAddMemcpyNode(line, last, len(last), parameters, context))


def _add_clear(line, last, node):
    parameters = check(driver.cuGraphMemsetNodeGetParams(node))
    address, nbytes = int(parameters.dst), parameters.width * parameters.elementSize
    if parameters.value or parameters.height != 1 or nbytes % 4 or address % 4:
        context = check(driver.cuCtxGetCurrent())
        return check(driver.cuGraphAddMemsetNode(line, last, len(last), parameters, context))
    interface = {"shape": (nbytes // 4,), "typestr": "<u4", "data": (address, False), "version": 3}
    memory = cuda.from_cuda_array_interface(interface)
    launch = record(lambda: clear(memory))
    try:
        (kernel_node,) = check(driver.cuGraphGetNodes(launch, 1))
        return _add_kernel(line, last, kernel_node)
    finally:
        driver.cuGraphDestroy(launch)


_COPIERS = {
    _Kind.CU_GRAPH_NODE_TYPE_KERNEL: _add_kernel,
    _Kind.CU_GRAPH_NODE_TYPE_MEMCPY: _add_copy,
    _Kind.CU_GRAPH_NODE_TYPE_MEMSET: _add_clear,
}
