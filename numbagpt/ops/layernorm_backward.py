"""Backward pass of the layer normalisation; layernorm.py has the forward pass and its names.

For each row x of C channels, with norm = (x - mean(x)) * rstd and dnorm = dout * weight:

    dinp    += rstd * (dnorm - mean(dnorm) - norm * mean(dnorm * norm))
    dweight += Σ over rows of dout * norm
    dbias   += Σ over rows of dout

The two means take from the gradient what a row cannot respond to: adding a constant to x or
scaling x - mean leaves the output unchanged.

dinp is the gradient of the residual stream, and the matrix that last added to the stream has a
bias, whose gradient is the sum of dinp's rows. While the new dinp is in registers that sum costs
no memory traffic, so it can be had here: dresidual_sum.

Each block leaves its share of the sums over rows in scratch; layernorm_partials.py adds these up.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, ceil_div, device_function, kernel
from numbagpt.gpu.reduce import WARP_SIZE, warp_sum
from numbagpt.gpu.vec import MAX_WIDTH, fetch, load, store, unpack, width
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors
from numbagpt.ops.layernorm_partials import sum_partials
from numbagpt.ops.rows import PRESET_CHANNELS, check_channels

# The multiprocessors of an H200. A constant, not asked of the GPU, so that the order of the
# additions is the same on all of them.
MULTIPROCESSORS = 132
# Warps of a block, which has a multiprocessor to itself; more where a row needs more. With so few a
# thread may have 128 registers, and the sums of all their columns fit into 48 KB of shared memory.
WARPS = 15
# Columns of each lane: one vector of a row in bf16, two in float32.
COLUMNS = MAX_WIDTH
# Vectors that a lane holds of inp, dout and dinp at a time: two rows in bf16, one in float32.
VECTORS = 2
ROWS = 2
VALUES = ROWS * COLUMNS
WORDS = 4 * VECTORS
# Sums that a team takes in a turn: of each of its rows the sum of dnorm and of dnorm * norm.
SUMS = 2 * ROWS


def layernorm_backward_reference(
    dinp: np.ndarray,
    dweight: np.ndarray,
    dbias: np.ndarray,
    dout: np.ndarray,
    inp: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    scratch: np.ndarray | None = None,
    dresidual_sum: np.ndarray | None = None,
    accumulate: bool = True,
) -> None:
    """What layernorm_backward computes, in NumPy and in the arrays' own precision.

    scratch is not used.
    """
    C = inp.shape[-1]
    norm = inp - mean[..., None]
    norm *= rstd[..., None]
    dweight += np.einsum("nc,nc->c", dout.reshape(-1, C), norm.reshape(-1, C))
    dbias += np.add.reduce(dout.reshape(-1, C), axis=0)
    dnorm = dout * weight
    mean_dnorm = dnorm.mean(axis=-1, keepdims=True)
    mean_dnorm_norm = np.einsum("...c,...c->...", dnorm, norm)[..., None] / C
    norm *= mean_dnorm_norm
    dnorm -= norm
    dnorm -= mean_dnorm
    dnorm *= rstd[..., None]
    if accumulate:
        dinp += dnorm
    else:
        dinp[...] = dnorm
    if dresidual_sum is not None:
        dresidual_sum += np.add.reduce(dinp.reshape(-1, C), axis=0)


def backward_shape(C: int) -> tuple[int, int]:
    """Lanes of a team, which holds a row; teams of a block.

    Raises UserError where there are too many channels.
    """
    check_channels(C)
    warps = ceil_div(C, COLUMNS * WARP_SIZE)
    return warps * WARP_SIZE, max(1, WARPS // warps)


@device_function
def rows_of_turn(arr):
    """Rows that a team holds at a time, a constant of the kernel."""
    return VECTORS * width(arr) // COLUMNS


@device_function
def vector_column(n, arr, LANES):
    """First column of this lane's n-th vector of a row; it may lie beyond the row."""
    return int32((n * LANES + cuda.threadIdx.x) * width(arr))


