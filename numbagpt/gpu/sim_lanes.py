"""One thread block under the simulator: lanes, warps, and the scheduler that takes turns.

A greenlet is a function call that can be put aside and taken up again: `g.switch(value)` runs g
until it finishes or itself switches back to its parent, and at the next `g.switch(value)` it goes
on behind the place where it stopped, with `value` as the result of the call that stopped it. All
greenlets of a program share one OS thread, so exactly one runs at any time, nothing is ever
interrupted, and a debugger steps through them as through ordinary functions.

Here each CUDA thread, a `Lane`, runs in a greenlet. It runs alone, without interruption, until it
needs its neighbours: at a barrier or at a warp operation such as a shuffle. There it leaves its
operand and switches back to the scheduler, `Block.run`, which starts or resumes another lane. The
lane that arrives last at an operation finishes it for all: the results are computed, and every
lane that took part becomes ready again. When no lane is ready and not all have returned, they wait
for each other for ever: that is a deadlock, and is reported.

What counts as arrived follows the hardware (PTX, `bar.sync` and `shfl.sync`): an operation waits
for all threads that are named in its mask and have not returned. A thread that has returned
holds nobody up, but its registers are gone, so that reading from it is an error.

A GPU promises no order among threads between two barriers. Here a warp goes on to the next barrier
before another gets its turn: from the first to the last in blocks with an even number, from the
last to the first in the others. Of two warps, each is ahead of the other in one of them, so that a
kernel which lacks a barrier is likely to give different results in the two.
"""

import bdb
import collections
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF
SIMULATED = "__simulated__"  # a global of every function that runs under the simulator


class SimulatorError(Exception):
    """A kernel did under the simulator what would fail, hang or be undefined on a GPU.

    The message names the kernel, the block and the thread. Where the kernel raised an exception of
    its own, that one is the `__cause__`.
    """


class Dim3(NamedTuple):
    """threadIdx, blockIdx, blockDim or gridDim."""

    x: int
    y: int = 1
    z: int = 1

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Here:
    """What the running thread sees of itself; becomes the kernels' `cuda` (see sim_cuda.py).

    The scheduler rewrites `threadIdx`, `laneid` and `lane` each time it resumes a lane, so that
    reading them costs a kernel one attribute look-up.
    """

    block: "Block | None" = None
    lane: "Lane | None" = None
    threadIdx: Dim3
    blockIdx: Dim3
    blockDim: Dim3
    gridDim: Dim3
    laneid: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.{name} is not something the simulator knows")


here = Here()


class Operation:
    """A warp operation that some lanes have reached: what they brought, and how it ends."""

    __slots__ = ("complete", "missing", "name", "operands")

    def __init__(self, name: str, missing: int, complete: Callable[[dict], Any]):
        self.name = name
        self.missing = missing  # a bit for each lane that it still waits for
        self.complete = complete
        self.operands: dict[int, Any] = {}  # by lane


class Warp:
    """Up to 32 consecutive lanes. `alive` has a bit for each that has not returned."""

    __slots__ = ("alive", "lanes", "operations")

    def __init__(self, lanes: list["Lane"]):
        for lane in lanes:
            lane.warp = self
        self.lanes = lanes
        self.alive = (1 << len(lanes)) - 1
        self.operations: dict[int, Operation] = {}  # by mask


class Lane:
    """One CUDA thread; `worker` is the greenlet that it runs in.

    copies, products   what the thread has started and not waited for: asynchronous copies, a list
                       for each group of which the last is still open (ptx.py), and products
                       (wgmma.py)
    """

    __slots__ = ("bit", "copies", "laneid", "number", "products", "threadIdx", "warp", "worker")

    def __init__(self, number: int, threadIdx: Dim3):
        self.number = number  # among all threads of the block
        self.laneid = number % WARP_SIZE
        self.bit = 1 << self.laneid  # in a warp's masks
        self.threadIdx = threadIdx
        self.copies: list[list] = [[]]
        self.products: list = []


