"""The names a kernel uses, under the simulator: `cuda`, `math`, and casts such as float32(x).

Integers follow Numba's typing of them: signed and short unsigned integers are Python ints, since
Numba computes in 64 bits whatever the width of the operands (int32 * int32 is int64), and a cast
wraps or truncates as in C. Floats are NumPy scalars: float32 stays float32.
"""

import functools
import math as host_math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from numbagpt.gpu.sim_arrays import REGISTERS, CheckedArray, checked
from numbagpt.gpu.sim_lanes import FULL_MASK, WARP_SIZE, SimulatorError, here, warp_operation

STATIC_SHARED_LIMIT = 48 * 1024


# ---- casts ---------------------------------------------------------------------------------------


class IntegerCast:
    """int32(x), uint16(x) …: truncates floats towards zero and keeps the low bits, as C does."""

    __slots__ = ("dtype", "low_bits", "top")

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self.low_bits = (1 << 8 * dtype.itemsize) - 1
        self.top = self.low_bits >> (dtype.kind == "i")

    def __call__(self, x: Any) -> int:
        x = int(x) & self.low_bits
        return x if x <= self.top else x - self.low_bits - 1


class Uint64Cast(IntegerCast):
    """uint64(x): a NumPy scalar, whose arithmetic wraps at 64 bits as the hardware's does."""

    __slots__ = ()

    def __call__(self, x: Any) -> np.uint64:
        return np.uint64(super().__call__(x))


class BooleanCast:
    """boolean(x)."""

    dtype = np.dtype(bool)

    def __call__(self, x: Any) -> bool:
        return bool(x)


@functools.cache
def cast(name: str) -> Callable[[Any], Any]:
    """The cast to the number type that Numba calls `name`; serves as dtype=… in a kernel too."""
    dtype = np.dtype(name)
    if dtype.kind == "f":
        return dtype.type
    if dtype.kind == "b":
        return BooleanCast()
    return Uint64Cast(dtype) if dtype == np.uint64 else IntegerCast(dtype)


# ---- arrays --------------------------------------------------------------------------------------


def _dtype(dtype: Any) -> np.dtype:
    return dtype.dtype if isinstance(dtype, IntegerCast | BooleanCast) else np.dtype(dtype)


@functools.cache
def _poison(shape: int | tuple, dtype: Any) -> np.ndarray:
    """Memory that nobody has written: NaN, a huge signed integer, or all ones."""
    array = np.empty(shape, _dtype(dtype))
    array.reshape(-1).view(np.uint8)[:] = 0x7F if array.dtype.kind == "i" else 0xFF
    return array


def _shared_array(shape: int | tuple, dtype: Any, alignment: int | None = None) -> CheckedArray:
    """cuda.shared.array: one array a block for each place in the source that asks for one.

    Shape 0 is the dynamic shared memory of the launch: every such array starts at its first byte.
    Without `alignment` an array may start at any multiple of its elements' size.
    """
    block = here.block
    alignment = alignment or _dtype(dtype).itemsize
    if shape == 0:
        dtype = _dtype(dtype)
        whole = block.dynamic.size // dtype.itemsize
        memory = block.dynamic[: whole * dtype.itemsize].view(dtype)
        return checked(memory, "dynamic shared array", alignment=alignment)
    frame = sys._getframe(1)
    site = (frame.f_code, frame.f_lasti)
    array = block.shared.get(site)
    if array is None:
        memory = _poison(shape, dtype).copy()
        array = block.shared[site] = checked(memory, "shared array", alignment=alignment)
        block.static_bytes += array.array.nbytes
        if block.static_bytes > STATIC_SHARED_LIMIT:
            raise SimulatorError(
                f"{block.static_bytes} bytes of static shared memory; a block has at most "
                f"{STATIC_SHARED_LIMIT}, more only as dynamic shared memory"
            )
    elif array.shape != (shape if isinstance(shape, tuple) else (shape,)):
        raise SimulatorError(
            f"shared array asked for with shape {shape} by this thread and {array.shape} by "
            "another; a shape must be a constant"
        )
    return array


def _local_array(shape: int | tuple, dtype: Any, alignment: int | None = None) -> CheckedArray:
    return checked(_poison(shape, dtype).copy(), "local array", alignment=REGISTERS)


# ---- barriers and warp operations ----------------------------------------------------------------


def _barrier(kind: str) -> Callable[..., Any]:
    def barrier(predicate: Any = None) -> Any:
        frame = sys._getframe(1)
        return here.block.arrive_at_barrier(kind, predicate, (frame.f_code, frame.f_lasti))

    barrier.__name__ = kind
    return barrier


def _shuffle(name: str, source: Callable[[int, int], int]) -> Callable[[int, Any, int], Any]:
    """A shuffle in which lane i, given the operand b, reads the value of lane source(i, b)."""

    def complete(operands: dict[int, tuple[Any, int]]) -> dict[int, Any]:
        results = {}
        for i, (own, b) in operands.items():
            j = source(i, b)
            if not 0 <= j < WARP_SIZE:
                results[i] = own
            elif j in operands:
                results[i] = operands[j][0]
            else:
                raise SimulatorError(
                    f"{name}: lane {i} reads lane {j}, which has returned or is not in the mask"
                )
        return results

    def shuffle(mask: int, value: Any, b: int) -> Any:
        return warp_operation(name, mask, (value, b), complete)

    shuffle.__name__ = name
    return shuffle


