"""Sums and maxima over a warp or a block.

A warp is 32 threads scheduled together. A lane is one of them, or its number in the warp. By a
shuffle a lane reads a register of another lane. Some lanes may fall behind, so a shuffle waits for
all that its mask names, a bit for each. A butterfly of shuffles adds up their values in five steps
with no memory at all: first each lane adds the value of the lane 16 away, then 8, 4, 2, 1, and
every lane ends with the total.

    lane     0    1    2    3   (a warp of four, to fit the page)
    value    a    b    c    d
    xor 2   a+c  b+d  c+a  d+b
    xor 1   a+b+c+d in every lane

A block is up to 32 warps. Each warp reduces its own values, and its first lane leaves the result in
shared memory, a small fast store common to the threads of a block. After a barrier, where all
threads of the block wait for each other (`syncthreads`), every warp reduces those results the same
way. The order of the additions is fixed by the lane numbers, so a rerun gives the same bits.
"""

from numba import cuda, float32

from numbagpt.gpu.kernel import device_function

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF
# The most negative float32: a maximum's starting value. Not -inf, since inf - inf is NaN.
LOWEST = float32(-3.4028234663852886e38)


@device_function
def warp_sum(value):
    """Sum of `value` over the warp, in every lane. All 32 lanes must call it."""
    for i in range(5):
        value += cuda.shfl_xor_sync(FULL_MASK, value, 16 >> i)
    return value


@device_function
def warp_max(value):
    """Maximum of `value` over the warp, in every lane. All 32 lanes must call it."""
    for i in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, 16 >> i))
    return value


@device_function
def block_sum(value, shared):
    """Sum of `value` over the block, in every thread. All threads must call it.

    The block has one dimension, from which a thread's warp and lane are taken, and whole warps: a
    multiple of 32 threads, at most 1024.
    shared: float32 shared memory, 32 elements, free for use again after the next barrier.
    """
    lane = cuda.threadIdx.x & 31
    warps = cuda.blockDim.x >> 5
    value = warp_sum(value)
    if lane == 0:
        shared[cuda.threadIdx.x >> 5] = value
    cuda.syncthreads()
    return warp_sum(shared[lane] if lane < warps else float32(0))


@device_function
def block_max(value, shared):
    """Maximum of `value` over the block, in every thread. All threads must call it.

    The block has one dimension, from which a thread's warp and lane are taken, and whole warps: a
    multiple of 32 threads, at most 1024.
    shared: float32 shared memory, 32 elements, free for use again after the next barrier.
    """
    lane = cuda.threadIdx.x & 31
    warps = cuda.blockDim.x >> 5
    value = warp_max(value)
    if lane == 0:
        shared[cuda.threadIdx.x >> 5] = value
    cuda.syncthreads()
    return warp_max(shared[lane] if lane < warps else LOWEST)
