"""residual_forward against NumPy."""

import numpy as np
import pytest
from check import Place, poisoned, relative_error
from numba import cuda, float32, int64, void

from numbagpt.gpu import stream
from numbagpt.gpu.kernel import kernel
from numbagpt.gpu.vec import bf16_to_float32, float32_to_bf16
from numbagpt.ops.residual import residual_forward, residual_forward_reference

SHAPES = [(1, 1, 4), (2, 37, 36), (3, 5, 128), (1, 2, 768)]


@pytest.mark.parametrize("shape", SHAPES)
def test_adds(place: Place, shape: tuple) -> None:
    rng = np.random.default_rng(1)
    inp1, inp2 = rng.standard_normal((2, *shape)).astype(np.float32)
    out = poisoned(shape)
    place.run(residual_forward, out, inp1, inp2)
    np.testing.assert_array_equal(out, inp1 + inp2)


def test_adds_in_place(place: Place) -> None:
    rng = np.random.default_rng(2)
    inp1, inp2 = rng.standard_normal((2, 2, 37, 36)).astype(np.float32)
    expected = inp1 + inp2
    place.run(residual_forward, inp1, inp1, inp2)
    np.testing.assert_array_equal(inp1, expected)


@pytest.mark.ampere
def test_adds_bf16(place: Place) -> None:
    rng = np.random.default_rng(3)
    inp1, inp2 = float32_to_bf16(rng.standard_normal((2, 3, 5, 40)))
    out = np.zeros_like(inp1)
    place.run(residual_forward, out, inp1, inp2)
    expected = float32_to_bf16(bf16_to_float32(inp1) + bf16_to_float32(inp2))
    np.testing.assert_array_equal(out, expected)


def test_reference() -> None:
    rng = np.random.default_rng(4)
    inp1, inp2 = rng.standard_normal((2, 2, 37, 36))
    out = poisoned(inp1.shape, np.float64)
    residual_forward_reference(out, inp1, inp2)
    assert relative_error(out, inp1 + inp2) == 0


@kernel(void(float32[::1], float32[::1], int64), max_threads=256)
def fill_kernel(inp1, inp2, N):
    """inp1[i] = i % 8191, inp2[i] = i % 127: small integers, whose sums are exact."""
    i = cuda.grid(1)
    if i < N:
        inp1[i] = float32(i % 8191)
        inp2[i] = float32(i % 127)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_elements_than_int32_counts() -> None:
    N = 2**31 + 4096
    out, inp1, inp2 = (cuda.device_array(N, np.float32) for _ in range(3))
    fill_kernel[N // 256, 256](inp1, inp2, N)
    residual_forward(out, inp1, inp2)
    stream.synchronize()
    for begin in (0, 2**30, 2**31 - 4096, 2**31, N - 1024):
        i = np.arange(begin, begin + 1024)
        np.testing.assert_array_equal(
            out[begin : begin + 1024].copy_to_host(), (i % 8191 + i % 127).astype(np.float32)
        )
