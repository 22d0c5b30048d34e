"""Backward pass of the embedding; encoder.py has the forward pass and its names.

With the gradients accumulating:

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

# Threads and warps of a block.
BLOCK = 512
WARPS = BLOCK // WARP_SIZE
# A warp sums the runs that begin at its CHUNK places of the order. It looks at the tokens of up to
# two times 32 places; runs that it might not see the end of are long, and the work of blocks.
CHUNK = 8
LONG_RUN = 2 * WARP_SIZE - CHUNK
# Long runs: lanes of a team, which reads 128 bytes of a row at a time; teams of a block; blocks
# along the runs.
TEAM = 8
TEAMS = BLOCK // TEAM
RUN_BLOCKS = 64
# Sums of a block, whichever way dout is stored.
ALL_SUMS = BLOCK * MAX_WIDTH
# Rows under way at a time: of one sum, or of several with what they are added to.
AT_ONCE = 8
SHORT_AT_ONCE = 2
# Registers for those rows.
ROW_VALUES = AT_ONCE * MAX_WIDTH
SHORT_VALUES = SHORT_AT_ONCE * MAX_WIDTH


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


@device_function
def add_rows(total, x, rows, places, dout, order, begin, end, step, c, C):
    """total += Σ of dout[order[j]] over j = begin, begin + step, … below end; 16 bytes from c on.

    The rows come AT_ONCE at a time, their positions a batch ahead. Where fewer are left, the last
    of the run is read again, so that no load waits for a test, and counts for nothing.
    """
    last = int32(end - 1)
    for i in range(AT_ONCE):
        places[i] = order[min(int32(begin + i * step), last)]
    left = int32(end - begin)
    j = int32(begin)
    while left > 0:
        j = int32(j + AT_ONCE * step)
        for i in range(AT_ONCE):
            load(x, dout, int64(places[i]) * C + c)
            for k in range(width(dout)):
                rows[i * MAX_WIDTH + k] = x[k]
        for i in range(AT_ONCE):
            places[i] = order[min(int32(j + i * step), last)]
        for i in range(AT_ONCE):
            share = float32(1) if int32(i * step) < left else float32(0)
            for k in range(width(dout)):
                total[k] += share * rows[i * MAX_WIDTH + k]
        left = int32(left - AT_ONCE * step)


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


@device_function
def sum_sequences(dwpe, dout, i, B, TC, rows, x, total):
    """dwpe[i : i + width] += Σ over b of dout[b, i : i + width], i counting a sequence's T*C."""
    load_gradient(total, x, dwpe, i, dout)
    for b in range(0, B, AT_ONCE):
        for j in range(AT_ONCE):
            load(x, dout, min(b + j, B - 1) * TC + i)
            for k in range(width(dout)):
                rows[j * MAX_WIDTH + k] = x[k]
        for j in range(AT_ONCE):
            share = float32(1) if b + j < B else float32(0)
            for k in range(width(dout)):
                total[k] += share * rows[j * MAX_WIDTH + k]
    store_gradient(dwpe, i, total, x, dout)


@device_function
def sum_long_run(dwte, dout, inp, order, begin, end, c0, C, rows, places, x, total, shared):
    """dwte[token] += Σ of dout over a run, a block together; 128 bytes of the channels from c0 on.

    Each of the 64 teams sums every 64th position, then the teams' sums are added in their order.
    """
    team = cuda.threadIdx.x // TEAM
    channels = TEAM * width(dout)
    lane_c = (cuda.threadIdx.x & (TEAM - 1)) * width(dout)
    mine = cuda.threadIdx.x
    adds = mine < channels and c0 + mine < C
    row = int64(inp[order[begin]]) * C
    for k in range(width(dout)):
        total[k] = float32(0)
    c = min(c0 + lane_c, C - width(dout))  # lanes beyond the row read its end, for nothing
    add_rows(total, x, rows, places, dout, order, begin + team, end, TEAMS, c, C)
    for k in range(width(dout)):
        shared[team * channels + lane_c + k] = total[k]
    # Under way while the block waits for its slowest team.
    column = dwte[row + c0 + mine] if adds else float32(0)
    cuda.syncthreads()
    if adds:
        for other in range(TEAMS):
            column += shared[other * channels + mine]
        dwte[row + c0 + mine] = column
    cuda.syncthreads()


