"""One thread block under the simulator: lanes, warps, and the scheduler that takes turns.

A greenlet is a function call that can be put aside and taken up again: `g.switch(value)` runs g
until it finishes or itself switches back to its parent, and at the next `g.switch(value)` it goes
on behind the place where it stopped, with `value` as the result of the call that stopped it. All
greenlets of a program share one OS thread, so exactly one runs at any time, nothing is ever
interrupted, and a debugger steps through them as through ordinary functions.

Here each CUDA thread is such a greenlet, a `Lane`. It runs alone, without interruption, until it
needs its neighbours: at a barrier or at a warp operation such as a shuffle. There it leaves its
operand, and switches back to the scheduler (`Block.run`), which runs the next lane that is ready.
The lane that arrives last at an operation finishes it for all: the results are computed, and
every lane that took part becomes ready again, in the order of lanes. When no lane is ready and
not all have returned, they wait for each other for ever: that is a deadlock, and is reported.

What counts as arrived follows the hardware (PTX, `bar.sync` and `shfl.sync`): an operation waits
for all threads that are named in its mask and have not returned. A thread that has returned
holds nobody up, but its registers are gone, so that reading from it is an error.
"""

import bdb
import collections
import contextvars
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


here = Here()


class Operation:
    """A warp operation that some lanes have reached: what they brought, and how it ends."""

    __slots__ = ("arrived", "complete", "name", "operands")

    def __init__(self, name: str, complete: Callable[[dict], Any]):
        self.name = name
        self.complete = complete
        self.operands: dict[int, Any] = {}
        self.arrived = 0


class Warp:
    """Up to 32 consecutive lanes. `alive` has a bit for each lane that has not returned."""

    __slots__ = ("alive", "lanes", "operations")

    def __init__(self, lanes: list["Lane"]):
        self.lanes = lanes
        self.alive = (1 << len(lanes)) - 1
        self.operations: dict[int, Operation] = {}  # by mask


class Lane(greenlet):
    """One CUDA thread."""

    __slots__ = ("laneid", "threadIdx", "warp")


