"""Residual connection: the sum of two activations.

    out = inp1 + inp2

Its backward pass needs no kernel: the gradient of a sum flows unchanged into both summands. Along
the residual stream one of them is the stream's own gradient, which the layernorm backward adds to.

The model does not call this operation, the simplest there is: its matmul_forward (matmul.py) adds
the residual while the projection is still in registers.
"""

import numpy as np
from numba import cuda, float32, int64, uint16, void

from numbagpt.gpu.kernel import ceil_div, kernel
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width
from numbagpt.ops.arguments import check_sizes, check_vectors

BLOCK = 256


def residual_forward_reference(out: np.ndarray, inp1: np.ndarray, inp2: np.ndarray) -> None:
    """What residual_forward computes, in NumPy and in the arrays' own precision."""
    np.add(inp1, inp2, out=out)


# Compiled for these arguments, with arrays of float32 or, as uint16, of bf16 (gpu/vec.py says why).
# [::1] is an array of one dimension without gaps; void: nothing is returned.
@kernel(
    void(float32[::1], float32[::1], float32[::1], int64),
    void(uint16[::1], uint16[::1], uint16[::1], int64),
    max_threads=BLOCK,
)
def residual_forward_kernel(out, inp1, inp2, N):
    """out[i] = inp1[i] + inp2[i].

    One thread per 16 bytes: consecutive threads touch consecutive vectors, so the access of a warp,
    32 consecutive threads that run together, is one run of 512 bytes. Moves three arrays: 12 N
    bytes in float32.
    """
    a = cuda.local.array(MAX_WIDTH, float32)
    b = cuda.local.array(MAX_WIDTH, float32)
    # cuda.grid(1): this thread's number in the whole grid, blockIdx.x * blockDim.x + threadIdx.x
    i = cuda.grid(1) * width(out)
    if i < N:
        load(a, inp1, i)
        load(b, inp2, i)
        for k in range(width(out)):
            a[k] += b[k]
        store(out, i, a)


def residual_forward(out, inp1, inp2) -> None:
    """out = inp1 + inp2.

    out, inp1, inp2  one shape, float32 or bf16 bits; a multiple of 16 bytes each, starting on such
                     a boundary. out may be either of the others.

    Raises ValueError where that is not so.
    """
    N = out.size
    check_sizes("residual_forward", inp1=(inp1, N), inp2=(inp2, N))
    check_vectors("residual_forward", N, out=out, inp1=inp1, inp2=inp2)
    vectors = N * out.dtype.itemsize // 16
    residual_forward_kernel[ceil_div(vectors, BLOCK), BLOCK](out, inp1, inp2, N)
