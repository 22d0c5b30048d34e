"""matmul of NumPy arrays: what blas.matmul means, and what it does where there is no GPU.

The GELU is the tanh form, the one that cuBLASLt's epilogue computes (Hendrycks & Gimpel, 2016):

    gelu(x) = x s,   s = 1 / (1 + exp(-2u)) = (1 + tanh u) / 2,   u = √(2/π) (x + 0.044715 x³)
"""

import math

import numpy as np

from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16

_SCALE = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def matmul(
    out: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    alpha: float,
    beta: float,
    bias: np.ndarray | None,
    add: np.ndarray | None,
    gelu_aux: np.ndarray | None,
) -> None:
    """blas.matmul of arrays that fit, already transposed.

    bfloat16 arrays (uint16) are computed with as float32; results are rounded once, at the end.
    """
    in_place = out.dtype != np.uint16 and beta == 0.0
    result = np.matmul(_values(a), _values(b), out=out if in_place else None)
    if alpha != 1.0:
        result *= alpha
    if beta != 0.0:  # not 0 * out: what is there may be NaN
        result += beta * _values(out)
    if bias is not None:
        result += _values(bias)
    if add is not None:
        result += _values(add)
    if gelu_aux is not None:
        _store(gelu_aux, result)
        result *= _logistic(result)
    if result is not out:
        _store(out, result)


def _values(array: np.ndarray) -> np.ndarray:
    return bf16_to_float32(array) if array.dtype == np.uint16 else array


def _store(target: np.ndarray, values: np.ndarray) -> None:
    target[...] = float32_to_bf16(values) if target.dtype == np.uint16 else values


def _logistic(x: np.ndarray) -> np.ndarray:
    """s of the formulas above, by tanh, which does not overflow."""
    return 0.5 * (1 + np.tanh(_SCALE * (x + _CUBE * x * x * x)))
