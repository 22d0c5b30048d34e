"""Softmax, cross-entropy and the gradient of the logits in one pass over them.

For each row x (V logits, padded to Vp) with target c and weight dloss:

    logsumexp  = log(sum over i of exp(x_i))
    loss       = logsumexp - x_c                 the cross-entropy -log(prob_c)
    prob_i     = exp(x_i - logsumexp)
    dx_i       = (prob_i - [i == c]) dloss

The gradient overwrites the logits: with V = 50257 they are the largest activation, and neither the
probabilities nor a second array of that size is ever stored. The loss is computed as a difference
and not as -log(prob_c), which is infinite where prob_c underflows.

The sum is taken around the maximum m, so that no exp overflows, and both in one pass ("online", in
Milakov and Gimelshein 2018): where a larger maximum m' turns up, the sum so far is multiplied by
exp(m - m').
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, device_function, kernel
from numbagpt.gpu.ptx import LOG2_E, copy_async, copy_async_commit, copy_async_wait, exp2
from numbagpt.gpu.reduce import LOWEST, block_max, block_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.arguments import check_sizes, check_vectors

BLOCK = 1024
# Bytes of shared memory beside the rows: what block_max and block_sum use.
STATIC_SHARED = 256
# Logits the NumPy reference takes at a time: the piece stays in the cache.
CHUNK = 1 << 18


def _signature(storage):
    return void(
        storage[::1],  # logits
        float32[::1],  # losses
        storage[::1],  # probs
        float32[::1],  # dlosses
        int32[::1],  # targets
        int32,  # N
        int32,  # V
        int32,  # Vp
        float32,  # dloss
        int32,  # has_dlosses
        int32,  # write_dlogits
        int32,  # write_probs
    )


@device_function
def exp(x):
    """exp(x) for x <= 0 by a product and the GPU's instruction for powers of two.

    Relative error below (3 - x) 1e-7. math.exp, right to the last bit or two, takes eight
    instructions in a device function, which fastmath does not reach: with two exp per logit, the
    arithmetic would take longer than the memory.
    """
    return exp2(x * float32(LOG2_E))


@device_function
def first_of_vector(column, arr):
    """The first column of the 16-byte vector that a column lies in."""
    return column & int32(-width(arr))


@device_function
def row_statistics(values, start, V, Vp):
    """The maximum m of the logits values[start : start + V], and the sum of exp(x - m).

    Thread t takes vectors t, t + blockDim.x, … of the row, here and in write_gradient; what the
    threads tell each other is the maximum and the sum. The third of the results is where the
    thread's next vector would be, behind the row.

    A NaN among the logits makes the sum, and so the loss, NaN: the maximum passes over it. In the
    body of a kernel, which fastmath reaches in full, that would not be certain.
    """
    shared_max = cuda.shared.array(32, float32)
    shared_sum = cuda.shared.array(32, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    step = int32(cuda.blockDim.x * width(values))
    thread_max = LOWEST
    thread_sum = float32(0)
    i = int32(cuda.threadIdx.x * width(values))
    while i < Vp:
        load(x, values, start + i)
        if int32(V - i) < width(values):
            for k in range(width(values)):
                x[k] = x[k] if k < int32(V - i) else LOWEST
        new_max = thread_max
        for k in range(width(values)):
            new_max = max(new_max, x[k])
        thread_sum *= exp(thread_max - new_max)
        for k in range(width(values)):
            thread_sum += exp(x[k] - new_max)
        thread_max = new_max
        i = int32(i + step)
    # A thread that had no logit has LOWEST, whose exp is zero.
    row_max = block_max(thread_max, shared_max)
    row_sum = block_sum(thread_sum * exp(thread_max - row_max), shared_sum)
    return row_max, row_sum, i


@device_function
def write_loss(losses, row, values, start, statistics, target):
    """losses[row] = the cross-entropy, from the thread that has the target's logit."""
    x = cuda.local.array(MAX_WIDTH, float32)
    row_max, row_sum, _ = statistics
    step = int32(cuda.blockDim.x * width(values))
    target_vector = first_of_vector(target, values)
    if target_vector % step == cuda.threadIdx.x * width(values):
        load(x, values, start + target_vector)
        target_logit = x[0]
        for k in range(1, width(values)):
            target_logit = x[k] if int32(target_vector + k) == target else target_logit
        losses[row] = math.log(row_sum) + (row_max - target_logit)


