"""Record a training step once, replay it with one call.

Launching a Numba kernel costs the host about 50 microseconds; a kernel replayed from a CUDA graph
costs about 1.2. Capturing runs a Python function with its launches recorded instead of executed:
the recorded kernels, their arguments and their order are the graph.

What a graph holds is fixed: pointers, scalar arguments and grid sizes are those of the capture.
Whatever changes from step to step (learning rate, step count, tokens) has to be read from device
memory by a kernel, where a copy puts it: before the graph, or in it from a fixed host buffer.

Run the function once before capturing it. The first run compiles its kernels, makes its cuBLASLt
plans and allocates its scratch, and none of that can happen during a capture. Capturing refuses,
rather than silently leaves out, what a graph cannot hold: the capture mode is thread-local, so
that allocation fails, and the capturing stream is a blocking one, so that copies and launches on
the legacy default stream fail too.
"""

import weakref
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from numbagpt.gpu import stream
from numbagpt.gpu.memset import memsets_as_kernels
from numbagpt.gpu.recording import check, record


class Graph:
    """A captured function. `launch()` replays it."""

    def __init__(self, executable: driver.CUgraphExec, captured: Callable[[], Any]) -> None:
        self._executable = executable
        # The graph knows addresses only: what the function refers to must outlive it.
        self._captured = captured
        # At exit the driver may be gone before this object; the process then frees everything.
        weakref.finalize(self, driver.cuGraphExecDestroy, executable).atexit = False

    def launch(self) -> None:
        """Put a replay on the current stream; returns at once.

        Raises GraphError if the driver refuses.
        """
        check(driver.cuGraphLaunch(self._executable, stream.current().handle))


def capture(fn: Callable[[], Any]) -> Graph:
    """Record what `fn()` launches; nothing runs on the GPU until `Graph.launch()`.

    The caller has run fn() once before. Inside fn nothing may allocate, compile or synchronize, and
    copies go to and from page-locked host memory, on the current stream.

    Raises GraphError saying what could not be captured; a UserError from fn passes through.
    """
    graph = record(fn)
    try:
        graph = memsets_as_kernels(graph)
        executable = check(driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)
    result = Graph(executable, fn)
    # Uploading now keeps the first replay as fast as the others.
    check(driver.cuGraphUpload(executable, stream.current().handle))
    return result
