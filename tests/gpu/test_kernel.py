"""What a launch takes and what it refuses, before anything runs."""

import numpy as np
import pytest
from check import poisoned
from numba import cuda, float32, int64, uint16, void

from numbagpt.gpu.kernel import kernel

BLOCK = 32


@kernel(
    void(float32[::1], float32[::1], float32, int64),
    void(uint16[::1], uint16[::1], float32, int64),
    max_threads=BLOCK,
)
def scale_kernel(out, inp, factor, N):
    i = cuda.grid(1)
    if i < N:
        out[i] = factor * inp[i]


FLOATS, BITS = np.ones(4, np.float32), np.ones(4, np.uint16)


def test_the_signature_is_that_of_the_arrays():
    assert scale_kernel.signature_for((FLOATS, FLOATS, 2.0, 4)) == scale_kernel.signatures[0]
    assert scale_kernel.signature_for((BITS, BITS, np.float32(2), 4)) == scale_kernel.signatures[1]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((FLOATS, BITS, 2.0, 4), "float32, uint16, float, int"),
        ((FLOATS.astype(np.float64), FLOATS, 2.0, 4), "float64, float32, float, int"),
        ((FLOATS, FLOATS, FLOATS, 4), "float32, float32, float32, int"),
        ((FLOATS, np.float32(1), 2.0, 4), "float32, float32, float, int"),
        ((FLOATS, None, 2.0, 4), "float32, NoneType, float, int"),
        ((FLOATS, FLOATS, 2.0), "float32, float32, float"),
    ],
    ids=str,
)
def test_arguments_without_a_signature(arguments, found):
    with pytest.raises(TypeError, match=rf"scale_kernel takes .* not \({found}\)"):
        scale_kernel[1, BLOCK](*arguments)


@pytest.mark.parametrize("out", [slice(None, None, 2), slice(None, None, -1)], ids=str)
def test_a_vector_with_gaps_is_refused(out):
    memory = np.zeros(8, np.float32)
    view = memory[out]
    with pytest.raises(TypeError, match=r"scale_kernel: out, of shape .* is not C-contiguous"):
        scale_kernel[1, BLOCK](view, np.ones(view.size, np.float32), 2.0, view.size)
    assert not memory.any()


@pytest.mark.parametrize("view", [lambda a: a[:, :2], lambda a: a.T], ids=["columns", "transpose"])
def test_a_matrix_with_gaps_is_refused(view):
    """Flattening one would make a copy, and the result would be lost with it."""
    memory, ones = np.zeros((3, 4), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(TypeError, match=r"scale_kernel: out, of shape .* is not C-contiguous"):
        scale_kernel[1, BLOCK](view(memory), ones, 2.0, 6)
    with pytest.raises(TypeError, match=r"scale_kernel: inp, of shape .* is not C-contiguous"):
        scale_kernel[1, BLOCK](memory, view(ones), 2.0, 6)
    assert not memory.any()


@pytest.mark.gpu
def test_device_arrays_with_gaps_are_refused():
    memory, ones = (cuda.to_device(np.zeros((3, 4), np.float32)) for _ in range(2))
    for view in (memory[:, :2], memory.reshape(-1)[::2]):
        with pytest.raises(TypeError, match=r"scale_kernel: out, of shape .* is not C-contiguous"):
            scale_kernel[1, BLOCK](view, ones, 2.0, 6)


def test_a_matrix_without_gaps_is_written(place):
    out, inp = poisoned((3, 4)), np.arange(12, dtype=np.float32).reshape(3, 4)
    place.run(scale_kernel[1, BLOCK], out, inp, 2.0, 12)
    np.testing.assert_array_equal(out, 2 * inp)


class DeviceArray:
    """As much of a device array as a launch looks at."""

    def __init__(self, n):
        self.shape, self.strides, self.ndim, self.dtype = (n,), (4,), 1, np.dtype(np.float32)

    def is_c_contiguous(self):
        return self.strides == (4,)


def test_numpy_and_device_arrays_do_not_mix():
    """Numba would copy the array to the GPU and back at each launch."""
    for arrays in ((FLOATS, DeviceArray(4)), (DeviceArray(4), FLOATS)):
        with pytest.raises(TypeError, match="scale_kernel: NumPy arrays and device arrays"):
            scale_kernel[1, BLOCK](*arrays, 2.0, 4)


def test_a_device_array_with_gaps_is_refused_before_it_is_used():
    view = DeviceArray(4)
    view.strides = (8,)
    with pytest.raises(TypeError, match=r"out, of shape \(4,\) and strides \(8,\), is not C-"):
        scale_kernel[1, BLOCK](view, DeviceArray(4), 2.0, 4)


@pytest.mark.parametrize("block", [BLOCK + 1, (BLOCK, 2), (8, 4, 2)])
def test_a_block_larger_than_the_kernel_is_compiled_for(block):
    threads = np.prod(block)
    with pytest.raises(ValueError, match=f"scale_kernel: a block of {threads} .* at most {BLOCK}"):
        scale_kernel[1, block]


@pytest.mark.parametrize("block", [BLOCK, (BLOCK, 1), (8, 2, 2), 1])
def test_a_block_that_the_kernel_is_compiled_for(place, block):
    out = np.zeros(1, np.float32)
    place.run(scale_kernel[1, block], out, np.ones(1, np.float32), 3.0, 1)
    assert out[0] == 3
