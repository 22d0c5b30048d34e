"""GELU, the activation between the two matrices of the MLP, in its tanh form.

    gelu(x) = x/2 (1 + tanh u),   u = √(2/π) (x + 0.044715 x³)

Hendrycks & Gimpel, "Gaussian Error Linear Units" (2016). GPT-2 was trained with this form, which
differs from the exact x Φ(x) by up to 5e-4. Its derivative, with sech² u = 1 - tanh² u:

    gelu'(x) = (1 + tanh u)/2 + x/2 (1 - tanh² u) u',   u' = √(2/π) (1 + 3 · 0.044715 x²)

The kernels use neither tanh nor cosh. (1 + tanh u)/2 is the logistic function of 2u,

    s = 1 / (1 + exp(-2u)),   gelu(x) = x s,   gelu'(x) = s + 2 x s (1 - s) u'

since 1 - tanh² u = (1 + tanh u)(1 - tanh u) = 4 s (1 - s). That is one exponential and one
reciprocal, each a single instruction of the GPU's special function units, and s keeps its relative
precision where tanh u is close to -1 and 1 + tanh u would cancel. The GPU does have a tanh
instruction, but of 11 bits only. The exponential instruction is to base 2, so log2(e) is multiplied
into the constants beforehand: in bf16, with 4 bytes to move for a value, every instruction counts,
and math.exp, in a device function, which fastmath does not reach, takes seven more than exp2.

The backward pass adds up its result's columns on the way: the matrix before the GELU has a bias,
whose gradient they are, and to sum them later means to read that result, the widest of a layer's
gradients, once more.
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.ptx import LOG2_E, exp2, reciprocal
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, fetch, load, store, unpack, width
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors
from numbagpt.ops.column_sum import (
    SHARED_SIZE,
    THREADS,
    WARPS,
    add_partials,
    add_warps,
    chunk_grid,
    first_column,
    partials_size,
)

BLOCK = 256
# Blocks of the backward pass that a multiprocessor holds at a time, and those that the 132
# multiprocessors of an H200 hold. A constant, not asked of the GPU, so that the order of the
# additions is the same on all of them.
BACKWARD_PER_MULTIPROCESSOR = 4
BACKWARD_BLOCKS = 132 * BACKWARD_PER_MULTIPROCESSOR
# Rows that a warp of the backward pass has on the way, and registers for a vector of each.
ROWS = 2
WORDS = 4 * ROWS
SCALE = math.sqrt(2 / math.pi)
CUBE = 0.044715

# exp(-2u) = 2 ** (x (LINEAR + CUBIC x²)), and -2u' = SLOPE + CURVE x²
LINEAR = np.float32(-2 * SCALE * LOG2_E)
CUBIC = np.float32(-2 * SCALE * CUBE * LOG2_E)
SLOPE = np.float32(-2 * SCALE)
CURVE = np.float32(-2 * SCALE * 3 * CUBE)
# 2 ** 115 is 4e34: s is zero to float32's precision, and exp2 cannot overflow to infinity.
LARGEST = np.float32(115)


def _tanh_u(x: np.ndarray) -> np.ndarray:
    """tanh u, as a new array."""
    t = np.multiply(x, x)
    t *= CUBE
    t += 1
    t *= x
    t *= SCALE
    return np.tanh(t, out=t)


def gelu_forward_reference(out: np.ndarray, inp: np.ndarray) -> None:
    """What gelu_forward computes, in NumPy and in the arrays' own precision."""
    t = _tanh_u(inp)
    t += 1
    t *= inp
    np.multiply(t, 0.5, out=out)


def gelu_backward_reference(
    dinp: np.ndarray,
    dbias: np.ndarray,
    dout: np.ndarray,
    inp: np.ndarray,
    scratch: np.ndarray | None,
) -> None:
    """What gelu_backward computes, in NumPy and in the arrays' own precision."""
    t = _tanh_u(inp)
    slope = np.multiply(inp, inp)  # becomes x (1 - tanh² u) u'
    slope *= 3 * CUBE * SCALE
    slope += SCALE
    slope *= inp
    slope *= 1 - t * t
    slope += t
    slope += 1
    slope *= 0.5
    np.multiply(slope, dout, out=dinp)
    dbias += dinp.reshape(-1, dbias.size).sum(axis=0)


@device_function
def logistic(x, square):
    """s = (1 + tanh u)/2 of x; square is x²."""
    exponent = min(x * (LINEAR + CUBIC * square), LARGEST)
    return reciprocal(float32(1) + exp2(exponent))


@kernel(
    void(float32[::1], float32[::1], int64),
    void(uint16[::1], uint16[::1], int64),
    max_threads=BLOCK,
)
def gelu_forward_kernel(out, inp, N):
    """out[i] = x s, x = inp[i].

    One thread per 16 bytes. Moves two arrays: 8 N bytes in float32.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    i = cuda.grid(1) * width(out)
    if i < N:
        load(x, inp, i)
        for k in range(width(out)):
            x[k] *= logistic(x[k], x[k] * x[k])
        store(out, i, x)


@device_function
def fetch_vectors(x_words, d_words, r, inp, dout, row, end, column, C):
    """Begin to load a row's vectors of inp and dout at `column`, as number r, if row < end."""
    if row < end:
        i = int64(row) * C + column
        fetch(x_words, 4 * r, inp, i)
        fetch(d_words, 4 * r, dout, i)


