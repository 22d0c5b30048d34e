"""Embedding: each position's vector is that of its token plus that of its place.

    out[b, t] = wte[inp[b, t]] + wpe[t]

The backward pass is in encoder_backward.py.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors
from numbagpt.ops.encoder_backward import encoder_backward, encoder_backward_reference, token_runs

__all__ = [
    "encoder_backward",
    "encoder_backward_reference",
    "encoder_forward",
    "encoder_forward_reference",
    "token_runs",
]

# Threads and warps of a block, and sequences of which a warp has a row under way.
BLOCK = 256
WARPS = BLOCK // WARP_SIZE
ROWS = 4
VALUES = ROWS * MAX_WIDTH


def encoder_forward_reference(
    out: np.ndarray, inp: np.ndarray, wte: np.ndarray, wpe: np.ndarray
) -> None:
    """What encoder_forward computes, in NumPy and in the arrays' own precision."""
    T = inp.shape[1]
    np.take(wte, inp, axis=0, out=out)
    out += wpe[:T]


@kernel(
    void(float32[::1], int32[::1], float32[::1], float32[::1], int32, int32, int32),
    void(uint16[::1], int32[::1], uint16[::1], uint16[::1], int32, int32, int32),
    max_threads=BLOCK,
    min_blocks=6,
)
def encoder_forward_kernel(out, inp, wte, wpe, B, T, C):
    """out[b, t] = wte[inp[b, t]] + wpe[t].

    A warp takes a position t, of its channels 32 vectors of 16 bytes, those that blockIdx.x says,
    and ROWS sequences, those that blockIdx.z says: it has as many rows of wte under way, and adds
    to each the same wpe[t]. Moves 4 B T C bytes for the output, 4 C for each different token and
    4 T C of wpe, in float32.
    """
    rows = cuda.local.array(VALUES, float32)
    p = cuda.local.array(MAX_WIDTH, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    lane = cuda.threadIdx.x & (WARP_SIZE - 1)
    t = cuda.blockIdx.y * WARPS + cuda.threadIdx.x // WARP_SIZE
    c = (cuda.blockIdx.x * WARP_SIZE + lane) * width(out)
    if t >= T or c >= C:
        return
    first = cuda.blockIdx.z * ROWS
    load(p, wpe, int64(t) * C + c)
    for j in range(ROWS):
        token = inp[int64(min(first + j, B - 1)) * T + t]
        load(x, wte, int64(token) * C + c)
        for k in range(width(out)):
            rows[j * MAX_WIDTH + k] = x[k]
    for j in range(ROWS):
        if first + j < B:
            for k in range(width(out)):
                x[k] = rows[j * MAX_WIDTH + k] + p[k]
            store(out, (int64(first + j) * T + t) * C + c, x)


def encoder_forward(out, inp, wte, wpe) -> None:
    """out[b, t] = wte[inp[b, t]] + wpe[t].

    out       (B, T, C), float32 or bf16 bits; C a multiple of 4 (float32) or 8 (bf16)
    inp       (B, T) int32, each less than Vp
    wte, wpe  (Vp, C) and (maxT, C) with maxT >= T, stored as out

    out, wte and wpe start on a 16-byte boundary. Raises ValueError where sizes or addresses are
    others; the tokens are not looked at.
    """
    B, T, C = out.shape
    check_sizes("encoder_forward", inp=(inp, B * T), wte=(wte, wte.shape[0] * C))
    check_room("encoder_forward", wpe=(wpe, T * C))
    check_vectors("encoder_forward", C, out=out, wte=wte, wpe=wpe)
    slices = ceil_div(C * out.dtype.itemsize, 16 * WARP_SIZE)
    grid = slices, ceil_div(T, WARPS), ceil_div(B, ROWS)
    encoder_forward_kernel[grid, BLOCK](out, inp, wte, wpe, B, T, C)