@device_function
def write_gradient(out, row_start, values, start, V, statistics, target, weight):
    """out[row_start + i] = (prob_i - [i == target]) weight, and zero from column V on.

    Backwards, since what was read last is the likeliest to be in a cache.
    """
    x = cuda.local.array(MAX_WIDTH, float32)
    row_max, row_sum, end = statistics
    step = int32(cuda.blockDim.x * width(values))
    target_vector = first_of_vector(target, values)
    factor = weight / row_sum
    i = int32(end - step)
    while i >= 0:
        load(x, values, start + i)
        for k in range(width(values)):
            x[k] = exp(x[k] - row_max) * factor
        if int32(V - i) < width(values):
            for k in range(width(values)):
                x[k] = x[k] if k < int32(V - i) else float32(0)
        if i == target_vector:
            for k in range(width(values)):
                x[k] -= weight if int32(i + k) == target else float32(0)
        store(out, row_start + i, x)
        i = int32(i - step)


@device_function
def copy_row_async(values, start, logits, row, N, Vp):
    """Begin to copy a row, if there is such a row, to values[start : start + Vp]."""
    if row < N:
        i = int32(cuda.threadIdx.x * width(logits))
        while i < Vp:
            copy_async(values, start + i, logits, int64(row) * Vp + i)
            i = int32(i + cuda.blockDim.x * width(logits))
    copy_async_commit()


def make_kernel(SLOTS: int, **options) -> Kernel:
    """The kernel that keeps SLOTS rows in shared memory: 2, 1, or none where no row fits."""
    BEHIND = max(0, SLOTS - 1)  # copies that may be under way while a row is worked on

    @kernel(_signature(float32), _signature(uint16), max_threads=BLOCK, **options)
    def fused_classifier_kernel(
        logits,
        losses,
        probs,
        dlosses,
        targets,
        N,
        V,
        Vp,
        dloss,
        has_dlosses,
        write_dlogits,
        write_probs,
    ):
        """Losses, and in place of the logits their gradient. A block takes every gridDim.x-th row.

        Columns V to Vp - 1 are padding. What they hold is not used; they get gradient and
        probability zero, so that the matmuls that read the gradient need not know of them.

        With rows in shared memory, one block to a multiprocessor, each logit is read once and
        written once: 4 Vp bytes a row move in bf16 and 8 Vp in float32. With two of them, in bf16
        on an H200, the memory brings the next row while the block computes this one. The copies
        pass through no register. A thread reads only what it has copied itself; it waits for its
        own copies and needs no barrier.

        With none, there is one block for each row, and the row is read twice, the second time in
        part from the cache: about 8 Vp bytes a row (float32) move.
        """
        values = cuda.shared.array(0, logits.dtype, alignment=16) if SLOTS else logits
        row = int32(cuda.blockIdx.x)
        for slot in range(SLOTS):
            copy_row_async(values, slot * Vp, logits, row + slot * cuda.gridDim.x, N, Vp)
        slot = int32(0)
        while row < N:
            row_start = int64(row) * Vp
            start = slot * Vp if SLOTS else row_start
            if SLOTS:
                copy_async_wait(BEHIND)
            target = targets[row]
            statistics = row_statistics(values, start, V, Vp)
            write_loss(losses, row, values, start, statistics, target)
            if write_probs != 0:
                # the gradient of a row that has no target, with weight 1
                none, one = int32(-1), float32(1)
                write_gradient(probs, row_start, values, start, V, statistics, none, one)
            if write_dlogits != 0:
                weight = dlosses[row] if has_dlosses != 0 else dloss
                write_gradient(logits, row_start, values, start, V, statistics, target, weight)
            if SLOTS == 0:
                return  # each row has its own block
            ahead = int32(row + SLOTS * cuda.gridDim.x)
            copy_row_async(values, start, logits, ahead, N, Vp)
            slot = int32(SLOTS - 1 - slot)
            row = int32(row + cuda.gridDim.x)

    fused_classifier_kernel.__name__ += f"_{SLOTS}"
    return fused_classifier_kernel


# By the number of rows that a block keeps in shared memory.
KERNELS = {
    2: make_kernel(2, minimum=(8, 0)),
    1: make_kernel(1, minimum=(8, 0)),
    0: make_kernel(0, min_blocks=2),
}


