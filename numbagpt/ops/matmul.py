"""Linear layers.

    out = inp weight^T + bias (+ residual)   (N, C) (OC, C)^T -> (N, OC), with N = B*T rows

    dinp     = dout weight             (N, OC) (OC, C)   -> (N, C)
    dweight += dout^T inp              (N, OC)^T (N, C)  -> (OC, C)
    dbias   += sum of dout over rows   (N, OC)           -> (OC,)

and, for the linear layer of the MLP that a GELU follows, the two in one.

The products are cuBLASLt's, which adds the bias while out is still in registers, and the residual
or dweight's old value likewise. The sum over rows is a kernel of ours, in column_sum.py.

Hopper's tensor cores multiply TF32 only where the numbers of each sum lie side by side, in both
operands; bf16 they take either way. For out they do lie so. For dweight, whose sums run down the
rows of dout and inp, neither operand's do, and cuBLASLt falls back on slower kernels: so slow that
it pays to transpose the narrower of the two first.
"""

import functools

import numpy as np

from numbagpt.gpu import blas
from numbagpt.gpu.kernel import ceil_div
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors
from numbagpt.ops.column_sum import (
    THREADS,
    add_partials,
    chunk_grid,
    column_sum_kernel,
    partials_size,
)
from numbagpt.ops.gelu import gelu_forward, gelu_forward_reference
from numbagpt.ops.transpose import transpose

# Blocks that share the sum over rows: enough to keep all multiprocessors of a large GPU reading. A
# constant, not asked of the GPU, so that the order of the additions is the same on all of them.
BLOCKS = 512