@device_function
def next_begin(begins, place):
    """The first place after `place` where a run begins, by the bits of `begins`; 32 if none."""
    found = int32(cuda.ffs(int32(begins >> (place + 1))))
    return int32(place + found) if found > 0 else int32(WARP_SIZE)


@device_function
def sum_short_runs(
    dwte, dout, inp, order, first, c, inside, N, C, rows, places, grads, x, total, sums
):
    """dwte[token] += Σ of dout for the runs that begin at order[first : first + CHUNK], a warp.

    Lane l has place first - 1 + l of the order, its position and token: a run begins where the
    token is not that of the lane before. Its own places are those of lanes 1 … CHUNK. Runs come
    longest first, so if the first that begins here has CHUNK places or more, no other begins here.
    """
    lane = cuda.threadIdx.x & (WARP_SIZE - 1)
    place = int32(first - 1 + lane)
    position = order[max(0, min(place, N - 1))]
    token = inp[position] if 0 <= place < N else int32(-1)
    begins = cuda.ballot_sync(FULL_MASK, token != cuda.shfl_up_sync(FULL_MASK, token, 1))
    begin = next_begin(begins, int32(0))
    last = min(CHUNK, N - first)
    if begin > last:
        return
    end = next_begin(begins, begin)
    if end - begin >= CHUNK:
        own = cuda.shfl_sync(FULL_MASK, token, begin)
        if end == WARP_SIZE:  # the end may be among the next 32 places
            place = int32(first - 1 + WARP_SIZE + lane)
            token = inp[order[min(place, N - 1)]] if place < N else int32(-1)
            others = cuda.ballot_sync(FULL_MASK, token != own)
            end = int32(WARP_SIZE + next_begin(others, int32(-1)))
        if end - begin < LONG_RUN:
            start = int64(own) * C + c
            load_gradient(total, x, dwte, start, dout)
            first_row, behind = int32(first - 1 + begin), int32(first - 1 + end)
            add_rows(total, x, rows, places, dout, order, first_row, behind, 1, c, C)
            if inside:
                store_gradient(dwte, start, total, x, dout)
        return

    end = next_begin(begins, int32(last))
    for batch in range(begin, end, SHORT_AT_ONCE):
        for i in range(SHORT_AT_ONCE):
            source = int32(min(batch + i, end - 1))
            start = int64(cuda.shfl_sync(FULL_MASK, position, source)) * C + c
            load(x, dout, start)
            for k in range(width(dout)):
                rows[i * MAX_WIDTH + k] = x[k]
            start = int64(cuda.shfl_sync(FULL_MASK, token, source)) * C + c
            if (begins >> source) & 1:
                load_gradient(total, x, dwte, start, dout)
                for k in range(width(dout)):
                    grads[i * MAX_WIDTH + k] = total[k]
            else:
                for k in range(width(dout)):
                    grads[i * MAX_WIDTH + k] = float32(0)
        for i in range(SHORT_AT_ONCE):
            source = int32(batch + i)
            start = int64(cuda.shfl_sync(FULL_MASK, token, source)) * C + c
            # Beyond the end this adds up what nobody reads: a test would delay the loads.
            for k in range(width(dout)):
                carried = float32(0) if (begins >> source) & 1 else sums[k]
                sums[k] = carried + grads[i * MAX_WIDTH + k] + rows[i * MAX_WIDTH + k]
            if inside and source < end and (begins >> (source + 1)) & 1:
                store_gradient(dwte, start, sums, x, dout)