def rows_that_fit(logits) -> int:
    """How many rows of the logits a block is to keep in shared memory: 2, 1 or none.

    50304 logits take 98 KB in bf16 and 197 KB in float32. By compute capability a block may have
    64 KB (7.5), 163 KB (8.0), 99 KB (8.6, 8.9, 12.0) or 227 KB (9.0, 10.0).
    """
    if isinstance(logits, np.ndarray):
        return 2  # the simulator has as much as it is asked for
    gpu = cuda.get_current_device()
    if not KERNELS[1].runs_on(gpu.compute_capability):
        return 0
    row_bytes = logits.shape[-1] * logits.dtype.itemsize
    return min(2, (gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN - STATIC_SHARED) // row_bytes)


def multiprocessors(logits) -> int:
    """How many there are where the logits are; the simulator plays a GPU with one."""
    if isinstance(logits, np.ndarray):
        return 1
    return cuda.get_current_device().MULTIPROCESSOR_COUNT


def fused_classifier(
    logits,
    losses,
    probs,
    dlosses,
    targets,
    V: int,
    dloss: float | None = None,
    write_dlogits: bool = True,
) -> None:
    """Losses of all tokens; the logits become their own gradient.

    logits   (..., Vp) float32, or uint16 holding bf16; Vp a multiple of 128. Read, and with
             write_dlogits overwritten by the gradient, zero in columns V to Vp - 1
    losses   (...) float32, written: -log of the target's probability, in nats
    probs    None, or like logits: written, zero in columns V to Vp - 1
    dlosses  None, or (...) float32: derivative of what is minimised by each loss
    targets  (...) int32, 0 <= target < V; V is at most Vp
    dloss    that derivative where dlosses is None; one over the number of losses unless given

    Raises ValueError where V, sizes or addresses are others; the targets are not looked at.
    """
    dloss = 1 / losses.size if dloss is None else dloss
    Vp = logits.shape[-1]
    N = losses.size
    if not 0 < V <= Vp:
        raise ValueError(f"fused_classifier: V is {V}; expected 1 to {Vp}, the columns of logits")
    check_sizes("fused_classifier", logits=(logits, N * Vp), targets=(targets, N))
    check_vectors("fused_classifier", Vp, logits=logits)
    if probs is not None:
        check_sizes("fused_classifier", probs=(probs, N * Vp))
        check_vectors("fused_classifier", Vp, probs=probs)
    if dlosses is not None:
        check_sizes("fused_classifier", dlosses=(dlosses, N))
    slots = rows_that_fit(logits)
    grid = min(N, multiprocessors(logits)) if slots else N
    KERNELS[slots][grid, BLOCK, slots * Vp * logits.dtype.itemsize](
        logits,
        losses,
        logits if probs is None else probs,
        losses if dlosses is None else dlosses,
        targets,
        N,
        V,
        Vp,
        dloss,
        int(dlosses is not None),
        int(write_dlogits),
        int(probs is not None),
    )


def fused_classifier_reference(
    logits: np.ndarray,
    losses: np.ndarray,
    probs: np.ndarray | None,
    dlosses: np.ndarray | None,
    targets: np.ndarray,
    V: int,
    dloss: float | None = None,
    write_dlogits: bool = True,
) -> None:
    """The same with NumPy, in any float type; a few rows at a time."""
    Vp = logits.shape[-1]
    x = logits.reshape(-1, Vp)
    loss = losses.reshape(-1)
    target = targets.reshape(-1)
    weight = dlosses.reshape(-1) if dlosses is not None else None
    if weight is None:
        weight = np.full(loss.size, 1 / loss.size if dloss is None else dloss, x.dtype)
    rows = max(1, CHUNK // Vp)
    scratch = np.empty((rows, V), x.dtype)
    for start in range(0, len(x), rows):
        piece = slice(start, start + rows)
        row, c = x[piece], target[piece]
        indices = np.arange(len(row))
        prob = scratch[: len(row)]

        row_max = row[:, :V].max(axis=1)
        np.subtract(row[:, :V], row_max[:, None], out=prob)
        x_target = prob[indices, c]
        np.exp(prob, out=prob)
        row_sum = prob.sum(axis=1)
        loss[piece] = np.log(row_sum) - x_target

        if probs is not None:
            p = probs.reshape(-1, Vp)[piece]
            np.divide(prob, row_sum[:, None], out=p[:, :V])
            p[:, V:] = 0
        if write_dlogits:
            np.multiply(prob, (weight[piece] / row_sum)[:, None], out=row[:, :V])
            row[indices, c] -= weight[piece]
            row[:, V:] = 0
