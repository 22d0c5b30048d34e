"""The norm of all gradients together, and the factor that clips it.

    norm       = sqrt(sum of g²)
    grad_scale = min(1, max_norm / (norm + 1e-6))

AdamW multiplies every gradient by grad_scale, so clipping costs no pass over memory of its own
(Pascanu, Mikolov, Bengio 2013; the 1e-6 is PyTorch's clip_grad_norm_). Where the norm is not finite
grad_scale is -1, which AdamW takes as "change nothing": one bad batch does not destroy a model, and
the host, which reads the norm later, can stop the run.
"""

import math

import numpy as np
from numba import cuda, float32, int64, void

from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.reduce import block_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, width
from numbagpt.ops.arguments import check_room, check_sizes, check_vectors

BLOCK = 256
# Blocks in the first stage. Constant, so that the sum is the same on every GPU; 1024 blocks of 256
# threads just fill an H200 (132 multiprocessors with room for 2048 threads each).
MAX_PARTIALS = 1024

LARGEST = float32(3.4028234663852886e38)
EPSILON = float32(1e-6)
# Elements the NumPy reference squares at a time: the piece stays in the cache.
CHUNK = 1 << 16


def global_norm_partials(N: int) -> int:
    """Number of float32 that `global_norm` needs as scratch for N gradients."""
    return max(1, min(MAX_PARTIALS, ceil_div(N, BLOCK * 4)))


# No fastmath in both kernels, since it promises nothing of NaN and infinity: they have to arrive,
# and to be told from numbers.
@kernel(void(float32[::1], float32[::1], int64), max_threads=BLOCK, min_blocks=8, fastmath=False)
def global_norm_partial_kernel(partials, grads, N):
    """partials[block] = sum of the squares of the block's share of grads.

    The grid strides over the vectors, so that neighbouring threads read neighbouring addresses.
    Moves 4 N bytes.
    """
    shared = cuda.shared.array(32, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    total = float32(0)
    end = N // width(grads) * width(grads)
    first = cuda.grid(1)
    stride = cuda.gridsize(1)
    for i in range(first * width(grads), end, stride * width(grads)):
        load(x, grads, i)
        # The vector is summed on its own: the fewer additions in a row, the smaller their error.
        squares = float32(0)
        for k in range(width(grads)):
            squares += x[k] * x[k]
        total += squares
    # The last N % width elements, by the first threads of the grid.
    if end + first < N:
        total += grads[end + first] * grads[end + first]
    total = block_sum(total, shared)
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = total


@kernel(
    void(float32[::1], float32[::1], float32[::1], int64, float32),
    max_threads=BLOCK,
    fastmath=False,
)
def global_norm_kernel(norm, grad_scale, partials, count, max_norm):
    """norm[0] and grad_scale[0] from the partial sums. One block."""
    shared = cuda.shared.array(32, float32)
    total = float32(0)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        total += partials[i]
    total = block_sum(total, shared)
    if cuda.threadIdx.x == 0:
        norm[0] = math.sqrt(total)
        scale = float32(1)
        if not total <= LARGEST:  # false for NaN as well
            scale = float32(-1)
        elif max_norm > float32(0):
            scale = min(scale, max_norm / (math.sqrt(total) + EPSILON))
        grad_scale[0] = scale


def global_norm(norm, grad_scale, grads, partials, max_norm: float) -> None:
    """Norm of the flat gradients and the factor that clips it to max_norm.

    norm        (1,) float32, written; infinite too where a square exceeds 3.4e38
    grad_scale  (1,) float32, written: in (0, 1], or -1 where the norm is not finite
    grads       flat float32, starting on a 16-byte boundary
    partials    float32 scratch, at least global_norm_partials(grads.size)
    max_norm    0 or less: no clipping

    Raises ValueError where sizes or addresses are others.
    """
    count = global_norm_partials(grads.size)
    check_sizes("global_norm", norm=(norm, 1), grad_scale=(grad_scale, 1))
    check_room("global_norm", partials=(partials, count))
    check_vectors("global_norm", 0, grads=grads)
    global_norm_partial_kernel[count, BLOCK](partials, grads, grads.size)
    global_norm_kernel[1, BLOCK](norm, grad_scale, partials, count, max_norm)


def global_norm_reference(
    norm: np.ndarray,
    grad_scale: np.ndarray,
    grads: np.ndarray,
    partials: np.ndarray,
    max_norm: float,
) -> None:
    """The same with NumPy, in any float type; `partials` is not used."""
    total = 0.0
    for start in range(0, grads.size, CHUNK):
        piece = grads[start : start + CHUNK]
        total += float(np.dot(piece, piece))
    norm[0] = math.sqrt(total)
    if not math.isfinite(total):
        grad_scale[0] = -1
    else:
        grad_scale[0] = min(1.0, max_norm / (norm[0] + 1e-6)) if max_norm > 0 else 1
