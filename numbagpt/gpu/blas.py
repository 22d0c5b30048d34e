"""Matrix products of row-major arrays: cuBLASLt for device arrays, NumPy for NumPy arrays.

out = alpha * op(a) @ op(b) + beta * out + bias + add

and, in the same pass over out, the GELU of that: see `matmul`.
"""

from typing import Any

import numpy as np

from numbagpt.errors import UserError
from numbagpt.gpu import blas_numpy
from numbagpt.gpu.blas_problem import VECTOR_BYTES, BlasError, Problem
from numbagpt.gpu.cublaslt import plan_for
from numbagpt.modes import PRECISIONS

__all__ = ["BlasError", "matmul", "precision", "set_autotune", "set_precision"]

# By NumPy's type character; bf16 lives in uint16.
_STORAGE = {"f": "float32", "H": "bfloat16", "d": "float64"}
_ALLOWED = {  # storage of a and b, of out
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float64", "float64"),
}
_AUX_COLUMNS = 8  # of the columns of gelu_aux: cuBLASLt takes multiples of that

_precision = "fp32"
_autotune = True


def set_precision(name: str) -> None:
    """How float32 device arrays are multiplied from now on; sums are float32 in every case.

    fp32  in float32 (23 bits of mantissa), without tensor cores
    tf32  inputs rounded to TF32 (10 bits), on tensor cores
    bf16  inputs rounded to bfloat16 (7 bits), on tensor cores

    Arrays stored as bfloat16 are always multiplied as bfloat16, NumPy arrays in their own type.

    Raises UserError for another name.
    """
    global _precision
    if name not in PRECISIONS:
        raise UserError(f"precision is {name!r}; expected one of {', '.join(PRECISIONS)}")
    _precision = name


def precision() -> str:
    """The name last given to set_precision; fp32 at the start."""
    return _precision


def set_autotune(on: bool) -> None:
    """Whether products of device arrays run on the fastest algorithm (as at the start).

    Then the first use of a kind of product that this GPU has not seen before takes some
    milliseconds for timing; see numbagpt/gpu/autotune.py. Otherwise the algorithm that cuBLASLt
    puts first is taken, unmeasured, and nothing is read from or written to the disk.
    """
    global _autotune
    _autotune = on


def matmul(
    out: Any,
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    add: Any = None,
    gelu_aux: Any = None,
) -> None:
    """out (M, N) = alpha * op(a) (M, K) @ op(b) (K, N) + beta * out + bias (N,) + add (M, N).

    op(x) is x, or its transpose where the flag says so: a is (K, M) with transpose_a, b is (N, K)
    with transpose_b. All three may have a leading batch dimension, the same in each. With beta = 0
    out is not read. bias is added to every row.

    add         shaped like out, but apart from it in memory: added in float32, before the sum is
                rounded to out's type; takes neither beta nor gelu_aux
    gelu_aux    shaped like out: is given the sum above, and out the GELU of it (tanh form)

    Device arrays (C-contiguous): a and b both float32, or both uint16 holding bfloat16; out float32
    or, for bfloat16 inputs, uint16. bias, add and gelu_aux are of out's type; bias and gelu_aux
    start on a 16-byte boundary; with gelu_aux, N is a multiple of 8. The product is queued on the
    current stream. Call from one thread: plans and workspace are shared. The same call gives the
    same bits again, also in another process. The first call of its kind may run the product several
    times.
    A bfloat16 out is rounded once, as measured on an H200 and with two exceptions: with beta, the
    rest of the sum is rounded before it is added to out in memory; with bias, the sum without it
    may be, unless N is a multiple of 8 and add starts on a 16-byte boundary.
    NumPy arrays: the same types, or all float64.

    Raises ValueError or TypeError for arrays that do not go together, BlasError if cuBLASLt fails,
    UserError if CUDA cannot be used or the GPU lacks the precision.
    """
    if add is not None and (beta != 0.0 or gelu_aux is not None):
        raise ValueError("matmul: add goes with neither beta nor gelu_aux")
    shape = _shape(out, a, b, bias, add, gelu_aux, transpose_a, transpose_b)
    storage, out_storage = _storage(out, a, b, bias, add, gelu_aux)
    if add is not None and _overlap(out, add):
        raise ValueError("matmul: add overlaps out; expected arrays of their own, or beta = 1")
    if isinstance(out, np.ndarray):
        a = a.swapaxes(-1, -2) if transpose_a else a
        b = b.swapaxes(-1, -2) if transpose_b else b
        blas_numpy.matmul(out, a, b, alpha, beta, bias, add, gelu_aux)
        return
    bias_pointer = 0 if bias is None else _vector_pointer("bias", bias)
    arrays = [out, a, b]
    if add is not None:
        arrays.append(add)
    if gelu_aux is not None:
        _vector_pointer("gelu_aux", gelu_aux)
        arrays.append(gelu_aux)
        if out.shape[-1] % _AUX_COLUMNS:
            raise ValueError(
                f"matmul: out has {out.shape[-1]} columns; expected, with a GELU, a multiple of "
                f"{_AUX_COLUMNS}; use a kernel for the GELU"
            )
    pointers = [_pointer(x) for x in arrays]
    extra_pointer = pointers[3] if len(pointers) > 3 else 0
    problem = Problem(
        *shape,
        transpose_a,
        transpose_b,
        storage,
        out_storage,
        bias is not None,
        gelu_aux is not None,
        beta != 0.0,
        add is not None,
        _precision if storage == "float32" else "bf16",
        tuple(map(_alignment, pointers, arrays)),
    )
    plan_for(problem, _autotune)(*pointers[:3], bias_pointer, extra_pointer, alpha, beta)


