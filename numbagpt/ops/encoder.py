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
from numbagpt.gpu.reduce import FULL_MASK, WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

BLOCK = 256
WARPS = BLOCK // WARP_SIZE
# Forward: rows of wte that a warp has under way at a time.
ROWS = 4

# Backward: lanes of a team, which reads 128 bytes of a row at a time; teams of a block; blocks
# along the runs; and the length from which a run is the work of a whole block, not of one team.
TEAM = 8
TEAMS = 64
RUN_THREADS = TEAMS * TEAM
RUN_BLOCKS = 64
LONG_RUN = 64
# Sums of a block, whichever way dout is stored.
ALL_SUMS = RUN_THREADS * MAX_WIDTH
# Rows that a team has under way at a time, in short runs and in long ones; likewise for wpe.
SHORT_ROWS = 4
LONG_ROWS = 8
BATCH_ROWS = 8
# Registers for those rows.
FORWARD_VALUES = ROWS * MAX_WIDTH
RUN_VALUES = LONG_ROWS * MAX_WIDTH
BATCH_VALUES = BATCH_ROWS * MAX_WIDTH


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
    void(float32[::1], int32[::1], float32[::1], float32[::1], int32, int32, int32),
    void(uint16[::1], int32[::1], uint16[::1], uint16[::1], int32, int32, int32),
    max_threads=BLOCK,
    min_blocks=4,
)
def encoder_forward_kernel(out, inp, wte, wpe, B, T, C):
    """out[b, t] = wte[inp[b, t]] + wpe[t].

    A warp takes a position t, and of its channels 32 vectors of 16 bytes, those that blockIdx.x
    says; and of these all sequences b, so that wpe[t] is read once. It fetches its tokens 32 at a
    time, a lane each, hands them round, and has ROWS rows of wte under way at once. Moves 4 B T C
    bytes for the output, 4 C for each different token and 4 T C of wpe, in float32.
    """
    rows = cuda.local.array(FORWARD_VALUES, float32)
    p = cuda.local.array(MAX_WIDTH, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    lane = cuda.threadIdx.x & (WARP_SIZE - 1)
    t = cuda.blockIdx.y * WARPS + cuda.threadIdx.x // WARP_SIZE
    if t >= T:
        return
    c = (cuda.blockIdx.x * WARP_SIZE + lane) * width(out)
    inside = c < C
    c = min(c, C - width(out))  # lanes beyond the row read its end, and write nothing
    load(p, wpe, int64(t) * C + c)
    for first in range(0, B, WARP_SIZE):
        count = min(WARP_SIZE, B - first)
        tokens = inp[int64(first + min(lane, count - 1)) * T + t]
        for b in range(0, count, ROWS):
            for j in range(ROWS):
                token = cuda.shfl_sync(FULL_MASK, tokens, min(b + j, count - 1))
                load(x, wte, int64(token) * C + c)
                for k in range(width(out)):
                    rows[j * MAX_WIDTH + k] = x[k] + p[k]
            for j in range(ROWS):
                if inside and b + j < count:
                    for k in range(width(out)):
                        x[k] = rows[j * MAX_WIDTH + k]
                    store(out, (int64(first + b + j) * T + t) * C + c, x)


@device_function
def add_rows(total, x, rows, dout, order, begin, end, step, c, C, at_once):
    """total += Σ of dout[order[j]] over j = begin, begin + step, … below end; 16 bytes from c on.

    The rows come at_once at a time. Where fewer are left, the last of the run is read again, so
    that no load waits for a test, and counts for nothing.
    """
    for j in range(begin, end, step * at_once):
        for i in range(at_once):
            position = order[min(j + i * step, end - 1)]
            load(x, dout, int64(position) * C + c)
            for k in range(width(dout)):
                rows[i * MAX_WIDTH + k] = x[k]
        for i in range(at_once):
            share = float32(1) if j + i * step < end else float32(0)
            for k in range(width(dout)):
                total[k] += share * rows[i * MAX_WIDTH + k]


@device_function
def load_gradient(total, x, grad, start, dout):
    """total = the values of float32 `grad` from start on that go with one vector of dout."""
    for v in range(0, width(dout), width(grad)):
        load(x, grad, start + v)
        for k in range(width(grad)):
            total[v + k] = x[k]


@device_function
def store_gradient(grad, start, total, x, dout):
    """grad = total, likewise."""
    for v in range(0, width(dout), width(grad)):
        for k in range(width(grad)):
            x[k] = total[v + k]
        store(grad, start + v, x)


@kernel(
    void(float32[::1], float32[::1], int32[::1], int32[::1], int32[::1], int32, int32),
    void(float32[::1], uint16[::1], int32[::1], int32[::1], int32[::1], int32, int32),
    max_threads=RUN_THREADS,
    min_blocks=2,
)
def encoder_backward_wte_kernel(dwte, dout, inp, order, starts, N, C):
    """dwte[token] += Σ of dout over the token's run, for every run of the N = B*T positions.

    blockIdx.x chooses 128 bytes of the channels, 16 for each of a team's 8 lanes. The runs are
    dealt out along y, and come longest first. A long one, like that of the comma, is the work of a
    block: each of its 64 teams sums every 64th position, then the sums are added in the order of
    the teams. Where the short ones begin, and most tokens of a text occur once or twice in a
    batch, each team goes on with runs of its own. Moves 4 N C bytes of dout in float32, and 8 C of
    dwte for each different token.
    """
    rows = cuda.local.array(RUN_VALUES, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    total = cuda.local.array(MAX_WIDTH, float32)
    shared = cuda.shared.array(ALL_SUMS, float32)
    team = cuda.threadIdx.x // TEAM
    channels = TEAM * width(dout)
    c0 = cuda.blockIdx.x * channels
    lane_c = (cuda.threadIdx.x & (TEAM - 1)) * width(dout)
    c = c0 + lane_c

    run = cuda.blockIdx.y
    while run < N and starts[run + 1] - starts[run] >= LONG_RUN:
        begin = starts[run]
        end = starts[run + 1]
        if c < C:
            for k in range(width(dout)):
                total[k] = float32(0)
            add_rows(total, x, rows, dout, order, begin + team, end, TEAMS, c, C, LONG_ROWS)
            for k in range(width(dout)):
                shared[team * channels + lane_c + k] = total[k]
        cuda.syncthreads()
        mine = c0 + cuda.threadIdx.x
        if cuda.threadIdx.x < channels and mine < C:
            column = float32(0)
            for other in range(TEAMS):
                column += shared[other * channels + cuda.threadIdx.x]
            dwte[int64(inp[order[begin]]) * C + mine] += column
        cuda.syncthreads()
        run += cuda.gridDim.y

    run += team * cuda.gridDim.y
    while run < N and starts[run] < N:
        begin = starts[run]
        end = starts[run + 1]
        if c < C:
            start = int64(inp[order[begin]]) * C + c
            load_gradient(total, x, dwte, start, dout)
            add_rows(total, x, rows, dout, order, begin, end, 1, c, C, SHORT_ROWS)
            store_gradient(dwte, start, total, x, dout)
        run += TEAMS * cuda.gridDim.y


@kernel(
    void(float32[::1], float32[::1], int32, int64),
    void(float32[::1], uint16[::1], int32, int64),
    max_threads=BLOCK,
    min_blocks=4,
)
def encoder_backward_wpe_kernel(dwpe, dout, B, TC):
    """dwpe[i] += Σ over b of dout[b, i], i counting the T*C values of a sequence.

    One thread per 16 bytes of a sequence of dout, BATCH_ROWS sequences at a time. Moves 4 B T C
    bytes of dout in float32, and 8 T C of dwpe.
    """
    rows = cuda.local.array(BATCH_VALUES, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    total = cuda.local.array(MAX_WIDTH, float32)
    i = int64(cuda.grid(1)) * width(dout)
    if i < TC:
        load_gradient(total, x, dwpe, i, dout)
        for b in range(0, B, BATCH_ROWS):
            for j in range(BATCH_ROWS):
                load(x, dout, min(b + j, B - 1) * TC + i)
                for k in range(width(dout)):
                    rows[j * MAX_WIDTH + k] = x[k]
            for j in range(BATCH_ROWS):
                share = float32(1) if b + j < B else float32(0)
                for k in range(width(dout)):
                    total[k] += share * rows[j * MAX_WIDTH + k]
        store_gradient(dwpe, i, total, x, dout)


def encoder_forward(out, inp, wte, wpe) -> None:
    """out[b, t] = wte[inp[b, t]] + wpe[t].

    out       (B, T, C), float32 or bf16 bits; C a multiple of 4 (float32) or 8 (bf16)
    inp       (B, T) int32, each less than Vp
    wte, wpe  (Vp, C) and (maxT, C) with maxT >= T, stored as out
    """
    B, T, C = out.shape
    grid = ceil_div(C * out.dtype.itemsize, 16 * WARP_SIZE), ceil_div(T, WARPS)
    encoder_forward_kernel[grid, BLOCK](out, inp, wte, wpe, B, T, C)


def encoder_backward(dwte, dwpe, dout, inp, order, starts) -> None:
    """Adds the gradients of encoder_forward to dwte and dwpe. Deterministic.

    dwte, dwpe     (Vp, C) and (maxT, C) float32
    dout           (B, T, C), float32 or bf16 bits
    inp            (B, T) int32, and
    order, starts  token_runs(inp)

    dout is read twice, since the one sum wants it by token and the other by position. The second
    reader finds it in the cache where the cache is large enough.
    """
    B, T, C = dout.shape
    N = B * T
    vector = 16 // dout.dtype.itemsize
    encoder_backward_wpe_kernel[ceil_div(T * C, BLOCK * vector), BLOCK](dwpe, dout, B, T * C)
    grid = ceil_div(C, TEAM * vector), min(RUN_BLOCKS, ceil_div(N, TEAMS))
    encoder_backward_wte_kernel[grid, RUN_THREADS](dwte, dout, inp, order, starts, N, C)