@kernel(
    void(float32[::1], float32[::1], float32[::1], float32[::1], int32, int32, int32),
    void(uint16[::1], float32[::1], uint16[::1], uint16[::1], int32, int32, int32),
    max_threads=THREADS,
    min_blocks=BACKWARD_PER_MULTIPROCESSOR,
)
def gelu_backward_kernel(dinp, partials, dout, inp, N, C, chunk_rows):
    """dinp[n, c] = dout[n, c] (s + 2 x s (1 - s) u'), x = inp[n, c], and
    partials[chunk, c] = sum of dinp[n, c] over the chunk's rows, before dinp is rounded.

    Grid (strips of columns, chunks of rows). Each lane has `width` columns of its own, and the
    block's warps take the chunk's rows in turn; while a warp works on one row, its next two are on
    the way. Moves three arrays: 12 N C bytes in float32.
    """
    shared = cuda.shared.array(SHARED_SIZE, float32)
    sums = cuda.local.array(MAX_WIDTH, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    d = cuda.local.array(MAX_WIDTH, float32)
    x_words = cuda.local.array(WORDS, int32)
    d_words = cuda.local.array(WORDS, int32)
    column = first_column(inp)
    for k in range(width(inp)):
        sums[k] = float32(0)
    if column < C:
        row = int32(cuda.blockIdx.y * chunk_rows + cuda.threadIdx.x // WARP_SIZE)
        end = min(int32((cuda.blockIdx.y + 1) * chunk_rows), N)
        for r in range(ROWS):
            fetch_vectors(x_words, d_words, r, inp, dout, int32(row + r * WARPS), end, column, C)
        while row < end:
            for r in range(ROWS):
                if row < end:
                    unpack(x, 0, x_words, 4 * r, inp)
                    unpack(d, 0, d_words, 4 * r, dout)
                    after = int32(row + ROWS * WARPS)
                    fetch_vectors(x_words, d_words, r, inp, dout, after, end, column, C)
                    for k in range(width(inp)):
                        square = x[k] * x[k]
                        s = logistic(x[k], square)
                        minus_2du = SLOPE + CURVE * square
                        d[k] *= s - x[k] * s * (float32(1) - s) * minus_2du
                        sums[k] += d[k]
                    store(dinp, int64(row) * C + column, d)
                row = int32(row + WARPS)
    add_warps(partials, int64(cuda.blockIdx.y) * C, C, sums, inp, shared, 0)


def gelu_forward(out, inp) -> None:
    """out = gelu(inp).

    out, inp  one shape, float32 or bf16 bits; a multiple of 16 bytes each, starting on such a
              boundary. out may be inp.

    Raises ValueError where that is not so.
    """
    check_sizes("gelu_forward", inp=(inp, out.size))
    check_vectors("gelu_forward", out.size, out=out, inp=inp)
    vectors = out.size * out.dtype.itemsize // 16
    gelu_forward_kernel[ceil_div(vectors, BLOCK), BLOCK](out, inp, out.size)


def gelu_backward_scratch(N: int, C: int) -> int:
    """Number of float32 values that gelu_backward needs for N rows of C columns."""
    return partials_size(N, C, BACKWARD_BLOCKS)


def gelu_backward(dinp, dbias, dout, inp, scratch) -> None:
    """dinp = gelu'(inp) dout and dbias += sum of dinp over all its axes but the last.

    dinp     (..., C)   written; may be dout, which it then overwrites
    dbias    (C,)       float32: += the gradient of the bias that was added to inp, summed before
                        dinp is rounded; the same bits in every run
    dout     (..., C)
    inp      (..., C)   input of the forward pass
    scratch  float32, at least gelu_backward_scratch(N, C) values, overwritten

    dinp, dout and inp are float32, C divisible by 4, or bf16, C divisible by 8. They and scratch
    start on a 16-byte boundary. Raises ValueError where sizes or addresses are others.

    cuBLASLt could apply the derivative at the end of the product that makes dout (DGELU). On an
    H200, in the bf16 training step of GPT-2 124M with 16,384 rows, that takes 66 µs more than the
    product alone, and the sum, which has to read dinp again, another 28.
    """
    C = dinp.shape[-1]
    N = dinp.size // C
    check_sizes("gelu_backward", dbias=(dbias, C), dout=(dout, N * C), inp=(inp, N * C))
    check_room("gelu_backward", scratch=(scratch, gelu_backward_scratch(N, C)))
    check_vectors("gelu_backward", C, dinp=dinp, dout=dout, inp=inp)
    check_vectors("gelu_backward", 0, scratch=scratch)
    strips, chunks = chunk_grid(N, C, dinp.dtype.itemsize, BACKWARD_BLOCKS)
    chunk_rows = ceil_div(N, chunks)
    gelu_backward_kernel[(strips, chunks), THREADS](dinp, scratch, dout, inp, N, C, chunk_rows)
    add_partials(dbias, scratch, chunks)
