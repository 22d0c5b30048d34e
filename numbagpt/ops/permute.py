"""Between rows of channels and rows of heads.

The matmuls around attention see a token as one row of channels; attention itself wants the rows of
each head together, as one matrix. With P tensors side by side in a row, three in QKV and one in
attention's output:

    rows   (B, T, P, NH, HS)
    heads  (P, B, NH, T, HS)

    permute     heads[p, b, h, t, i] = rows[b, t, p, h, i]
    unpermute   rows[b, t, p, h, i] = heads[p, b, h, t, i]

Each value moves to one place, so its gradient moves back from there: the backward of either is the
other. All arrays are float32: only materialized attention permutes, and it has no other precision.

HS is any, C = NH * HS a multiple of 4, and all arrays start on a 16-byte boundary. The launchers
raise ValueError where that is not so, or where one array has more elements than the other.
"""

import numpy as np
from numba import cuda, float32, int32, int64, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.arguments import check_sizes, check_vectors

MAX_THREADS = 256


def permute_reference(qkvr: np.ndarray, inp: np.ndarray) -> None:
    """What permute computes, in NumPy and in the arrays' own precision."""
    _, B, NH, T, HS = qkvr.shape
    qkvr[...] = inp.reshape(B, T, 3, NH, HS).transpose(2, 0, 3, 1, 4)


def permute_backward_reference(dinp: np.ndarray, dqkvr: np.ndarray) -> None:
    """What permute_backward computes, in NumPy and in the arrays' own precision."""
    _, B, NH, T, HS = dqkvr.shape
    dinp.reshape(B, T, 3, NH, HS)[...] = dqkvr.transpose(1, 3, 0, 2, 4)


def unpermute_reference(out: np.ndarray, inp: np.ndarray) -> None:
    """What unpermute computes, in NumPy and in the arrays' own precision."""
    B, NH, T, HS = inp.shape
    out.reshape(B, T, NH, HS)[...] = inp.swapaxes(1, 2)


def unpermute_backward_reference(dinp: np.ndarray, dout: np.ndarray) -> None:
    """What unpermute_backward computes, in NumPy and in the arrays' own precision."""
    B, NH, T, HS = dinp.shape
    dinp[...] = dout.reshape(B, T, NH, HS).swapaxes(1, 2)


@device_function
def heads_offset(row, c, T, NH, HS):
    """Where channel c of row b*T + t lies in (B, NH, T, HS)."""
    b = row // T
    h = c // HS
    return ((int64(b) * NH + h) * T + row - b * T) * HS + c - h * HS


@kernel(
    void(float32[::1], float32[::1], int32, int32, int32, int32),
    max_threads=MAX_THREADS,
    min_blocks=8,
)
def permute_kernel(heads, rows, P, T, NH, HS):
    """heads[p, b, h, t, i] = rows[b, t, p, h, i].

    Grid (B*T, blocks along C). A thread takes one vector of channels of one row, in each of the P
    tensors: reads are contiguous along the row, writes along the head. Reads and writes each value
    once: 8 P B T C bytes.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    C = NH * HS
    BTC = int64(cuda.gridDim.x) * C
    row = cuda.blockIdx.x
    c = (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * width(rows)
    if c < C:
        source = int64(row) * P * C + c
        if HS % width(rows) == 0:
            target = heads_offset(row, c, T, NH, HS)
            for p in range(P):
                load(x, rows, source + p * C)
                store(heads, target + p * BTC, x)
        else:
            # A vector may straddle two heads, which lie T rows apart: one value at a time.
            for k in range(width(rows)):
                target = heads_offset(row, c + k, T, NH, HS)
                for p in range(P):
                    heads[target + p * BTC] = rows[source + p * C + k]


@kernel(
    void(float32[::1], float32[::1], int32, int32, int32, int32),
    max_threads=MAX_THREADS,
    min_blocks=8,
)
def unpermute_kernel(rows, heads, P, T, NH, HS):
    """rows[b, t, p, h, i] = heads[p, b, h, t, i].

    Grid, threads and bytes as in permute_kernel, with reads and writes exchanged.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    C = NH * HS
    BTC = int64(cuda.gridDim.x) * C
    row = cuda.blockIdx.x
    c = (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * width(rows)
    if c < C:
        target = int64(row) * P * C + c
        if HS % width(rows) == 0:
            source = heads_offset(row, c, T, NH, HS)
            for p in range(P):
                load(x, heads, source + p * BTC)
                store(rows, target + p * C, x)
        else:
            for k in range(width(rows)):
                source = heads_offset(row, c + k, T, NH, HS)
                for p in range(P):
                    rows[target + p * C + k] = heads[source + p * BTC]


def _launch(operation, kernel, out, inp, P, heads):
    """Run one of the kernels; `heads` is whichever of out and inp ends in (B, NH, T, HS)."""
    B, NH, T, HS = heads.shape[-4:]
    N = P * B * T * NH * HS
    check_sizes(operation, out=(out, N), inp=(inp, N))
    check_vectors(operation, NH * HS, out=out, inp=inp)
    vectors = ceil_div(NH * HS * heads.dtype.itemsize, 16)
    blocks = ceil_div(vectors, MAX_THREADS)
    threads = 32 * ceil_div(vectors, 32 * blocks)
    kernel[(B * T, blocks), threads](out, inp, P, T, NH, HS)


def permute(qkvr, inp) -> None:
    """Sort the output of the QKV matmul by head.

    qkvr  (3, B, NH, T, HS)   float32, written
    inp   (B, T, 3C)          float32, of any shape with as many elements
    """
    _launch("permute", permute_kernel, qkvr, inp, 3, heads=qkvr)


def permute_backward(dinp, dqkvr) -> None:
    """dinp (B, T, 3C) = the gradients dqkvr (3, B, NH, T, HS) in the order of rows, float32."""
    _launch("permute_backward", unpermute_kernel, dinp, dqkvr, 3, heads=dqkvr)


def unpermute(out, inp) -> None:
    """out (B, T, C) = inp (B, NH, T, HS), the heads of a token side by side again, float32."""
    _launch("unpermute", unpermute_kernel, out, inp, 1, heads=inp)


def unpermute_backward(dinp, dout) -> None:
    """dinp (B, NH, T, HS) = the gradient dout (B, T, C), sorted by head, float32."""
    _launch("unpermute_backward", permute_kernel, dinp, dout, 1, heads=dinp)
