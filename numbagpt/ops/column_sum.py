"""Sums over the rows of a matrix, column by column: what the gradient of a bias is.

The rows are cut into chunks, and a grid of blocks sums each chunk of each strip of columns; a
second kernel adds those partial sums to the gradient. Float atomics would need no second kernel,
but they add in the order in which the blocks happen to finish, and so round differently in every
run. Here that order is fixed: a rerun gives the same bits.
"""

from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, width

WARPS = 8
THREADS = WARPS * WARP_SIZE
SHARED_SIZE = THREADS * MAX_WIDTH


@device_function
def first_column(arr):
    """First of this thread's columns of arr, which are as many as there are in 16 bytes.

    A warp takes 32 vectors of a row at a time, the strip of columns that blockIdx.x numbers.
    """
    return (cuda.blockIdx.x * WARP_SIZE + cuda.threadIdx.x % WARP_SIZE) * width(arr)


@device_function
def add_warps(out, start, OC, sums, arr, shared, accumulate):
    """out[start + o] = the sums of column o of arr of all warps (+= where accumulate is not 0).

    sums    those of first_column(arr) and the columns that follow it: a warp's own rows
    shared  float32 shared memory, SHARED_SIZE elements, in which the sums of the warps meet, to be
            added in the order of the warps

    All threads must call it.
    """
    columns = WARP_SIZE * width(arr)
    for k in range(width(arr)):
        shared[cuda.threadIdx.x * width(arr) + k] = sums[k]
    cuda.syncthreads()
    thread = cuda.threadIdx.x
    o = cuda.blockIdx.x * columns + thread
    if thread < columns and o < OC:
        total = float32(0)
        for w in range(WARPS):
            total += shared[w * columns + thread]
        if accumulate != 0:
            out[start + o] += total
        else:
            out[start + o] = total


@kernel(
    void(float32[::1], float32[::1], int64, int32, int32, int32),
    void(float32[::1], uint16[::1], int64, int32, int32, int32),
    max_threads=THREADS,
)
def column_sum_kernel(out, inp, N, OC, chunk_rows, accumulate):
    """out[chunk, o] = sum of inp[n, o] over the chunk's rows (+= where accumulate is not 0).

    Grid (strips of columns, chunks of rows). Each lane has `width` columns of its own, and the
    block's warps take the chunk's rows in turn. Reads each value once: 4 N OC bytes (float32).
    """
    shared = cuda.shared.array(SHARED_SIZE, float32)
    sums = cuda.local.array(MAX_WIDTH, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    warp = cuda.threadIdx.x // WARP_SIZE
    column = first_column(inp)
    for k in range(width(inp)):
        sums[k] = float32(0)
    if column < OC:
        first_row = int64(cuda.blockIdx.y) * chunk_rows
        for n in range(first_row + warp, min(first_row + chunk_rows, N), WARPS):
            load(x, inp, n * OC + column)
            for k in range(width(inp)):
                sums[k] += x[k]
    add_warps(out, int64(cuda.blockIdx.y) * OC, OC, sums, inp, shared, accumulate)


def chunk_grid(N: int, OC: int, itemsize: int, blocks: int) -> tuple[int, int]:
    """Into how many strips of columns and chunks of rows N rows of OC values are cut.

    That makes at most `blocks` in all, where the strips alone are not more, and one chunk at most
    for every 4 WARPS rows, begun or whole: a warp has four rows or more, fewer where N is small.
    """
    strips = ceil_div(OC * itemsize, WARP_SIZE * 16)
    return strips, max(1, min(blocks // strips, ceil_div(N, 4 * WARPS)))


def partials_size(N: int, OC: int, blocks: int) -> int:
    """Number of partial sums that such a grid leaves, in either storage type."""
    # bf16 rows make for fewer strips, hence more chunks, than float32 ones
    _, chunks = chunk_grid(N, OC, 2, blocks)
    return chunks * OC


def add_partials(out, partials, chunks: int) -> None:
    """out += sum over the chunks of partials, which is (chunks, OC); both float32."""
    OC = out.size
    strips, _ = chunk_grid(chunks, OC, out.dtype.itemsize, 1)
    column_sum_kernel[strips, THREADS](out, partials, chunks, OC, chunks, 1)
