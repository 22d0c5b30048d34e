"""Layer normalisation of the rows of an (N, C) array (Ba, Kiros & Hinton, 2016).

Forward, for each row x, with the means over its C channels:

    mean = mean(x)      rstd = 1 / sqrt(mean((x - mean)²) + 1e-5)
    norm = (x - mean) rstd        out = norm weight + bias

mean and rstd are kept for the backward pass, which needs norm again. The variance is the mean of
the squared differences: the shorter mean(x²) - mean² subtracts two large numbers where |mean| is
large, and loses every digit that matters.

Backward, with dnorm = dout weight:

    dinp    += rstd (dnorm - mean(dnorm) - norm mean(dnorm norm))
    dweight += Σ over rows of dout norm
    dbias   += Σ over rows of dout

The two means take from the gradient what a row cannot respond to: adding a constant to x or
scaling x - mean leaves out unchanged.

Here N = B·T and arrays come as (B, T, C) or (N, C); mean and rstd as (B, T) or (N,). C is a
multiple of 4 (float32) or 8 (bf16).
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.errors import UserError
from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.reduce import WARP_SIZE, block_sum, warp_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

EPSILON = np.float32(1e-5)

# Forward: warps of a block, one row each, and the shared memory that their rows may take.
FORWARD_WARPS = 8
SHARED_BYTES = 48 * 1024

# Backward: as many blocks as an H200 holds at once, 36 warps (at 56 registers a thread) on each of
# its 132 multiprocessors; but at least so many rows for each block that its partial sums are a
# small part of what it moves.
MULTIPROCESSORS = 132
BACKWARD_THREADS = 36 * WARP_SIZE
BACKWARD_MIN_ROWS = 4
MAX_BLOCK = 1024


def layernorm_forward_reference(
    out: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    inp: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
) -> None:
    """What layernorm_forward computes, in NumPy and in the arrays' own precision."""
    C = inp.shape[-1]
    np.mean(inp, axis=-1, out=mean)
    np.subtract(inp, mean[..., None], out=out)
    variance = np.einsum("...c,...c->...", out, out) / C
    np.divide(1, np.sqrt(variance + 1e-5), out=rstd)
    out *= rstd[..., None]
    out *= weight
    out += bias


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
    dinp += dnorm


