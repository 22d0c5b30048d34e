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

from numbagpt.gpu.kernel import device_function, kernel
from numbagpt.gpu.ptx import copy_async, copy_async_commit, copy_async_wait, exp2
from numbagpt.gpu.reduce import LOWEST, block_max, block_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

BLOCK = 1024
# Bytes of shared memory beside the rows: what block_max and block_sum use.
STATIC_SHARED = 256
LOG2_E = np.float32(1.4426950408889634)
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
        int32,  # slots
    )


@device_function
def exp(x):
    """exp(x) for x <= 0 by a product and the GPU's instruction for powers of two.

    Relative error below (3 - x) 1e-7. math.exp is right to the last bit and takes nine
    instructions: with two exp per logit, the arithmetic would take longer than the memory.
    """
    return exp2(x * LOG2_E)


@device_function
def probabilities(x, values, start, row_max, factor, valid):
    """x[k] = exp(values[start + k] - row_max) * factor for a vector, zero from x[valid] on."""
    load(x, values, start)
    for k in range(width(values)):
        x[k] = exp(x[k] - row_max) * factor
    if valid < width(values):
        for k in range(width(values)):
            x[k] = x[k] if k < valid else float32(0)


@device_function
def classify(
    row,
    values,
    start,
    logits,
    losses,
    probs,
    dlosses,
    targets,
    V,
    Vp,
    dloss,
    has_dlosses,
    write_dlogits,
    write_probs,
):
    """Loss and gradient of a row, which is values[start : start + Vp].

    Thread t has vectors t, t + blockDim.x, … of the row and touches no others; what the threads
    tell each other is the maximum and the sum.

    Columns V to Vp - 1 are padding. What they hold is not used; they get gradient and probability
    zero, so that the matmuls that read the gradient need not know of them.
    """
    shared_max = cuda.shared.array(32, float32)
    shared_sum = cuda.shared.array(32, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    out = int64(row) * Vp
    step = int32(cuda.blockDim.x * width(logits))
    target = targets[row]
    target_vector = int32(target // width(logits) * width(logits))

    # Maximum and sum of exp(x - maximum), first of what this thread has.
    thread_max = LOWEST
    thread_sum = float32(0)
    i = int32(cuda.threadIdx.x * width(logits))
    while i < Vp:
        load(x, values, start + i)
        if i + width(logits) > V:
            for k in range(width(logits)):
                x[k] = x[k] if k < int32(V - i) else LOWEST
        new_max = thread_max
        for k in range(width(logits)):
            new_max = max(new_max, x[k])
        thread_sum *= exp(thread_max - new_max)
        for k in range(width(logits)):
            thread_sum += exp(x[k] - new_max)
        thread_max = new_max
        i = int32(i + step)
    end = i

    # Then of the block. A thread that had no logit has LOWEST, whose exp is zero.
    row_max = block_max(thread_max, shared_max)
    row_sum = block_sum(thread_sum * exp(thread_max - row_max), shared_sum)
    if target_vector % step == cuda.threadIdx.x * width(logits):
        load(x, values, start + target_vector)
        target_logit = x[0]
        for k in range(1, width(logits)):
            target_logit = x[k] if int32(target_vector + k) == target else target_logit
        losses[row] = math.log(row_sum) + (row_max - target_logit)

    # Backwards, since what was read last is the likeliest to be in a cache.
    if write_probs != 0:
        factor = float32(1) / row_sum
        i = int32(end - step)
        while i >= 0:
            probabilities(x, values, start + i, row_max, factor, int32(V - i))
            store(probs, out + i, x)
            i = int32(i - step)
    if write_dlogits != 0:
        weight = dlosses[row] if has_dlosses != 0 else dloss
        factor = weight / row_sum
        i = int32(end - step)
        while i >= 0:
            probabilities(x, values, start + i, row_max, factor, int32(V - i))
            if i == target_vector:
                for k in range(width(logits)):
                    x[k] -= weight if int32(i + k) == target else float32(0)
            store(logits, out + i, x)
            i = int32(i - step)


@device_function
def fetch(values, start, logits, row, N, Vp):
    """Begin to copy a row, if there is such a row, to values[start : start + Vp]."""
    if row < N:
        i = int32(cuda.threadIdx.x * width(logits))
        while i < Vp:
            copy_async(values, start + i, logits, int64(row) * Vp + i)
            i = int32(i + cuda.blockDim.x * width(logits))
    copy_async_commit()


@kernel(_signature(float32), _signature(uint16), max_threads=BLOCK, minimum=(8, 0))
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
    slots,
):
    """Losses, and in place of the logits their gradient. A block takes every gridDim.x-th row.

    Moves 4 Vp bytes a row in bf16 and 8 Vp in float32: each logit is read once and written once.

    There is one block for each multiprocessor, with `slots` rows in shared memory: 2 in bf16 on an
    H200, so that the memory brings the next row while the block computes this one. The copies pass
    through no register. A thread reads only what it has copied itself; it waits for its own copies
    and needs no barrier.
    """
    values = cuda.shared.array(0, logits.dtype, alignment=16)
    row = cuda.blockIdx.x
    for slot in range(slots):
        fetch(values, slot * Vp, logits, row + slot * cuda.gridDim.x, N, Vp)
    slot = int32(0)
    while row < N:
        if slots == 1:
            copy_async_wait(0)
        else:
            copy_async_wait(1)
        classify(
            row,
            values,
            slot * Vp,
            logits,
            losses,
            probs,
            dlosses,
            targets,
            V,
            Vp,
            dloss,
            has_dlosses,
            write_dlogits,
            write_probs,
        )
        fetch(values, slot * Vp, logits, row + slots * cuda.gridDim.x, N, Vp)
        row += cuda.gridDim.x
        slot = int32(slots - 1 - slot)


@kernel(_signature(float32), _signature(uint16), max_threads=BLOCK, min_blocks=2)
def fused_classifier_rereading_kernel(
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
    slots,
):
    """The same for rows that do not fit into shared memory, one block for each.

    A row is read twice, the second time in part from the cache: about 8 Vp bytes a row (float32)
    move.
    """
    classify(
        cuda.blockIdx.x,
        logits,
        int64(cuda.blockIdx.x) * Vp,
        logits,
        losses,
        probs,
        dlosses,
        targets,
        V,
        Vp,
        dloss,
        has_dlosses,
        write_dlogits,
        write_probs,
    )


def rows_that_fit(logits) -> int:
    """How many rows of the logits a block is to keep in shared memory: 2, 1 or none.

    50304 logits take 98 KB in bf16 and 197 KB in float32. By compute capability a block may have
    64 KB (7.5), 163 KB (8.0), 99 KB (8.6, 8.9, 12.0) or 227 KB (9.0, 10.0).
    """
    if isinstance(logits, np.ndarray):
        return 2  # the simulator has as much as it is asked for
    gpu = cuda.get_current_device()
    if not fused_classifier_kernel.runs_on(gpu.compute_capability):
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
    targets  (...) int32, 0 <= target < V
    dloss    that derivative where dlosses is None; one over the number of losses unless given
    """
    dloss = 1 / losses.size if dloss is None else dloss
    Vp = logits.shape[-1]
    N = losses.size
    slots = rows_that_fit(logits)
    if slots:
        grid = min(N, multiprocessors(logits))
        launch = fused_classifier_kernel[grid, BLOCK, slots * Vp * logits.dtype.itemsize]
    else:
        launch = fused_classifier_rereading_kernel[N, BLOCK]
    launch(
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
        slots,
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
