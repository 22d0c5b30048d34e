"""What the blocks of layernorm's backward pass have summed, added to the gradients.

dweight += Σ over blocks of partials[block, 0]         partials (blocks, sums, C)
dbias   += Σ over blocks of partials[block, 1]
dresidual_sum += Σ over blocks of partials[block, 2]   where sums is 3
"""

from numba import cuda, float32, int32, int64, void

from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.reduce import FULL_MASK, WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store

# Threads of a block, and lanes of a warp that share a row of partials.
THREADS = 256
LANES = 8
# Rows that each of these lanes has under way at a time: all there are of 132 blocks.
ROWS = 5


@kernel(
    void(*[float32[::1]] * 4, int32, int32, int32),
    max_threads=THREADS,
)
def layernorm_sum_partials_kernel(dweight, dbias, dresidual_sum, partials, blocks, sums, C):
    """dweight += Σ partials[:, 0], dbias += Σ partials[:, 1] and, where sums is 3,
    dresidual_sum += Σ partials[:, 2], partials being (blocks, sums, C).

    A block takes 32 of the columns. Eight lanes hold four of them each, so that a warp reads four
    rows at once, and a block 32. Shuffles add up a warp's four rows, and the sums of the warps meet
    in shared memory, to be added in the order of the warps. So the order of all additions is fixed,
    and a rerun gives the same bits. Moves 4 sums C (blocks + 2) bytes.
    """
    shared = cuda.shared.array(THREADS, float32, 16)
    part = cuda.local.array(MAX_WIDTH, float32)
    total = cuda.local.array(4, float32)
    lane = cuda.threadIdx.x % WARP_SIZE
    warp = cuda.threadIdx.x // WARP_SIZE
    columns = sums * C
    # The column that a lane of warp 0 writes, and its gradient so far: on its way meanwhile.
    own = cuda.blockIdx.x * WARP_SIZE + lane
    before = float32(0)
    if warp == 0 and own < columns:
        if own < C:
            before = dweight[own]
        elif own < 2 * C:
            before = dbias[own - C]
        else:
            before = dresidual_sum[own - 2 * C]
    for k in range(4):
        total[k] = float32(0)
    column = cuda.blockIdx.x * WARP_SIZE + lane % LANES * 4
    row = int32(cuda.threadIdx.x // LANES)
    if column < columns:
        while row < blocks:
            for _ in range(ROWS):
                share = float32(1) if row < blocks else float32(0)
                load(part, partials, int64(min(row, blocks - 1)) * columns + column)
                for k in range(4):
                    total[k] += share * part[k]
                row = int32(row + THREADS // LANES)
    for k in range(4):
        total[k] += cuda.shfl_xor_sync(FULL_MASK, total[k], LANES)
        total[k] += cuda.shfl_xor_sync(FULL_MASK, total[k], 2 * LANES)
    if lane < LANES:
        store(shared, warp * WARP_SIZE + lane * 4, total)
    cuda.syncthreads()
    if warp == 0 and own < columns:
        after = float32(0)
        for w in range(THREADS // WARP_SIZE):
            after += shared[w * WARP_SIZE + lane]
        after += before
        if own < C:
            dweight[own] = after
        elif own < 2 * C:
            dbias[own - C] = after
        else:
            dresidual_sum[own - 2 * C] = after


def sum_partials(dweight, dbias, dresidual_sum, partials, blocks: int) -> None:
    """dweight, dbias and, unless it is None, dresidual_sum += the sums over the blocks.

    dweight, dbias, dresidual_sum  (C,) float32; C a multiple of 4
    partials                       float32, starts with (blocks, 3, C), or (blocks, 2, C) where
                                   dresidual_sum is None; on a 16-byte boundary
    """
    C = dweight.size
    sums = 2 if dresidual_sum is None else 3
    if dresidual_sum is None:
        dresidual_sum = dbias  # for the kernel's signature; not used
    layernorm_sum_partials_kernel[ceil_div(sums * C, WARP_SIZE), THREADS](
        dweight, dbias, dresidual_sum, partials, blocks, sums, C
    )
