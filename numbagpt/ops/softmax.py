"""Causal softmax: a token's scores against itself and the tokens before it become weights.

For the row of token t in each of the B*NH heads, and t2 <= t:

    att[t2] = exp(scale * preatt[t2]) / sum over t3 <= t of exp(scale * preatt[t3])

Subtracting the row's maximum from every score changes nothing in the quotient and keeps exp from
overflowing. The maximum and the sum come from one pass: when a larger maximum turns up, the sum so
far is multiplied by exp(scale * (old maximum - new maximum)) (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018). The GPU has an instruction for powers of two, so the
kernel is given scale * log2(e) and computes 2^x in place of e^x.

Backward, since d att[t3] / d preatt[t2] = scale * att[t3] * ((1 if t2 == t3 else 0) - att[t2]):

    dpreatt[t2] = scale * att[t2] * (datt[t2] - sum over t3 <= t of att[t3] * datt[t3])

Above the diagonal the kernels read and write nothing. The matmuls that follow do read all of att
and dpreatt, so whoever allocates them zeroes them once.
"""

import numpy as np
from numba import cuda, float32, int32, uint32, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.ptx import LOG2_E, exp2
from numbagpt.gpu.reduce import LOWEST, WARP_SIZE, warp_max, warp_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.arguments import check_sizes, check_vectors
from numbagpt.ops.rows import lane_of_warp

# Warps of a block, one row each.
WARPS = 4
THREADS = WARPS * WARP_SIZE
# Values of a row that a lane holds at a time, and that its warp holds: a piece.
VALUES = 32
PIECE = VALUES * WARP_SIZE


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


# A warp takes a row, the values from index `begin` up to `end`. With T not a multiple of 4, most
# rows do not begin on a multiple of 16 bytes. So a row has vectors in the middle, and edges:
#
#     begin               vectors_begin                    vectors_end          end
#     | edge: 0-3 values  | piece        | piece     | …   | edge: 0-3 values   |
#
# Lanes 0-3 take the edge in front and lanes 4-7 the edge behind, a value each. The vectors are
# taken in pieces of PIECE values, VALUES for each lane; the last piece may be shorter. A piece is
# held in registers, and all its loads are under way before the first value is used.
#
# A kernel goes through the pieces forwards, for the sum over the row, and then backwards, to write:
# the last piece, the only one where T <= 1024, is still in the registers. Others are loaded again.
#
# After the forward loop piece_begin is one piece too far, and the backward loop starts by going one
# back. In a row with no whole vector, vectors_begin and vectors_end are the same, and neither loop
# is entered.


@device_function
def row_of_warp():
    """The row that this warp takes, the last rows first.

    The matmul before left the last heads in the cache, and the one after begins with the first
    heads. Going backwards, the kernel finds the last heads there and leaves the first. Within a
    head the long rows come first, so that the kernel does not end waiting for one.
    """
    block = cuda.gridDim.x - 1 - cuda.blockIdx.x
    return block * WARPS + (cuda.threadIdx.x >> 5)


@device_function
def parts_of_row(arr, row, T):
    """begin, vectors_begin, vectors_end and end of a row; the middle two are the same where it has
    no whole vector.
    """
    begin = row * T
    # Of unsigned numbers the compiler takes the remainder in 32 bits, of signed ones in 64.
    end = begin + int32(uint32(row) % uint32(T)) + 1
    vectors_begin = min(begin + (-begin & (width(arr) - 1)), end)
    vectors_end = max(vectors_begin, end - (end & (width(arr) - 1)))
    return begin, vectors_begin, vectors_end, end


@device_function
def edge_of_lane(arr, begin, vectors_begin, vectors_end, end):
    """Index of this lane's edge value, and whether it has one."""
    lane = lane_of_warp()
    if lane < width(arr):
        return begin + lane, begin + lane < vectors_begin
    i = vectors_end + lane - width(arr)
    return i, i < end