def _vote(name: str, count: Callable[[dict[int, bool]], Any]) -> Callable[[int, Any], Any]:
    def complete(operands: dict[int, bool]) -> dict[int, Any]:
        return dict.fromkeys(operands, count(operands))

    def vote(mask: int, predicate: Any) -> Any:
        return warp_operation(name, mask, bool(predicate), complete)

    vote.__name__ = name
    return vote


def _syncwarp(mask: int = FULL_MASK) -> None:
    warp_operation("syncwarp", mask, None, lambda operands: operands)


# ---- indices, bits, atomics ----------------------------------------------------------------------


def _grid(ndim: int) -> int | tuple[int, ...]:
    block, size, thread = here.blockIdx, here.blockDim, here.threadIdx
    x = block.x * size.x + thread.x
    if ndim == 1:
        return x
    return (x, block.y * size.y + thread.y, block.z * size.z + thread.z)[:ndim]


def _gridsize(ndim: int) -> int | tuple[int, ...]:
    grid, block = here.gridDim, here.blockDim
    size = (grid.x * block.x, grid.y * block.y, grid.z * block.z)
    return size[0] if ndim == 1 else size[:ndim]


def _bits32(x: int) -> int:
    if not -(1 << 31) <= x < 1 << 32:
        raise SimulatorError(f"{x} does not fit into 32 bits, where this bit operation works")
    return int(x) & FULL_MASK


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a*b + c of float32 with one rounding.

    The product is exact in float64, the sum is not: rounded to float64 it may become a tie between
    two float32, and the second rounding then err. So a sum that lost anything is rounded to the
    neighbour whose last bit is odd, which is no tie and lies on the same side of any as the exact
    sum does (Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    product, c = float(a) * float(b), float(c)
    total = product + c
    if host_math.isfinite(total):
        summand = total - product
        lost = (product - (total - summand)) + (c - summand)
        if lost != 0 and not np.float64(total).view(np.int64) & 1:
            total = host_math.nextafter(total, host_math.copysign(host_math.inf, lost))
    return np.float32(total)


def _atomic(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def atomic(array: CheckedArray, index: Any, value: Any) -> Any:
        old = array[index]
        array[index] = combine(old, value)
        return old

    return atomic


def _load(array: CheckedArray, index: Any) -> Any:
    return array[index]


def _store(array: CheckedArray, index: Any, value: Any) -> None:
    array[index] = value


def _nothing() -> None:
    """A fence: lanes take turns, so memory is always in order."""


cuda = here
vars(cuda).update(
    warpsize=WARP_SIZE,
    grid=_grid,
    gridsize=_gridsize,
    shared=types.SimpleNamespace(array=_shared_array),
    local=types.SimpleNamespace(array=_local_array),
    syncthreads=_barrier("syncthreads"),
    syncthreads_count=_barrier("syncthreads_count"),
    syncthreads_and=_barrier("syncthreads_and"),
    syncthreads_or=_barrier("syncthreads_or"),
    syncwarp=_syncwarp,
    shfl_sync=_shuffle("shfl_sync", lambda i, b: b % WARP_SIZE),
    shfl_xor_sync=_shuffle("shfl_xor_sync", lambda i, b: i ^ b),
    shfl_up_sync=_shuffle("shfl_up_sync", lambda i, b: i - b),
    shfl_down_sync=_shuffle("shfl_down_sync", lambda i, b: i + b),
    ballot_sync=_vote("ballot_sync", lambda votes: sum(v << i for i, v in votes.items())),
    any_sync=_vote("any_sync", lambda votes: any(votes.values())),
    all_sync=_vote("all_sync", lambda votes: all(votes.values())),
    eq_sync=_vote("eq_sync", lambda votes: len(set(votes.values())) == 1),
    fma=_fma,
    selp=lambda condition, a, b: a if condition else b,
    popc=lambda x: _bits32(x).bit_count(),
    clz=lambda x: 32 - _bits32(x).bit_length(),
    ffs=lambda x: (_bits32(x) & -_bits32(x)).bit_length(),
    brev=lambda x: int(f"{_bits32(x):032b}"[::-1], 2),
    atomic=types.SimpleNamespace(
        add=_atomic(lambda a, b: a + b),
        sub=_atomic(lambda a, b: a - b),
        max=_atomic(max),
        min=_atomic(min),
    ),
    threadfence=_nothing,
    threadfence_block=_nothing,
    threadfence_system=_nothing,
    **dict.fromkeys(("ldca", "ldcg", "ldcs", "ldcv", "ldlu"), _load),
    **dict.fromkeys(("stcg", "stcs", "stwb", "stwt"), _store),
)


# ---- math ----------------------------------------------------------------------------------------


def _erf(x: Any) -> Any:
    return np.result_type(x).type(host_math.erf(x))


_SAME_IN_NUMPY = (
    "sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh fabs hypot copysign "
    "fmod ldexp isnan isinf isfinite pi e inf nan"
)
math = types.SimpleNamespace(
    **{name: getattr(np, name) for name in _SAME_IN_NUMPY.split()},
    pow=np.power,
    asin=np.arcsin,
    acos=np.arccos,
    atan=np.arctan,
    atan2=np.arctan2,
    asinh=np.arcsinh,
    acosh=np.arccosh,
    atanh=np.arctanh,
    erf=_erf,
    floor=host_math.floor,
    ceil=host_math.ceil,
    trunc=host_math.trunc,
)
"""`math` that keeps the type of its argument: exp of a float32 is a float32, as on the GPU."""
