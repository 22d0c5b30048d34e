"""Layer normalisation of the rows of an (N, C) array (Ba, Kiros & Hinton, 2016).

Forward, for each row x, with the means over its C channels:

    mean = mean(x)      rstd = 1 / sqrt(mean((x - mean)²) + EPSILON)
    norm = (x - mean) * rstd        out = norm * weight + bias

mean and rstd are kept for the backward pass, which needs norm again. The variance is the mean of
the squared differences: the shorter mean(x²) - mean² subtracts two large numbers where |mean| is
large, and loses every digit that matters.

The backward pass is in layernorm_backward.py.

Here N = B·T and arrays come as (B, T, C) or (N, C); mean and rstd as (B, T) or (N,). C is a
multiple of 4 (float32) or 8 (bf16), and at most 4096. A row is held in registers: see rows.py.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int32, int64, uint16, void

from numbagpt.gpu.kernel import Kernel, ceil_div, device_function, kernel
from numbagpt.gpu.reduce import WARP_SIZE, warp_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, width
from numbagpt.ops.arguments import check_sizes, check_vectors
from numbagpt.ops.layernorm_backward import (
    layernorm_backward,
    layernorm_backward_reference,
    layernorm_backward_scratch,
)
from numbagpt.ops.rows import (
    PRESET_CHANNELS,
    check_channels,
    lane_array_size,
    lane_of_warp,
    load_row,
    store_row,
    vectors_per_lane,
)

__all__ = [
    "layernorm_backward",
    "layernorm_backward_reference",
    "layernorm_backward_scratch",
    "layernorm_forward",
    "layernorm_forward_reference",
]

EPSILON = 1e-5  # GPT-2's

# Warps of a block, one row each, and the registers that a multiprocessor has for all its threads.
WARPS = 8
REGISTERS = 65536


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
    np.divide(1, np.sqrt(variance + EPSILON), out=rstd)
    out *= rstd[..., None]
    out *= weight
    out += bias


@device_function
def row_mean(x, arr, C):
    """Mean of a warp's row; arr: the array it comes from."""
    total = float32(0)
    for i in range(vectors_per_lane(arr, C) * width(arr)):
        total += x[i]
    return warp_sum(total) / float32(C)


@device_function
def row_rstd(x, mean, arr, C):
    """1 / sqrt(variance + EPSILON) of a warp's row; mean: its mean."""
    total = float32(0)
    for n in range(vectors_per_lane(arr, C)):
        if (n * WARP_SIZE + lane_of_warp()) * width(arr) < C:
            for k in range(width(arr)):
                difference = x[n * width(arr) + k] - mean
                total += difference * difference
    return float32(1) / math.sqrt(warp_sum(total) / float32(C) + float32(EPSILON))


@device_function
def normalize_row(x, mean, rstd, weight, bias, w, b, C):
    """x = (x - mean) * rstd * weight + bias for a warp's row.

    w, b: local arrays of MAX_WIDTH, to be overwritten, for a vector of weight and of bias
    """
    for n in range(vectors_per_lane(weight, C)):
        c = (n * WARP_SIZE + lane_of_warp()) * width(weight)
        if c < C:
            load(w, weight, c)
            load(b, bias, c)
            for k in range(width(weight)):
                i = n * width(weight) + k
                x[i] = (x[i] - mean) * rstd * w[k] + b[k]


def resident_blocks(C: int) -> int:
    """Blocks that a multiprocessor should hold: as many as it has registers for, and at most 6.

    While some of these resident blocks wait for memory, others compute. A block keeps its registers
    and its shared memory until it ends, so these limit how many can be resident.

    A lane needs a register for each value of its part of the row, as many again for weight and
    bias, and 12 for indices and sums. Weight and bias take so many because the compiler unrolls the
    loop of normalize_row, and begins the loads of later vectors while it computes with the first.

    6 blocks are 48 warps, the most that a multiprocessor of compute capability 8.6 or 8.9 holds.
    """
    per_thread = 2 * lane_array_size(C) + 12
    return min(6, max(1, REGISTERS // (WARPS * WARP_SIZE * per_thread)))


@functools.cache
def forward_kernel(C: int) -> Kernel:
    """The forward kernel for rows of C channels."""
    VALUES = lane_array_size(C)

    @kernel(
        void(*[float32[::1]] * 6, int32),
        void(uint16[::1], float32[::1], float32[::1], *[uint16[::1]] * 3, int32),
        max_threads=WARPS * WARP_SIZE,
        min_blocks=resident_blocks(C),
    )
    def layernorm_forward_kernel(out, mean, rstd, inp, weight, bias, N):
        """out = (inp - mean) * rstd * weight + bias for each row, and its mean and rstd.

        Grid: one warp per row, ceil(N / WARPS) blocks. All loads of a row are under way before its
        first value is needed: at 768 channels 3 KB (float32) a warp, with 32 warps on a
        multiprocessor. Moves 8 N C bytes in float32, 4 N C in bf16; weight and bias stay in the
        caches: each multiprocessor has a small one, and all share a larger one, the second-level
        cache (L2).
        """
        x = cuda.local.array(VALUES, float32)
        vector = cuda.local.array(MAX_WIDTH, float32)
        w = cuda.local.array(MAX_WIDTH, float32)
        b = cuda.local.array(MAX_WIDTH, float32)
        row = int64(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // WARP_SIZE)
        if row < N:
            load_row(x, vector, inp, row * C, C)
            mean_of_row = row_mean(x, inp, C)
            rstd_of_row = row_rstd(x, mean_of_row, inp, C)
            normalize_row(x, mean_of_row, rstd_of_row, weight, bias, w, b, C)
            store_row(out, row * C, x, vector, C)
            if lane_of_warp() == 0:
                mean[row] = mean_of_row
                rstd[row] = rstd_of_row

    layernorm_forward_kernel.__name__ += f"_{C}"
    return layernorm_forward_kernel


for channels in PRESET_CHANNELS:
    forward_kernel(channels)


def layernorm_forward(out, mean, rstd, inp, weight, bias) -> None:
    """out = (inp - mean) * rstd * weight + bias, with each row's mean and rstd.

    out, inp      (…, C), float32 or bf16 bits; out may be inp
    mean, rstd    (…,) float32
    weight, bias  (C,), stored as inp

    out, inp, weight and bias start on a 16-byte boundary. Raises ValueError where sizes or
    addresses are others, or C is no multiple of 4 (float32) or 8 (bf16); UserError where a row does
    not fit into registers: more than 4096 channels.
    """
    C = inp.shape[-1]
    N = inp.size // C
    check_channels(C)
    check_sizes("layernorm_forward", out=(out, N * C), mean=(mean, N), rstd=(rstd, N))
    check_sizes("layernorm_forward", weight=(weight, C), bias=(bias, C))
    check_vectors("layernorm_forward", C, out=out, inp=inp, weight=weight, bias=bias)
    forward_kernel(C)[ceil_div(N, WARPS), WARPS * WARP_SIZE](out, mean, rstd, inp, weight, bias, N)
