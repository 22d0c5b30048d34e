"""The loss of a step: one number on the device.

    out += scale * sum(losses)

With scale = 1/(B*T*steps) and one call per micro-batch, `out` ends as the mean loss of an
optimizer step. It stays on the device, so that the host can read it when it likes, not when the
GPU has it.
"""

import numpy as np
from numba import cuda, float32, int64, void

from numbagpt.gpu.kernel import kernel
from numbagpt.gpu.reduce import block_sum
from numbagpt.gpu.vec import MAX_WIDTH, load, width
from numbagpt.ops.arguments import check_sizes, check_vectors

BLOCK = 1024


# No fastmath, which promises nothing of NaN: one among the losses has to come out as a NaN.
@kernel(void(float32[::1], float32[::1], float32, int64), max_threads=BLOCK, fastmath=False)
def mean_loss_kernel(out, losses, scale, N):
    """out[0] += scale * sum of losses[:N].

    One block: N is the number of tokens in a batch, too few to be worth a second pass. Thread t
    adds up vectors t, t + blockDim.x, …, then the block adds up its threads, always in the same
    order. Moves 4 N bytes.
    """
    shared = cuda.shared.array(32, float32)
    x = cuda.local.array(MAX_WIDTH, float32)
    total = float32(0)
    end = N // width(losses) * width(losses)
    for i in range(
        int64(cuda.threadIdx.x) * width(losses), end, int64(cuda.blockDim.x) * width(losses)
    ):
        load(x, losses, i)
        for k in range(width(losses)):
            total += x[k]
    # The last N % width elements, one thread each.
    i = end + cuda.threadIdx.x
    if i < N:
        total += losses[i]
    total = block_sum(total, shared)
    if cuda.threadIdx.x == 0:
        out[0] += scale * total


def mean_loss(out, losses, scale: float) -> None:
    """out (1,) float32 += scale * sum of losses (B, T) float32. Not finite if a loss is not.

    Raises ValueError unless out has one element and losses starts on a 16-byte boundary.
    """
    check_sizes("mean_loss", out=(out, 1))
    check_vectors("mean_loss", 0, losses=losses)
    mean_loss_kernel[1, BLOCK](out, losses, scale, losses.size)


def mean_loss_reference(out: np.ndarray, losses: np.ndarray, scale: float) -> None:
    """The same with NumPy, in any float type."""
    out += scale * losses.sum()