@kernel(
    void(*[float32[::1]] * 3, *[int32[::1]] * 3, *[int32] * 5),
    void(*[float32[::1]] * 2, uint16[::1], *[int32[::1]] * 3, *[int32] * 5),
    max_threads=BLOCK,
    min_blocks=2,
)
def encoder_backward_kernel(dwte, dwpe, dout, inp, order, starts, B, T, C, wpe_blocks, run_blocks):
    """dwpe[t] += Σ over b of dout[b, t], and dwte[token] += Σ of dout over each token's run.

    One launch, so that the sums by position and by token find in the cache what the other has
    read, and no sum waits for the slowest of another kind. The blocks divide the work in the order
    of their start:

    * wpe_blocks with a thread for 16 bytes of a sequence of dout, which adds up all sequences;
    * run_blocks along the long runs, like that of the comma, for each 128 bytes of the channels;
    * warps with CHUNK places of the order each, for the short runs that begin there and 512 bytes
      of the channels. Most tokens of a text occur once or twice in a batch.

    Moves 8 B T C bytes of dout in float32, half of them from the cache if it is large enough, 8 C
    of dwte for each different token, and 8 T C of dwpe.
    """
    rows = cuda.local.array(ROW_VALUES, float32)
    places = cuda.local.array(AT_ONCE, int32)
    grads = cuda.local.array(SHORT_VALUES, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    total = cuda.local.array(MAX_WIDTH, float32)
    sums = cuda.local.array(MAX_WIDTH, float32)
    shared = cuda.shared.array(ALL_SUMS, float32)
    N = int32(B * T)
    block = int32(cuda.blockIdx.x)
    slices = int32((C + TEAM * width(dout) - 1) // (TEAM * width(dout)))

    if block < wpe_blocks:
        i = (int64(block) * BLOCK + cuda.threadIdx.x) * width(dout)
        if i < int64(T) * C:
            sum_sequences(dwpe, dout, i, B, int64(T) * C, rows, x, total)
        return

    block = int32(block - wpe_blocks)
    if block < run_blocks * slices:
        c0 = block % slices * TEAM * width(dout)
        run = block // slices
        while run < N and starts[run + 1] - starts[run] >= LONG_RUN:
            begin, end = starts[run], starts[run + 1]
            sum_long_run(dwte, dout, inp, order, begin, end, c0, C, rows, places, x, total, shared)
            run += run_blocks
        return

    block = int32(block - run_blocks * slices)
    slices = int32((C + WARP_SIZE * width(dout) - 1) // (WARP_SIZE * width(dout)))
    warp = int32(block * WARPS + cuda.threadIdx.x // WARP_SIZE)
    first = int32(warp // slices * CHUNK)
    if first < N:
        c = (warp % slices * WARP_SIZE + (cuda.threadIdx.x & (WARP_SIZE - 1))) * width(dout)
        inside = c < C
        c = min(c, C - width(dout))  # lanes beyond the row read its end, and write nothing
        sum_short_runs(
            dwte, dout, inp, order, first, c, inside, N, C, rows, places, grads, x, total, sums
        )


def encoder_backward(dwte, dwpe, dout, inp, order, starts) -> None:
    """Adds the gradients of encoder_forward to dwte and dwpe. Deterministic.

    dwte, dwpe     (Vp, C) and (maxT, C) float32
    dout           (B, T, C), float32 or bf16 bits
    inp            (B, T) int32, and
    order, starts  token_runs(inp)
    """
    B, T, C = dout.shape
    N = B * T
    vector = 16 // dout.dtype.itemsize
    wpe_blocks = ceil_div(T * C, BLOCK * vector)
    run_blocks = min(RUN_BLOCKS, N // LONG_RUN)
    slices = ceil_div(C, WARP_SIZE * vector)
    short_blocks = ceil_div(ceil_div(N, CHUNK) * slices, WARPS)
    blocks = wpe_blocks + run_blocks * ceil_div(C, TEAM * vector) + short_blocks
    encoder_backward_kernel[blocks, BLOCK](
        dwte, dwpe, dout, inp, order, starts, B, T, C, wpe_blocks, run_blocks
    )
