"""How GPU time is measured.

The host takes 50 µs to launch a kernel from Python, longer than most kernels run. So calls are
captured into a CUDA graph and the graph is timed with events: what is left is the GPU's own time.
The calls of a graph go round several sets of buffers that together exceed the L2 cache, or a
kernel would find in cache what in training it has to fetch from memory.
"""

import functools
from collections.abc import Callable
from itertools import cycle, islice
from typing import TypeVar

import numpy as np
from numba import cuda, float32, int64, void

from numbagpt.errors import OutOfMemory
from numbagpt.gpu import stream
from numbagpt.gpu.autotune import elapsed_seconds
from numbagpt.gpu.graph import capture
from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.runtime import free_dropped_memory
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

# Several times the L2 cache of the largest GPUs (H200: 60 MB).
CACHE_BYTES = 256 << 20
# Steps of training that are not counted, and that are.
WARMUP, STEPS = 5, 15
GRAPH_SECONDS = 2e-3
REPLAYS = 11

# In the place of a time that could not be measured.
DOES_NOT_FIT = "does not fit"

Result = TypeVar("Result")


def measure(measurement: Callable[[], Result]) -> Result | None:
    """What the measurement returns, or None where memory does not suffice for it.

    What it took is free again for the next one.
    """
    try:
        result = measurement()
    except Exception as error:
        if not _ran_out_of_memory(error):
            raise
        result = None
    free_dropped_memory()
    return result


def _ran_out_of_memory(error: Exception) -> bool:
    """Of CUDA's error, the exceptions of Numba, PyTorch and ourselves share no more than the name:
    CUDA_ERROR_OUT_OF_MEMORY, CUDA out of memory."""
    words = str(error).lower().replace("_", " ")
    return isinstance(error, MemoryError | OutOfMemory) or "out of memory" in words


def interval_seconds(step: Callable[[], None], warmup: int, count: int) -> float:
    """Median GPU time from the end of one step to the end of the next, as in training: the host
    queues the next step while the GPU works on this one."""
    queue = cuda.external_stream(stream.handle())
    events = [cuda.event() for _ in range(warmup + count + 1)]
    for event in events:
        step()
        event.record(queue)
    events[-1].synchronize()
    pairs = zip(events[warmup:], events[warmup + 1 :], strict=False)
    return float(np.median([cuda.event_elapsed_time(a, b) for a, b in pairs])) * 1e-3


def buffer_sets(nbytes: int) -> int:
    """How many sets of buffers of `nbytes` a graph's calls go round, to outgrow the L2 cache."""
    return min(16, max(2, ceil_div(CACHE_BYTES, max(nbytes, 1))))


def median_seconds(make_call: Callable[[], Callable[[], None]], nbytes: int) -> float:
    """Median GPU time of one call over the replays of a graph.

    make_call   allocates one set of buffers and returns the function that works on them
    nbytes      what one set takes: decides how many sets there are
    """
    sets = buffer_sets(nbytes)
    calls = [make_call() for _ in range(sets)]
    for call in calls:
        call()
    once = elapsed_seconds(capture(lambda: [call() for call in calls]).launch) / sets
    rounds = max(sets, min(2000, int(GRAPH_SECONDS / max(once, 1e-6))))
    graph = capture(lambda: [call() for call in islice(cycle(calls), rounds)])
    times = [elapsed_seconds(graph.launch) / rounds for _ in range(REPLAYS)]
    return float(np.median(times))


@kernel(void(float32[::1], float32[::1], int64), max_threads=256)
def copy_kernel(out, inp, N):
    """out = inp, one 128-bit vector a thread: the bandwidth that other kernels are held against."""
    x = cuda.local.array(MAX_WIDTH, float32)
    i = int64(cuda.grid(1)) * width(out)
    if i < N:
        load(x, inp, i)
        store(out, i, x)


def fill(out: object, noise: object) -> object:
    """Repeat the device array `noise` over the whole of `out`; returns out."""
    flat = out.reshape(-1)
    for start in range(0, flat.size, noise.size):
        part = flat[start : start + noise.size]
        part.copy_to_device(noise[: part.size])
    return out


@functools.cache
def copy_bandwidth(nbytes: int) -> float:
    """Bytes per second of a copy that reads and writes `nbytes` in all.

    Small copies do not reach the rate of large ones: filling and draining the GPU takes some 2 µs.
    """
    N = ceil_div(nbytes, 8 * 4) * 4

    def make_call() -> Callable[[], None]:
        out, inp = (cuda.device_array(N, np.float32) for _ in range(2))
        return lambda: copy_kernel[ceil_div(N, 1024), 256](out, inp, N)

    return 8 * N / median_seconds(make_call, 8 * N)
