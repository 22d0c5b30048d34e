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
from numba import cuda, float32, int32, int64, uint16, uint32, void

from numbagpt.gpu.kernel import ceil_div, device_function, kernel
from numbagpt.gpu.ptx import look_up
from numbagpt.gpu.reduce import FULL_MASK, WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors

# Threads of a block, and how many blocks are to fit on a multiprocessor: what its registers allow.
BLOCK = 256
RESIDENT_BLOCKS = 5
WARPS = BLOCK // WARP_SIZE
# Threads that read one row together, 16 bytes each. The blocks work through the channels slice by
# slice of so many bytes, so that the cache need only hold a slice of dout for its second use.
LANES = 32
GROUPS = BLOCK // LANES
# A run of this length or more is long: the work of a block. Its threads read rows in teams of
# fewer lanes, each team its own rows, so that there are more teams, and fewer rows for each.
LONG_RUN = 56
TEAM = 4
TEAMS = BLOCK // TEAM
WARP_TEAMS = WARP_SIZE // TEAM
PARTS = LANES // TEAM
# Blocks along the long runs for each part of a slice, and along the short runs for each slice.
LONG_BLOCKS = 24
SHORT_BLOCKS = 512
# Rows under way at a time: of a long run, of a short one, of a position's. Registers for them.
LONG_ROWS = 5
SHORT_ROWS = 4
SEQUENCES = 4
ROW_VALUES = max(LONG_ROWS, SHORT_ROWS, SEQUENCES) * MAX_WIDTH
# The most that dout may have: load_rows numbers its vectors of 16 bytes in an int32.
MAX_BYTES = 16 << 31
# Sums of the warps of a block, whichever way dout is stored.
ALL_SUMS = WARPS * TEAM * MAX_WIDTH


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
def load_rows(rows, dout, places, vector, vectors):
    """rows = the 16 bytes number `vector` of the rows of dout at `places`, all under way at once.

    A row has `vectors` times 16 bytes. Counted so, 32 bits are enough for a place in dout, which
    has MAX_BYTES at the most.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    for i in range(places.size):
        load(x, dout, int64(int32(places[i] * vectors + vector)) * width(dout))
        for k in range(width(dout)):
            rows[i * MAX_WIDTH + k] = x[k]


@device_function
def add_rows(total, rows, places, left, step, dout):
    """total += those of the loaded rows that are among the `left` that remain, one each `step`."""
    for i in range(places.size):
        share = float32(1) if int32(i * step) < left else float32(0)
        for k in range(width(dout)):
            total[k] += share * rows[i * MAX_WIDTH + k]


@device_function
def sum_run(total, places, dout, order, begin, end, step, vector, vectors):
    """total += Σ of dout[order[j]] over j = begin, begin + step, … below end; 16 bytes of each row.

    The positions are looked up one batch of rows ahead. Where fewer than a batch are left, the last
    of the run is read again, so that no load waits for a test, and counts for nothing.
    """
    rows = cuda.local.array(ROW_VALUES, float32)
    last = int32(end - 1)
    for i in range(places.size):
        places[i] = look_up(order, min(int32(begin + i * step), last))
    while begin < end:
        load_rows(rows, dout, places, vector, vectors)
        left = int32(end - begin)
        begin = int32(begin + places.size * step)
        for i in range(places.size):
            places[i] = look_up(order, min(int32(begin + i * step), last))
        add_rows(total, rows, places, left, step, dout)


@device_function
def sum_sequences(total, dout, t, B, T, vector, vectors):
    """total += Σ over b of dout[b, t]; 16 bytes of each row."""
    places = cuda.local.array(SEQUENCES, int32)
    rows = cuda.local.array(ROW_VALUES, float32)
    for b in range(0, B, places.size):
        for i in range(places.size):
            places[i] = int32(min(int32(b + i), int32(B - 1)) * T + t)
        load_rows(rows, dout, places, vector, vectors)
        add_rows(total, rows, places, int32(B - b), 1, dout)


@device_function
def load_gradient(total, grad, start, dout):
    """total = the values of float32 `grad` from start on that go with one vector of dout."""
    x = cuda.local.array(MAX_WIDTH, float32)
    for v in range(0, width(dout), width(grad)):
        load(x, grad, start + v)
        for k in range(width(grad)):
            total[v + k] = x[k]


@device_function
def store_gradient(grad, start, total, dout):
    """grad = total, likewise."""
    x = cuda.local.array(MAX_WIDTH, float32)
    for v in range(0, width(dout), width(grad)):
        for k in range(width(grad)):
            x[k] = total[v + k]
        store(grad, start + v, x)


@device_function
def sum_long_run(dwte, dout, inp, order, begin, end, first_vector, vectors):
    """dwte[token] += Σ of dout over a run, a block together; TEAM vectors of each row.

    Each of the TEAMS teams sums every TEAMS-th position. Then the sums of a warp's teams are added,
    and those of the warps.
    """
    places = cuda.local.array(LONG_ROWS, int32)
    total = cuda.local.array(MAX_WIDTH, float32)
    shared = cuda.shared.array(ALL_SUMS, float32)
    thread = uint32(cuda.threadIdx.x)  # unsigned: an index that may be negative is tested
    lane = thread % TEAM
    for k in range(width(dout)):
        total[k] = float32(0)
    vector = int32(min(first_vector + lane, vectors - 1))  # beyond the row: its end, for nothing
    first = int32(begin + thread // TEAM)
    sum_run(total, places, dout, order, first, end, TEAMS, vector, vectors)
    for k in range(width(dout)):
        teams = WARP_TEAMS
        while teams > 1:
            teams //= 2
            total[k] += cuda.shfl_xor_sync(FULL_MASK, total[k], teams * TEAM)
        if thread % WARP_SIZE < TEAM:
            shared[(thread // WARP_SIZE * width(dout) + k) * TEAM + lane] = total[k]

    # From here on a thread has one channel: value k of its lane's vector.
    k = thread // TEAM
    adds = k < width(dout) and first_vector + lane < vectors
    place = (int64(look_up(inp, look_up(order, begin))) * vectors + vector) * width(dout) + k
    # Under way while the block waits for its slowest warp.
    column = dwte[place] if adds else float32(0)
    cuda.syncthreads()
    if adds:
        for warp in range(WARPS):
            column += shared[(warp * width(dout) + k) * TEAM + lane]
        dwte[place] = column
    cuda.syncthreads()


@kernel(
    void(*[float32[::1]] * 3, *[int32[::1]] * 3, *[int32] * 5),
    void(*[float32[::1]] * 2, uint16[::1], *[int32[::1]] * 3, *[int32] * 5),
    max_threads=BLOCK,
    min_blocks=RESIDENT_BLOCKS,
)
def encoder_backward_kernel(
    dwte, dwpe, dout, inp, order, starts, B, T, C, long_blocks, short_blocks
):
    """dwpe[t] += Σ over b of dout[b, t], and dwte[token] += Σ of dout over each token's run.

    One launch, so that no sum waits for the slowest of another kind. blockIdx.y is the slice of the
    channels: LANES times 16 bytes. The blocks of a slice are, in the order of their start:

    * long_blocks along the long runs, like that of the comma, for each part of the slice;
    * short_blocks along the other runs, LANES threads for each. Most tokens of a text occur once or
      twice in a batch. Runs come longest first, so neighbours take as long as each other;
    * blocks with LANES threads for each position of a sequence, which add up all sequences. They
      are short and alike, and fill the GPU until the last run is summed.

    Moves 8 B T C bytes of dout in float32, half of them from the cache if it holds a slice, 8 C of
    dwte for each different token, and 8 T C of dwpe.
    """
    places = cuda.local.array(SHORT_ROWS, int32)
    total = cuda.local.array(MAX_WIDTH, float32)
    thread = uint32(cuda.threadIdx.x)
    block = int32(cuda.blockIdx.x)
    N = int32(B * T)
    vectors = int32(C // width(dout))
    vector = int32(cuda.blockIdx.y * LANES)

    if block < long_blocks * PARTS:
        vector = int32(vector + block % PARTS * TEAM)
        run = int32(block // PARTS)
        while vector < vectors and run < N:
            begin, end = look_up(starts, run), look_up(starts, run + 1)
            if end - begin < LONG_RUN:
                return
            sum_long_run(dwte, dout, inp, order, begin, end, vector, vectors)
            run = int32(run + long_blocks)
        return

    vector = int32(vector + thread % LANES)
    if vector >= vectors:
        return
    block = int32(block - long_blocks * PARTS)
    if block < short_blocks:
        run = int32(block * GROUPS + thread // LANES)
        while run < N:
            begin, end = look_up(starts, run), look_up(starts, run + 1)
            if begin == N:
                return
            if end - begin < LONG_RUN:
                token = look_up(inp, look_up(order, begin))
                start = (int64(token) * vectors + vector) * width(dout)
                load_gradient(total, dwte, start, dout)
                sum_run(total, places, dout, order, begin, end, 1, vector, vectors)
                store_gradient(dwte, start, total, dout)
            run = int32(run + short_blocks * GROUPS)
        return

    t = int32((block - short_blocks) * GROUPS + thread // LANES)
    if t < T:
        start = (int64(t) * vectors + vector) * width(dout)
        load_gradient(total, dwpe, start, dout)
        sum_sequences(total, dout, t, B, T, vector, vectors)
        store_gradient(dwpe, start, total, dout)


def encoder_backward(dwte, dwpe, dout, inp, order, starts) -> None:
    """Adds the gradients of encoder_forward to dwte and dwpe. Deterministic.

    dwte, dwpe     (Vp, C) and (maxT, C) float32, maxT >= T
    dout           (B, T, C), float32 or bf16 bits; C a multiple of 4 (float32) or 8 (bf16)
    inp            (B, T) int32, each less than Vp, and
    order, starts  token_runs(inp)

    dwte, dwpe and dout start on a 16-byte boundary; dout has at most MAX_BYTES. Raises ValueError
    where sizes or addresses are others; the tokens are not looked at.
    """
    B, T, C = dout.shape
    N = B * T
    if (nbytes := dout.size * dout.dtype.itemsize) > MAX_BYTES:
        raise ValueError(
            f"encoder_backward: dout has {nbytes} bytes; expected at most {MAX_BYTES}, of which "
            "32 bits can number the vectors; use a smaller batch"
        )
    check_sizes("encoder_backward", dwte=(dwte, dwte.shape[0] * C), inp=(inp, N))
    check_sizes("encoder_backward", order=(order, N), starts=(starts, N + 1))
    check_room("encoder_backward", dwpe=(dwpe, T * C))
    check_vectors("encoder_backward", C, dwte=dwte, dwpe=dwpe, dout=dout)
    long_blocks = min(LONG_BLOCKS, N // LONG_RUN)
    short_blocks = min(SHORT_BLOCKS, ceil_div(N, GROUPS))
    blocks = long_blocks * PARTS + short_blocks + ceil_div(T, GROUPS)
    slices = ceil_div(C * dout.dtype.itemsize, 16 * LANES)
    encoder_backward_kernel[(blocks, slices), BLOCK](
        dwte, dwpe, dout, inp, order, starts, B, T, C, long_blocks, short_blocks
    )
