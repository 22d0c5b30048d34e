"""A row of channels in the registers of a warp, or of a few warps.

A row of C values is cut into vectors of 16 bytes. Of these, lane l of `lanes` holds the numbers
l, l + lanes, l + 2 lanes, … in a local array:

    x[n width + k]  is value  (n lanes + l) width + k  of the row

So the lanes' n-th loads together are one run of memory, and a row is read once, however often its
values are used. Registers have no addresses: how many vectors a lane holds must be known when the
kernel is compiled. Kernels that hold rows are therefore made for a number of channels, by a
function of C, when they are first asked for.
"""

from numba import cuda, float32

from numbagpt.errors import UserError
from numbagpt.gpu.kernel import ceil_div, device_function
from numbagpt.gpu.reduce import WARP_SIZE
from numbagpt.gpu.vec import MAX_WIDTH, load, store, width

# A warp with this many channels has 128 of each lane's 255 registers full.
MAX_CHANNELS = 4096
# GPT-2's sizes. Their kernels are there from the start, for the offline checks to find; they are
# compiled, as all are, when they are first launched.
GPT2_CHANNELS = (128, 768, 1024, 1280, 1600)


def check_channels(C: int) -> None:
    """Raise UserError where a row of C channels does not fit into the registers of a warp."""
    if C > MAX_CHANNELS:
        raise UserError(
            f"layernorm of {C} channels; expected at most {MAX_CHANNELS}, what fits into a warp's "
            "registers; choose a model with fewer channels"
        )


def values_per_lane(C: int, lanes: int = WARP_SIZE) -> int:
    """Size of the local array for a row of C values, enough for either storage type."""
    return ceil_div(C, lanes * MAX_WIDTH) * MAX_WIDTH


@device_function
def lane_of(lanes):
    """This thread's number among its `lanes`, a power of two.

    With a mask, not a remainder: the compiler then knows its range, and drops the tests against C
    where no vector can lie beyond the row.
    """
    return cuda.threadIdx.x & (lanes - 1)


@device_function
def vectors_per_lane(arr, C, lanes):
    """Vectors of each lane, a constant of the kernel; the last may lie beyond the row."""
    step = lanes * width(arr)
    return (C + step - 1) // step


@device_function
def registers_of_row(arr, C, lanes):
    """Values of each lane, as many as its vectors hold."""
    return vectors_per_lane(arr, C, lanes) * width(arr)


@device_function
def load_row(x, part, arr, start, lanes, C):
    """x = this lane's values of arr[start : start + C], zeros beyond; part: MAX_WIDTH registers."""
    for n in range(vectors_per_lane(arr, C, lanes)):
        c = (n * lanes + lane_of(lanes)) * width(arr)
        if c < C:
            load(part, arr, start + c)
            for k in range(width(arr)):
                x[n * width(arr) + k] = part[k]
        else:
            for k in range(width(arr)):
                x[n * width(arr) + k] = float32(0)


@device_function
def store_row(arr, start, x, part, lanes, C):
    """arr[start : start + C] = the lanes' values x; part: MAX_WIDTH registers."""
    for n in range(vectors_per_lane(arr, C, lanes)):
        c = (n * lanes + lane_of(lanes)) * width(arr)
        if c < C:
            for k in range(width(arr)):
                part[k] = x[n * width(arr) + k]
            store(arr, start + c, part)


# ---- rows in shared memory, always float32 -------------------------------------------------------


@device_function
def load_part(x, part, arr, start, count):
    """x[:count] = arr[start : start + count], 16 bytes at a time; part: MAX_WIDTH registers."""
    for v in range(0, count, width(arr)):
        load(part, arr, start + v)
        for k in range(width(arr)):
            x[v + k] = part[k]


@device_function
def add_part(arr, start, x, part, count):
    """arr[start : start + count] += x[:count], likewise; for one thread's own elements."""
    for v in range(0, count, width(arr)):
        load(part, arr, start + v)
        for k in range(width(arr)):
            part[k] += x[v + k]
        store(arr, start + v, part)


@device_function
def keep_row(shared, start, x, part, arr, lanes, C):
    """shared[start : start + C] = the lanes' values x, which lie as load_row lays those of arr."""
    for n in range(vectors_per_lane(arr, C, lanes)):
        c = (n * lanes + lane_of(lanes)) * width(arr)
        if c < C:
            for v in range(0, width(arr), width(shared)):
                for k in range(width(shared)):
                    part[k] = x[n * width(arr) + v + k]
                store(shared, start + c + v, part)