@device_function
def fetch_rows(words, arr, row, N, LANES, C):
    """words = this lane's vectors of the rows row, row + blocks, …; zeros beyond N and C."""
    for v in range(VECTORS):
        own = int32(row + v * width(arr) // COLUMNS * cuda.gridDim.x)
        c = vector_column(v % (COLUMNS // width(arr)), arr, LANES)
        if own < N and c < C:
            fetch(words, 4 * v, arr, int64(own) * C + c)
        else:
            for k in range(4):
                words[4 * v + k] = int32(0)


@device_function
def fetch_statistics(row_mean, row_rstd, mean, rstd, row, N, arr):
    """mean and rstd of the same rows of arr; beyond N those of the last, for rows of zeros."""
    for r in range(rows_of_turn(arr)):
        own = min(int32(row + r * cuda.gridDim.x), N - 1)
        row_mean[r] = mean[own]
        row_rstd[r] = rstd[own]


@device_function
def unpack_rows(x, words, arr):
    """x = the values of the vectors that fetch_rows has fetched, a row after the other."""
    for v in range(VECTORS):
        unpack(x, v * width(arr), words, 4 * v, arr)


@device_function
def keep_columns(shared, start, x, part, arr, LANES, C):
    """shared[start : start + C] = the lanes' values x, which lie as a row of arr does."""
    for n in range(COLUMNS // width(arr)):
        c = vector_column(n, arr, LANES)
        if c < C:
            for v in range(0, width(arr), width(shared)):
                for k in range(width(shared)):
                    part[k] = x[n * width(arr) + v + k]
                store(shared, start + c + v, part)


@functools.cache
def backward_kernel(C: int, accumulate: bool) -> Kernel:
    """The backward kernel for rows of C channels, which adds to dinp or overwrites it."""
    ACCUMULATE = int(accumulate)
    LANES, TEAMS = backward_shape(C)
    TEAM_WARPS = LANES // WARP_SIZE
    SLOT = SUMS * TEAMS * TEAM_WARPS
    SHARED = TEAMS * 3 * C

    sizes = int32, int32

    @kernel(
        void(*[float32[::1]] * 7, *sizes),
        void(uint16[::1], float32[::1], *[uint16[::1]] * 3, float32[::1], float32[::1], *sizes),
        max_threads=TEAMS * LANES,
    )
    def layernorm_backward_kernel(dinp, partials, dout, inp, weight, mean, rstd, N, sums):
        """dinp (+)= rstd * (dnorm - mean(dnorm) - norm * mean(dnorm * norm)), and the block's share
        of the column sums: partials[block] = Σ dout * norm, Σ dout and, where sums is 3, Σ of
        the new dinp.

        threadIdx.y is the team, one warp for every 256 channels; threadIdx.x is the lane in it. A
        lane has the same 8 columns of all the team's rows, with their weights and three sums in
        registers. While a team works on one or two rows of inp, dout and dinp, the next are on
        their way: with 15 warps 46 KB to each multiprocessor, where some 23 KB keep the memory of
        an H200 busy. At the end the block adds up its teams' sums, in their order. Moves 16 N C
        bytes in float32, 12 where dinp is not read.
        """
        x = cuda.local.array(VALUES, float32)
        d = cuda.local.array(VALUES, float32)
        g = cuda.local.array(VALUES, float32)
        x_words = cuda.local.array(WORDS, int32)
        d_words = cuda.local.array(WORDS, int32)
        g_words = cuda.local.array(WORDS, int32)
        row_mean = cuda.local.array(ROWS, float32)
        row_rstd = cuda.local.array(ROWS, float32)
        next_mean = cuda.local.array(ROWS, float32)
        next_rstd = cuda.local.array(ROWS, float32)
        row_sums = cuda.local.array(SUMS, float32)
        w = cuda.local.array(COLUMNS, float32)
        dweight = cuda.local.array(COLUMNS, float32)
        dbias = cuda.local.array(COLUMNS, float32)
        dresidual = cuda.local.array(COLUMNS, float32)
        part = cuda.local.array(MAX_WIDTH, float32)
        # For what the warps of a team tell each other; after the last row, for the columns' sums.
        shared = cuda.shared.array(SHARED, float32, 16)

        team = cuda.threadIdx.y
        thread = int32(team * LANES + cuda.threadIdx.x)
        turn_rows = int32(cuda.gridDim.x * TEAMS * rows_of_turn(inp))
        first = int32(cuda.blockIdx.x)  # of team 0: all teams turn together, for the barrier
        row = int32(first + cuda.gridDim.x * team * rows_of_turn(inp))
        fetch_rows(x_words, inp, row, N, LANES, C)
        fetch_rows(d_words, dout, row, N, LANES, C)
        if ACCUMULATE:
            fetch_rows(g_words, dinp, row, N, LANES, C)
        fetch_statistics(next_mean, next_rstd, mean, rstd, row, N, inp)

        for i in range(COLUMNS):
            w[i] = float32(0)
            dweight[i] = float32(0)
            dbias[i] = float32(0)
            dresidual[i] = float32(0)
        for n in range(COLUMNS // width(inp)):
            c = vector_column(n, inp, LANES)
            if c < C:
                load(part, weight, c)
                for k in range(width(inp)):
                    w[n * width(inp) + k] = part[k]

        slot = int32(0)
        while first < N:
            unpack_rows(x, x_words, inp)
            unpack_rows(d, d_words, dout)
            if ACCUMULATE:
                unpack_rows(g, g_words, dinp)
            else:
                for i in range(VALUES):
                    g[i] = float32(0)
            for r in range(rows_of_turn(inp)):
                row_mean[r] = next_mean[r]
                row_rstd[r] = next_rstd[r]
            after = int32(row + turn_rows)
            fetch_rows(x_words, inp, after, N, LANES, C)
            fetch_rows(d_words, dout, after, N, LANES, C)
            if ACCUMULATE:
                fetch_rows(g_words, dinp, after, N, LANES, C)
            fetch_statistics(next_mean, next_rstd, mean, rstd, after, N, inp)

            for k in range(SUMS):
                row_sums[k] = float32(0)
            for r in range(rows_of_turn(inp)):
                for i in range(COLUMNS):
                    j = r * COLUMNS + i
                    x[j] = (x[j] - row_mean[r]) * row_rstd[r]
                    dweight[i] += d[j] * x[j]
                    dbias[i] += d[j]
                    d[j] *= w[i]
                    row_sums[2 * r] += d[j]
                    row_sums[2 * r + 1] += d[j] * x[j]
            for k in range(2 * rows_of_turn(inp)):
                row_sums[k] = warp_sum(row_sums[k])
            if cuda.threadIdx.x % WARP_SIZE == 0:
                store(shared, slot + SUMS * (thread // WARP_SIZE), row_sums)
            cuda.syncthreads()
            for k in range(SUMS):
                row_sums[k] = float32(0)
            # TEAM_WARPS in a form unknown to the compiler, which would otherwise load all the
            # warps' sums at once, into registers that are not there.
            for warp in range(cuda.blockDim.x // WARP_SIZE):
                load(part, shared, slot + SUMS * (team * TEAM_WARPS + warp))
                for k in range(SUMS):
                    row_sums[k] += part[k]
            # Turns alternate between two slots, so that one barrier is enough: who writes to a slot
            # has passed the barrier of the other, and all have read the first before that.
            slot = int32(SLOT - slot)

            for v in range(VECTORS):
                r = v * width(inp) // COLUMNS
                n = v % (COLUMNS // width(inp))
                c = vector_column(n, inp, LANES)
                own = int32(row + r * cuda.gridDim.x)
                mean_dnorm = row_sums[2 * r] / float32(C)
                mean_dnorm_norm = row_sums[2 * r + 1] / float32(C)
                for k in range(width(inp)):
                    j = v * width(inp) + k
                    part[k] = g[j] + row_rstd[r] * (d[j] - mean_dnorm - x[j] * mean_dnorm_norm)
                if own < N and c < C:
                    for k in range(width(inp)):
                        dresidual[n * width(inp) + k] += part[k]
                    store(dinp, int64(own) * C + c, part)
            first = int32(first + turn_rows)
            row = after

        cuda.syncthreads()
        start = team * 3 * C
        keep_columns(shared, start, dweight, part, inp, LANES, C)
        keep_columns(shared, start + C, dbias, part, inp, LANES, C)
        keep_columns(shared, start + 2 * C, dresidual, part, inp, LANES, C)
        cuda.syncthreads()
        for c in range(4 * thread, sums * C, 4 * TEAMS * LANES):
            for k in range(4):
                w[k] = float32(0)
            for t in range(TEAMS):
                load(part, shared, t * 3 * C + c)
                for k in range(4):
                    w[k] += part[k]
            store(partials, int64(cuda.blockIdx.x) * sums * C + c, w)

    layernorm_backward_kernel.__name__ += f"_{C}" if accumulate else f"_{C}_overwrite"
    return layernorm_backward_kernel


for channels in PRESET_CHANNELS:
    for accumulates in (True, False):
        backward_kernel(channels, accumulates)


def _blocks(N: int, C: int) -> int:
    """Blocks of the backward kernel: as many as run at once, if there are rows for all teams."""
    _, teams = backward_shape(C)
    return min(MULTIPROCESSORS, ceil_div(N, teams))


def layernorm_backward_scratch(N: int, C: int) -> int:
    """Number of float32 that layernorm_backward needs as scratch for N rows of C channels."""
    return _blocks(N, C) * 3 * C


def layernorm_backward(
    dinp,
    dweight,
    dbias,
    dout,
    inp,
    weight,
    mean,
    rstd,
    scratch,
    dresidual_sum=None,
    accumulate=True,
) -> None:
    """Adds the gradients of layernorm_forward to dinp, dweight and dbias. Deterministic.

    dinp, dout, inp  (…, C), float32 or bf16 bits
    dweight, dbias   (C,) float32
    weight           (C,), stored as inp
    mean, rstd       (…,) float32, of the forward pass
    scratch          float32, at least layernorm_backward_scratch(N, C) elements; overwritten
    dresidual_sum    (C,) float32 or None: += the column sums of the new dinp, before it is rounded
    accumulate       False: dinp is overwritten, and need not be zero before

    dinp, dout, inp, weight and scratch start on a 16-byte boundary. Raises ValueError where sizes
    or addresses are others, or C is no multiple of 4 (float32) or 8 (bf16); UserError where a row
    does not fit into registers: more than 4096 channels.
    """
    C = inp.shape[-1]
    N = inp.size // C
    blocks = _blocks(N, C)
    sums = 2 if dresidual_sum is None else 3
    name = "layernorm_backward"
    check_sizes(name, dinp=(dinp, N * C), dout=(dout, N * C), mean=(mean, N), rstd=(rstd, N))
    check_sizes(name, dweight=(dweight, C), dbias=(dbias, C), weight=(weight, C))
    if dresidual_sum is not None:
        check_sizes(name, dresidual_sum=(dresidual_sum, C))
    check_room(name, scratch=(scratch, layernorm_backward_scratch(N, C)))
    check_vectors(name, C, dinp=dinp, dout=dout, inp=inp, weight=weight, scratch=scratch)
    backward_kernel(C, accumulate)[blocks, backward_shape(C)](
        dinp, scratch, dout, inp, weight, mean, rstd, N, sums
    )
    sum_partials(dweight, dbias, dresidual_sum, scratch, blocks)
