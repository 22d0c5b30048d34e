"""Backward pass of the layer normalisation; layernorm.py has the forward pass and its names.

For each row x of C channels, with norm = (x - mean(x)) rstd and dnorm = dout weight:

    dinp    += rstd (dnorm - mean(dnorm) - norm mean(dnorm norm))
    dweight += Σ over rows of dout norm
    dbias   += Σ over rows of dout

The two means take from the gradient what a row cannot respond to: adding a constant to x or
scaling x - mean leaves the output unchanged.

dinp is the gradient of the residual stream, and the matrix that last added to the stream has a
bias, whose gradient is the sum of dinp's rows. While the new dinp is in registers that sum costs
no memory traffic, so it can be had here: dresidual_sum.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, ceil_div, device_function, kernel
from numbagpt.gpu.reduce import WARP_SIZE, warp_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.rows import (
    GPT2_CHANNELS,
    add_part,
    check_channels,
    keep_row,
    lane_of,
    load_part,
    load_row,
    registers_of_row,
    values_per_lane,
    vectors_per_lane,
)

# The multiprocessors of an H200. A constant, not asked of the GPU, so that the order of the
# additions is the same on all of them.
MULTIPROCESSORS = 132
# What one multiprocessor has, in four parts; a warp's registers come from one of them.
REGISTERS = 65536
PARTS = 4
MAX_WARPS = 16
# Two slots of two sums for each warp: see the loop over the rows.
EXCHANGE = 4 * MAX_WARPS
# Warps of a block that adds up partial sums.
SUM_WARPS = 32
SUM_THREADS = SUM_WARPS * WARP_SIZE
# Partial sums that each of them has under way at a time: all, for one block on a multiprocessor.
SUM_ROWS = 5


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


def backward_shape(C: int) -> tuple[int, int, int]:
    """Warps of a team, which holds a row; teams of a block; blocks of a multiprocessor.

    A lane keeps five values for each channel it has: of the three rows and of two sums. With 48
    registers for all else the compiler needs no memory, on any architecture.
    Raises UserError where there are too many channels.
    """
    check_channels(C)
    team = 1
    while C > 1024 * team:
        team *= 2
    registers = 5 * values_per_lane(C, team * WARP_SIZE) + 48
    warps = min(MAX_WARPS, REGISTERS // PARTS // WARP_SIZE // registers * PARTS)
    # Teams of several warps wait for each other; a second block computes meanwhile.
    blocks = 1 if team == 1 else 2
    return team, warps // blocks // team, blocks


@device_function
def store_sum(partials, start, shared, TEAMS, LANES, C):
    """partials[start : start + C] = the sum of the rows shared[team], in the order of the teams."""
    cuda.syncthreads()
    for c in range(cuda.threadIdx.x, C, TEAMS * LANES):
        column = float32(0)
        for team in range(TEAMS):
            column += shared[team * C + c]
        partials[start + c] = column
    cuda.syncthreads()


@functools.cache
def backward_kernel(C: int, accumulate: bool) -> Kernel:
    """The backward kernel for rows of C channels, which adds to dinp or overwrites it."""
    ACCUMULATE = int(accumulate)
    TEAM_WARPS, TEAMS, BLOCKS = backward_shape(C)
    LANES = TEAM_WARPS * WARP_SIZE
    VALUES = values_per_lane(C, LANES)
    SHARED = TEAMS * C

    sizes = int32, int32

    @kernel(
        void(*[float32[::1]] * 7, *sizes),
        void(uint16[::1], float32[::1], *[uint16[::1]] * 3, float32[::1], float32[::1], *sizes),
        max_threads=TEAMS * LANES,
        min_blocks=BLOCKS,
    )
    def layernorm_backward_kernel(dinp, partials, dout, inp, weight, mean, rstd, N, sums):
        """dinp (+)= rstd (dnorm - mean(dnorm) - norm mean(dnorm norm)), and the block's share of
        the column sums: partials[block] = Σ dout norm, Σ dout and, where sums is 3, Σ new dinp.

        A team is one warp up to 1024 channels, else two or four. Its lanes hold a row each of inp,
        dout and dinp, all under way before the first value is needed, and add up dweight and dbias
        of their columns over all the team's rows. weight, as float32, and the sum of dinp are in
        shared memory. At the end the block adds up its teams' sums, in their order. At 768
        channels a multiprocessor has 12 warps of 168 registers, with up to 9 KB (float32) each on
        the way; about 23 KB in all keep the memory of an H200 busy. Moves 16 N C bytes in
        float32, 12 where dinp is not read.
        """
        x = cuda.local.array(VALUES, float32)
        d = cuda.local.array(VALUES, float32)
        g = cuda.local.array(VALUES, float32)
        dweight = cuda.local.array(VALUES, float32)
        dbias = cuda.local.array(VALUES, float32)
        w = cuda.local.array(MAX_WIDTH, float32)
        part = cuda.local.array(MAX_WIDTH, float32)
        weights = cuda.shared.array(C, float32, 16)
        shared = cuda.shared.array(SHARED, float32, 16)
        exchange = cuda.shared.array(EXCHANGE, float32)
        for i in range(registers_of_row(inp, C, LANES)):
            dweight[i] = float32(0)
            dbias[i] = float32(0)

        for c in range(cuda.threadIdx.x * width(inp), C, cuda.blockDim.x * width(inp)):
            load(w, weight, c)
            for k in range(width(inp)):
                weights[c + k] = w[k]
        if sums == 3:
            for c in range(cuda.threadIdx.x, SHARED, cuda.blockDim.x):
                shared[c] = float32(0)
        cuda.syncthreads()

        team = cuda.threadIdx.x // LANES
        first = int32(cuda.blockIdx.x)  # the row of team 0, by which the whole block turns
        lag = int32(cuda.gridDim.x * team)
        if TEAM_WARPS == 1:  # no barrier in the loop: each warp turns by itself
            first = int32(first + lag)
            lag = int32(0)
        slot = int32(0)
        while first < N:
            row = int32(first + lag)
            start = int64(row) * C
            m = float32(0)
            s = float32(0)
            sum_dnorm = float32(0)
            sum_dnorm_norm = float32(0)
            if row < N:
                m = mean[row]
                s = rstd[row]
                load_row(x, w, inp, start, LANES, C)
                load_row(d, w, dout, start, LANES, C)
                if ACCUMULATE:
                    load_row(g, w, dinp, start, LANES, C)
                else:
                    for i in range(registers_of_row(inp, C, LANES)):
                        g[i] = float32(0)
                for n in range(vectors_per_lane(inp, C, LANES)):
                    c = (n * LANES + lane_of(LANES)) * width(inp)
                    if c < C:
                        load_part(w, part, weights, c, width(inp))
                        for k in range(width(inp)):
                            i = n * width(inp) + k
                            x[i] = (x[i] - m) * s
                            dweight[i] += d[i] * x[i]
                            dbias[i] += d[i]
                            d[i] *= w[k]
                            sum_dnorm += d[i]
                            sum_dnorm_norm += d[i] * x[i]
            sum_dnorm = warp_sum(sum_dnorm)
            sum_dnorm_norm = warp_sum(sum_dnorm_norm)
            if TEAM_WARPS > 1:
                # Rows take turns in two slots, so that one barrier is enough: who writes to a slot
                # has passed the barrier of the other, and all have read the first before that.
                if lane_of(WARP_SIZE) == 0:
                    exchange[slot + 2 * (cuda.threadIdx.x // WARP_SIZE)] = sum_dnorm
                    exchange[slot + 2 * (cuda.threadIdx.x // WARP_SIZE) + 1] = sum_dnorm_norm
                cuda.syncthreads()
                sum_dnorm = float32(0)
                sum_dnorm_norm = float32(0)
                for warp in range(team * TEAM_WARPS, (team + 1) * TEAM_WARPS):
                    sum_dnorm += exchange[slot + 2 * warp]
                    sum_dnorm_norm += exchange[slot + 2 * warp + 1]
                slot = int32(2 * MAX_WARPS - slot)
            if row < N:
                mean_dnorm = sum_dnorm / float32(C)
                mean_dnorm_norm = sum_dnorm_norm / float32(C)
                for n in range(vectors_per_lane(inp, C, LANES)):
                    c = (n * LANES + lane_of(LANES)) * width(inp)
                    for k in range(width(inp)):
                        i = n * width(inp) + k
                        w[k] = g[i] + s * (d[i] - mean_dnorm - x[i] * mean_dnorm_norm)
                    if c < C:
                        store(dinp, start + c, w)
                        if sums == 3:
                            add_part(shared, team * C + c, w, part, width(inp))
            first = int32(first + cuda.gridDim.x * TEAMS)

        mine = int64(cuda.blockIdx.x) * sums * C
        if sums == 3:
            store_sum(partials, mine + 2 * C, shared, TEAMS, LANES, C)
        keep_row(shared, team * C, dweight, w, inp, LANES, C)
        store_sum(partials, mine, shared, TEAMS, LANES, C)
        keep_row(shared, team * C, dbias, w, inp, LANES, C)
        store_sum(partials, mine + C, shared, TEAMS, LANES, C)

    layernorm_backward_kernel.__name__ += f"_{C}" if accumulate else f"_{C}_overwrite"
    return layernorm_backward_kernel


@kernel(
    void(*[float32[::1]] * 4, int32, int32, int32),
    max_threads=SUM_THREADS,
)
def layernorm_sum_partials_kernel(dweight, dbias, dresidual_sum, partials, blocks, sums, C):
    """dweight += Σ partials[:, 0], dbias += Σ partials[:, 1] and, where sums is 3,
    dresidual_sum += Σ partials[:, 2], partials being (blocks, sums, C).

    A block takes 32 of the columns, a lane one of them, and warp w the rows w, w + warps, …; the
    warps' sums meet in shared memory and are added in the order of the warps. So the order of all
    additions is fixed, and a rerun gives the same bits. Moves 4 sums C (blocks + 2) bytes.
    """
    shared = cuda.shared.array(SUM_THREADS, float32)
    lane = cuda.threadIdx.x % WARP_SIZE
    warp = cuda.threadIdx.x // WARP_SIZE
    warps = cuda.blockDim.x // WARP_SIZE
    columns = sums * C
    column = cuda.blockIdx.x * WARP_SIZE + lane
    total = float32(0)
    before = float32(0)
    if column < columns:
        if warp == 0:  # the gradient so far, on its way while the partial sums are
            if column < C:
                before = dweight[column]
            elif column < 2 * C:
                before = dbias[column - C]
            else:
                before = dresidual_sum[column - 2 * C]
        row = int32(warp)
        while row < blocks:
            for _ in range(SUM_ROWS):
                share = float32(1) if row < blocks else float32(0)
                total += share * partials[int64(min(row, blocks - 1)) * columns + column]
                row = int32(row + warps)
    shared[cuda.threadIdx.x] = total
    cuda.syncthreads()
    if warp == 0 and column < columns:
        total = float32(0)
        for w in range(warps):
            total += shared[w * WARP_SIZE + lane]
        if column < C:
            dweight[column] = before + total
        elif column < 2 * C:
            dbias[column - C] = before + total
        else:
            dresidual_sum[column - 2 * C] = before + total


for channels in GPT2_CHANNELS:
    backward_kernel(channels, True)


def _blocks(N: int, C: int) -> int:
    """Blocks of the backward kernel: as many as run at once, if there are rows for all teams."""
    _, teams, per_multiprocessor = backward_shape(C)
    return min(MULTIPROCESSORS * per_multiprocessor, ceil_div(N, teams))


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

    Raises UserError where a row does not fit into registers: more than 4096 channels.
    """
    C = inp.shape[-1]
    N = inp.size // C
    team, teams, _ = backward_shape(C)
    blocks = _blocks(N, C)
    sums = 2 if dresidual_sum is None else 3
    backward_kernel(C, accumulate)[blocks, teams * team * WARP_SIZE](
        dinp, scratch, dout, inp, weight, mean, rstd, N, sums
    )
    warps = min(SUM_WARPS, blocks)
    layernorm_sum_partials_kernel[ceil_div(sums * C, WARP_SIZE), warps * WARP_SIZE](
        dweight, dbias, dbias if sums == 2 else dresidual_sum, scratch, blocks, sums, C
    )