class Workers:
    """The greenlets of one launch, kept from lane to lane.

    A new greenlet costs ten times what a switch does, and most kernels never switch at all. So a
    worker starts lane after lane in the same greenlet, until one of them has to wait; only then
    does the scheduler take another worker for the lanes behind it.
    """

    def __init__(self, kernel: types.FunctionType, args: tuple):
        self.kernel = kernel
        self.args = args
        self.all: list[greenlet] = []
        self.idle: list[greenlet] = []

    def run_lanes(self) -> None:
        """Has a worker start lanes until one waits or none is left to start."""
        if not self.idle:
            self.idle.append(greenlet(self._work))
            self.all.append(self.idle[-1])
        self.idle.pop().switch()

    def _work(self) -> None:
        kernel, args, worker = self.kernel, self.args, getcurrent()
        # NumPy keeps this per greenlet. A GPU overflows to inf without a word.
        with np.errstate(all="ignore"):
            while True:
                block = here.block
                for lane in block.unstarted:
                    lane.worker = worker
                    here.lane = lane
                    here.threadIdx = lane.threadIdx
                    here.laneid = lane.laneid
                    kernel(*args)
                    block.returned(lane)
                self.idle.append(worker)
                worker.parent.switch()

    def close(self) -> None:
        """Ends all greenlets, those too that an error has left waiting in the kernel."""
        for worker in self.all:
            worker.throw()


class Block:
    """One thread block, from its first thread's start to its last thread's return."""

    def __init__(self, workers: Workers, threads: list[Dim3], shared_bytes: int, backwards: bool):
        self.workers = workers
        self.scheduler = getcurrent()
        self.lanes = [Lane(number, threadIdx) for number, threadIdx in enumerate(threads)]
        self.warps = [
            Warp(self.lanes[i : i + WARP_SIZE]) for i in range(0, len(threads), WARP_SIZE)
        ]
        self.live = len(threads)  # threads that have not returned
        self.backwards = backwards
        self.unstarted = iter(self.lanes[::-1] if backwards else self.lanes)
        self.ready: list[tuple[Lane, Any]] = []  # a stack: who became ready last goes on first
        self.barrier = ("", None)  # kind and place of the barrier that threads are waiting at
        self.at_barrier: dict[int, tuple[Lane, Any]] = {}  # by thread number
        self.shared: dict = {}  # the arrays of cuda.shared.array, by call site
        self.static_bytes = 0
        self.dynamic = np.full(shared_bytes, 0xFF, np.uint8)

    def run(self) -> None:
        """Runs every thread to its end. Raises SimulatorError."""
        here.block = self
        ready = self.ready
        try:
            while ready or operator.length_hint(self.unstarted):
                if not ready:
                    self.workers.run_lanes()
                    continue
                lane, result = ready.pop()
                here.lane = lane
                here.threadIdx = lane.threadIdx
                here.laneid = lane.laneid
                lane.worker.switch(result)
            if self.live:
                self._deadlock()
        except bdb.BdbQuit:  # `quit` at a pdb prompt inside the kernel
            raise
        except Exception as error:
            text = str(error)
            if not isinstance(error, SimulatorError):
                text = f"{type(error).__name__}: {text}"
            name = self.workers.kernel.__name__
            where = f"block {here.blockIdx}, thread {here.threadIdx}{_raised_at(error)}"
            raise SimulatorError(f"{name}, {where}: {text}") from error
        finally:
            here.block = None

    def arrive_at_barrier(self, kind: str, predicate: Any, site: tuple) -> Any:
        """The running lane reaches a block-wide barrier; gives the barrier's result."""
        if not self.at_barrier:
            self.barrier = (kind, site)
        elif self.barrier != (kind, site):
            other = next(iter(self.at_barrier.values()))[0]
            raise SimulatorError(
                f"divergent barrier: {kind}() reached while thread {other.threadIdx} "
                f"waits in {self.barrier[0]}() at {_location(other)}"
            )
        self.at_barrier[here.lane.number] = (here.lane, predicate)
        if len(self.at_barrier) == self.live:
            self._release_barrier()
        return self.scheduler.switch()

    def _release_barrier(self) -> None:
        waiting, self.at_barrier = self.at_barrier, {}
        votes = sum(bool(predicate) for _, predicate in waiting.values())
        result = {
            "syncthreads": None,
            "syncthreads_count": votes,
            "syncthreads_and": int(votes == len(waiting)),
            "syncthreads_or": int(votes > 0),
        }[self.barrier[0]]
        order = sorted(waiting, reverse=not self.backwards)
        self.ready.extend((waiting[number][0], result) for number in order)

    def complete(self, warp: Warp, mask: int) -> None:
        """Finishes the operation under `mask`, for which no lane is missing any more."""
        operation = warp.operations.pop(mask)
        order = sorted(operation.operands)
        results = operation.complete({i: operation.operands[i] for i in order})
        for i in order if self.backwards else reversed(order):
            self.ready.append((warp.lanes[i], results[i]))

    def returned(self, lane: Lane) -> None:
        """The kernel has ended for this lane; what waited only for it can go on."""
        self.live -= 1
        warp = lane.warp
        warp.alive &= ~lane.bit
        for mask, operation in list(warp.operations.items()):
            operation.missing &= ~lane.bit
            if not operation.missing:
                self.complete(warp, mask)
        if self.at_barrier and len(self.at_barrier) == self.live:
            self._release_barrier()

    def _deadlock(self) -> None:
        """Raises SimulatorError that says who waits where."""
        groups: dict[str, list[Lane]] = collections.defaultdict(list)
        for lane, _ in self.at_barrier.values():
            groups[f"in {self.barrier[0]}() at {_location(lane)}"].append(lane)
        for warp in self.warps:
            for mask, operation in warp.operations.items():
                for lane in (warp.lanes[i] for i in operation.operands):
                    what = f"in {operation.name} with mask {mask:#010x} at {_location(lane)}"
                    groups[what].append(lane)
        waits = [
            f"{len(lanes)} waiting {what}, the first of them {lanes[0].threadIdx}"
            for what, lanes in groups.items()
        ]
        returned = len(self.lanes) - self.live
        here.threadIdx = next(iter(groups.values()))[0].threadIdx
        raise SimulatorError(
            f"deadlock of {self.live} threads: {'; '.join(waits)}; {returned} have returned"
        )


