"""The stream that every kernel, matmul and graph goes to.

A stream is a queue: what is put in runs on the GPU in that order. numbagpt uses one, made at the
first launch. It is not CUDA's legacy default stream, which cannot be captured into a graph, but
it is a *blocking* stream: the legacy stream, where Numba's `to_device`, `copy_to_device` and
`copy_to_host` go when they are given no stream, waits for all work queued here, and work queued
here later waits for the copy. So plain Numba copies are always in order with the kernels. Pass
`stream=current()` to a copy only to make it asynchronous.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator

from cuda.core import Device, Stream, StreamOptions
from numba import cuda

_in_use: Stream | None = None


def new_stream() -> Stream:
    """A new stream of the current GPU, in order with the legacy default stream."""
    cuda.current_context()  # Numba's context first: cuda.core then uses the same one
    device = Device()
    device.set_current()
    return device.create_stream(options=StreamOptions(nonblocking=False))


_shared = functools.cache(new_stream)
_thread = threading.local()


def _default() -> Stream:
    if not hasattr(_thread, "context"):
        # The driver may refuse calls from a thread that does not have the GPU's context (580 does
        # not). The thread that made the model has it from Numba.
        _thread.context = cuda.current_context()
    return _shared()


def current() -> Stream:
    """The stream to launch to: `kernel[grid, block, current()](...)`."""
    return _default() if _in_use is None else _in_use


def handle() -> int:
    """The current stream as the integer (a CUstream) that cuBLAS takes."""
    return int(current().handle)


@contextlib.contextmanager
def use(stream: Stream) -> Iterator[None]:
    """Inside the block, everything goes to `stream`. Does not nest."""
    global _in_use
    if _in_use is not None:
        raise RuntimeError("another stream is in use already: a graph is being captured")
    _in_use = stream
    try:
        yield
    finally:
        _in_use = None


def synchronize() -> None:
    """Wait until everything queued on the current stream has run."""
    current().sync()