@kernel(
    void(*[float32[::1]] * 6, int64, int32),
    void(uint16[::1], float32[::1], float32[::1], *[uint16[::1]] * 3, int64, int32),
    max_threads=FORWARD_WARPS * WARP_SIZE,
    min_blocks=5,  # 48 registers a thread: 40 warps to hide the memory's latency
)
def layernorm_forward_kernel(out, mean, rstd, inp, weight, bias, N, C):
    """out = (inp - mean) rstd weight + bias for each row, and its mean and rstd.

    One warp per row. The row is read three times, for the mean, the variance and the output, but
    only once from memory: the first time each lane puts its values into shared memory. The n-th
    value of lane l lies at 32 n + l, so that the 32 lanes always touch the 32 different banks. A
    lane reads back only what it has put there itself, so no barrier is needed. Moves 8 N C bytes
    in float32.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    w = cuda.local.array(MAX_WIDTH, float32)
    b = cuda.local.array(MAX_WIDTH, float32)
    kept = cuda.shared.array(0, float32)
    lane = cuda.threadIdx.x % WARP_SIZE
    warp = cuda.threadIdx.x // WARP_SIZE
    row = int64(cuda.blockIdx.x) * (cuda.blockDim.x // WARP_SIZE) + warp
    if row >= N:
        return
    step = WARP_SIZE * width(inp)
    mine = warp * ((C + step - 1) // step * step) + lane

    total = float32(0)
    n = mine
    for c in range(lane * width(inp), C, step):
        load(x, inp, row * C + c)
        for k in range(width(inp)):
            kept[n + k * WARP_SIZE] = x[k]
            total += x[k]
        n += step
    m = warp_sum(total) / float32(C)

    total = float32(0)
    n = mine
    for _ in range(lane * width(inp), C, step):
        for k in range(width(inp)):
            difference = kept[n + k * WARP_SIZE] - m
            total += difference * difference
        n += step
    s = float32(1) / math.sqrt(warp_sum(total) / float32(C) + EPSILON)

    n = mine
    for c in range(lane * width(inp), C, step):
        load(w, weight, c)
        load(b, bias, c)
        for k in range(width(inp)):
            x[k] = (kept[n + k * WARP_SIZE] - m) * s * w[k] + b[k]
        store(out, row * C + c, x)
        n += step
    if lane == 0:
        mean[row] = m
        rstd[row] = s


@kernel(
    void(*[float32[::1]] * 7, int64, int32),
    void(uint16[::1], float32[::1], *[uint16[::1]] * 3, float32[::1], float32[::1], int64, int32),
    max_threads=MAX_BLOCK,
)
def layernorm_backward_kernel(dinp, partials, dout, inp, weight, mean, rstd, N, C):
    """dinp += rstd (dnorm - mean(dnorm) - norm mean(dnorm norm)), and each block's share of
    dweight and dbias: partials[block, 0] = Σ dout norm, partials[block, 1] = Σ dout.

    A block takes the rows blockIdx.x, blockIdx.x + gridDim.x, … one after the other, a thread the
    same 16 bytes of each. So a row is read once and stays in registers while the block sums it,
    and a thread adds up dweight and dbias of its channels in registers too, over all the block's
    rows. Moves 16 N C bytes in float32.

    One barrier in each block_sum is enough, because they take turns in using two pieces of shared
    memory: a thread that writes one of them has passed the barrier of the other, which no thread
    reaches before it has read what the first one held.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    d = cuda.local.array(MAX_WIDTH, float32)
    w = cuda.local.array(MAX_WIDTH, float32)
    g = cuda.local.array(MAX_WIDTH, float32)
    dweight = cuda.local.array(MAX_WIDTH, float32)
    dbias = cuda.local.array(MAX_WIDTH, float32)
    shared_a = cuda.shared.array(32, float32)
    shared_b = cuda.shared.array(32, float32)
    c = cuda.threadIdx.x * width(inp)
    active = c < C
    for k in range(width(inp)):
        # A thread beyond the row's end keeps these zeros and adds nothing to the sums.
        x[k] = float32(0)
        d[k] = float32(0)
        w[k] = float32(0)
        dweight[k] = float32(0)
        dbias[k] = float32(0)
    if active:
        load(w, weight, c)

    row = int64(cuda.blockIdx.x)
    while row < N:
        m = mean[row]
        s = rstd[row]
        if active:
            load(x, inp, row * C + c)
            load(d, dout, row * C + c)
            load(g, dinp, row * C + c)
        sum_dnorm = float32(0)
        sum_dnorm_norm = float32(0)
        for k in range(width(inp)):
            x[k] = (x[k] - m) * s
            dweight[k] += d[k] * x[k]
            dbias[k] += d[k]
            d[k] *= w[k]
            sum_dnorm += d[k]
            sum_dnorm_norm += d[k] * x[k]
        mean_dnorm = block_sum(sum_dnorm, shared_a) / float32(C)
        mean_dnorm_norm = block_sum(sum_dnorm_norm, shared_b) / float32(C)
        if active:
            for k in range(width(inp)):
                g[k] += s * (d[k] - mean_dnorm - x[k] * mean_dnorm_norm)
            store(dinp, row * C + c, g)
        row += cuda.gridDim.x

    if active:
        mine = int64(cuda.blockIdx.x) * 2 * C + c
        for k in range(width(inp)):
            partials[mine + k] = dweight[k]
            partials[mine + C + k] = dbias[k]


