"""Memsets become kernels: the rewriting on a driver that is played, the result on a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from numba import cuda, float32, int64, void

from numbagpt.gpu import graph, memset, stream
from numbagpt.gpu.kernel import kernel
from numbagpt.gpu.recording import record

OK = driver.CUresult.CUDA_SUCCESS
KIND = driver.CUgraphNodeType
KERNEL = KIND.CU_GRAPH_NODE_TYPE_KERNEL
MEMCPY = KIND.CU_GRAPH_NODE_TYPE_MEMCPY
MEMSET = KIND.CU_GRAPH_NODE_TYPE_MEMSET


@pytest.mark.parametrize("N", [1, 255, 256, 1000])
def test_clear(N):
    out = np.full(N + 1, 7, np.uint32)
    memset.clear(out[:N])
    assert (out[:N] == 0).all()
    assert out[N] == 7


class PlayedDriver:
    """The driver's functions on graphs, which are lists of (kind, parameters), a node an index."""

    CUresult = driver.CUresult
    CUgraphNodeType = KIND

    def __init__(self, nodes, edges=None):
        self.nodes = nodes
        self.edges = edges or [(i, i + 1) for i in range(len(nodes) - 1)]
        self.edges_status = OK
        self.made = []
        self.copied = []  # attributes: to and from
        self.destroyed = []

    def cuGraphGetNodes(self, recorded, count=0):
        if recorded == "clear":
            return OK, ["clear"], 1
        # in an order of no meaning
        return OK, list(range(len(self.nodes)))[::-1], len(self.nodes)

    def cuGraphGetEdges(self, recorded, count=0):
        before, after = zip(*self.edges, strict=True)
        return self.edges_status, list(before), list(after), len(self.edges)

    def cuGraphNodeGetType(self, node):
        return OK, self.nodes[node][0]

    def cuGraphKernelNodeGetParams(self, node):
        return OK, "clear" if node == "clear" else self.nodes[node][1]

    cuGraphMemsetNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphKernelNodeGetParams

    def cuGraphCreate(self, flags):
        return OK, "line"

    def _add(self, kind, last, parameters):
        assert last == ([len(self.made) - 1] if self.made else [])
        self.made.append((kind, parameters))
        return OK, len(self.made) - 1

    def cuGraphAddKernelNode(self, line, last, count, parameters):
        return self._add(KERNEL, last, parameters)

    def cuGraphAddMemcpyNode(self, line, last, count, parameters, context):
        return self._add(MEMCPY, last, parameters)

    def cuGraphAddMemsetNode(self, line, last, count, parameters, context):
        return self._add(MEMSET, last, parameters)

    def cuGraphKernelNodeCopyAttributes(self, new, node):
        self.copied.append((new, node))
        return (OK,)

    def cuCtxGetCurrent(self):
        return OK, "context"

    def cuGraphDestroy(self, destroyed):
        self.destroyed.append(destroyed)


def zeros(nbytes, address=1024, value=0, height=1):
    return SimpleNamespace(dst=address, elementSize=1, width=nbytes, value=value, height=height)


@pytest.fixture
def play(monkeypatch):
    def play(*arguments):
        played = PlayedDriver(*arguments)
        monkeypatch.setattr(memset, "driver", played)
        monkeypatch.setattr(memset, "_load_clear_kernel", lambda: None)
        monkeypatch.setattr(memset, "record", lambda launch: "clear")
        monkeypatch.setattr(memset.cuda, "from_cuda_array_interface", lambda interface: None)
        return played

    return play


def test_a_memset_becomes_a_kernel(play):
    played = play([(KERNEL, "a"), (MEMSET, zeros(4)), (MEMCPY, "b"), (KERNEL, "c")])
    assert memset.memsets_as_kernels("recorded") == "line"
    assert played.made == [(KERNEL, "a"), (KERNEL, "clear"), (MEMCPY, "b"), (KERNEL, "c")]
    assert played.copied == [(0, 0), (1, "clear"), (3, 3)]
    assert played.destroyed == ["clear", "recorded"]


@pytest.mark.parametrize(
    "parameters", [zeros(4, value=1), zeros(4, height=2), zeros(6), zeros(4, address=1026)]
)
def test_a_memset_of_another_kind_stays(play, parameters):
    played = play([(MEMSET, zeros(8)), (MEMSET, parameters)])
    memset.memsets_as_kernels("recorded")
    assert played.made == [(KERNEL, "clear"), (MEMSET, parameters)]


@pytest.mark.parametrize(
    "arguments",
    [
        ([(KERNEL, "a"), (KERNEL, "b")],),
        ([(MEMSET, zeros(4)), (KIND.CU_GRAPH_NODE_TYPE_HOST, "a")],),
        ([(MEMSET, zeros(4)), (KERNEL, "a"), (KERNEL, "b")], [(0, 1), (0, 2)]),
        ([(MEMSET, zeros(4)), (KERNEL, "a"), (KERNEL, "b")], [(0, 2), (1, 2)]),
    ],
    ids=["no memset", "a node of another kind", "a fork", "a join"],
)
def test_other_graphs_stay(play, arguments):
    played = play(*arguments)
    assert memset.memsets_as_kernels("recorded") == "recorded"
    assert not played.made
    assert not played.destroyed


def test_edges_that_the_driver_does_not_list(play):
    played = play([(KERNEL, "a"), (MEMSET, zeros(4))])
    played.edges_status = driver.CUresult.CUDA_ERROR_LOSSY_QUERY
    assert memset.memsets_as_kernels("recorded") == "recorded"


# --- on the GPU ---


@kernel(void(float32[::1], float32[::1], int64), max_threads=128)
def add_kernel(out, inp, N):
    """out[i] += inp[i]. One thread per element."""
    i = cuda.grid(1)
    if i < N:
        out[i] = out[i] + inp[i]


@pytest.mark.gpu
def test_replays_clear_what_the_memsets_cleared():
    n = 1000
    ones, out, total = (cuda.to_device(np.ones(n, np.float32)) for _ in range(3))
    add_kernel[-(-n // 128), 128](total, ones, n)

    def work():
        add_kernel[-(-n // 128), 128](out, ones, n)
        pointer = out.device_ctypes_pointer.value
        for start, nbytes in ((4, 4), (40, 400), (2000, 2000)):
            driver.cuMemsetD8Async(pointer + start, 0, nbytes, stream.handle())
        driver.cuMemsetD8Async(pointer + 1001, 0, 2, stream.handle())  # not whole words
        add_kernel[-(-n // 128), 128](total, out, n)
        driver.cuMemcpyDtoDAsync(pointer + 800, pointer + 2000, 4, stream.handle())

    recorded = memset.memsets_as_kernels(record(work))
    *_, count = driver.cuGraphGetNodes(recorded)
    _, nodes, _ = driver.cuGraphGetNodes(recorded, count)
    kinds = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
    assert (kinds.count(KERNEL), kinds.count(MEMSET), kinds.count(MEMCPY)) == (5, 1, 1)
    driver.cuGraphDestroy(recorded)

    total.copy_to_device(np.ones(n, np.float32))
    expected_out, expected_total = np.ones(n, np.float32), np.ones(n, np.float32)
    captured = graph.capture(work)
    for _ in range(3):
        captured.launch()
        expected_out += 1
        expected_out[1] = expected_out[10:110] = expected_out[500:] = 0
        expected_out.view(np.uint8)[1001:1003] = 0
        expected_total += expected_out
        expected_out[200] = expected_out[500]
    np.testing.assert_array_equal(out.copy_to_host(), expected_out)
    np.testing.assert_array_equal(total.copy_to_host(), expected_total)
