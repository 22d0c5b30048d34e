"""What a launch takes and what it refuses, before anything runs."""

import numpy as np
import pytest
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
