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
from numba import cuda

from numbagpt.errors import UserError
from numbagpt.gpu import stream

_MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_RULES = (
    "run the step once before capturing it, and inside it do not allocate, compile, synchronize "
    "or copy to or from host memory that is not page-locked"
)


class GraphError(RuntimeError):
    """A step could not be captured or replayed."""


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
        _check(driver.cuGraphLaunch(self._executable, stream.current().handle))


def capture(fn: Callable[[], Any]) -> Graph:
    """Record what `fn()` launches; nothing runs on the GPU until `Graph.launch()`.

    The caller has run fn() once before. Inside fn nothing may allocate, compile or synchronize, and
    copies go to and from page-locked host memory, on the current stream.

    Raises GraphError saying what could not be captured; a UserError from fn passes through.
    """
    recording = stream.new_stream()
    # Numba frees device memory when Python drops an array; a free would spoil the capture.
    with cuda.defer_cleanup():
        _check(driver.cuStreamBeginCapture(recording.handle, _MODE))
        try:
            with stream.use(recording):
                fn()
        except BaseException as error:
            _abandon(recording)
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise
            raise GraphError(f"capturing a CUDA graph failed: {error}; {_RULES}") from error
        graph = _check(driver.cuStreamEndCapture(recording.handle))
    try:
        executable = _check(driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)
    result = Graph(executable, fn)
    # Uploading now keeps the first replay as fast as the others.
    _check(driver.cuGraphUpload(executable, stream.current().handle))
    return result


def _abandon(recording: stream.Stream) -> None:
    """End a capture that failed and throw away what it recorded."""
    status, graph = driver.cuStreamEndCapture(recording.handle)
    if status == driver.CUresult.CUDA_SUCCESS:
        driver.cuGraphDestroy(graph)


def _check(result: tuple) -> Any:
    """The value of a driver call; raises GraphError unless the call succeeded."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        hint = f"; {_RULES}" if "CAPTURE" in status.name else ""
        raise GraphError(f"a CUDA graph failed with {status.name}{hint}")
    return values[0] if values else None
