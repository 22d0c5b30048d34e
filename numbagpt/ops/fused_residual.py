"""Residual connection and the layer normalisation that follows it, in one pass over memory.

    residual = inp1 + inp2
    normed   = (residual - mean) rstd weight + bias        with the row's mean and rstd

One after the other, the layernorm would read back what the sum has just written: 5 arrays moved
instead of 4. residual is rounded to its storage first, and normalised as rounded: that is what the
backward pass will read again, and its norm has to be the one that the forward pass used.

The backward pass is that of the layernorm, which adds to the gradient of the residual stream.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, ceil_div, device_function, kernel
from numbagpt.gpu.ptx import bf16_high, bf16_low, pack_bf16
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, width
from numbagpt.ops.layernorm import (
    WARPS,
    layernorm_forward_reference,
    normalize_row,
    resident_blocks,
    row_mean,
    row_rstd,
)
from numbagpt.ops.rows import (
    GPT2_CHANNELS,
    check_channels,
    lane_of_warp,
    load_row,
    registers_of_row,
    store_row,
    values_per_lane,
)


def fused_residual_forward_reference(
    residual: np.ndarray,
    normed: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    inp1: np.ndarray,
    inp2: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
) -> None:
    """What fused_residual_forward computes, in NumPy and in the arrays' own precision."""
    np.add(inp1, inp2, out=residual)
    layernorm_forward_reference(normed, mean, rstd, residual, weight, bias)


@device_function
def round_row(x, arr, C):
    """x = what a warp's row x will be once stored in arr."""
    if width(arr) == MAX_WIDTH:  # bf16
        for i in range(0, registers_of_row(arr, C), 2):
            word = pack_bf16(x[i], x[i + 1])
            x[i] = bf16_low(word)
            x[i + 1] = bf16_high(word)


@functools.cache
def fused_residual_kernel(C: int) -> Kernel:
    """The kernel for rows of C channels."""
    VALUES = values_per_lane(C)

    @kernel(
        void(*[float32[::1]] * 8, int32),
        void(*[uint16[::1]] * 2, *[float32[::1]] * 2, *[uint16[::1]] * 4, int32),
        max_threads=WARPS * WARP_SIZE,
        min_blocks=resident_blocks(C, 2),
    )
    def fused_residual_forward_kernel(residual, normed, mean, rstd, inp1, inp2, weight, bias, N):
        """residual = inp1 + inp2; normed, mean and rstd are its layernorm.

        One warp per row, which stays in registers from the sum to the last store. Moves 16 N C
        bytes in float32; weight and bias stay in the cache.
        """
        x = cuda.local.array(VALUES, float32)
        y = cuda.local.array(VALUES, float32)
        w = cuda.local.array(MAX_WIDTH, float32)
        b = cuda.local.array(MAX_WIDTH, float32)
        row = int64(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP_SIZE)
        if row < N:
            load_row(x, w, inp1, row * C, C)
            load_row(y, w, inp2, row * C, C)
            for i in range(registers_of_row(residual, C)):
                x[i] += y[i]
            round_row(x, residual, C)
            store_row(residual, row * C, x, w, C)
            m = row_mean(x, residual, C)
            s = row_rstd(x, m, residual, C)
            normalize_row(x, m, s, weight, bias, w, b, C)
            store_row(normed, row * C, x, w, C)
            if lane_of_warp() == 0:
                mean[row] = m
                rstd[row] = s

    fused_residual_forward_kernel.__name__ += f"_{C}"
    return fused_residual_forward_kernel


for channels in GPT2_CHANNELS:
    fused_residual_kernel(channels)


def fused_residual_forward(residual, normed, mean, rstd, inp1, inp2, weight, bias) -> None:
    """residual = inp1 + inp2, and normed = its layernorm, with each row's mean and rstd.

    residual, normed, inp1, inp2  (…, C), float32 or bf16 bits; C a multiple of 4 (float32) or 8
                                  (bf16). residual may be inp1 or inp2
    mean, rstd                    (…,) float32, of residual as stored
    weight, bias                  (C,), stored as residual

    Raises UserError where a row does not fit into registers: more than 4096 channels.
    """
    C = residual.shape[-1]
    N = residual.size // C
    check_channels(C)
    fused_residual_kernel(C)[ceil_div(N, WARPS), WARPS * WARP_SIZE](
        residual, normed, mean, rstd, inp1, inp2, weight, bias, N
    )
