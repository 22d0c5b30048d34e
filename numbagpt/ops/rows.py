"""A row of channels in the registers of a warp.

A row of C values is cut into vectors of 16 bytes, `width` values each. A lane holds vectors lane,
lane + 32, lane + 64, … in a local array:

    x[n * width + k]  is value  (32 * n + lane) * width + k  of the row

So the lanes' n-th loads together are one run of memory. And a row is read once, however often its
values are used.

Registers have no addresses, so how many vectors a lane holds must be known when the kernel is
compiled. Kernels that hold rows are therefore made for a number of channels, by a function of C,
when they are first asked for.
"""

from numba import cuda, float32

from numbagpt.errors import UserError
from numbagpt.gpu.kernel import ceil_div, device_function
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

# The backward pass has 16 warps for a row of this size: 512 threads. With 128 registers each they
# take all that a multiprocessor has, and their column sums fill 48 KB of shared memory. In the
# forward pass a row of so many values takes 128 of the 255 registers that a lane may have.
MAX_CHANNELS = 4096
# The presets' sizes, nano's and GPT-2's. Their kernels are made on import, so that the offline
# checks find them. They are compiled, as all are, when they are first launched.
PRESET_CHANNELS = (128, 768, 1024, 1280, 1600)


def check_channels(C: int) -> None:
    """Raise UserError where a row of C channels is too long for the layernorm's kernels."""
    if C > MAX_CHANNELS:
        raise UserError(
            f"layernorm of {C} channels; expected at most {MAX_CHANNELS}, what a multiprocessor's "
            "registers suffice for; choose a model with fewer channels"
        )


def lane_array_size(C: int) -> int:
    """Size of a lane's local array for a row of C values, enough for either storage type."""
    return ceil_div(C, WARP_SIZE * MAX_WIDTH) * MAX_WIDTH


@device_function
def lane_of_warp():
    """This thread's number in its warp.

    With a mask, not a remainder: the compiler then knows its range, and drops the tests against C
    where no vector can lie beyond the row.
    """
    return cuda.threadIdx.x & (WARP_SIZE - 1)


@device_function
def vectors_per_lane(arr, C):
    """Vectors that a lane holds of a row, a constant of the kernel; the last may lie beyond it."""
    step = WARP_SIZE * width(arr)
    return (C + step - 1) // step


@device_function
def load_row(x, vector, arr, start, C):
    """x = this lane's values of arr[start : start + C], zeros beyond.

    vector: a local array of MAX_WIDTH, to be overwritten, through which each vector passes.
    """
    for n in range(vectors_per_lane(arr, C)):
        c = (n * WARP_SIZE + lane_of_warp()) * width(arr)
        if c < C:
            load(vector, arr, start + c)
            for k in range(width(arr)):
                x[n * width(arr) + k] = vector[k]
        else:
            for k in range(width(arr)):
                x[n * width(arr) + k] = float32(0)


@device_function
def store_row(arr, start, x, vector, C):
    """arr[start : start + C] = the lanes' values x; vector as for load_row."""
    for n in range(vectors_per_lane(arr, C)):
        c = (n * WARP_SIZE + lane_of_warp()) * width(arr)
        if c < C:
            for k in range(width(arr)):
                vector[k] = x[n * width(arr) + k]
            store(arr, start + c, vector)