@kernel(
    void(float32[::1], float32[::1], float32[::1], int32, int32),
    max_threads=MAX_BLOCK,
)
def layernorm_sum_partials_kernel(dweight, dbias, partials, blocks, C):
    """dweight += Σ partials[:, 0], dbias += Σ partials[:, 1], partials being (blocks, 2, C).

    A block takes 32 of the 2C columns, a lane one of them, and warp w the rows w, w + warps, …;
    the warps' sums meet in shared memory and are added in the order of the warps. So the order of
    all additions is fixed, and a rerun gives the same bits. Moves 8 C (blocks + 2) bytes.
    """
    shared = cuda.shared.array(MAX_BLOCK, float32)
    lane = cuda.threadIdx.x % WARP_SIZE
    warp = cuda.threadIdx.x // WARP_SIZE
    warps = cuda.blockDim.x // WARP_SIZE
    column = cuda.blockIdx.x * WARP_SIZE + lane
    total = float32(0)
    if column < 2 * C:
        for row in range(warp, blocks, warps):
            total += partials[int64(row) * 2 * C + column]
    shared[cuda.threadIdx.x] = total
    cuda.syncthreads()
    if warp == 0 and column < 2 * C:
        total = float32(0)
        for w in range(warps):
            total += shared[w * WARP_SIZE + lane]
        if column < C:
            dweight[column] += total
        else:
            dbias[column - C] += total


def layernorm_forward(out, mean, rstd, inp, weight, bias) -> None:
    """out = (inp - mean) rstd weight + bias, with each row's mean and rstd.

    out, inp      (…, C), float32 or bf16 bits; out may be inp
    mean, rstd    (…,) float32
    weight, bias  (C,), stored as inp

    Raises UserError where a row does not fit into shared memory: more than 12288 channels.
    """
    C = inp.shape[-1]
    N = inp.size // C
    step = WARP_SIZE * 16 // inp.dtype.itemsize
    row_bytes = ceil_div(C, step) * step * 4
    warps = min(FORWARD_WARPS, SHARED_BYTES // row_bytes)
    if warps == 0:
        raise UserError(
            f"layernorm of {C} channels; expected at most {SHARED_BYTES // 4}, "
            "what a block's shared memory holds; choose a model with fewer channels"
        )
    layernorm_forward_kernel[ceil_div(N, warps), warps * WARP_SIZE, warps * row_bytes](
        out, mean, rstd, inp, weight, bias, N, C
    )


def _backward_block(C: int, vector: int) -> int:
    """Threads of a block: one per vector of the row, rounded up to whole warps."""
    return ceil_div(ceil_div(C, vector), WARP_SIZE) * WARP_SIZE


def _backward_blocks(N: int, C: int) -> int:
    """Blocks of a launch: no more than run at once, with equal numbers of rows."""
    most = MULTIPROCESSORS * max(1, BACKWARD_THREADS // _backward_block(C, 4))
    rows = max(BACKWARD_MIN_ROWS, ceil_div(N, most))
    return ceil_div(N, rows)


def layernorm_backward_scratch(N: int, C: int) -> int:
    """Number of float32 that layernorm_backward needs as scratch for N rows of C channels."""
    return _backward_blocks(N, C) * 2 * C


def layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, scratch) -> None:
    """Adds the gradients of layernorm_forward to dinp, dweight and dbias.

    dinp, dout, inp  (…, C), float32 or bf16 bits
    dweight, dbias   (C,) float32
    weight           (C,), stored as inp
    mean, rstd       (…,) float32, of the forward pass
    scratch          float32, at least layernorm_backward_scratch(N, C) elements; overwritten

    Raises UserError where a row does not fit into a block: more than 4096 channels in float32.
    """
    C = inp.shape[-1]
    N = inp.size // C
    vector = 16 // inp.dtype.itemsize
    if C > MAX_BLOCK * vector:
        raise UserError(
            f"layernorm backward of {C} channels; expected at most {MAX_BLOCK * vector}, "
            f"{vector} for each thread of a block; choose a model with fewer channels"
        )
    blocks = _backward_blocks(N, C)
    layernorm_backward_kernel[blocks, _backward_block(C, vector)](
        dinp, scratch, dout, inp, weight, mean, rstd, N, C
    )
    warps = min(MAX_BLOCK // WARP_SIZE, blocks)
    layernorm_sum_partials_kernel[ceil_div(2 * C, WARP_SIZE), warps * WARP_SIZE](
        dweight, dbias, scratch, blocks, C
    )
