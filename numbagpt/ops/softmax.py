"""Causal softmax: a token's scores against itself and the tokens before it become weights.

For the row of token t in each of the B*NH heads, and t2 <= t:

    att[t2] = exp(scale * preatt[t2]) / sum over t3 <= t of exp(scale * preatt[t3])

Subtracting the row's maximum from every score changes nothing in the quotient and keeps exp from
overflowing. The maximum and the sum come from one pass: when a larger maximum turns up, the sum so
far is multiplied by exp(scale * (old maximum - new maximum)) (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018).

Backward, since d att[t3] / d preatt[t2] = scale * att[t3] * ((1 if t2 == t3 else 0) - att[t2]):

    dpreatt[t2] = scale * att[t2] * (datt[t2] - sum over t3 <= t of att[t3] * datt[t3])

Above the diagonal the kernels read and write nothing. The matmuls that follow do read all of att
and dpreatt, so whoever allocates them zeroes them once.
"""

import math

import numpy as np
from numba import cuda, float32, int32, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.reduce import LOWEST, WARP_SIZE, warp_max, warp_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

THREADS = 256


def softmax_forward_reference(att: np.ndarray, preatt: np.ndarray, scale: float) -> None:
    """What softmax_forward computes, in NumPy and in the arrays' own precision."""
    above_diagonal = np.triu(np.ones(att.shape[-2:], bool), 1)
    np.multiply(preatt, scale, out=att)
    np.copyto(att, -np.inf, where=above_diagonal)
    att -= att.max(axis=-1, keepdims=True)
    np.exp(att, out=att)
    att /= att.sum(axis=-1, keepdims=True)


def softmax_backward_reference(
    dpreatt: np.ndarray, datt: np.ndarray, att: np.ndarray, scale: float
) -> None:
    """What softmax_backward computes, in NumPy and in the arrays' own precision."""
    total = np.einsum("...j,...j->...", att, datt)[..., None]
    np.subtract(datt, total, out=dpreatt)
    dpreatt *= att
    dpreatt *= scale


@device_function
def load_within(x, arr, i, begin, end, outside):
    """x[k] = arr[i + k] where begin <= i + k < end, and `outside` elsewhere."""
    if begin <= i and i + width(arr) <= end:
        load(x, arr, i)
    else:
        for k in range(width(arr)):
            x[k] = arr[i + k] if begin <= i + k and i + k < end else outside


@device_function
def store_within(arr, i, x, begin, end):
    """arr[i + k] = x[k] where begin <= i + k < end."""
    if begin <= i and i + width(arr) <= end:
        store(arr, i, x)
    else:
        for k in range(width(arr)):
            if begin <= i + k and i + k < end:
                arr[i + k] = x[k]


@device_function
def row_of_warp():
    """The row that this warp takes, the last rows first.

    The matmul before left the last heads in the cache, and the one after begins with the first:
    going backwards finds the former there and leaves the latter. Within a head the long rows come
    first, so that the kernel does not end waiting for one.
    """
    warps = cuda.blockDim.x // WARP_SIZE
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    return block * warps + cuda.threadIdx.x // WARP_SIZE


@kernel(
    void(float32[::1], float32[::1], float32, int32, int32),
    max_threads=THREADS,
    min_blocks=6,
)
def softmax_forward_kernel(att, preatt, scale, rows, T):
    """att[row, t2] = softmax over t2 <= t of scale * preatt[row, t2], where t = row % T.

    One warp per row, in two passes of 128-bit accesses; the second finds the row in the cache. A
    row begins where its T puts it, not always on a multiple of 16 bytes: the lanes walk over the
    aligned vectors that cover it, and the two at its ends may be partial. Moves the lower triangle
    twice: 8 B NH T (T + 1) / 2 bytes.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    row = row_of_warp()
    if row >= rows:
        return
    begin = row * T
    end = begin + row % T + 1
    first = begin - begin % width(preatt) + cuda.threadIdx.x % WARP_SIZE * width(preatt)
    step = WARP_SIZE * width(preatt)

    maximum = LOWEST
    total = float32(0)
    for i in range(first, end, step):
        load_within(x, preatt, i, begin, end, LOWEST)
        old = maximum
        for k in range(width(preatt)):
            maximum = max(maximum, x[k])
        total *= math.exp(scale * (old - maximum))
        for k in range(width(preatt)):
            total += math.exp(scale * (x[k] - maximum))

    # Lanes past the row's end still hold LOWEST and 0, which add nothing.
    row_maximum = warp_max(maximum)
    norm = float32(1) / warp_sum(total * math.exp(scale * (maximum - row_maximum)))
    for i in range(first, end, step):
        load_within(x, preatt, i, begin, end, LOWEST)
        for k in range(width(preatt)):
            x[k] = math.exp(scale * (x[k] - row_maximum)) * norm
        store_within(att, i, x, begin, end)


@kernel(
    void(float32[::1], float32[::1], float32[::1], float32, int32, int32),
    max_threads=THREADS,
    min_blocks=6,
)
def softmax_backward_kernel(dpreatt, datt, att, scale, rows, T):
    """dpreatt[row, t2] = scale * att * (datt - sum of att * datt over the row) for t2 <= t.

    One warp per row, laid out as in softmax_forward_kernel. Moves the lower triangle three times:
    12 B NH T (T + 1) / 2 bytes.
    """
    a = cuda.local.array(MAX_WIDTH, float32)
    d = cuda.local.array(MAX_WIDTH, float32)
    row = row_of_warp()
    if row >= rows:
        return
    begin = row * T
    end = begin + row % T + 1
    first = begin - begin % width(att) + cuda.threadIdx.x % WARP_SIZE * width(att)
    step = WARP_SIZE * width(att)

    total = float32(0)
    for i in range(first, end, step):
        load_within(a, att, i, begin, end, float32(0))
        load_within(d, datt, i, begin, end, float32(0))
        for k in range(width(att)):
            total += a[k] * d[k]
    total = warp_sum(total)

    for i in range(first, end, step):
        load_within(a, att, i, begin, end, float32(0))
        load_within(d, datt, i, begin, end, float32(0))
        for k in range(width(att)):
            a[k] *= scale * (d[k] - total)
        store_within(dpreatt, i, a, begin, end)


def softmax_forward(att, preatt, scale) -> None:
    """Causal softmax over the last axis, lower triangle only.

    att     (B, NH, T, T)   written on and below the diagonal
    preatt  (B, NH, T, T)   scores, read on and below the diagonal
    scale   positive number that multiplies the scores
    """
    T = att.shape[-1]
    rows = att.size // T
    grid = ceil_div(rows, THREADS // WARP_SIZE)
    softmax_forward_kernel[grid, THREADS](att, preatt, scale, rows, T)


def softmax_backward(dpreatt, datt, att, scale) -> None:
    """Gradient of softmax_forward with respect to preatt, lower triangle only.

    dpreatt  (B, NH, T, T)   written on and below the diagonal; may be datt itself
    datt     (B, NH, T, T)   gradient of att
    att      (B, NH, T, T)   what softmax_forward wrote
    """
    T = att.shape[-1]
    rows = att.size // T
    grid = ceil_div(rows, THREADS // WARP_SIZE)
    softmax_backward_kernel[grid, THREADS](dpreatt, datt, att, scale, rows, T)