def _shape(
    out: Any,
    a: Any,
    b: Any,
    bias: Any,
    add: Any,
    gelu_aux: Any,
    transpose_a: bool,
    transpose_b: bool,
) -> tuple[int, int, int, int]:
    """(batch, M, N, K) of a product whose arrays fit together."""
    if 2 <= out.ndim <= 3 and out.ndim == a.ndim == b.ndim:
        M, K = a.shape[-2:] if not transpose_a else a.shape[:-3:-1]
        K_of_b, N = b.shape[-2:] if not transpose_b else b.shape[:-3:-1]
        batch = out.shape[:-2]
        if (
            K == K_of_b
            and out.shape == (*batch, M, N)
            and a.shape[:-2] == batch == b.shape[:-2]
            and (bias is None or bias.shape == (N,))
            and (add is None or add.shape == out.shape)
            and (gelu_aux is None or gelu_aux.shape == out.shape)
        ):
            return (batch[0] if batch else 1), M, N, K
    raise ValueError(
        f"matmul: out {out.shape}, a{'^T' * transpose_a} stored as {a.shape}, "
        f"b{'^T' * transpose_b} stored as {b.shape}, bias {bias if bias is None else bias.shape}"
        f"{'' if add is None else f', add {add.shape}'}"
        f"{'' if gelu_aux is None else f', gelu_aux {gelu_aux.shape}'}; "
        "expected out (M, N), op(a) (M, K), op(b) (K, N), bias (N,), add and gelu_aux like out, "
        "with the same leading batch dimension on out, a and b or on none"
    )


def _storage(out: Any, a: Any, b: Any, bias: Any, add: Any, gelu_aux: Any) -> tuple[str, str]:
    """Storage of the inputs and of the output of a product."""
    fits = _fits_host if isinstance(out, np.ndarray) else _fits_device
    arrays = {"out": out, "a": a, "b": b, "bias": bias, "add": add, "gelu_aux": gelu_aux}
    found = {}
    for name, x in arrays.items():
        if x is None:
            continue
        if not fits(x):
            where = "as out is a NumPy array, one of float32, float64 or uint16 (bfloat16)"
            if fits is _fits_device:
                where = (
                    "as out is on the GPU, a C-contiguous device array of float32 or uint16 "
                    "(bfloat16)"
                )
            raise TypeError(
                f"matmul: {name} is a {type(x).__name__} of {x.dtype}; expected, {where}"
            )
        found[name] = _STORAGE[x.dtype.char]
    kind = found["a"], found["out"]
    like_out = {found.get(name, kind[1]) for name in ("bias", "add", "gelu_aux")}
    if found["a"] != found["b"] or kind not in _ALLOWED or like_out != {kind[1]}:
        raise TypeError(
            f"matmul: types are {found}; expected a and b alike, bias, add and gelu_aux like out "
            "(a bfloat16 out takes a bfloat16 bias), and a bfloat16 out only of bfloat16 inputs"
        )
    return kind


def _fits_host(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.char in _STORAGE


def _fits_device(array: Any) -> bool:
    return (
        not isinstance(array, np.ndarray)
        and array.dtype.char in _STORAGE
        and array.dtype.itemsize < 8
        and array.is_c_contiguous()
    )


def _overlap(x: Any, y: Any) -> bool:
    """Whether arrays of one size and one place share memory; a GPU's are contiguous."""
    if isinstance(x, np.ndarray):
        return np.may_share_memory(x, y)
    return abs(_pointer(x) - _pointer(y)) < x.size * x.dtype.itemsize


def _vector_pointer(name: str, array: Any) -> int:
    pointer = _pointer(array)
    if pointer % VECTOR_BYTES:
        raise ValueError(
            f"matmul: {name} starts at {pointer:#x}; expected a multiple of {VECTOR_BYTES} "
            "bytes; align the buffer it is cut from"
        )
    return pointer


def _pointer(array: Any) -> int:
    return array.device_ctypes_pointer.value or 0


def _alignment(pointer: int, array: Any) -> int:
    """Largest power of two, at most 256, that divides the address of every matrix of the batch."""
    stride = array.shape[-1] * array.shape[-2] * array.dtype.itemsize if array.ndim > 2 else 0
    bits = pointer | stride | 256
    return bits & -bits