def _rows(array):
    """The array as a matrix: every axis but the last is one of rows."""
    return array.reshape((array.size // array.shape[-1], array.shape[-1]))


def matmul_backward_bias_reference(
    dbias: np.ndarray, dout: np.ndarray, scratch: np.ndarray | None
) -> None:
    """What matmul_backward_bias computes, in NumPy and in the arrays' own precision."""
    dbias += _rows(dout).sum(axis=0)


def matmul_forward_reference(
    out: np.ndarray,
    inp: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None = None,
) -> None:
    """What matmul_forward computes, in NumPy and in the arrays' own precision."""
    out = _rows(out)
    np.matmul(_rows(inp), weight.T, out=out)
    if bias is not None:
        out += bias
    if residual is not None:
        out += _rows(residual)


def matmul_gelu_forward_reference(
    out: np.ndarray, pre: np.ndarray, inp: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> None:
    """What matmul_gelu_forward computes, in NumPy and in the arrays' own precision."""
    matmul_forward_reference(pre, inp, weight, bias)
    gelu_forward_reference(out, pre)


def matmul_backward_reference(
    dinp: np.ndarray,
    dweight: np.ndarray,
    dbias: np.ndarray | None,
    dout: np.ndarray,
    inp: np.ndarray,
    weight: np.ndarray,
    scratch: np.ndarray | None,
    *,
    accumulate: bool = True,
    transposed: np.ndarray | None = None,
) -> None:
    """What matmul_backward computes, in NumPy and in the arrays' own precision."""
    if dbias is not None:
        matmul_backward_bias_reference(dbias, dout, scratch)
    np.matmul(_rows(dout), weight, out=_rows(dinp))
    if accumulate:
        dweight += _rows(dout).T @ _rows(inp)
    else:
        np.matmul(_rows(dout).T, _rows(inp), out=dweight)


def matmul_backward_bias_scratch(N: int, OC: int) -> int:
    """Number of float32 values that matmul_backward_bias needs for N rows of OC columns."""
    return partials_size(N, OC, BLOCKS)


def matmul_backward_bias(dbias, dout, scratch) -> None:
    """dbias += sum of dout over all its axes but the last; the same bits in every run.

    dbias    (OC,)       float32
    dout     (..., OC)   float32, OC divisible by 4, or bf16, OC divisible by 8
    scratch  float32, at least matmul_backward_bias_scratch(N, OC) values, overwritten

    dout and scratch start on a 16-byte boundary. Raises ValueError where sizes or addresses are
    others.
    """
    OC = dout.shape[-1]
    N = dout.size // OC
    check_sizes("matmul_backward_bias", dbias=(dbias, OC))
    check_room("matmul_backward_bias", scratch=(scratch, matmul_backward_bias_scratch(N, OC)))
    check_vectors("matmul_backward_bias", OC, dout=dout, scratch=scratch)
    strips, chunks = chunk_grid(N, OC, dout.dtype.itemsize, BLOCKS)
    chunk_rows = ceil_div(N, chunks)
    column_sum_kernel[(strips, chunks), THREADS](scratch, dout, N, OC, chunk_rows, 0)
    add_partials(dbias, scratch, chunks)


def matmul_forward(out, inp, weight, bias, residual=None) -> None:
    """out = inp weight^T + bias (+ residual).

    out       (..., OC)           written
    inp       (..., C)
    weight    (OC, C)
    bias      (OC,) or None
    residual  (..., OC) or None   may not overlap out

    All are float32, or all uint16 holding bf16. On a GPU bias starts on a 16-byte boundary.

    Raises what blas.matmul does: ValueError or TypeError for arrays that do not go together,
    BlasError where cuBLASLt fails, UserError where CUDA or the precision is not there.

    With residual a projection ends in the residual stream. The addition then costs one more read
    (of residual, N OC values) in the product's epilogue; as a kernel of its own it reads both the
    projection and residual and writes the sum, after the product wrote the projection. On an H200,
    at (16384, 768) x (768, 768), 39 µs instead of 30 + 18 in bf16, 72 instead of 60 + 36 in TF32.
    It is made in float32 before the only rounding, where bf16 would otherwise be rounded twice (OC
    has to be a multiple of 8 for that: see blas.matmul), and no memory holds the projection.
    """
    blas.matmul(
        _rows(out),
        _rows(inp),
        weight,
        transpose_b=True,
        bias=bias,
        add=None if residual is None else _rows(residual),
    )


def matmul_gelu_forward(out, pre, inp, weight, bias) -> None:
    """pre = inp weight^T + bias and out = gelu(pre), both kept: the backward pass reads pre.

    out, pre      (..., OC)   written
    inp, weight, bias         as in matmul_forward

    Types and errors are those of matmul_forward. On a GPU pre starts, in bf16, on a 16-byte
    boundary. OC is divisible by 4 (float32) or 8 (bf16).

    In bf16 cuBLASLt applies the GELU while pre is still in registers: on an H200, at (16384, 768) x
    (768, 3072), 147 µs where product and GELU apart take 112 + 46. In TF32 its fused kernel is the
    slower way, 364 µs against 211 + 99, so there they stay apart.
    """
    if out.dtype == np.uint16:
        blas.matmul(
            _rows(out), _rows(inp), weight, transpose_b=True, bias=bias, gelu_aux=_rows(pre)
        )
    else:
        matmul_forward(pre, inp, weight, bias)
        gelu_forward(out, pre)


def transpose_pays(precision: str, compute_capability: tuple[int, int]) -> bool:
    """Whether matmul_backward_weight is faster with room for a transpose."""
    return precision == "tf32" and compute_capability == (9, 0)


def matmul_backward_weight(dweight, dout, inp, *, accumulate=True, transposed=None) -> None:
    """dweight = dout^T inp, or with accumulate dweight += that.

    dweight     (OC, C)     float32
    dout        (..., OC)   float32, or uint16 holding bf16
    inp         (..., C)    as dout
    transposed  1-D float32, at least N min(OC, C) values, overwritten: room for the transpose of
                dout or inp; or None, as always for bf16

    Raises what matmul_forward does, and ValueError where the room does not suffice.

    On an H200, for dout (4096, 3072) and inp (4096, 768) in TF32, 80 µs with the transpose, 108
    without.
    """
    dout, inp = _rows(dout), _rows(inp)
    (N, OC), C = dout.shape, inp.shape[-1]
    multiply = functools.partial(blas.matmul, dweight, beta=1.0 if accumulate else 0.0)
    if transposed is None:
        multiply(dout, inp, transpose_a=True)
        return
    check_room("matmul_backward_weight", transposed=(transposed, N * min(OC, C)))
    if C <= OC:
        multiply(dout, _transpose(transposed, inp), transpose_a=True, transpose_b=True)
    else:
        multiply(_transpose(transposed, dout), inp)


def _transpose(room, matrix):
    """The transpose of the matrix, in `room`."""
    result = room[: matrix.size].reshape(matrix.shape[::-1])
    transpose(result, matrix)
    return result


def matmul_backward(
    dinp, dweight, dbias, dout, inp, weight, scratch, *, accumulate=True, transposed=None
) -> None:
    """Gradients of matmul_forward.

    dinp        (..., C)        written
    dweight                     as in matmul_backward_weight, like accumulate and transposed
    dbias       (OC,) or None   float32: +=
    dout        (..., OC)       as in matmul_backward_bias where there is dbias
    inp, weight                 as in matmul_forward
    scratch                     as in matmul_backward_bias; unused where dbias is None

    dinp, dout, inp and weight are float32, or all uint16 holding bf16. Raises what matmul_forward
    does.
    """
    if dbias is not None:
        matmul_backward_bias(dbias, dout, scratch)
    blas.matmul(_rows(dinp), _rows(dout), weight)
    matmul_backward_weight(dweight, dout, inp, accumulate=accumulate, transposed=transposed)