def warp_operation(
    name: str, mask: int, operand: Any, complete: Callable[[dict[int, Any]], Any]
) -> Any:
    """What every warp-wide instruction does: wait for the lanes in `mask`, give this one's result.

    complete(operands) is called once for the warp, when all have arrived, with what each lane
    brought, keyed by lane number in rising order; it returns the results under the same keys. It
    is how a warp-wide intrinsic states its meaning, for example a tensor-core product.

    Raises SimulatorError where the lane is not in its own mask, or where lanes meet under one mask
    with different operations.
    """
    lane = here.lane
    warp = lane.warp
    mask = int(mask) & FULL_MASK
    if not mask & lane.bit:
        raise SimulatorError(
            f"{name}: mask {mask:#010x} does not name the calling lane {lane.laneid}"
        )
    operation = warp.operations.get(mask)
    if operation is None:
        operation = warp.operations[mask] = Operation(name, mask & warp.alive, complete)
    elif operation.name != name:
        other = warp.lanes[next(iter(operation.operands))]
        raise SimulatorError(
            f"{name} reached under mask {mask:#010x} while lane {other.laneid} "
            f"waits in {operation.name} at {_location(other)}"
        )
    operation.operands[lane.laneid] = operand
    operation.missing &= ~lane.bit
    if not operation.missing:
        here.block.complete(warp, mask)
    return here.block.scheduler.switch()


def _location(lane: Lane) -> str:
    """file:line of the innermost kernel or device function on a waiting lane's stack."""
    frame = lane.worker.gr_frame
    while frame.f_back is not None and SIMULATED not in frame.f_globals:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _raised_at(error: Exception) -> str:
    """The innermost line of a kernel or device function that an exception came from."""
    place = ""
    step = error.__traceback__
    while step is not None:
        if SIMULATED in step.tb_frame.f_globals:
            place = f", {step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return place
