"""What a Python function launches, recorded by the driver as a graph instead of being run."""

import contextlib
import gc
from collections.abc import Callable, Iterator
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


def record(fn: Callable[[], Any]) -> driver.CUgraph:
    """The graph of what `fn()` launches; the caller destroys it. See graph.capture.

    Raises GraphError saying what could not be captured; a UserError from fn passes through.
    """
    recording = stream.new_stream()
    # What is freed on the way would spoil the capture. Numba frees device memory when Python drops
    # an array; the collector drops what it finds, such as the graph of a model no longer used.
    with cuda.defer_cleanup(), _collector_off():
        check(driver.cuStreamBeginCapture(recording.handle, _MODE))
        try:
            with stream.use(recording):
                fn()
        except BaseException as error:
            _abandon(recording)
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise
            raise GraphError(f"capturing a CUDA graph failed: {error}; {_RULES}") from error
        return check(driver.cuStreamEndCapture(recording.handle))


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Inside the block, Python's garbage collector does not run by itself."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _abandon(recording: stream.Stream) -> None:
    """End a capture that failed and throw away what it recorded."""
    status, graph = driver.cuStreamEndCapture(recording.handle)
    if status == driver.CUresult.CUDA_SUCCESS:
        driver.cuGraphDestroy(graph)


def check(result: tuple) -> Any:
    """The first value of a driver call; raises GraphError unless the call succeeded."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        hint = f"; {_RULES}" if "CAPTURE" in status.name else ""
        raise GraphError(f"a CUDA graph failed with {status.name}{hint}")
    return values[0] if values else None
