"""Runs kernels without a GPU: every block in turn, every thread of a block as a greenlet.

    run_kernel(kernel, grid=4, block=(32, 8), shared_bytes=0, args=(out, inp, np.int64(n)))

The kernel is the plain Python function under the decorator, so a kernel can be stepped through:
put `breakpoint()` into it, or

    if cuda.grid(1) == 37: breakpoint()

and pdb stops in that thread, with its locals. `next` over a barrier or a shuffle lets the other
threads of the block catch up, and comes back to the same thread.

How it works, in the order of the files:

* sim_arrays.py   arrays that check every index;
* sim_lanes.py    threads as greenlets, and the scheduler: read its first page for what a greenlet
                  is and for when a barrier or a warp operation is complete;
* sim_cuda.py     `cuda`, `math` and the number types as kernels know them, in Python;
* this file       gives a kernel those names in place of Numba's, and runs the grid.

A kernel finds `cuda`, `float32` or a device function among the globals of its module. To run it
here, while the compiled path stays as it is, `rebind` makes a second function from the same code
object with other globals: Numba's names replaced by ours, device functions rebound likewise.
Globals are taken as they are at the first run of a kernel, as Numba takes them when it compiles.

What it diagnoses, as SimulatorError: indices outside an array, misaligned vectors, barriers that
threads reach at different places, warp operations that do not match or whose mask does not name
the caller, shuffles that read from a lane which is not there, deadlocks, and any exception raised
inside a kernel. Shared and local memory that nobody has written reads as NaN, and so does the
target of an asynchronous copy or product before it is waited for. What it cannot show: races
between threads that its order of execution happens to serialise, the rounding of fused or
approximate instructions, and speed.
"""

import math
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numba.cuda
import numpy as np

from numbagpt.gpu import sim_cuda
from numbagpt.gpu.sim_arrays import (
    CheckedArray,
    checked_argument,
    checked_slice,
    reads_as_int,
)
from numbagpt.gpu.sim_lanes import (
    SIMULATED,
    Block,
    Dim3,
    SimulatorError,
    Workers,
    here,
    warp_operation,
)

__all__ = [
    "CheckedArray",
    "SimulatorError",
    "checked_slice",
    "register_meaning",
    "run_kernel",
    "warp_operation",
]

# What every GPU takes: threads of a block, and in each dimension threads and blocks.
MAX_THREADS = 1024
MAX_BLOCK = Dim3(1024, 1024, 64)
MAX_GRID = Dim3(2**31 - 1, 65535, 65535)
_meanings: dict[int, tuple[Any, Callable]] = {}
_rebound: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_one_launch = threading.RLock()


def register_meaning(obj: Any, function: Callable) -> None:
    """Kernels under the simulator call `function` where their source names `obj`, an intrinsic.

    The function runs as it is: it sees CheckedArray arguments, Python ints and NumPy floats, and
    may use checked_slice for vector access and warp_operation for what a warp does together.
    """
    _meanings[id(obj)] = (obj, function)  # keeps obj alive, so that its id stays its own


def rebind(function: types.FunctionType) -> types.FunctionType:
    """The same code with the simulator's names in place of Numba's; made once per function."""
    found = _rebound.get(function)
    if found is not None:
        return found
    names = dict(function.__globals__)
    names[SIMULATED] = True
    closure = tuple(types.CellType() for _ in function.__closure__ or ())
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure or None
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    _rebound[function] = copy  # before looking further: a function may name itself
    for name in _names_in(function.__code__):
        if name in names:
            names[name] = _simulated(names[name])
    for cell, original in zip(closure, function.__closure__ or (), strict=True):
        cell.cell_contents = _simulated(original.cell_contents)
    return copy


def run_kernel(
    function: types.FunctionType,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    shared_bytes: int,
    args: Sequence[Any],
) -> None:
    """Runs `function` for every thread of a launch; what it writes lands in the arrays given.

    function      the kernel as plain Python: `dispatcher.py_func`
    grid, block   blocks and threads per block, an int or up to three of them
    shared_bytes  size of the dynamic shared memory, which cuda.shared.array(0, …) names
    args          contiguous NumPy arrays, passed as they are, and NumPy or Python scalars

    Raises SimulatorError where the kernel does what a GPU would not survive, and where the launch
    itself is impossible.
    """
    grid, block = _dim3(grid), _dim3(block)
    if not (_within(grid, MAX_GRID) and _within(block, MAX_BLOCK)) or (
        math.prod(block) > MAX_THREADS
    ):
        raise SimulatorError(
            f"{function.__name__}: launch of {grid} blocks of {block} threads; expected 1 to "
            f"{MAX_GRID} blocks and 1 to {MAX_BLOCK} threads, {MAX_THREADS} at most in all"
        )
    arg_names = function.__code__.co_varnames
    args = tuple(
        checked_argument(value, name) if isinstance(value, np.ndarray) else _number(value)
        for value, name in zip(args, arg_names, strict=False)
    )
    threads = list(_indices(block))
    with _one_launch:
        if here.block is not None:
            raise SimulatorError(f"{function.__name__}: launched from inside a kernel")
        here.gridDim, here.blockDim = grid, block
        workers = Workers(rebind(function), args)
        try:
            for number, here.blockIdx in enumerate(_indices(grid)):
                Block(workers, threads, shared_bytes, backwards=number % 2 == 1).run()
        finally:
            workers.close()


def _indices(size: Dim3) -> Iterator[Dim3]:
    """All indices within `size` in CUDA's order: x runs fastest."""
    for z in range(size.z):
        for y in range(size.y):
            for x in range(size.x):
                yield Dim3(x, y, z)


def _within(size: Dim3, largest: Dim3) -> bool:
    """Whether there is at least one in each dimension and not more than the largest."""
    return all(1 <= n <= limit for n, limit in zip(size, largest, strict=True))


def _dim3(size: int | Sequence[int]) -> Dim3:
    return Dim3(*map(int, size)) if isinstance(size, Sequence) else Dim3(int(size))


def _number(value: Any) -> Any:
    """A constant or argument with the types of sim_arrays.py: short integers as Python ints."""
    if isinstance(value, np.generic) and reads_as_int(value.dtype):
        return value.item()
    return value


def _simulated(value: Any) -> Any:
    """What stands for `value`, a global of a kernel, under the simulator."""
    if value is numba.cuda:
        return sim_cuda.cuda
    if value is math:
        return sim_cuda.math
    if id(value) in _meanings:
        return _meanings[id(value)][1]
    if isinstance(value, numba.types.Number | numba.types.Boolean):
        return sim_cuda.cast(value.name)
    if hasattr(value, "py_func"):
        return rebind(value.py_func)
    return _number(value)


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function and the functions nested in it may look up as globals."""
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names_in, nested))
