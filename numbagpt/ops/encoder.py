"""Embedding: each position's vector is that of its token plus that of its place.

    out[b, t] = wte[inp[b, t]] + wpe[t]

Backward, with the gradients accumulating:

    dwte[v] += Σ of dout[b, t] over all (b, t) with inp[b, t] = v
    dwpe[t] += Σ over b of dout[b, t]

A token occurs any number of times, so the first sum scatters. Adding with atomics would need no
preparation, but its order, and so its rounding, would differ from run to run. Instead the host
groups the positions by token while it loads the batch (`token_runs`): a run of equal tokens belongs
to one row of dwte, and so every sum has one owner and a fixed order.
"""

import itertools

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

BLOCK = 256
WARPS = BLOCK // WARP_SIZE

# Backward: blocks along the runs, warps of a block, and the length from which a run is the work of
# a whole block, not of one warp.
RUN_BLOCKS = 256
RUN_WARPS = 16
LONG_RUN = 32
# Channels of one warp: 16 bytes of float32 for each lane.
CHANNELS = 4 * WARP_SIZE
ALL_SUMS = RUN_WARPS * CHANNELS


def token_runs(inp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group the positions of a batch by token, on the host.

    inp     (B, T) tokens
    order   (B*T,) int32: the flat positions, those of one token together and rising, the most
            frequent token first
    starts  (B*T+1,) int32: run r is order[starts[r] : starts[r+1]]. Behind the last run all are
            B*T, so that the size does not depend on the number of runs
    """
    tokens = inp.reshape(-1)
    N = tokens.size
    by_token = np.argsort(tokens, kind="stable")
    ordered = tokens[by_token]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(begins, append=N)
    longest_first = np.argsort(-lengths, kind="stable")
    begins, lengths = begins[longest_first], lengths[longest_first]
    starts = np.full(N + 1, N, np.int32)
    starts[0] = 0
    np.cumsum(lengths, out=starts[1 : lengths.size + 1])
    moved = np.repeat(begins - starts[: begins.size], lengths)
    return by_token[np.arange(N) + moved].astype(np.int32), starts


def encoder_forward_reference(
    out: np.ndarray, inp: np.ndarray, wte: np.ndarray, wpe: np.ndarray
) -> None:
    """What encoder_forward computes, in NumPy and in the arrays' own precision."""
    T = inp.shape[1]
    np.take(wte, inp, axis=0, out=out)
    out += wpe[:T]


def encoder_backward_reference(
    dwte: np.ndarray,
    dwpe: np.ndarray,
    dout: np.ndarray,
    inp: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
) -> None:
    """What encoder_backward computes, in NumPy and in the arrays' own precision."""
    B, T, C = dout.shape
    rows = dout.reshape(-1, C)
    bounds = starts[: np.searchsorted(starts, B * T) + 1].tolist()
    for begin, end in itertools.pairwise(bounds):
        positions = order[begin:end]
        dwte[inp.reshape(-1)[positions[0]]] += rows[positions].sum(axis=0)
    dwpe[:T] += dout.sum(axis=0)


@kernel(
    void(float32[::1], int32[::1], float32[::1], float32[::1], int64, int32, int32),
    void(uint16[::1], int32[::1], uint16[::1], uint16[::1], int64, int32, int32),
    max_threads=BLOCK,
)
def encoder_forward_kernel(out, inp, wte, wpe, N, T, C):
    """out[row] = wte[inp[row]] + wpe[row % T] for the N = B*T rows of C channels.

    One warp per row, 16 bytes a lane and step. The N C outputs go to memory; of the tables each
    row in use comes from memory once and is found in the cache after that. Moves 4 N C bytes for
    the output and at most as many for each table, in float32.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    p = cuda.local.array(MAX_WIDTH, float32)
    lane = cuda.threadIdx.x % WARP_SIZE
    row = cuda.grid(1) // WARP_SIZE
    if row >= N:
        return
    token = int64(inp[row])
    position = row % T
    for c in range(lane * width(out), C, WARP_SIZE * width(out)):
        load(x, wte, token * C + c)
        load(p, wpe, position * C + c)
        for k in range(width(out)):
            x[k] += p[k]
        store(out, row * C + c, x)


@device_function
def sum_rows(total, x, dout, order, begin, end, step, c, C):
    """total = Σ of dout[order[j]] over j = begin, begin + step, … below end; 16 bytes from c on."""
    for k in range(width(dout)):
        total[k] = float32(0)
    for j in range(begin, end, step):
        load(x, dout, int64(order[j]) * C + c)
        for k in range(width(dout)):
            total[k] += x[k]


@device_function
def add_to_row(grad, x, total, row, c, C):
    """grad[row] += total; 16 bytes from c on."""
    load(x, grad, int64(row) * C + c)
    for k in range(width(grad)):
        x[k] += total[k]
    store(grad, int64(row) * C + c, x)


@kernel(
    void(float32[::1], float32[::1], int32[::1], int32[::1], int32[::1], int32, int32),
    max_threads=RUN_WARPS * WARP_SIZE,
)
def encoder_backward_wte_kernel(dwte, dout, inp, order, starts, N, C):
    """dwte[token] += Σ of dout over the token's run, for every run of the N = B*T positions.

    blockIdx.y chooses 128 channels, 16 bytes for each lane. The runs are dealt out along x, and
    come longest first. A long one is the work of a block: each warp sums every RUN_WARPS-th
    position, then warp 0 adds the warps' sums in their order. Where the short ones begin, and most
    tokens of a text occur once or twice in a batch, each warp goes on with runs of its own.
    Moves 4 N C bytes of dout, and 8 C of dwte for each different token.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    total = cuda.local.array(MAX_WIDTH, float32)
    shared = cuda.shared.array(ALL_SUMS, float32)
    lane = cuda.threadIdx.x % WARP_SIZE
    warp = cuda.threadIdx.x // WARP_SIZE
    c = cuda.blockIdx.y * CHANNELS + lane * width(dout)

    run = cuda.blockIdx.x
    while run < N and starts[run + 1] - starts[run] >= LONG_RUN:
        begin = starts[run]
        if c < C:
            sum_rows(total, x, dout, order, begin + warp, starts[run + 1], RUN_WARPS, c, C)
            for k in range(width(dout)):
                shared[warp * CHANNELS + k * WARP_SIZE + lane] = total[k]
        cuda.syncthreads()
        if warp == 0 and c < C:
            for w in range(1, RUN_WARPS):
                for k in range(width(dout)):
                    total[k] += shared[w * CHANNELS + k * WARP_SIZE + lane]
            add_to_row(dwte, x, total, inp[order[begin]], c, C)
        cuda.syncthreads()
        run += cuda.gridDim.x

    run += warp * cuda.gridDim.x
    while run < N and starts[run] < N:
        begin = starts[run]
        if c < C:
            sum_rows(total, x, dout, order, begin, starts[run + 1], 1, c, C)
            add_to_row(dwte, x, total, inp[order[begin]], c, C)
        run += RUN_WARPS * cuda.gridDim.x


@kernel(
    void(float32[::1], float32[::1], int32, int64),
    max_threads=BLOCK,
)
def encoder_backward_wpe_kernel(dwpe, dout, B, TC):
    """dwpe[i] += Σ over b of dout[b, i], i counting the T*C values of a sequence.

    One thread per 16 bytes of dwpe. Moves 4 B T C bytes of dout and 8 T C of dwpe.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    total = cuda.local.array(MAX_WIDTH, float32)
    i = cuda.grid(1) * width(dout)
    if i < TC:
        load(total, dwpe, i)
        for b in range(B):
            load(x, dout, b * TC + i)
            for k in range(width(dout)):
                total[k] += x[k]
        store(dwpe, i, total)


def encoder_forward(out, inp, wte, wpe) -> None:
    """out[b, t] = wte[inp[b, t]] + wpe[t].

    out       (B, T, C), float32 or bf16 bits; C a multiple of 4 (float32) or 8 (bf16)
    inp       (B, T) int32, each less than Vp
    wte, wpe  (Vp, C) and (maxT, C) with maxT >= T, stored as out
    """
    B, T, C = out.shape
    N = B * T
    encoder_forward_kernel[ceil_div(N, WARPS), BLOCK](out, inp, wte, wpe, N, T, C)


def encoder_backward(dwte, dwpe, dout, inp, order, starts) -> None:
    """Adds the gradients of encoder_forward to dwte and dwpe. Deterministic.

    dwte, dwpe     (Vp, C) and (maxT, C) float32
    dout           (B, T, C) float32
    inp            (B, T) int32, and
    order, starts  token_runs(inp)
    """
    B, T, C = dout.shape
    N = B * T
    grid = min(RUN_BLOCKS, ceil_div(N, RUN_WARPS)), ceil_div(C, CHANNELS)
    encoder_backward_wte_kernel[grid, RUN_WARPS * WARP_SIZE](dwte, dout, inp, order, starts, N, C)
    encoder_backward_wpe_kernel[ceil_div(T * C, BLOCK * 4), BLOCK](dwpe, dout, B, T * C)