@device_function
def load_piece(x, vector, arr, piece_begin, vectors_end, outside):
    """x = this lane's values of a piece, `outside` from vectors_end on.

    vector: a local array of MAX_WIDTH, to be overwritten, through which each vector passes.
    """
    first = piece_begin + lane_of_warp() * width(arr)
    remaining = int32(vectors_end - first)
    for n in range(VALUES // width(arr)):
        if n * WARP_SIZE * width(arr) < remaining:
            load(vector, arr, first + n * WARP_SIZE * width(arr))
            for k in range(width(arr)):
                x[n * width(arr) + k] = vector[k]
        else:
            for k in range(width(arr)):
                x[n * width(arr) + k] = outside


@device_function
def store_piece(arr, piece_begin, vectors_end, x, vector):
    """Store x where load_piece would find it."""
    first = piece_begin + lane_of_warp() * width(arr)
    remaining = int32(vectors_end - first)
    for n in range(VALUES // width(arr)):
        if n * WARP_SIZE * width(arr) < remaining:
            for k in range(width(arr)):
                vector[k] = x[n * width(arr) + k]
            store(arr, first + n * WARP_SIZE * width(arr), vector)


@device_function
def exponentiate(x, scale, maximum):
    """x = 2^(scale (x - maximum)); returns the sum."""
    total = float32(0)
    for i in range(VALUES):
        x[i] = exp2(scale * (x[i] - maximum))
        total += x[i]
    return total


@kernel(
    void(float32[::1], float32[::1], float32, int32, int32),
    max_threads=THREADS,
    min_blocks=8,
)
def softmax_forward_kernel(att, preatt, scale, rows, T):
    """att[row, t2] = softmax over t2 <= t of preatt[row, t2] with base 2^scale, where t = row % T.

    Grid: one warp per row, ceil(rows / WARPS) blocks. Each lane subtracts its own maximum, so that
    it can go on to exp before the row's maximum is known. A factor for each lane makes up for it at
    the end. Moves the lower triangle twice: 8 B NH T (T + 1) / 2 bytes.
    """
    x = cuda.local.array(VALUES, float32)
    vector = cuda.local.array(MAX_WIDTH, float32)
    row = row_of_warp()
    if row >= rows:
        return
    begin, vectors_begin, vectors_end, end = parts_of_row(att, row, T)
    i, has_edge = edge_of_lane(att, begin, vectors_begin, vectors_end, end)

    edge = preatt[i] if has_edge else LOWEST
    maximum = LOWEST
    total = float32(0)
    piece_begin = vectors_begin
    while piece_begin < vectors_end:
        load_piece(x, vector, preatt, piece_begin, vectors_end, LOWEST)
        old = maximum
        for k in range(VALUES):
            maximum = max(maximum, x[k])
        total *= exp2(scale * (old - maximum))
        total += exponentiate(x, scale, maximum)
        piece_begin += PIECE
    last_piece = piece_begin - PIECE  # where the registers' piece begins

    # LOWEST, where a lane has no vector or no edge, becomes zero.
    row_maximum = warp_max(max(maximum, edge))
    factor = exp2(scale * (maximum - row_maximum))
    edge = exp2(scale * (edge - row_maximum))
    norm = float32(1) / warp_sum(total * factor + edge)
    factor *= norm
    if has_edge:
        att[i] = edge * norm
    while piece_begin > vectors_begin:
        piece_begin -= PIECE
        if piece_begin != last_piece:
            load_piece(x, vector, preatt, piece_begin, vectors_end, LOWEST)
            exponentiate(x, scale, maximum)
        for k in range(VALUES):
            x[k] *= factor
        store_piece(att, piece_begin, vectors_end, x, vector)


@kernel(
    void(float32[::1], float32[::1], float32[::1], float32, int32, int32),
    max_threads=THREADS,
    min_blocks=5,
)
def softmax_backward_kernel(dpreatt, datt, att, scale, rows, T):
    """dpreatt[row, t2] = scale * att * (datt - sum of att * datt over the row) for t2 <= t.

    Grid: one warp per row, ceil(rows / WARPS) blocks. Moves the lower triangle three times:
    12 B NH T (T + 1) / 2 bytes.
    """
    a = cuda.local.array(VALUES, float32)
    d = cuda.local.array(VALUES, float32)
    vector = cuda.local.array(MAX_WIDTH, float32)
    row = row_of_warp()
    if row >= rows:
        return
    begin, vectors_begin, vectors_end, end = parts_of_row(att, row, T)
    i, has_edge = edge_of_lane(att, begin, vectors_begin, vectors_end, end)

    a_edge = att[i] if has_edge else float32(0)
    d_edge = datt[i] if has_edge else float32(0)
    total = float32(0)
    piece_begin = vectors_begin
    while piece_begin < vectors_end:
        load_piece(a, vector, att, piece_begin, vectors_end, float32(0))
        load_piece(d, vector, datt, piece_begin, vectors_end, float32(0))
        for k in range(VALUES):
            total += a[k] * d[k]
        piece_begin += PIECE
    last_piece = piece_begin - PIECE  # where the registers' piece begins

    total = warp_sum(total + a_edge * d_edge)
    if has_edge:
        dpreatt[i] = scale * a_edge * (d_edge - total)
    while piece_begin > vectors_begin:
        piece_begin -= PIECE
        if piece_begin != last_piece:
            load_piece(a, vector, att, piece_begin, vectors_end, float32(0))
            load_piece(d, vector, datt, piece_begin, vectors_end, float32(0))
        for k in range(VALUES):
            a[k] *= scale * (d[k] - total)
        store_piece(dpreatt, piece_begin, vectors_end, a, vector)


def softmax_forward(att, preatt, scale) -> None:
    """Causal softmax over the last axis, lower triangle only.

    att     (B, NH, T, T)   written on and below the diagonal
    preatt  (B, NH, T, T)   scores, read on and below the diagonal
    scale   positive number that multiplies the scores

    Both are float32 and start on a 16-byte boundary. Raises ValueError where sizes or addresses are
    others.
    """
    check_sizes("softmax_forward", preatt=(preatt, att.size))
    check_vectors("softmax_forward", 0, att=att, preatt=preatt)
    T = att.shape[-1]
    rows = att.size // T
    grid = ceil_div(rows, WARPS)
    softmax_forward_kernel[grid, THREADS](att, preatt, scale * LOG2_E, rows, T)


def softmax_backward(dpreatt, datt, att, scale) -> None:
    """Gradient of softmax_forward with respect to preatt, lower triangle only.

    dpreatt  (B, NH, T, T)   written on and below the diagonal; may be datt itself
    datt     (B, NH, T, T)   gradient of att
    att      (B, NH, T, T)   what softmax_forward wrote

    All are float32 and start on a 16-byte boundary. Raises ValueError where sizes or addresses are
    others.
    """
    check_sizes("softmax_backward", dpreatt=(dpreatt, att.size), datt=(datt, att.size))
    check_vectors("softmax_backward", 0, dpreatt=dpreatt, datt=datt, att=att)
    T = att.shape[-1]
    rows = att.size // T
    grid = ceil_div(rows, WARPS)
    softmax_backward_kernel[grid, THREADS](dpreatt, datt, att, scale, rows, T)
