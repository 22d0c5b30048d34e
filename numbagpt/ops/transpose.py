"""A matrix with its rows and columns exchanged.

    out[c, n] = inp[n, c]       (N, C) -> (C, N)

Read along the rows of inp, the numbers would have to be written down the columns of out, N numbers
apart: a transaction with memory for each. So a block takes a square tile, reads its rows into
shared memory, and writes its columns from there: neighbours in memory on both sides.

Four numbers at a time are moved all the way. A thread reads a vector of four from each of four rows
and turns these 4 x 4 numbers in its registers: then it holds a vector of each of four columns. In
shared memory the columns lie one behind the other, a column being 16 chunks of four numbers.

Shared memory lies in 32 banks, 4 bytes in each in turn, so that addresses 128 bytes apart are in
the same bank. Where the lanes of a warp want different numbers of one bank, they are served one
after the other: a bank conflict. Here neighbours in a warp write the same chunk of columns that are
four apart, and 4 columns are 1024 bytes: all of them would write to the same banks. So chunk i of
column c lies at place i ^ (c / 4) of its column, and neighbours write to different banks.
flash_tile.py draws such a swizzle.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.vec import MAX_WIDTH, load, store
from numbagpt.ops.arguments import check_sizes, check_vectors

TILE = 64
SIZE = TILE * TILE
WIDTH = 4  # numbers of a chunk
SQUARE = WIDTH * WIDTH
CHUNKS = TILE // WIDTH
THREADS = CHUNKS * CHUNKS


def transpose_reference(out: np.ndarray, inp: np.ndarray) -> None:
    """What transpose computes, in NumPy."""
    out[...] = inp.T


@device_function
def chunk_at(column, chunk):
    """Where a chunk of a column of the tile lies in shared memory."""
    return (column * CHUNKS + (chunk ^ (column // WIDTH))) * WIDTH


@kernel(void(float32[::1], float32[::1], int32, int32), max_threads=THREADS)
def transpose_kernel(out, inp, N, C):
    """out[c, n] = inp[n, c].

    One block per tile of 64 x 64 numbers, 4 x 4 a thread; grid (tiles along C, tiles along N).
    Reads and writes each number once: 8 N C bytes.
    """
    tile = cuda.shared.array(SIZE, float32, alignment=16)
    square = cuda.local.array(SQUARE, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    n0, c0 = int32(cuda.blockIdx.y * TILE), int32(cuda.blockIdx.x * TILE)
    thread = uint32(cuda.threadIdx.x)
    major, minor = int32(thread // uint32(CHUNKS)), int32(thread % uint32(CHUNKS))

    n, c = int32(n0 + WIDTH * major), int32(c0 + WIDTH * minor)
    for i in range(WIDTH):
        if n + i < N and c < C:
            load(x, inp, int64(n + i) * C + c)
            for k in range(WIDTH):
                square[WIDTH * k + i] = x[k]
    for k in range(WIDTH):
        for i in range(WIDTH):
            x[i] = square[WIDTH * k + i]
        store(tile, chunk_at(int32(WIDTH * minor + k), major), x)
    cuda.syncthreads()

    n = int32(n0 + WIDTH * minor)
    for i in range(WIDTH):
        column = int32(CHUNKS * i + major)
        if c0 + column < C and n < N:
            load(x, tile, chunk_at(column, minor))
            at = int64(c0 + column) * N + n
            if N % WIDTH == 0:
                store(out, at, x)
            else:  # most rows of out do not begin on a multiple of 16 bytes
                for k in range(WIDTH):
                    if n + k < N:
                        out[at + k] = x[k]


def transpose(out, inp) -> None:
    """out (C, N) = the transpose of inp (N, C), both float32.

    C is a multiple of 4, and both start on a 16-byte boundary. Raises ValueError where that is not
    so, or where the sizes differ.
    """
    N, C = inp.shape
    check_sizes("transpose", out=(out, N * C))
    check_vectors("transpose", C, inp=inp)
    check_vectors("transpose", 0, out=out)
    grid = ceil_div(C, TILE), ceil_div(N, TILE)
    transpose_kernel[grid, THREADS](out, inp, N, C)
