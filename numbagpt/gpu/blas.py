"""Matrix products of row-major arrays: cuBLASLt for device arrays, NumPy for NumPy arrays.

out = alpha * op(a) @ op(b) + beta * out + bias
"""

from typing import Any

import numpy as np

from numbagpt.errors import UserError
from numbagpt.gpu import stream
from numbagpt.gpu.cublaslt import BlasError, Problem, plan_for

__all__ = ["PRECISIONS", "BlasError", "matmul", "precision", "set_precision"]

PRECISIONS = ("fp32", "tf32", "bf16")
_STORAGE = {"f": "float32", "H": "bfloat16"}  # by NumPy's type character; bf16 lives in uint16
# cuBLASLt can be told how a, b and out are aligned, but not the bias, which it reads in vectors.
_BIAS_ALIGNMENT = 16

_precision = "fp32"


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
) -> None:
    """out (M, N) = alpha * op(a) (M, K) @ op(b) (K, N) + beta * out + bias (N,).

    op(x) is x, or its transpose where the flag says so: a is (K, M) with transpose_a, b is (N, K)
    with transpose_b. All three may have a leading batch dimension, the same in each. With beta = 0
    out is not read. bias is added to every row.

    Device arrays (C-contiguous): a and b both float32, or both uint16 holding bfloat16; out float32
    or, for bfloat16 inputs, uint16; bias of out's type, on a 16-byte boundary. The product is
    queued on the current stream. Call from one thread: plans and workspace are shared.
    NumPy arrays: all float32 or all float64.

    Raises ValueError or TypeError for arrays that do not go together, BlasError if cuBLASLt fails,
    UserError if CUDA cannot be used or the GPU lacks the precision.
    """
    shape = _shape(out, a, b, bias, transpose_a, transpose_b)
    if isinstance(out, np.ndarray):
        _matmul_numpy(out, a, b, transpose_a, transpose_b, alpha, beta, bias)
        return
    storage, out_storage = _storage(out, a, b, bias)
    arrays = out, a, b
    pointers = [_pointer(x) for x in arrays]
    bias_pointer = 0 if bias is None else _pointer(bias)
    if bias_pointer % _BIAS_ALIGNMENT:
        raise ValueError(
            f"matmul: bias starts at {bias_pointer:#x}; expected a multiple of {_BIAS_ALIGNMENT} "
            "bytes; align the buffer it is cut from"
        )
    problem = Problem(
        *shape,
        transpose_a,
        transpose_b,
        storage,
        out_storage,
        bias is not None,
        beta != 0.0,
        _precision if storage == "float32" else "bf16",
        tuple(_alignment(p, x) for p, x in zip(pointers, arrays, strict=True)),
    )
    plan_for(problem)(*pointers, bias_pointer, alpha, beta, stream.handle())


def _shape(
    out: Any, a: Any, b: Any, bias: Any, transpose_a: bool, transpose_b: bool
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
        ):
            return (batch[0] if batch else 1), M, N, K
    raise ValueError(
        f"matmul: out {out.shape}, a{'^T' * transpose_a} stored as {a.shape}, "
        f"b{'^T' * transpose_b} stored as {b.shape}, bias {bias if bias is None else bias.shape}; "
        "expected out (M, N), op(a) (M, K), op(b) (K, N), bias (N,), with the same leading batch "
        "dimension on out, a and b or on none"
    )


def _storage(out: Any, a: Any, b: Any, bias: Any) -> tuple[str, str]:
    """Storage of the inputs and of the output of a product of device arrays."""
    arrays = {"out": out, "a": a, "b": b} | ({} if bias is None else {"bias": bias})
    for name, x in arrays.items():
        if isinstance(x, np.ndarray) or x.dtype.char not in _STORAGE or not x.is_c_contiguous():
            raise TypeError(
                f"matmul: {name} is a {type(x).__name__} of {x.dtype}; expected, as out is on the "
                "GPU, a C-contiguous device array of float32 or uint16 (bfloat16)"
            )
    found = {name: _STORAGE[x.dtype.char] for name, x in arrays.items()}
    if (
        found["a"] != found["b"]
        or found.get("bias", found["out"]) != found["out"]
        or (found["a"], found["out"]) == ("float32", "bfloat16")
    ):
        raise TypeError(
            f"matmul: types are {found}; expected a and b alike, bias like out, and a bfloat16 out "
            "only of bfloat16 inputs"
        )
    return found["a"], found["out"]


def _pointer(array: Any) -> int:
    return array.device_ctypes_pointer.value or 0


def _alignment(pointer: int, array: Any) -> int:
    """Largest power of two, at most 256, that divides the address of every matrix of the batch."""
    stride = array.shape[-1] * array.shape[-2] * array.dtype.itemsize if array.ndim > 2 else 0
    bits = pointer | stride | 256
    return bits & -bits


def _matmul_numpy(
    out: Any,
    a: Any,
    b: Any,
    transpose_a: bool,
    transpose_b: bool,
    alpha: float,
    beta: float,
    bias: Any,
) -> None:
    arrays = [out, a, b] if bias is None else [out, a, b, bias]
    types = {str(x.dtype) if isinstance(x, np.ndarray) else type(x).__name__ for x in arrays}
    if types not in ({"float32"}, {"float64"}):
        raise TypeError(
            f"matmul: types are {sorted(types)}; expected NumPy arrays that are all float32 or all "
            "float64"
        )
    if transpose_a:
        a = a.swapaxes(-1, -2)
    if transpose_b:
        b = b.swapaxes(-1, -2)
    if alpha == 1.0 and beta == 0.0:
        np.matmul(a, b, out=out)
    else:
        product = alpha * np.matmul(a, b)
        # Not 0 * out: what is there may be NaN.
        out[...] = product if beta == 0.0 else product + beta * out
    if bias is not None:
        out += bias