class Block:
    """One thread block, from its first thread's start to its last thread's return."""

    def __init__(self, kernel: types.FunctionType, args: tuple, shared_bytes: int):
        self.kernel = kernel
        self.scheduler = getcurrent()
        self.ready: collections.deque = collections.deque()
        self.barrier: tuple | None = None
        self.at_barrier: list[tuple[Lane, Any]] = []
        self.shared: dict = {}  # the arrays of cuda.shared.array, by call site
        self.static_bytes = 0
        self.dynamic = np.full(shared_bytes, 0xFF, np.uint8)

        def start(_: None) -> None:
            kernel(*args)

        # NumPy keeps np.errstate in the context, and a new greenlet would start with an empty one.
        context = contextvars.copy_context()
        lanes = []
        size = here.blockDim
        for z in range(size.z):
            for y in range(size.y):
                for x in range(size.x):
                    lane = Lane(start)
                    lane.threadIdx = Dim3(x, y, z)
                    lane.laneid = len(lanes) % WARP_SIZE
                    lane.gr_context = context
                    lanes.append(lane)
                    self.ready.append((lane, None))
        self.lanes = lanes
        self.live = len(lanes)
        for i in range(0, len(lanes), WARP_SIZE):
            warp = Warp(lanes[i : i + WARP_SIZE])
            for lane in warp.lanes:
                lane.warp = warp

    def run(self) -> None:
        """Runs every lane to its end. Raises SimulatorError."""
        ready = self.ready
        here.block = self
        try:
            while ready:
                lane, result = ready.popleft()
                here.lane = lane
                here.threadIdx = lane.threadIdx
                here.laneid = lane.laneid
                lane.switch(result)
                if lane.dead:
                    self._returned(lane)
            if self.live:
                raise SimulatorError(self._deadlock())
        except bdb.BdbQuit:  # `quit` at a pdb prompt inside the kernel
            raise
        except Exception as error:
            text = str(error)
            if not isinstance(error, SimulatorError):
                text = f"{type(error).__name__}: {text}"
            raise SimulatorError(f"{self._where()}: {text}") from error
        finally:
            here.block = here.lane = None
            for lane in self.lanes:
                if not lane.dead:
                    lane.throw()  # unwinds what an error left waiting

    def arrive_at_barrier(self, kind: str, predicate: Any, site: tuple) -> Any:
        """The running lane reaches a block-wide barrier; gives the barrier's result."""
        if not self.at_barrier:
            self.barrier = (kind, site)
        elif self.barrier != (kind, site):
            other = self.at_barrier[0][0]
            raise SimulatorError(
                f"divergent barrier: {kind}() reached while thread {other.threadIdx} "
                f"waits in {self.barrier[0]}() at {_location(other.gr_frame)}"
            )
        self.at_barrier.append((here.lane, predicate))
        if len(self.at_barrier) == self.live:
            self._release_barrier()
        return self.scheduler.switch()

    def _release_barrier(self) -> None:
        waiting, self.at_barrier = self.at_barrier, []
        votes = sum(bool(predicate) for _, predicate in waiting)
        result = {
            "syncthreads": None,
            "syncthreads_count": votes,
            "syncthreads_and": int(votes == len(waiting)),
            "syncthreads_or": int(votes > 0),
        }[self.barrier[0]]
        waiting.sort(key=lambda pair: pair[0].threadIdx[::-1])
        self.ready.extend((lane, result) for lane, _ in waiting)

    def complete(self, warp: Warp, mask: int) -> None:
        """Finishes the operation on `mask` if all its living lanes are there."""
        operation = warp.operations[mask]
        if mask & warp.alive & ~operation.arrived:
            return
        del warp.operations[mask]
        operands = dict(sorted(operation.operands.items()))
        results = operation.complete(operands)
        self.ready.extend((warp.lanes[i], results[i]) for i in operands)

    def _returned(self, lane: Lane) -> None:
        self.live -= 1
        warp = lane.warp
        warp.alive &= ~(1 << lane.laneid)
        for mask in [m for m in warp.operations if m >> lane.laneid & 1]:
            self.complete(warp, mask)
        if self.at_barrier and len(self.at_barrier) == self.live:
            self._release_barrier()

    def _where(self) -> str:
        return f"{self.kernel.__name__}, block {here.blockIdx}, thread {here.threadIdx}"

    def _deadlock(self) -> str:
        """Who waits where, as one sentence."""
        groups: dict[str, list[Lane]] = collections.defaultdict(list)
        for lane, _ in self.at_barrier:
            groups[f"in {self.barrier[0]}() at {_location(lane.gr_frame)}"].append(lane)
        for warp in {id(lane.warp): lane.warp for lane in self.lanes}.values():
            for mask, operation in warp.operations.items():
                for i in operation.operands:
                    place = _location(warp.lanes[i].gr_frame)
                    groups[f"in {operation.name}(mask {mask:#010x}) at {place}"].append(
                        warp.lanes[i]
                    )
        waits = [
            f"{len(lanes)} thread{'s'[: len(lanes) > 1]} from {lanes[0].threadIdx} wait {what}"
            for what, lanes in groups.items()
        ]
        returned = len(self.lanes) - self.live
        here.threadIdx = next(iter(groups.values()))[0].threadIdx
        return "deadlock: " + "; ".join([*waits, f"{returned} have returned"])


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
    if not mask >> lane.laneid & 1:
        raise SimulatorError(
            f"{name}: mask {mask:#010x} does not name the calling lane {lane.laneid}"
        )
    operation = warp.operations.get(mask)
    if operation is None:
        operation = warp.operations[mask] = Operation(name, complete)
    elif operation.name != name:
        other = warp.lanes[next(iter(operation.operands))]
        raise SimulatorError(
            f"{name} reached under mask {mask:#010x} while lane {other.laneid} "
            f"waits in {operation.name} at {_location(other.gr_frame)}"
        )
    operation.operands[lane.laneid] = operand
    operation.arrived |= 1 << lane.laneid
    if not mask & warp.alive & ~operation.arrived:
        here.block.complete(warp, mask)
    return here.block.scheduler.switch()


def _location(frame: types.FrameType | None) -> str:
    """file:line of the innermost kernel or device function on a waiting lane's stack."""
    while frame.f_back is not None and SIMULATED not in frame.f_globals:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
