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
from numbagpt.gpu.reduce import LOWEST, block_max, block_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

BLOCK = 1024
# Logits the NumPy reference takes at a time: the piece stays in the cache.
CHUNK = 1 << 18


def _signature(storage):
    return void(
        storage[::1],  # logits
        float32[::1],  # losses
        storage[::1],  # probs
        float32[::1],  # dlosses
        int32[::1],  # targets
        int32,  # V
        int32,  # Vp
        float32,  # dloss
        int32,  # has_dlosses
        int32,  # write_dlogits
        int32,  # write_probs
    )


@device_function
def probabilities(x, W, row_max, factor, valid):
    """x[k] = exp(x[k] - row_max) * factor for k < W, and zero from x[valid] on."""
    for k in range(W):
        x[k] = math.exp(x[k] - row_max) * factor
    if valid < W:
        for k in range(W):
            x[k] = x[k] if k < valid else float32(0)


@kernel(_signature(float32), _signature(uint16), max_threads=BLOCK, min_blocks=2)
def fused_classifier_kernel(
    logits, losses, probs, dlosses, targets, V, Vp, dloss, has_dlosses, write_dlogits, write_probs
):
    """losses[row], and in place of the row's logits their gradient. One block per row.

    Reads the row twice and writes it once. The first pass runs from the end of the row to its
    start, so that the second, which runs forwards, begins with what was read last and is still in
    the cache: about 8 bytes a logit (float32) move from and to memory.

    Columns V to Vp - 1 are padding. What they hold is not used; they get gradient and probability
    zero, so that the matmuls that read the gradient need not know of them.
    """
    shared_max = cuda.shared.array(32, float32)
    shared_sum = cuda.shared.array(32, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    row = int64(cuda.blockIdx.x) * Vp
    target = targets[cuda.blockIdx.x]
    W = width(logits)
    first = cuda.threadIdx.x * W
    step = cuda.blockDim.x * W

    # Maximum of the row and sum of exp(x - maximum), first of what this thread reads.
    thread_max = LOWEST
    thread_sum = float32(0)
    last = (V - 1) // W * W
    for i in range(last - first, -1, -step):
        load(x, logits, row + i)
        if i + W > V:
            for k in range(width(logits)):
                x[k] = x[k] if i + k < V else LOWEST
        new_max = thread_max
        for k in range(width(logits)):
            new_max = max(new_max, x[k])
        thread_sum *= math.exp(thread_max - new_max)
        for k in range(width(logits)):
            thread_sum += math.exp(x[k] - new_max)
        thread_max = new_max

    x_target = float32(0)
    if cuda.threadIdx.x == 0:
        # Read before the barriers: after them the gradient takes its place.
        i = target // W * W
        load(x, logits, row + i)
        for k in range(width(logits)):
            x_target = x[k] if i + k == target else x_target

    # Then of the block. A thread that read nothing has LOWEST and a sum of zero.
    row_max = block_max(thread_max, shared_max)
    row_sum = block_sum(thread_sum * math.exp(thread_max - row_max), shared_sum)
    if cuda.threadIdx.x == 0:
        losses[cuda.blockIdx.x] = math.log(row_sum) + (row_max - x_target)

    factor = float32(1) / row_sum
    if write_probs != 0:
        for i in range(first, Vp, step):
            load(x, logits, row + i)
            probabilities(x, W, row_max, factor, V - i)
            store(probs, row + i, x)
    if write_dlogits != 0:
        weight = dlosses[cuda.blockIdx.x] if has_dlosses != 0 else dloss
        for i in range(first, Vp, step):
            load(x, logits, row + i)
            probabilities(x, W, row_max, factor, V - i)
            if i <= target and target < i + W:
                for k in range(width(logits)):
                    x[k] -= float32(1) if i + k == target else float32(0)
            for k in range(width(logits)):
                x[k] *= weight
            store(logits, row + i, x)


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

    logits   (B, T, Vp) float32, or uint16 holding bf16; Vp a multiple of 128. Read, and with
             write_dlogits overwritten by the gradient, zero in columns V to Vp - 1
    losses   (B, T) float32, written: -log of the target's probability, in nats
    probs    None, or like logits: written, zero in columns V to Vp - 1
    dlosses  None, or (B, T) float32: derivative of what is minimised by each loss
    targets  (B, T) int32, 0 <= target < V
    dloss    that derivative where dlosses is None; 1/(B*T), the mean, unless given
    """
    dloss = 1 / losses.size if dloss is None else dloss
    fused_classifier_kernel[losses.size, BLOCK](
        logits,
        losses,
        logits if probs is None else probs,
        losses if dlosses is None else dlosses,
        targets,
        V,
        logits.shape[-1],
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
