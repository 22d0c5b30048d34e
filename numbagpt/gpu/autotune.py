"""Which algorithm of cuBLASLt's is the fastest for a product: timed once, then remembered.

cuBLASLt orders the algorithms that it proposes by a guess. The best of the first eight is often
several percent faster than the first, which is worth a second or two of a first start.

An algorithm's order of additions decides the last bits of its results. Two that are equally fast
may win in turn, so a choice is made once and kept in a file: later runs read it, time nothing and
compute the same bits. To time again, delete the file.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from cuda.bindings import driver
from numba import cuda

from numbagpt.gpu import graph, stream
from numbagpt.gpu.blas_problem import BlasError
from numbagpt.gpu.recording import GraphError

if TYPE_CHECKING:
    from numbagpt.gpu.cublaslt import Plan

CANDIDATES = 8  # algorithms of a product that are timed
_SAMPLE_SECONDS = 2e-4  # what one sample takes at least: as many repeats as fill that,
_MAX_REPEATS = 16  # but no more than this
_ROUNDS = 5
_TOTAL_SECONDS = 2e-2  # no further round once the samples add up to this
_STILL_RACING = 1.1  # times the best median: what is slower after a round is out


def choose(
    plan: "Plan", candidates: list[np.ndarray], out: int, a: int, b: int, extra: int
) -> tuple[np.ndarray, bool]:
    """The fastest of a plan's algorithms, and whether timing said so or there was no room for it.

    out, a, b, extra   addresses of the arrays of the plan's first call, extra being add or
                       gelu_aux; out may be overwritten with the product
    Raises BlasError if none of them works; GraphError while a graph is being captured, when
    nothing runs.
    """
    if _capturing():
        raise GraphError(f"the algorithm of {plan.problem} is not chosen yet")
    # Where out is read too, repeats would spoil it.
    if plan.problem.accumulates:
        memory = _scratch(plan.problem.out_bytes)
    else:
        memory = contextlib.nullcontext(out)
    usable = candidates
    try:
        with memory as target:
            c = extra if plan.problem.adds else target
            usable, runs = _that_run(plan, candidates, target, a, b, c)
            return usable[fastest(runs)], True
    except (MemoryError, GraphError) as error:
        warnings.warn(f"not timed: {plan.problem}: {error}", RuntimeWarning, stacklevel=2)
        return usable[0], False


def _that_run(
    plan: "Plan", candidates: list[np.ndarray], out: int, a: int, b: int, c: int
) -> tuple[list[np.ndarray], list[Callable[[], None]]]:
    """The algorithms that cuBLASLt does not refuse when it comes to it, and a launch of each."""
    usable, runs, errors = [], [], []
    for algorithm in candidates:
        run = partial(plan.run, algorithm, out, a, b, c)
        try:
            run()  # loads the algorithm's code, which a capture cannot
        except BlasError as error:
            errors.append(error)
        else:
            usable.append(algorithm)
            runs.append(run)
    if not runs:
        raise errors[0]
    return usable, runs


def fastest(launches: list[Callable[[], None]]) -> int:
    """Index of the launch whose work takes the GPU the least time; the first of equals.

    launches   functions that queue the alternatives on the current stream; each has run before

    Each alternative is captured into a graph, because queueing it from Python takes longer than a
    small product takes to run. The alternatives take turns, so that a change of the GPU's clock
    meets them all; after each round the slow ones drop out.
    Raises GraphError if one cannot be captured, for lack of memory say.
    """
    once = elapsed_seconds(launches[0])
    repeats = min(_MAX_REPEATS, max(1, int(_SAMPLE_SECONDS / once)))
    graphs = [graph.capture(partial(_repeat, launch, repeats)) for launch in launches]
    samples: list[list[float]] = [[] for _ in launches]
    racing = list(range(len(launches)))
    for _ in range(_ROUNDS):
        for i in racing:
            samples[i].append(elapsed_seconds(graphs[i].launch))
        best = min(median(samples[i]) for i in racing)
        racing = [i for i in racing if median(samples[i]) <= _STILL_RACING * best]
        if len(racing) == 1 or sum(map(sum, samples)) > _TOTAL_SECONDS:
            break
    return min(racing, key=lambda i: median(samples[i]))


def _repeat(launch: Callable[[], None], times: int) -> None:
    for _ in range(times):
        launch()


def elapsed_seconds(enqueue: Callable[[], None]) -> float:
    """GPU time of the work that `enqueue` queues on the current stream, between two events."""
    start, stop = cuda.event(), cuda.event()
    queue = cuda.external_stream(stream.handle())
    start.record(queue)
    enqueue()
    stop.record(queue)
    stop.synchronize()
    return cuda.event_elapsed_time(start, stop) * 1e-3


@contextlib.contextmanager
def _scratch(nbytes: int) -> Iterator[int]:
    """Device memory for the time of the block; yields its address, a multiple of 256.

    Raises MemoryError if there is not so much.
    """
    # Not an array of Numba's, which would be given back some time later.
    status, pointer = driver.cuMemAlloc(nbytes)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise MemoryError(f"{nbytes} bytes of device memory: {status.name}")
    try:
        yield int(pointer)
    finally:
        driver.cuMemFree(pointer)  # waits for what still uses it


def _capturing() -> bool:
    """Whether what is queued now goes into a graph instead of running."""
    _, status = driver.cuStreamIsCapturing(stream.current().handle)
    return status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
